"""What one forward is asked to do, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from pdrt.kv.layout import KvLayout
from pdrt.sampling import Sampling, TokenLogprobs


class Matcher(Protocol):
    """How far one output has come in its grammar. Owned by one request, used by one step at a
    time; its state is a function of the output tokens, so that a resumed request makes a new one.
    """

    failure: str | None
    """Why the output cannot follow its grammar any further, if it cannot: the token of the step in
    which that was found, and all after it, is an end that the grammar did not ask for."""

    def advance(self, output_ids: Sequence[int]) -> None:
        """Take in what is new in `output_ids`, the whole output so far: longer than at the last
        call, or the same."""

    def fill(self, bitmask: Any, row: int) -> None:
        """Set row `row` of an int32 (rows, ceil(vocabulary / 32)) bitmask to the tokens that may
        come next: never none of them."""


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: a prefill chunk, or the one token of a decode step."""

    token_ids: Sequence[int]
    """Tokens fed in this step; never empty."""
    start: int
    """Absolute position of the first one: as many tokens are in the pool already."""
    pages: Sequence[int]
    """Page table; covers `end` tokens, may be longer."""
    sampling: Sampling | None
    """How to draw the token after the last one, or None for none (all chunks but the last)."""
    output_tokens: int = 0
    """Output tokens that exist already; for `Sampling.min_tokens`."""
    history: Sequence[int] = ()
    """Where `Sampling.needs_history`: all `end` tokens of the sequence so far, prompt then output
    (the last `output_tokens` of them). Not changed by anybody while the step runs."""
    matcher: Matcher | None = None
    """Exactly where `sampling.grammar` is set."""
    scored: Sequence[int] = ()
    """Tokens that follow this row's first ones in the prompt, to be scored: the i-th one is at
    position `start + i + 1`. At most as many as `token_ids`; fewer at the prompt's end."""
    scored_top: int = 0
    """How many of the most likely tokens to report at each scored position."""

    @property
    def end(self) -> int:
        """Tokens of the sequence in the pool after this step; the sampled token's position."""
        return self.start + len(self.token_ids)


class StepResult(msgspec.Struct, frozen=True):
    """The outcome of one step."""

    tokens: list[int | None]
    """Per row, as given: the sampled token, or None where none was asked for."""
    seconds: float
    """Time the step took on the compute thread."""
    logprobs: list[TokenLogprobs | None]
    """Per row: of the sampled token, where `Sampling.logprobs` asks for it."""
    scores: list[tuple[TokenLogprobs, ...]]
    """Per row: one per token of `Row.scored`."""


def validate_rows(rows: Sequence[Row], layout: KvLayout, pages: int, max_model_len: int) -> None:
    """Assert what the scheduler guarantees. A wrong page here would be a silent wrong answer."""
    assert rows, "a step needs at least one row"
    written: set[int] = set()
    for row in rows:
        assert len(row.token_ids) > 0, "a row feeds at least one token"
        assert row.start >= 0, "positions start at 0"
        assert len(row.scored) <= len(row.token_ids), "a token is scored after one that is fed"
        assert row.end <= max_model_len, f"{row.end} tokens exceed the model's {max_model_len}"
        if row.sampling is not None:
            _validate_sampled(row, row.sampling)
        needed = layout.pages_for(row.end)
        assert len(row.pages) >= needed, f"{len(row.pages)} pages for {row.end} tokens"
        # Pages that are only read are checked by the gather itself; these are written to.
        touched = row.pages[row.start // layout.page_size : needed]
        assert 0 <= min(touched) <= max(touched) < pages, "page outside of the pool"
        assert len(set(touched)) == len(touched), "a page twice in one row"
        assert written.isdisjoint(touched), "two rows write into one page"
        written.update(touched)


def _validate_sampled(row: Row, sampling: Sampling) -> None:
    has_grammar = sampling.grammar is not None
    assert (row.matcher is not None) == has_grammar, "a matcher exactly where there is a grammar"
    if sampling.needs_history:
        assert len(row.history) == row.end, f"{len(row.history)} of {row.end} tokens of history"
        assert 0 <= row.output_tokens <= row.end, f"{row.output_tokens} of {row.end} are output"
