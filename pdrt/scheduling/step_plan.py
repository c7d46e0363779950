"""What the decode scheduler is told and tells: bounds of a step, its plan, and pages. Pure."""

from __future__ import annotations

from typing import Protocol

import msgspec

from pdrt.scheduling.decode_request import DecodeRequest


class PagesWanted(msgspec.Struct, frozen=True):
    """Of one room: pages of the prompt, and pages that its request needs to begin with."""

    written: int
    leased: int


class StepLimits(msgspec.Struct, frozen=True):
    """How much one step computes at most."""

    sequences: int
    tokens: int
    """Of prompts, while no sequence decodes."""
    tokens_beside: int
    """Of prompts, beside sequences that decode: their next tokens come so much later."""


class StepPlan(msgspec.Struct, frozen=True):
    """What the next step computes, and who had to give up pages for it."""

    sequences: tuple[DecodeRequest, ...]
    """Each feeds `step_tokens` tokens, from position `computed` on."""
    preempted: tuple[DecodeRequest, ...]
    tokens: int
    prompt_tokens: int
    """Of `tokens`, those of prompts that are computed here."""


class SequencePool(Protocol):
    """What the scheduler asks of the pool; the worker owns it."""

    @property
    def available(self) -> int:
        """Pages that `take` could give now."""

    def take(self, request: DecodeRequest, count: int) -> list[int]:
        """Pages for a sequence, or PoolExhausted."""

    def give_back(self, request: DecodeRequest) -> None:
        """Take a sequence's pages back; what it has computed is sound."""
