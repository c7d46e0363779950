"""The model as the gateway needs it: its names and limits, text to ids, ids to text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdrt.config import ApiConfig, GatewayConfig
from pdrt.errors import RequestRefused
from pdrt.gateway.errors import ApiError, context_length_exceeded, invalid
from pdrt.gateway.logprobs import TokenNames
from pdrt.gateway.preparation import Preparation, Prepared
from pdrt.gateway.schema.bounds import Limits
from pdrt.gateway.schema.generation import Generation
from pdrt.gateway.schema.parsing import parse_tokenize
from pdrt.model.detokenizer import Detokenizer
from pdrt.model.fetch import resolve_for_gateway
from pdrt.model.grammar_limits import check_grammar
from pdrt.model.identity import ModelIdentity, read_served_identity
from pdrt.model.tokenizer import Tokenizer
from pdrt.sampling import Grammar

log = logging.getLogger("pdrt.gateway")

Parse = Callable[[bytes, Limits], Generation]
Result = TypeVar("Result")

INLINE_BYTES_MAX = 4096
"""Larger bodies (milliseconds and more, even of empty messages) are parsed and tokenized in a
thread, beside the loop."""
THREADS = 2
"""A big prompt does not hold up all others. More would only compete with the loop."""


class ServedModel:
    """The one model of this gateway."""

    def __init__(
        self,
        identity: ModelIdentity,
        name: str,
        tokenizer: Tokenizer,
        api: ApiConfig = ApiConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """`name` is what clients call it."""
        self.identity = identity
        self.name = name
        self.token_names = TokenNames(tokenizer.token_bytes)
        self._tokenizer = tokenizer
        self._preparation = Preparation(identity, tokenizer, api)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    async def prepare(self, body: bytes, parse: Parse, limits: Limits) -> Prepared:
        """What a body asks for, the token ids of its prompts, special tokens and chat template
        included, and its grammar. Holds the loop for some milliseconds at most, however large the
        body.

        Raises:
            ApiError: the body is none, another model is meant, the chat template refuses the
                messages, a token id is none, a prompt is far too long, or has no tokens at all.
        """

        def prepare() -> Prepared:
            generation = parse(body, limits)
            self.check_name(generation.model)
            return self._preparation.prepare(generation, limits)

        return prepare() if len(body) <= INLINE_BYTES_MAX else await self.beside(prepare)

    async def beside(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread, beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def check_grammar(self, grammar: Grammar, param: str) -> None:
        """Beside the loop: nothing is computed for an output that cannot be.

        Raises:
            ApiError: 400 naming `param`.
        """
        try:
            await self.beside(lambda: check_grammar(grammar))
        except RequestRefused as error:
            raise invalid(f"Invalid value for '{param}': {error}", param) from None

    def check_name(self, name: str | None) -> None:
        """Raises ApiError when another model is meant; None means this one."""
        if name is not None and name != self.name:
            message = f"The model '{name[:200]}' does not exist; this one is '{self.name}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def tokenize(self, body: bytes, limits: Limits) -> tuple[list[int], list[str] | None]:
        """Token ids, and each as text if the body asks for that. Raises ApiError."""

        def tokenize() -> tuple[list[int], list[str] | None]:
            asked, prompt, encoding = parse_tokenize(body, limits)
            self.check_name(asked.model)
            ids = list(self._preparation.tokenize(prompt, encoding, limits))
            texts = None
            if asked.return_token_strs:
                texts = [self.token_names.text(token) for token in ids]
            return ids, texts

        return tokenize() if len(body) <= INLINE_BYTES_MAX else await self.beside(tokenize)

    def decode(self, token_ids: Sequence[int], limits: Limits) -> str:
        """Text of token ids, special tokens included. The tokenizer lets nobody else run for as
        long as it takes, so they are not more than the context holds.

        Raises:
            ApiError: 400 naming `tokens`: one is no token, or they are too many.
        """
        if len(token_ids) > limits.tokens_max:
            raise context_length_exceeded(len(token_ids), limits.tokens_max, "tokens")
        if token_ids and max(token_ids) >= self.identity.vocab_size:
            message = f"Token ids must be from 0 to {self.identity.vocab_size - 1}"
            raise invalid(message, "tokens")
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        keep: Sequence[str] = (),
    ) -> Detokenizer:
        """For the output that follows `prompt_ids`; `keep` are special tokens that show even so."""
        return self._tokenizer.detokenizer(prompt_ids, skip_special_tokens, keep)

    def close(self) -> None:
        """End the threads; a prompt that is being tokenized is the last."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def load_served_model(config: GatewayConfig) -> tuple[ServedModel, tuple[str, ...]]:
    """The configured model, and the digests that its workers may have: workers started with
    `--load-format dummy` serve the same model as far as a gateway can tell.

    Raises:
        ModelError: there is no such model, or it cannot be served.
    """
    directory = resolve_for_gateway(config.model, log.info)
    identity, digests = read_served_identity(directory)
    name = config.served_model_name or identity.name
    return ServedModel(identity, name, Tokenizer(directory), config.api), digests
