"""Turning a stream of token ids into a stream of text, of which nothing is ever taken back.

A token is not text: one character may span several tokens, and whether a token starts with a
space may depend on the token before it. So text is decoded over a short window of tokens, and
only what follows the text sent already is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
"""What decoders put where bytes do not (or not yet) make a character."""
PROMPT_TAIL_TOKENS = 16
"""Tokens of the prompt that the first output tokens are decoded after."""
HELD_TOKENS_MAX = 64
"""Tokens held back for an unfinished character. One has 4 bytes at most; yet text may hold U+FFFD
itself, which looks unfinished, so only a long run of it is taken for garbage."""
GARBAGE_TAIL_TOKENS = 8
"""Tokens kept as the window when such bytes are given up on; UTF-8 falls into step within 3."""


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TokenTexts:
    """Texts of single tokens, where a text is nothing but the bytes of its tokens joined: there,
    between two characters, a token's text does not depend on the tokens before it."""

    def __init__(self, decoder: Decoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._texts: dict[int, str] = {}
        """As far as they have been needed; no more than the vocabulary, as others are empty."""

    def __call__(self, token_id: int) -> str:
        """Empty where it has none, or may hold a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._decoder.decode([token_id], self._skip_special_tokens)
            if not text or REPLACEMENT in text:
                return ""
            self._texts[token_id] = text
        return text


class Detokenizer:
    """The text of one output, as it grows. A token costs the decoding of a few.

    All that `push` and `finish` return, joined, is the text of all tokens decoded at once (after
    the prompt's, if a prompt is given). An output that ends within a character ends in U+FFFD.
    """

    def __init__(
        self,
        decoder: Decoder,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        texts: TokenTexts | None = None,
    ) -> None:
        """Start after `prompt_ids`; without them the text is decoded as one that begins here.
        `texts`: of the same decoder, if it is one whose tokens are bytes."""
        self._decoder = decoder
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_ids[-PROMPT_TAIL_TOKENS:])
        """Tokens from a character's boundary on."""
        self._settled = len(self._window)
        """Tokens of the window whose text has been sent: a character's boundary, too."""
        text = self._decode()
        # A prompt may end within a character, which is then sent whole, once it is known.
        self._sent = len(text.rstrip(REPLACEMENT))
        """Characters of the window's text that have been sent."""
        self._is_between = not text.endswith(REPLACEMENT)
        """All of the window has been sent, and ends with a character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; the text that they make final, often a token's, sometimes none."""
        if self._texts is not None and self._is_between and len(token_ids) == 1:
            text = self._texts(token_ids[0])
            if text:  # as `_settle` would have it
                self._window, self._settled, self._sent = list(token_ids), 1, len(text)
                return text
        self._window.extend(token_ids)
        text = self._decode()
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
        self._is_between = False
        if len(token_ids) > 1:
            # Many at once that end within a character: what is before it is found one by one.
            del self._window[-len(token_ids) :]
            return "".join(self.push([token]) for token in token_ids)
        if len(self._window) - self._settled > HELD_TOKENS_MAX:
            return self._give_up(text)
        return ""

    def finish(self) -> str:
        """The text that was held back. The last call."""
        text = self._decode()
        new = text[self._sent :]
        self._sent = len(text)
        return new

    def _decode(self) -> str:
        return self._decoder.decode(self._window, self._skip_special_tokens)

    def _settle(self, text: str) -> str:
        """Send the window's text, and let the window begin with the tokens that were new in it.

        They tell how the next token begins. Tokens without text cannot: they stay behind those
        with text, or, if they are many (special tokens that are skipped), go.
        """
        new = text[self._sent :]
        if new:
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._sent = len(self._decode())
        elif len(self._window) - self._settled > HELD_TOKENS_MAX:
            del self._window[self._settled :]
        self._is_between = len(self._window) == self._settled
        return new

    def _give_up(self, text: str) -> str:
        """Send bytes that will never make a character, so that garbage does not pile up.

        The last one is held back still: it may be the beginning of a valid character.
        """
        new = text[self._sent : -1]
        del self._window[: max(self._settled, len(self._window) - GARBAGE_TAIL_TOKENS)]
        self._settled = 0
        self._sent = max(0, len(self._decode()) - 1)
        return new
