"""The model as the gateway needs it: its names and limits, text to ids, ids to text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from pdrt.config import GatewayConfig
from pdrt.errors import RequestRefused
from pdrt.gateway.errors import ApiError, context_length_exceeded, invalid
from pdrt.gateway.schema import ChatMessages, Generation, Prompt
from pdrt.model.detokenizer import Detokenizer
from pdrt.model.fetch import resolve_model
from pdrt.model.identity import ModelIdentity, read_identity
from pdrt.model.tokenizer import Tokenizer

log = logging.getLogger("pdrt.gateway")

Parse = Callable[[bytes, int], Generation]
"""Of a body, given how many tokens the context holds."""

INLINE_BYTES_MAX = 4096
"""Larger bodies (milliseconds and more, even of empty messages) are parsed and tokenized in a
thread, beside the loop."""
THREADS = 2
"""A big prompt does not hold up all others. More would only compete with the loop."""
CHARACTERS_PER_MESSAGE = 16
"""What the chat template adds to each, or more: an empty message is work too."""
CHARACTERS_PER_TOKEN_MAX = 256
"""No vocabulary known to us has longer tokens, but for rulers and blanks. A text that is longer
than the context even so is refused unread: tokenizing it would keep the thread for minutes."""


class ServedModel:
    """The one model of this gateway."""

    def __init__(self, identity: ModelIdentity, name: str, tokenizer: Tokenizer) -> None:
        """`name` is what clients call it."""
        self.identity = identity
        self.name = name
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    async def prepare(self, body: bytes, parse: Parse) -> tuple[Generation, tuple[int, ...]]:
        """What a body asks for, and the token ids of its prompt, special tokens and chat template
        included. Holds the loop for some milliseconds at most, however large the body.

        Raises:
            ApiError: the body is none, another model is meant, the chat template refuses the
                messages, a token id is none, the prompt is far too long, or has no tokens at all.
        """
        if len(body) <= INLINE_BYTES_MAX:
            return self._prepare(body, parse)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._prepare, body, parse)

    def _prepare(self, body: bytes, parse: Parse) -> tuple[Generation, tuple[int, ...]]:
        generation = parse(body, self.identity.max_model_len)
        if generation.model != self.name:
            message = f"The model '{generation.model[:200]}' does not exist"
            raise ApiError(404, message, param="model", code="model_not_found")
        return generation, self._tokenize(generation.prompt)

    def _tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        param = "messages" if isinstance(prompt, ChatMessages) else "prompt"
        if isinstance(prompt, tuple):
            token_ids = prompt
            vocab_size = self.identity.vocab_size
            if prompt and not (min(prompt) >= 0 and max(prompt) < vocab_size):
                raise invalid(f"Token ids must be from 0 to {vocab_size - 1}", param)
        else:
            token_ids = self._tokenize_text(prompt, param)
        if not token_ids:
            raise invalid("The prompt must hold at least one token", param)
        return token_ids

    def _tokenize_text(self, prompt: ChatMessages | str, param: str) -> tuple[int, ...]:
        size = _characters(prompt)
        tokens_max = self.identity.max_model_len
        if size > tokens_max * CHARACTERS_PER_TOKEN_MAX:
            raise context_length_exceeded(f"{size} characters", tokens_max, param)
        try:
            return self._encode(prompt)
        except RequestRefused as error:
            raise invalid(str(error), error.param or param) from None

    def _encode(self, prompt: ChatMessages | str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._tokenizer.encode(prompt))
        return tuple(self._tokenizer.apply_chat_template(prompt.messages))

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """For the output that follows `prompt_ids`."""
        return self._tokenizer.detokenizer(prompt_ids)

    def close(self) -> None:
        """End the threads; a prompt that is being tokenized is the last."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _characters(prompt: ChatMessages | str) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(
        CHARACTERS_PER_MESSAGE + len(message["content"]) + len(message.get("name", ""))
        for message in prompt.messages
    )


def load_served_model(config: GatewayConfig) -> tuple[ServedModel, tuple[str, ...]]:
    """The configured model, and the digests that its workers may have: workers started with
    `--load-format dummy` serve the same model as far as a gateway can tell.

    Raises:
        ModelError: there is no such model, or it cannot be served.
    """
    directory = resolve_model(config.model, log.info)
    identity = read_identity(directory)
    digests = (identity.digest, read_identity(directory, "dummy").digest)
    name = config.served_model_name or identity.name
    return ServedModel(identity, name, Tokenizer(directory)), digests
