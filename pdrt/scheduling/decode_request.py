"""One attempt at a request on its way through a decode worker. Pure."""

from __future__ import annotations

from collections import deque
from enum import Enum

import msgspec

from pdrt.ids import RoomId
from pdrt.kv.prefix import PageKey
from pdrt.protocol.gateway_messages import FinishReason, Submit
from pdrt.sampling import Sampling, TokenLogprobs


class RequestState(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    RUNNING = "running"


class LocalReason(Enum):
    """Why a prompt is computed by the decode worker itself."""

    UNPAIRED = "unpaired"
    """No prefill worker is there that could take it."""
    ROOMS_FAILED = "rooms_failed"
    """As many of its rooms have failed as may."""
    SHORT = "short"
    """It takes less time here than a hand-over."""


class End(msgspec.Struct, frozen=True):
    """How a request ended; `detail` is for a person, when that is an error."""

    reason: FinishReason
    detail: str = ""


PHASES_MAX = 64
"""Remembered of one request, the latest: sixteen rooms."""


class Phase(msgspec.Struct, frozen=True):
    """What a request was doing, from when to when: queued, prefill, transfer or decode."""

    name: str
    began_at: float
    ended_at: float
    room: RoomId | None


class DecodeRequest:
    """One attempt at a request, on this worker."""

    def __init__(self, submit: Submit, now: float) -> None:
        self.request = submit.request
        self.sampling: Sampling = submit.sampling
        self.needs_history = submit.sampling.needs_history
        self.endpoints = submit.prefill_endpoints
        self.cache_salt = submit.cache_salt
        self.context = submit.context
        self.state = RequestState.QUEUED
        self.prompt_tokens = len(submit.token_ids)
        self.tokens = [*submit.token_ids, *submit.output_token_ids]
        """Prompt, then output, whoever computed it."""
        self.deadline = now + submit.seconds_max
        self.arrived_at = now
        self.order = 0
        """Of arrival on this worker; the youngest is preempted first."""
        self.room: RoomId | None = None
        """Exactly while PREFILLING."""
        self.last_room: RoomId | None = None
        """For the log: what the prefill worker calls it."""
        self.pages: tuple[int, ...] = ()
        """Exactly while RUNNING; covers `computed` tokens. Own ones and held cached ones."""
        self.computed = 0
        """Tokens whose KV is in `pages`: all but the last one sampled, once the prompt is
        computed."""
        self.keys: list[PageKey] = []
        """Of the first full pages of `tokens`; made where they are needed."""
        self.awaits_grammar = submit.sampling.grammar is not None
        """Its matcher is not there yet: it is prefilled, but takes part in no step."""
        self.awaits_scores = submit.sampling.prompt_logprobs is not None
        """The prompt's log probabilities are not there yet: its rooms ask for them."""
        self.here: LocalReason | None = None
        """Set while its prompt is being computed by steps of this worker; while RUNNING only."""
        self.scores: list[TokenLogprobs] = []
        """Those of the prompt's tokens so far, while it is computed here and they are awaited."""
        self.rooms_failed = 0
        self.tokens_taken = len(submit.output_token_ids)
        """Output tokens that the client has taken."""
        self.cached_tokens = 0
        self.step_tokens = 0
        """Of its tokens, those that the running step feeds; 0 when it is in none."""
        self.ended: End | None = None
        """Set when it ended during a step: it leaves after the step."""
        self.last_token_at = now
        self.timings: dict[str, float] = {}
        """Seconds by phase, summed over rooms."""
        self.phases: deque[Phase] = deque(maxlen=PHASES_MAX)
        self.phase_began_at = now

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def prefills_here(self) -> bool:
        return self.here is not None

    @property
    def is_in_step(self) -> bool:
        """A step that runs reads and writes its pages, and reads `tokens`: neither changes hands
        or is changed."""
        return self.step_tokens > 0

    def end_prompt(self) -> None:
        """Its prompt is computed, or given up, if it was being computed here."""
        self.here = None
        self.scores = []

    def end_phase(self, phase: str, now: float) -> None:
        """What it has been doing since the phase before counts up to now."""
        spent = now - self.phase_began_at
        self.timings[phase] = self.timings.get(phase, 0.0) + spent
        self.phases.append(Phase(phase, self.phase_began_at, now, self.last_room))
        self.phase_began_at = now

    def end_last_phase(self, now: float) -> None:
        """It is over."""
        if self.state is RequestState.QUEUED:
            self.end_phase("queued", now)
        elif self.prefills_here:
            self.end_phase("prefill", now)
        elif self.state is RequestState.RUNNING:
            self.end_phase("decode", now)
        else:
            self.end_phase("transfer" if "prefill" in self.timings else "prefill", now)
