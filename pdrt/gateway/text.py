"""From output tokens to the text a client may see. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdrt.gateway.effects import Submission
from pdrt.gateway.stop import StopMatcher


class Detokenizer(Protocol):
    """Turns ids into text piece by piece; holds back an incomplete character."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class TextAssembler:
    """Text of one output, up to its first stop string."""

    def __init__(
        self,
        submission: Submission,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        shows_stop: bool = False,
    ) -> None:
        """`shows_stop`: what ends the output, string or token, is a part of its text."""
        self._shows_stop = shows_stop
        self._submission = submission
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, shows_stop)
        self.tokens = 0
        """Tokens that count: up to the one that completed a stop string."""
        self.characters = 0
        """Of the text that their tokens have made certain: where the next token's text begins."""

    @property
    def stopped(self) -> bool:
        """A stop string was found; nothing after it counts."""
        return self._matcher.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add; tokens after a stop string are ignored."""
        if len(token_ids) == 1 and not self._matcher.stopped:
            return self._push(token_ids[0])
        return "".join([self._push(token) for token in token_ids if not self.stopped])

    def _push(self, token: int) -> str:
        position = self.tokens
        self.tokens += 1
        if not self._shows_stop and self._submission.is_end(token, position):
            return ""  # it ends the output and is no part of it
        text = self._detokenizer.push([token])
        self.characters += len(text)
        # As with end-of-sequence, no stop counts before `min_tokens`.
        if self.tokens < self._submission.sampling.min_tokens:
            return text
        return self._matcher.push(text)

    def finish(self) -> str:
        """The rest, when the output has ended otherwise than by a stop string."""
        assert not self.stopped
        text = self._matcher.push(self._detokenizer.finish())
        return text if self.stopped else text + self._matcher.finish()
