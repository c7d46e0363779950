"""Log probabilities in OpenAI's and vLLM's shapes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pdrt.gateway.schema.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    LikelyToken,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)
from pdrt.sampling import TokenLogprobs


class Scored(msgspec.Struct, frozen=True):
    """One token of a choice."""

    token_id: int
    offset: int
    """Where its text begins in the choice's."""
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt."""


class TokenNames:
    """What tokens are called. A token whose bytes are no whole characters is called by these, as
    in `\\xe2\\x80`: names of different tokens differ then, which U+FFFD would hide."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._texts: dict[int, str] = {}
        """By id; at most the vocabulary."""

    def bytes(self, token_id: int) -> bytes:
        return self._token_bytes(token_id)

    def text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = _name(self._token_bytes(token_id))
        return text


def _name(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in token)


class LogprobsFormat:
    """How one response shows them."""

    def __init__(self, names: TokenNames, top: int, as_ids: bool) -> None:
        """`top`: that many of the most likely tokens. `as_ids`: tokens are called
        `token_id:ID`."""
        self._names = names
        self._top = top
        self._as_ids = as_ids

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._names.text(token_id)

    def completion(self, scored: Sequence[Scored]) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=[one.offset for one in scored],
            token_logprobs=[None if s.logprobs is None else s.logprobs.logprob for s in scored],
            tokens=[self._text(one.token_id) for one in scored],
            top_logprobs=[None if s.logprobs is None else self._likely(s) for s in scored],
        )

    def _likely(self, scored: Scored) -> dict[str, float]:
        """The most likely tokens, and the token itself in any case."""
        assert scored.logprobs is not None
        likely = {self._text(token): value for token, value in scored.logprobs.top[: self._top]}
        likely[self._text(scored.token_id)] = scored.logprobs.logprob
        return likely

    def chat(self, scored: Sequence[Scored]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_token(one) for one in scored])

    def _chat_token(self, scored: Scored) -> TokenLogprob:
        assert scored.logprobs is not None
        name, value, as_bytes = self._chat_names(scored.token_id, scored.logprobs.logprob)
        top = scored.logprobs.top[: self._top]
        return TokenLogprob(
            name, value, as_bytes, [LikelyToken(*self._chat_names(*pair)) for pair in top]
        )

    def _chat_names(self, token_id: int, value: float) -> tuple[str, float, list[int]]:
        return self._text(token_id), value, list(self._names.bytes(token_id))


def prompt_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int, names: TokenNames
) -> PromptLogprobs:
    """vLLM's shape: of each token but the first, itself and the most likely ones by id."""
    positions: PromptLogprobs = [None]
    for token_id, one in zip(token_ids[1:], logprobs, strict=True):
        by_id = {str(token_id): PromptLogprob(one.logprob, one.rank, names.text(token_id))}
        for rank, (token, value) in enumerate(one.top[:top], start=1):
            if token != token_id:
                by_id[str(token)] = PromptLogprob(value, rank, names.text(token))
        positions.append(by_id)
    return positions
