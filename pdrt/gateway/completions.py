"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import math
import secrets
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdrt.config import GatewayConfig
from pdrt.gateway.answer import Answer, Job
from pdrt.gateway.effects import Submission
from pdrt.gateway.errors import context_length_exceeded, invalid, overloaded, unavailable
from pdrt.gateway.http import read_body
from pdrt.gateway.hub import Hub
from pdrt.gateway.responses import Bodies, ChatFormat, CompletionFormat, Format
from pdrt.gateway.schema import Generation, parse_chat, parse_completion
from pdrt.gateway.served_model import Parse, ServedModel
from pdrt.gateway.text import TextAssembler


class _Events(Response):
    """Runs the answer when Starlette sends the response."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer.events(receive, send)


class Completions:
    """Both endpoints."""

    def __init__(self, hub: Hub, model: ServedModel, config: GatewayConfig) -> None:
        self._hub = hub
        self._model = model
        self._config = config
        self._preparing = 0
        """Requests whose body is being read or tokenized; with those that run, at most
        `requests_max`."""

    async def chat(self, request: Request) -> Response:
        return await self._serve(request, parse_chat, ChatFormat())

    async def completion(self, request: Request) -> Response:
        return await self._serve(request, parse_completion, CompletionFormat())

    async def _serve(self, request: Request, parse: Parse, format: Format) -> Response:
        deadline = self._hub.clock() + self._seconds_max(request)
        self._check_room()
        self._preparing += 1
        try:
            body = await read_body(request, self._config.api.body_bytes_max)
            generation, token_ids = await self._model.prepare(body, parse)
            submission = self._submission(generation, token_ids, deadline)
        finally:
            self._preparing -= 1
        job = Job(
            id=request.state.request_id,
            submission=submission,
            bodies=Bodies(
                format,
                secrets.token_hex(12),
                int(time.time()),
                self._model.name,
                generation.include_usage,
            ),
            include_usage=generation.include_usage,
        )
        text = TextAssembler(submission, self._model.detokenizer(token_ids), generation.stops)
        answer = Answer(self._hub, job, text)
        return _Events(answer) if generation.stream else await answer.whole(request.receive)

    def _check_room(self) -> None:
        if self._hub.is_draining:
            raise unavailable("The gateway is shutting down")
        if self._preparing + self._hub.streams >= self._config.requests_max:
            raise overloaded(f"{self._config.requests_max} requests are in flight already")

    def _seconds_max(self, request: Request) -> float:
        """The client's own patience, at most the configured one."""
        most = self._config.protocol.request_timeout_seconds
        given = request.headers.get("x-request-timeout")
        if given is None:
            return most
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:  # NaN too
            raise invalid("X-Request-Timeout must be seconds, above 0", "X-Request-Timeout")
        return min(seconds, most)

    def _submission(
        self, generation: Generation, token_ids: tuple[int, ...], deadline: float
    ) -> Submission:
        """Fit the request into the context."""
        size = len(token_ids)
        size_max = min(
            self._model.identity.max_model_len, self._hub.registry.max_model_len() or math.inf
        )
        size_max = int(size_max)
        param = "messages" if not isinstance(generation.prompt, str | tuple) else "prompt"
        max_tokens = generation.max_tokens
        if max_tokens is None:
            max_tokens = size_max - size
            if max_tokens < max(1, generation.sampling.min_tokens):
                raise context_length_exceeded(size + 1, size_max, param)
        elif size > size_max:
            raise context_length_exceeded(size, size_max, param)
        elif size + max_tokens > size_max:
            asked = f"{size + max_tokens} ({size} of the prompt, {max_tokens} of output)"
            raise context_length_exceeded(asked, size_max, generation.max_tokens_param)
        vocab_size = self._model.identity.vocab_size
        ends = set(generation.sampling.stop_token_ids)
        if any(token >= vocab_size for token in ends):
            raise invalid(f"Token ids must be from 0 to {vocab_size - 1}", "stop_token_ids")
        if not generation.sampling.ignore_eos:
            ends.update(self._model.identity.eos_token_ids)
        seed = secrets.randbits(64) if generation.seed is None else generation.seed
        sampling = msgspec.structs.replace(generation.sampling, max_tokens=max_tokens, seed=seed)
        return Submission(token_ids, sampling, deadline, frozenset(ends))
