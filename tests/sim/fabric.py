"""The data plane: segments by name, writes under way, and the pages they touch.

Every landing is judged: the target page must be leased to the write's room on the generation the
write was granted, and the source page must still be the room's own, holding what it held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from pdrt.kv.pages import CACHE, Owner, OwnerKind
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import RoomWriter, WriteOutcome
from tests.sim.core import Kind, Violation
from tests.sim.plan import CONFIG, EngineKind, FaultRates

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.prefill import PrefillRank
    from tests.sim.world import World


CRAWL_SECONDS = 1.2
WRONG = -1
"""What a page holds that no tokens have."""


class Heads:
    """The slice of a page that one prefill rank sends to one decode rank, in heads."""

    def __init__(self, decode_rank: int, target: int, count: int) -> None:
        self.decode_rank = decode_rank
        self.target = target
        self.count = count


class Fabric:
    """Where names of segments lead."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.landed = 0
        self._segments: dict[str, DecodeRank] = {}
        self._registrations: Counter[str] = Counter()

    def register(self, name: str, rank: DecodeRank) -> None:
        self._segments[name] = rank
        self._registrations[name] += 1

    def tear_down(self, name: str) -> None:
        """Nobody can write through this name any more (unless it is registered twice)."""
        self._registrations[name] -= 1
        if self._registrations[name] <= 0:
            self._segments.pop(name, None)

    def find(self, name: str) -> DecodeRank | None:
        return self._segments.get(name)


class Raw(Enum):
    """What the engine itself answers."""

    OK = "ok"
    REFUSED = "refused"
    """Nothing was submitted, or everything is known to have ended."""
    ERROR = "error"
    """Proves nothing."""


class Fate(Enum):
    """What a directed schedule says of a write, instead of chance."""

    SUCCEEDS = "succeeds"
    FAILS = "fails"
    HANGS = "hangs"
    CRAWLS = "crawls"
    STARTS_LATE = "starts_late"
    STARTS_VERY_LATE = "starts_very_late"
    LANDS_AFTER_ERROR = "lands_after_error"
    LANDS_WRONG = "lands_wrong"
    LANDS_AFTER_SUCCESS = "lands_after_success"


class InFlight:
    """One write accepted by one engine instance."""

    def __init__(
        self,
        instance: EngineInstance,
        writer: RoomWriter,
        write_id: int,
        heads: Heads,
        pages: list[tuple[int, int, int]],
    ) -> None:
        self.instance = instance
        self.writer = writer
        self.write_id = write_id
        self.room = writer.room
        self.heads = heads
        self.pages = pages
        """(source page, what it held at submission, target page)."""
        self.is_answered = False
        self.landed: set[int] = set()
        self.wrong_part: int | None = None
        """Lands with another content than was read."""

    def read(self, part: int, network_seconds: float) -> None:
        """Take one page from the sender's memory; it lands later, whoever lives by then."""
        instance = self.instance
        prefill = instance.rank.worker
        if instance.is_destroyed or not prefill.is_alive:
            return
        source, expected, _ = self.pages[part]
        owner = prefill.pages.owner(source)
        is_ours = owner is CACHE or owner == Owner(OwnerKind.ROOM, self.room)
        if not is_ours or prefill.content[source] != expected:
            raise Violation(
                Kind.SOURCE, f"{prefill.name}: write of {self.room} reads page {source} of {owner}"
            )
        if instance.kind is EngineKind.LOCAL:
            self.land(part, expected)
        else:
            instance.fabric.world.sim.after(network_seconds, self.arrive, part, expected)

    def arrive(self, part: int, content: int) -> None:
        """Bytes reach the receiver. A receiver-applied engine needs its process to take them."""
        if self.instance.kind is EngineKind.TCP:
            rank = self.instance.fabric.find(self.name)
            if rank is not None and rank.is_hung:
                rank.post(self.land, part, content)
                return
        self.land(part, content)

    @property
    def name(self) -> str:
        return self.instance.segments[self.heads.decode_rank]

    def land(self, part: int, content: int) -> None:
        """Bytes are in place, if the segment still stands."""
        fabric = self.instance.fabric
        rank = fabric.find(self.name)
        if rank is None or not rank.worker.is_alive:
            return
        _, _, target = self.pages[part]
        decode = rank.worker
        fabric.landed += 1
        lease = decode.table.leases.get(self.room)
        owner = decode.pages.owner(target)
        if (
            lease is None
            or target not in lease.pages
            or lease.generation != self.instance.generation
            or owner != Owner(OwnerKind.LEASE, self.room)
        ):
            raise Violation(
                Kind.DESTINATION,
                f"{decode.name}: write of {self.room} lands on {target} of {owner}",
            )
        page = decode.content[rank.index][target]
        for head in range(self.heads.target, self.heads.target + self.heads.count):
            page[head] = WRONG if part == self.wrong_part else content
        self.landed.add(part)

    def answer(self, raw: Raw) -> None:
        """The engine's answer, as its adapter reports it: an error proves nothing."""
        if self.is_answered or self.instance.is_destroyed:
            return
        self.is_answered = True
        self.instance.writes.remove(self)
        self.instance.rank.settled(self, outcome_of(raw))

    def expire(self) -> None:
        """The adapter's bound on a write without progress."""
        self.answer(Raw.ERROR)


def outcome_of(raw: Raw) -> WriteOutcome:
    """What an adapter makes of its engine's answer."""
    match raw:
        case Raw.OK:
            return WriteOutcome.COMPLETED
        case Raw.REFUSED:
            return WriteOutcome.FAILED
        case Raw.ERROR:
            return WriteOutcome.UNSETTLED


class EngineInstance:
    """One prefill rank's engine for one generation of one decode worker."""

    def __init__(self, rank: PrefillRank, generation: int, segments: tuple[Segment, ...]) -> None:
        self.fabric = rank.worker.world.fabric
        self.rank = rank
        self.generation = generation
        self.kind = EngineKind(segments[0].engine)
        self.shown = segments
        self.segments = {segment.rank: segment.descriptor.decode() for segment in segments}
        """Their names, by decode rank."""
        self.is_destroyed = False
        self.writes: list[InFlight] = []
        """Accepted and not answered."""

    def submit(self, write: InFlight) -> None:
        """Accept a write. What becomes of it is drawn here."""
        sim, rates = self.fabric.world.sim, self.fabric.world.plan.rates
        if not self.fabric.world.network.is_faulty:
            rates = self.fabric.world.healed_rates
        start = sim.rng.random() * 0.01
        if sim.chance(rates.write_slow):
            start += sim.rng.random() * 0.6
        sim.after(CONFIG.write_seconds_max, self._post, write.expire)
        self.writes.append(write)
        self._draw_fate(write, rates)(write, start)

    def _draw_fate(self, write: InFlight, rates: FaultRates) -> Callable[[InFlight, float], None]:
        world = self.fabric.world
        if world.direct is not None:
            return {
                Fate.SUCCEEDS: self._succeeds,
                Fate.FAILS: self._fails,
                Fate.HANGS: self._hangs,
                Fate.CRAWLS: self._crawls,
                Fate.STARTS_LATE: self._starts_late,
                Fate.STARTS_VERY_LATE: self._starts_very_late,
                Fate.LANDS_AFTER_ERROR: self._lands_after_error,
                Fate.LANDS_WRONG: self._lands_wrong,
                Fate.LANDS_AFTER_SUCCESS: self._lands_after_success,
            }[world.direct(write)]
        draw = world.sim.rng.random()
        for fate, rate in (
            (self._fails, rates.write_fails),
            (self._errors_late, rates.write_errors_late),
            (self._hangs, rates.write_hangs),
            (self._lands_wrong, rates.write_lands_wrong if world.plan.kv_checksum else 0.0),
        ):
            if draw < rate:
                return fate
            draw -= rate
        return self._succeeds

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        self.rank.post(call, *arguments)

    def _succeeds(self, write: InFlight, start: float) -> None:
        sim, rates = self.fabric.world.sim, self.fabric.world.plan.rates
        is_slow = self.fabric.world.network.is_faulty and sim.chance(rates.write_slow)
        network = sim.rng.random() * 1.5 if is_slow else 0.004
        at = start
        for part in range(len(write.pages)):
            sim.after(at, write.read, part, network)
            at += 0.003
        sim.after(at + network + 0.002, self._post, self._finish, write)

    def _finish(self, write: InFlight) -> None:
        """The receiver has acknowledged every part, or the connection broke under it."""
        if self.fabric.find(write.name) is None:
            write.answer(Raw.ERROR)
        elif len(write.landed) == len(write.pages):
            write.answer(Raw.OK)
        elif not write.is_answered:
            self.fabric.world.sim.after(0.1, self._post, self._finish, write)

    def _fails(self, write: InFlight, start: float) -> None:
        sim = self.fabric.world.sim
        parts = sim.rng.randint(0, len(write.pages) - 1)
        for part in range(parts):
            sim.after(start, write.read, part, 0.002)
        sim.after(start + 0.01, self._post, self._refuse, write, parts)

    def _refuse(self, write: InFlight, parts: int) -> None:
        """FAILED once what was sent is known to have landed, or to have been dropped."""
        if len(write.landed) == parts or self.fabric.find(write.name) is None:
            write.answer(Raw.REFUSED)
        elif not write.is_answered:
            self.fabric.world.sim.after(0.1, self._post, self._refuse, write, parts)

    def _crawls(self, write: InFlight, start: float) -> None:
        """Read now, in the network for a while, acknowledged then."""
        for part in range(len(write.pages)):
            self.fabric.world.sim.after(start, write.read, part, CRAWL_SECONDS)
        self.fabric.world.sim.after(CRAWL_SECONDS + 0.1, self._post, self._finish, write)

    def _starts_late(self, write: InFlight, start: float) -> None:
        self._succeeds(write, start + CRAWL_SECONDS)

    def _starts_very_late(self, write: InFlight, start: float) -> None:
        """Just before it would count as unsettled."""
        self._succeeds(write, start + CONFIG.write_seconds_max - 0.3)

    def _lands_after_error(self, write: InFlight, start: float) -> None:
        for part in range(len(write.pages)):
            self.fabric.world.sim.after(start, write.read, part, 3.0)
        self.fabric.world.sim.after(start + 0.1, self._post, write.answer, Raw.ERROR)

    def _lands_wrong(self, write: InFlight, start: float) -> None:
        sim = self.fabric.world.sim
        sim.say("data", "write of %s will land wrong", write.room)
        write.wrong_part = sim.rng.randrange(len(write.pages))
        self._succeeds(write, start)

    def _lands_after_success(self, write: InFlight, start: float) -> None:
        """Read in time and acknowledged, while it is still in the network."""
        for part in range(len(write.pages)):
            self.fabric.world.sim.after(start, write.read, part, CRAWL_SECONDS)
        self.fabric.world.sim.after(start + 0.01, self._post, write.answer, Raw.OK)

    def _errors_late(self, write: InFlight, start: float) -> None:
        sim = self.fabric.world.sim
        sim.say("data", "write of %s will end in an error", write.room)
        self._land_late(write, start)
        sim.after(start + sim.rng.random() * 0.3, self._post, write.answer, Raw.ERROR)

    def _hangs(self, write: InFlight, start: float) -> None:
        self.fabric.world.sim.say("data", "write of %s will hang", write.room)
        self._land_late(write, start)

    def _land_late(self, write: InFlight, start: float) -> None:
        """Each part lands in time, late, twice or never."""
        sim = self.fabric.world.sim
        for part in range(len(write.pages)):
            for _ in range(sim.rng.choice((0, 1, 1, 2))):
                read = start + sim.rng.random() ** 2 * 6.0
                sim.after(read, write.read, part, sim.rng.random() ** 2 * 4.0)

    def destroy(self) -> None:
        self.is_destroyed = True
