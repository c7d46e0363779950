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
    ) -> None:
        """Start after `prompt_ids`; without them the text is decoded as one that begins here."""
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_ids[-PROMPT_TAIL_TOKENS:])
        """Tokens from a character's boundary on."""
        self._settled = len(self._window)
        """Tokens of the window whose text has been sent: a character's boundary, too."""
        # A prompt may end within a character, which is then sent whole, once it is known.
        self._sent = len(self._decode().rstrip(REPLACEMENT))
        """Characters of the window's text that have been sent."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; the text that they make final, often a token's, sometimes none."""
        self._window.extend(token_ids)
        text = self._decode()
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
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
