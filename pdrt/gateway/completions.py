"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import math
import secrets
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdrt.config import GatewayConfig
from pdrt.gateway.admission import Admission
from pdrt.gateway.answer import Answer, Job
from pdrt.gateway.chat.output import OutputParser
from pdrt.gateway.chat_format import ChatEvents, ChatWhole
from pdrt.gateway.choice import Choice, Plan
from pdrt.gateway.completion_format import CompletionEvents, CompletionWhole
from pdrt.gateway.errors import invalid
from pdrt.gateway.http import read_body
from pdrt.gateway.hub import Hub
from pdrt.gateway.plans import Circumstances, choice_plans
from pdrt.gateway.preparation import Prepared
from pdrt.gateway.responses import Head, Renderer
from pdrt.gateway.schema.parsing import parse_chat, parse_completion
from pdrt.gateway.served_model import Parse, ServedModel
from pdrt.gateway.text import TextAssembler
from pdrt.observe.http_server import DIRECT_BODY


class _Events(Response):
    """Runs the answer when Starlette sends the response."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = scope.get("extensions", {}).get(DIRECT_BODY)
        await self._answer.events(receive, send, direct)


class Completions:
    """Both endpoints."""

    def __init__(
        self, hub: Hub, model: ServedModel, admission: Admission, config: GatewayConfig
    ) -> None:
        self._hub = hub
        self._model = model
        self._admission = admission
        self._config = config

    async def chat(self, request: Request) -> Response:
        return await self._serve(request, parse_chat, is_chat=True)

    async def completion(self, request: Request) -> Response:
        return await self._serve(request, parse_completion, is_chat=False)

    async def _serve(self, request: Request, parse: Parse, is_chat: bool) -> Response:
        began = self._hub.clock()
        deadline = began + self._seconds_max(request)
        with self._admission.preparing():
            body = await read_body(request, self._config.api.body_bytes_max)
            limits = self._admission.limits()
            prepared = await self._model.prepare(body, parse, limits)
            if prepared.grammar is not None:
                await self._model.check_grammar(prepared.grammar, prepared.grammar_param)
        self._admission.check_choices(prepared.generation.choices)
        head = Head(
            ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12),
            int(time.time()),
            self._model.name,
            is_chat,
        )
        # `Answer` ends it. That of a request that is refused at once never ends, and is not sent.
        traceparent = request.headers.get("traceparent", "")
        span = self._hub.tracer.start("request", traceparent, began)
        met = Circumstances(
            identity=self._model.identity,
            tokens_max=limits.tokens_max,
            frame_bytes_max=self._config.protocol.frame_bytes_max,
            deadline=deadline,
            request_id=request.state.request_id,
            traceparent=span.traceparent,
            draw_seed=lambda: secrets.randbits(64),
        )
        plans = choice_plans(prepared, met)
        choices = tuple(self._choice(plan, prepared, head) for plan in plans)
        streaming = prepared.generation.streaming
        include_usage = streaming is not None and streaming.include_usage
        job = Job(request.state.request_id, choices, head, include_usage, span)
        answer = Answer(self._hub, job, self._model.beside)
        return await answer.whole(request.receive) if streaming is None else _Events(answer)

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

    def _choice(self, plan: Plan, prepared: Prepared, head: Head) -> Choice:
        generation, submission = prepared.generation, plan.submission
        shown = generation.shown
        text = TextAssembler(
            submission,
            self._model.detokenizer(
                submission.token_ids, shown.skip_special_tokens, prepared.markers
            ),
            generation.stops,
            shown.stop_string,
        )
        prompt_detokenizer = None
        if shown.echo and shown.logprobs is not None:
            prompt_detokenizer = self._model.detokenizer((), shown.skip_special_tokens)
        renderer = self._renderer(plan, prepared, head)
        return Choice(plan, text, renderer, prompt_detokenizer)

    def _renderer(self, plan: Plan, prepared: Prepared, head: Head) -> Renderer:
        shown, names, index = plan.shown, self._model.token_names, plan.index
        is_whole = prepared.generation.streaming is None
        if not head.is_chat:
            if is_whole:
                return CompletionWhole(index, shown, names, plan.submission.token_ids)
            return CompletionEvents(head, index, shown, names)
        parser = None
        if not prepared.is_plain:
            parser = OutputParser(prepared.tools, prepared.start, lambda: secrets.token_hex(12))
        if is_whole:
            return ChatWhole(index, shown, names, parser)
        return ChatEvents(head, index, shown, names, parser)
