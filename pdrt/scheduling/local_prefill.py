"""Which prompts a decode worker computes itself, instead of having them handed over. Pure.

A prompt that no prefill worker takes is computed here rather than refused (`fallback`). A short one
may be computed here although it could be handed over (`short`), where that is quicker: which of the
two it is depends on the machine, the link and the queues, so it is not guessed but measured. Both
ways are timed, from admission until the sequence can decode, as moving averages over short prompts;
the quicker one is taken, and now and then the other, so that its average stays true.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdrt.config import SchedulerConfig
from pdrt.protocol.messages import Reason
from pdrt.scheduling.decode_request import DecodeRequest, LocalReason

PROMPTS_MAX = 4
"""Computed here at once. More would take pages before their turn comes; and who waits finds what
others have computed of the same prefix."""
UNPAIRED_SECONDS = 0.25
"""Without a usable prefill worker for so long, nobody is there. A new generation, or a writer that
turned a grant away, takes some milliseconds until the next `Welcome`."""
NEWEST_SHARE = 1 / 8
"""Weight of the newest short prompt in its way's average."""
OTHER_WAY_EVERY = 32
"""One short prompt in so many goes the slower way."""


class LocalPrefill:
    """Decides, by what is there and by what both ways have taken."""

    def __init__(self, config: SchedulerConfig, rooms_per_request_max: int, now: float) -> None:
        self._is_on = config.local_prefill != "off"
        takes_short = config.local_prefill == "short"
        self.short_tokens_max = config.local_prefill_short_tokens if takes_short else 0
        """A prompt with no more uncached tokens may be computed here although it could be handed
        over."""
        self._rooms_max = rooms_per_request_max
        self._unpaired_since: float | None = now
        """None exactly while a grant could be sent at the last tick."""
        self._here = _Average()
        self._handed_over = _Average()
        self._shorts = 0

    @property
    def is_on(self) -> bool:
        return self._is_on

    def on_tick(self, *, is_paired: bool, now: float) -> None:
        if is_paired:
            self._unpaired_since = None
        elif self._unpaired_since is None:
            self._unpaired_since = now

    def unpaired_seconds(self, now: float) -> float:
        """How long no grant could be sent."""
        return 0.0 if self._unpaired_since is None else now - self._unpaired_since

    def goes_on(self, request: DecodeRequest, reason: Reason) -> bool:
        """Whether a request whose room has failed for `reason` may have another, or goes on here.
        Where forwards fail of its prompt, one here would fail of it too, in the middle of
        everybody else's steps."""
        may_go_on_here = self._is_on and reason is not Reason.FORWARD_FAILED
        return request.rooms_failed < self._rooms_max or may_go_on_here

    def why(self, request: DecodeRequest, *, is_paired: bool, now: float) -> LocalReason | None:
        """Why the prompt must be computed here; None when it waits for a room, or may have one."""
        if not self._is_on:
            return None
        if request.rooms_failed >= self._rooms_max:
            return LocalReason.ROOMS_FAILED
        if not is_paired and self.unpaired_seconds(now) >= UNPAIRED_SECONDS:
            return LocalReason.UNPAIRED
        return None

    def takes_short(self) -> bool:
        """Whether the next short prompt is computed here."""
        self._shorts += 1
        is_quicker = self._here.seconds <= self._handed_over.seconds
        return is_quicker != (self._shorts % OTHER_WAY_EVERY == 0)

    def computed_here(self, seconds: float) -> None:
        """So long a short prompt took here, from its admission on."""
        self._here.add(seconds)

    def handed_over(self, seconds: float) -> None:
        """So long one took by a room, until its KV had landed."""
        self._handed_over.add(seconds)


class _Average:
    """Moving, of seconds. 0 at first, so that each way is tried at once."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        change = seconds - self.seconds
        self.seconds += change * NEWEST_SHARE if self.seconds else change


def share_out(lacking: Sequence[int], budget: int) -> list[int]:
    """How many tokens of each of these prompts, oldest first, a step of `budget` tokens computes.

    As on prefill workers (`scheduling/prefill.py`): half goes to the oldest, so that none starves,
    the rest to those with the fewest tokens left, so that short ones do not wait for long ones.
    """
    given = [0] * len(lacking)
    if not lacking:
        return given
    given[0] = min(lacking[0], (budget + 1) // 2)
    left = budget - given[0]
    for index in sorted(range(len(lacking)), key=lambda place: lacking[place] - given[place]):
        more = min(left, lacking[index] - given[index])
        given[index] += more
        left -= more
    return given
