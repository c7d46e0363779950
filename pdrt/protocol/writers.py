"""What a decode worker knows of one prefill endpoint: who answers there, which generations of
segments it was shown, and what can fence it. Pure data with its rules; `LeaseTable` drives it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from pdrt.ids import Incarnation
from pdrt.protocol.messages import Segment

HELLO_SEQS_MAX = 64
"""An answer that is older than so many heartbeats tells nothing."""


class FenceKind(Enum):
    """What proves, without a writer's word, that it can no longer write."""

    PROCESS_DEATH = "process_death"
    """All its processes are dead (`local`)."""
    RETIRE_GENERATION = "retire_generation"
    """The generation's segments are torn down on every decode rank (every other engine)."""


class FenceState(Enum):
    """The means to fence one writer incarnation."""

    OPENING = "opening"
    HELD = "held"
    KILLED = "killed"
    """Held, and its processes have been sent SIGKILL."""
    REFUSED = "refused"
    DEAD = "dead"
    """All its processes are gone: it writes nothing any more."""


class SegmentState(Enum):
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"


class Generation:
    """The segments of one generation, one per decode rank."""

    def __init__(self, number: int, ranks: int, deadline: float) -> None:
        self.number = number
        self.state = SegmentState.OPENING
        self.deadline = deadline
        """By when every rank must have confirmed the step that is under way."""
        self.segments: dict[int, tuple[Segment, ...]] = {}
        """By rank, one for each engine on offer."""
        self.engine: str | None = None
        """What its first writer took. The other offers are closed then, and nobody takes them."""
        self.writers: set[Incarnation] = set()
        """Those that write through it."""
        # Ranks that have not confirmed the step that is under way.
        self.waiting = set(range(ranks))

    def opened(self, rank: int, segments: tuple[Segment, ...]) -> bool:
        """One rank has opened its segments; True when all have."""
        self.segments[rank] = segments
        self.waiting.discard(rank)
        if not self.waiting and self.state is SegmentState.OPENING:
            self.state = SegmentState.OPEN
        return self.state is SegmentState.OPEN

    def take(self, writer: Incarnation, engine: str) -> bool:
        """This writer writes through `engine`; True for the first one, while all offers stand."""
        assert self.engine in (None, engine), (self.number, self.engine, engine)
        self.writers.add(writer)
        is_first = self.engine is None
        self.engine = engine
        return is_first and self.state is SegmentState.OPEN

    def close(self, ranks: int, deadline: float) -> None:
        """Every rank is to tear down."""
        assert self.state is not SegmentState.CLOSING, self.number
        self.state = SegmentState.CLOSING
        self.waiting = set(range(ranks))
        self.deadline = deadline

    def closed(self, rank: int) -> bool:
        """One rank has torn down; True when every rank has."""
        self.waiting.discard(rank)
        return not self.waiting


class PairState(Enum):
    """What `pdrt status` shows of one endpoint."""

    CONNECTING = "connecting"
    PAIRED = "paired"
    FENCING = "fencing"
    REFUSED = "refused"
    LOST = "lost"


class WriterPeer:
    """One prefill endpoint, as a decode worker sees it. Kept when it is let go, so that generations
    on this endpoint are never counted anew."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.is_wanted = False
        """Some gateway lists it, or a request names it."""
        self.is_connected = False
        self.writer: Incarnation | None = None
        """Who answered last; switched by nothing but an accepted `Welcome`."""
        self.is_lost = False
        self.last_seq = 0
        """Of the last accepted `Welcome`."""
        self.hello_seqs: deque[int] = deque(maxlen=HELLO_SEQS_MAX)
        """Of the newest `Hello`s to this endpoint: a `Welcome` that answers none of them was meant
        for another endpoint of the same worker."""
        self.echoed_generation = 0
        """By the current writer; 0: none."""
        self.refusal: str | None = None
        self.engine: str | None = None
        """What the current writer writes through; None until it has said so."""
        self.passed_over: tuple[str, ...] = ()
        """Why that is none of the better ones, in its words."""
        self.fence_kind: FenceKind | None = None
        """What fences the current writer: it follows from `engine`."""
        self.fence_refusal: str | None = None
        """Why the means to fence a writer could not be had, of the latest such."""
        self.fences: dict[Incarnation, FenceState] = {}
        """Means for `PROCESS_DEATH`. To retire a generation takes no more than the generation."""
        self.generations: dict[int, Generation] = {}
        """Alive ones: the newest, and at most one older that is being torn down."""
        self.newest_generation = 0
        self.floor = 1
        """The lowest generation still alive, or the next to come."""
        self.hello_due = 0.0
        self.hello_pause = 0.0

    @property
    def newest(self) -> Generation | None:
        return self.generations.get(self.newest_generation)

    @property
    def is_retiring(self) -> bool:
        return any(g.state is SegmentState.CLOSING for g in self.generations.values())

    def is_usable(self) -> bool:
        """A grant may go to the current writer: it answers, accepts us, has shown that it knows
        the newest generation, and the means to fence it are in hand."""
        newest = self.newest
        return (
            self.writer is not None
            and not self.is_lost
            and self.refusal is None
            and newest is not None
            and newest.state is SegmentState.OPEN
            and self.echoed_generation == newest.number
            and self._can_fence(self.writer)
        )

    def _can_fence(self, writer: Incarnation) -> bool:
        """The means are in hand; which they are is not known before its engine is."""
        match self.fence_kind:
            case None:
                return False
            case FenceKind.PROCESS_DEATH:
                return self.fences.get(writer) is FenceState.HELD
            case FenceKind.RETIRE_GENERATION:
                return True

    def forget_engine(self) -> None:
        """Another writer answers, or none."""
        self.engine, self.passed_over, self.fence_kind = None, (), None

    @property
    def state(self) -> PairState:
        if self.is_usable():
            return PairState.PAIRED
        if self.refusal is not None:
            return PairState.REFUSED
        if self.is_lost:
            return PairState.LOST
        return PairState.FENCING if self.is_retiring else PairState.CONNECTING

    def check(self, ranks: int) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert len(self.generations) <= 2, (self.endpoint, list(self.generations))
        alive = [g for g in self.generations.values() if g.state is not SegmentState.CLOSING]
        assert len(alive) <= 1, [g.number for g in alive]
        assert all(g.number >= self.floor for g in self.generations.values())
        assert all(g.waiting <= set(range(ranks)) for g in self.generations.values())
        assert all(bool(g.writers) == (g.engine is not None) for g in self.generations.values())
