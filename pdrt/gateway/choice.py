"""One choice of an answer: from what the core says of its request to what the client gets."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from pdrt.gateway.effects import Submission
from pdrt.gateway.logprobs import Scored
from pdrt.gateway.responses import ChunkUsage, Piece, PromptShown, Renderer, Usage
from pdrt.gateway.schema.answers import FinishedBy
from pdrt.gateway.schema.generation import Shown
from pdrt.gateway.stream import OutputStream, Received
from pdrt.gateway.text import Detokenizer, TextAssembler
from pdrt.sampling import TokenLogprobs


class Plan(msgspec.Struct, frozen=True):
    """What a choice is to be."""

    index: int
    prompt_index: int
    submission: Submission
    shown: Shown
    echo: str
    """The prompt's text, where it is shown; else empty."""
    continuous_usage: bool
    include_usage: bool
    grammar_param: str
    """The field that the grammar comes from."""

    def blamed(self, detail: str) -> str | None:
        """The field that a worker complains about: it says the kind of a grammar that it cannot
        compile."""
        grammar = self.submission.sampling.grammar
        is_grammar = grammar is not None and detail.startswith(f"{grammar.kind.value}: ")
        return self.grammar_param if is_grammar else None


class Choice:
    """Used by the answer's task only, but for `push_prompt`, which may run beside the loop while
    the task waits for it."""

    def __init__(
        self,
        plan: Plan,
        text: TextAssembler,
        renderer: Renderer,
        prompt_detokenizer: Detokenizer | None,
    ) -> None:
        """`prompt_detokenizer` gives the prompt's tokens their places in `echo`; None where nobody
        asked."""
        self.plan = plan
        self.renderer = renderer
        self.stream: OutputStream | None = None
        """Its request; None until it is opened."""
        self.finished_by: FinishedBy | None = None
        """Set when the choice is complete; its request may run on for a moment."""
        self.tokens_taken = 0
        self._text = text
        self._prompt_detokenizer = prompt_detokenizer
        self._has_begun = False

    @property
    def tokens(self) -> int:
        """Of the output, as far as they count."""
        return self._text.tokens

    @property
    def is_stopped(self) -> bool:
        """By a stop string: what runs upstream is not wanted any more."""
        return self._text.stopped

    @property
    def prompt_logprobs(self) -> int:
        """How many there are: whether `push_prompt` is worth a thread."""
        top = self.plan.submission.sampling.prompt_logprobs
        return 0 if top is None else len(self.plan.submission.token_ids) * (1 + top)

    @property
    def logprobs(self) -> int:
        """How many there are by now, of the prompt and the output."""
        top = self.plan.submission.sampling.logprobs
        return self.prompt_logprobs + (0 if top is None else self.tokens * (1 + top))

    def push_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> bytes:
        """What begins an answer that is about the prompt too."""
        return self._begin(logprobs)

    def push(self, received: Received) -> bytes:
        """New output; what follows a stop string is ignored."""
        data = b"" if self._has_begun else self._begin(None)
        piece = self._piece(received)
        if self._text.stopped:
            return data + self._finish("stop", piece)
        return data + self.renderer.push(piece, self._usage())

    def finish(self, reason: FinishedBy) -> bytes:
        """The end, other than by a stop string found before."""
        data = b"" if self._has_begun else self._begin(None)
        text = self._text.finish()
        return data + self._finish("stop" if self._text.stopped else reason, Piece(text))

    def usage(self) -> Usage:
        prompt_tokens = len(self.plan.submission.token_ids)
        cached_tokens = 0 if self.stream is None else self.stream.cached_tokens
        return Usage(prompt_tokens, self._text.tokens, cached_tokens)

    def _begin(self, logprobs: tuple[TokenLogprobs, ...] | None) -> bytes:
        self._has_begun = True
        shown, prompt_ids = self.plan.shown, self.plan.submission.token_ids
        self.renderer.begin(PromptShown(prompt_ids if shown.token_ids else UNSET, logprobs))
        if not shown.echo:
            return b""
        scored = []
        if self._prompt_detokenizer is not None:
            offset = 0
            # A prompt of one token has nothing to ask for.
            for token, one in zip(prompt_ids, (None, *(logprobs or ())), strict=True):
                scored.append(Scored(token, offset, one))
                offset += len(self._prompt_detokenizer.push([token]))
        return self.renderer.push(Piece(self.plan.echo, (), scored), self._usage())

    def _piece(self, received: Received) -> Piece:
        before = self._text.tokens
        if not received.logprobs:
            text = self._text.push(received.token_ids)
            return Piece(text, received.token_ids[: self._text.tokens - before])
        texts, scored = [], []
        for token, one in zip(received.token_ids, received.logprobs, strict=True):
            if not self._text.stopped:
                offset = len(self.plan.echo) + self._text.characters
                scored.append(Scored(token, offset, one))
                texts.append(self._text.push((token,)))
        return Piece("".join(texts), received.token_ids[: self._text.tokens - before], scored)

    def _finish(self, reason: FinishedBy, piece: Piece) -> bytes:
        self.finished_by = reason
        return self.renderer.finish(piece, reason, self._usage())

    def _usage(self) -> ChunkUsage:
        """What an event says of the usage."""
        if self.plan.continuous_usage:
            return self.usage().body()
        # Events of a stream that ends with its usage carry a null until then.
        return None if self.plan.include_usage else UNSET
