"""The model as the gateway needs it: its names and limits, text to ids, ids to text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pdrt.config import GatewayConfig
from pdrt.errors import RequestRefused
from pdrt.gateway.errors import context_length_exceeded, invalid
from pdrt.gateway.schema import ChatMessages, Prompt
from pdrt.model.detokenizer import Detokenizer
from pdrt.model.fetch import resolve_model
from pdrt.model.identity import ModelIdentity, read_identity
from pdrt.model.tokenizer import Tokenizer

log = logging.getLogger("pdrt.gateway")

INLINE_CHARACTERS_MAX = 4096
"""Longer prompts (a millisecond and more) are tokenized in a thread, beside the loop."""
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
        # One thread: big prompts wait for each other, not for the loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, special tokens and chat template included.

        Raises:
            ApiError: the chat template refuses the messages, a token id is none, the text is
                far too long, or there are no tokens at all.
        """
        param = "messages" if isinstance(prompt, ChatMessages) else "prompt"
        if isinstance(prompt, tuple):
            token_ids = prompt
            vocab_size = self.identity.vocab_size
            if not all(0 <= token < vocab_size for token in prompt):
                raise invalid(f"Token ids must be from 0 to {vocab_size - 1}", param)
        else:
            token_ids = await self._tokenize_text(prompt, param)
        if not token_ids:
            raise invalid("The prompt must hold at least one token", param)
        return token_ids

    async def _tokenize_text(self, prompt: ChatMessages | str, param: str) -> tuple[int, ...]:
        size = _characters(prompt)
        tokens_max = self.identity.max_model_len
        if size > tokens_max * CHARACTERS_PER_TOKEN_MAX:
            raise context_length_exceeded(f"{size} characters", tokens_max, param)
        try:
            if size <= INLINE_CHARACTERS_MAX:
                return self._encode(prompt)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._encode, prompt)
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
        """End the thread; a prompt that is being tokenized is the last."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _characters(prompt: ChatMessages | str) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message["content"]) for message in prompt.messages)


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
