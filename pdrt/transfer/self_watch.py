"""Acts on what a worker finds out about itself: says it, once, and ends what only a new process can
help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pdrt.transfer.liveness import Ailment, Complaint, Liveness
from pdrt.transfer.worker_loop import ExitCode, WorkerLoop

log = logging.getLogger(__name__)


class SelfWatch:
    """Of one worker."""

    def __init__(
        self,
        liveness: Liveness,
        loop: WorkerLoop,
        complaints: Callable[[], Sequence[Complaint]],
    ) -> None:
        """`complaints`: all there are, those of `liveness` among them."""
        self.ailments: frozenset[Ailment] = frozenset()
        """At the last tick."""
        self._liveness = liveness
        self._loop = loop
        self._complaints = complaints

    def tick(self, step_age: float, waiting: int, now: float) -> bool:
        """See `Liveness.tick`. True when something else is wrong than at the tick before, or
        nothing any more: gateways are to hear of it."""
        self._liveness.tick(step_age, waiting, now)
        if (why := self._liveness.must_end()) is not None:
            self._loop.end(ExitCode.CANNOT_GO_ON, why)
        complaints = self._complaints()
        ailments = frozenset(complaint.ailment for complaint in complaints)
        if ailments == self.ailments:
            return False
        self.ailments = ailments
        if complaints:
            why = "; ".join(complaint.text for complaint in complaints)
            log.error("not healthy", extra={"why": why})
        else:
            log.info("healthy again")
        return True
