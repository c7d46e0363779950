"""What a prefill worker knows of decode incarnations: order of messages, generations and the
engine instances that reach them. Pure; `RoomTable` drives it.

An entry is kept as long as the prefill worker lives: its `seq` is what keeps a late `Grant` from
ever taking effect. The table is bounded; when it is full the worker drains and exits, and its
successor starts empty.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation, RoomId, short
from pdrt.protocol.clock import SilenceClock
from pdrt.protocol.effects import (
    CloseEngine,
    EndWorker,
    OpenEngine,
    PrefillEffect,
    ReleaseSource,
    SendToDecode,
)
from pdrt.protocol.engine_choice import candidates, none_in_common, passed_over, rank_count
from pdrt.protocol.messages import Hello, Load, Welcome

if TYPE_CHECKING:
    from pdrt.protocol.rooms import PrefillWorkerInfo


class EngineState(Enum):
    OPENING = "opening"
    OPEN = "open"
    REFUSED = "refused"
    CLOSING = "closing"


class EngineInstance:
    """One generation's engine instance on every rank."""

    def __init__(self, name: str, hello: Hello, ranks: int, deadline: float) -> None:
        self.name = name
        """Of the engine that was chosen."""
        self.passed_over: tuple[str, ...] = ()
        """Why it is none of the better ones."""
        self.state = EngineState.OPENING
        self.segments = hello.segments
        """All that were shown, of other engines too."""
        self.waiting = set(range(ranks))
        """Ranks that have not confirmed the step under way."""
        self.deadline = deadline
        """Of the step under way. An instance that cannot be opened counts as refused, one that
        cannot be destroyed ends the worker."""
        self.is_tainted = False
        """It answered UNSETTLED: no new writes, and what it read stays until it is destroyed."""
        self.retained: list[RoomId] = []
        """Rooms that ended UNSETTLED on it: their source pages stay."""


ENGINES_MAX = 4
"""Of one decode incarnation. Fences may follow each other faster than writes that hang end, and
with them their engines: the next generation waits for one to be gone."""


class DecodePeer:
    """One decode incarnation."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self.last_seq = 0
        """The highest accepted; never lowered, never forgotten."""
        self.is_lost = False
        self.hello: Hello | None = None
        """The newest accepted."""
        self.is_answered = True
        """`hello` has had its `Welcome`."""
        self.floor = 0
        self.engines: dict[int, EngineInstance] = {}
        self.refused: dict[str, str] = {}
        """Engines that could not be opened for the newest generation, and why. Empty once all have
        been refused: then all are tried again."""
        self.taken: tuple[int, str] | None = None
        """The newest generation that was open, and its engine, which is never changed."""
        self.unsettled_generation = 0
        """The newest generation in which a room ended UNSETTLED; only ever rises."""
        self.rooms: dict[RoomId, int] = {}
        """Alive ones, with their generation."""

    @property
    def newest(self) -> EngineInstance | None:
        """Of the newest generation that it has an instance of."""
        return self.engines[max(self.engines)] if self.engines else None

    def may_write(self, generation: int) -> bool:
        """A new room may be opened on `generation`."""
        engine = self.engines.get(generation)
        return (
            not self.is_lost
            and engine is not None
            and engine.state is EngineState.OPEN
            and not engine.is_tainted
            and generation >= self.floor
        )

    def taint(self, generation: int) -> None:
        """A room on `generation` has ended UNSETTLED."""
        self.unsettled_generation = max(self.unsettled_generation, generation)
        if engine := self.engines.get(generation):
            engine.is_tainted = True


class DecodePeers:
    """All decode incarnations that this prefill worker has accepted a `Hello` from."""

    def __init__(
        self,
        worker: PrefillWorkerInfo,
        config: ProtocolConfig,
        stale: Counter[str],
        now: float,
    ) -> None:
        self.known: dict[Incarnation, DecodePeer] = {}
        self.load = Load()
        self.refusal: str | None = None
        """Told to everybody: this worker takes nothing new."""
        self._worker = worker
        self._config = config
        self._stale = stale
        self._silence: SilenceClock[Incarnation] = SilenceClock(
            config.silence_seconds, config.tick_late_seconds, now
        )

    @property
    def is_full(self) -> bool:
        """The worker is to drain and exit; its successor starts empty."""
        return len(self.known) >= self._config.decode_incarnations_max

    def heard(self, peer: DecodePeer, seq: int, now: float) -> None:
        """Accept a message of `peer`."""
        peer.last_seq = seq
        # Silence counts from here again; only a Hello brings a lost one back.
        if not peer.is_lost:
            self._silence.heard(peer.incarnation, now)

    def hello(self, hello: Hello, now: float) -> list[PrefillEffect]:
        """Accept, refuse or drop a `Hello`. A refused one leaves no trace."""
        peer = self.known.get(hello.decode)
        if peer is None:
            refusal = self._refuses(hello)
            if refusal is not None:
                return [self._welcome(hello, None, (), refusal)]
            peer = self.known[hello.decode] = DecodePeer(hello.decode)
        elif hello.seq <= peer.last_seq:
            self._stale["old_seq"] += 1
            return []
        # One still unanswered waits for engines; that we are alive is said meanwhile.
        alive = self._answer(peer, peer.hello, 0, None) if peer.hello else []
        peer.is_lost = False
        self.heard(peer, hello.seq, now)
        if self._is_of_another_pairing(peer, hello):
            self._stale["other_pairing"] += 1
            refusal = "this worker is dialled under another address too; list one of them"
            return [*alive, self._welcome(hello, None, (), refusal)]
        if peer.hello is None or peer.hello.generation != hello.generation:
            peer.refused.clear()
        peer.hello, peer.is_answered = hello, False
        peer.floor = max(peer.floor, hello.floor)
        return [*alive, *self._advance(peer, now)]

    @staticmethod
    def _is_of_another_pairing(peer: DecodePeer, hello: Hello) -> bool:
        """The same decode worker pairs with us a second time, under another name of ours. Both
        count generations and show segments of their own: a fence of one would miss the other."""
        engine = peer.engines.get(hello.generation)
        has_other_segments = engine is not None and engine.segments != hello.segments
        return has_other_segments or hello.generation < peer.floor

    def _refuses(self, hello: Hello) -> str | None:
        differences = self._worker.fingerprint.differences(hello.fingerprint)
        if differences:
            return "prefill and decode differ: " + "; ".join(differences)
        if (undividable := self._undividable(hello)) is not None:
            return undividable
        if (apart := none_in_common(self._worker.engines, hello.segments)) is not None:
            return apart
        if self.is_full:
            return (
                f"{len(self.known)} decode incarnations are known (decode_incarnations_max): "
                "this worker drains and exits"
            )
        return self.refusal

    def _undividable(self, hello: Hello) -> str | None:
        """Every head of every decode rank is some prefill rank's to send."""
        ranks = {"prefill": len(self._worker.ranks), "decode": rank_count(hello.segments)}
        heads = self._worker.fingerprint.layout.kv_heads
        for side, count in ranks.items():
            if count and heads % count and count % heads:
                both = " and ".join(f"{n} {s} ranks" for s, n in ranks.items())
                return (
                    f"{heads} KV heads do not divide over {count} {side} ranks (here are {both}); "
                    f"start {side} with another --tensor-parallel-size"
                )
        return None

    def engine_opened(
        self, decode: Incarnation, generation: int, rank: int, now: float
    ) -> list[PrefillEffect]:
        """One rank reaches the segments of this generation."""
        peer = self.known[decode]
        engine = peer.engines.get(generation)
        if engine is None or engine.state is not EngineState.OPENING:
            return []
        engine.waiting.discard(rank)
        if not engine.waiting:
            engine.state = EngineState.OPEN
            peer.taken = generation, engine.name
        return self._advance(peer, now)

    def engine_refused(
        self, decode: Incarnation, generation: int, why: str, now: float
    ) -> list[PrefillEffect]:
        """One rank cannot reach them."""
        peer = self.known[decode]
        engine = peer.engines.get(generation)
        if engine is None or engine.state is not EngineState.OPENING:
            return []
        engine.state = EngineState.REFUSED
        if peer.hello is not None and peer.hello.generation == generation:
            peer.refused[engine.name] = why
        return self._advance(peer, now)

    def engine_closed(
        self, decode: Incarnation, generation: int, rank: int, now: float
    ) -> list[PrefillEffect]:
        """One rank has destroyed its instance."""
        peer = self.known[decode]
        engine = peer.engines.get(generation)
        if engine is None or engine.state is not EngineState.CLOSING:
            return []
        engine.waiting.discard(rank)
        if engine.waiting:
            return []
        del peer.engines[generation]
        return [*map(ReleaseSource, engine.retained), *self._advance(peer, now)]

    def room_ended(self, room: RoomId, is_unsettled: bool, now: float) -> list[PrefillEffect]:
        """Every rank has ended this room."""
        peer = self.known[room.decode]
        generation = peer.rooms.pop(room)
        engine = peer.engines.get(generation)
        if is_unsettled and engine is not None:
            engine.retained.append(room)
            return self._advance(peer, now)
        return [ReleaseSource(room), *self._advance(peer, now)]

    def retained_rooms(self) -> set[RoomId]:
        """Rooms that ended UNSETTLED and whose source pages stay until their engine is gone."""
        engines = (engine for peer in self.known.values() for engine in peer.engines.values())
        return {room for engine in engines for room in engine.retained}

    def engines_on(self, rank: int) -> list[tuple[Incarnation, int, str]]:
        """Decode incarnation, generation and name of every instance that `rank` has not said to
        have destroyed."""
        return [
            (peer.incarnation, number, engine.name)
            for peer in self.known.values()
            for number, engine in peer.engines.items()
            if engine.state is not EngineState.CLOSING or rank in engine.waiting
        ]

    def _advance(self, peer: DecodePeer, now: float) -> list[PrefillEffect]:
        """Bring engine instances to what the newest `Hello` asks for, and answer it when they
        are. Idempotent."""
        effects: list[PrefillEffect] = []
        hello = peer.hello
        assert hello is not None, peer.incarnation
        busy = set(peer.rooms.values())
        for number, engine in peer.engines.items():
            is_refused = engine.state is EngineState.REFUSED
            is_done = is_refused or engine.is_tainted or peer.is_lost or number < peer.floor
            # One that is opening is closed once it has opened, or has failed to.
            is_quiet = engine.state in (EngineState.OPEN, EngineState.REFUSED)
            if is_done and number not in busy and is_quiet:
                if is_refused:
                    effects += self._give_up(peer, hello)
                engine.state = EngineState.CLOSING
                engine.waiting = set(range(len(self._worker.ranks)))
                engine.deadline = now + self._config.retire_seconds_max
                effects.append(CloseEngine(peer.incarnation, number))
        if not peer.is_lost:
            effects += self._open_or_answer(peer, hello, now)
        return effects

    def _open_or_answer(self, peer: DecodePeer, hello: Hello, now: float) -> list[PrefillEffect]:
        generation = hello.generation
        if generation <= peer.unsettled_generation:
            return self._answer(peer, hello, 0, None)
        engine = peer.engines.get(generation)
        if engine is None and not peer.is_answered and len(peer.engines) < ENGINES_MAX:
            return self._open(peer, hello, now)
        if engine is not None and engine.state is EngineState.OPEN:
            return self._answer(peer, hello, generation, None)
        return []

    def _open(self, peer: DecodePeer, hello: Hello, now: float) -> list[PrefillEffect]:
        """The best engine that has not been refused."""
        found = self._candidates(peer, hello)
        if not found:
            return self._give_up(peer, hello)
        name, deadline = found[0], now + self._config.retire_seconds_max
        engine = EngineInstance(name, hello, len(self._worker.ranks), deadline)
        have, refused = self._worker.engines, peer.refused
        engine.passed_over = passed_over(name, have, hello.segments, refused)
        peer.engines[hello.generation] = engine
        segments = tuple(x for x in hello.segments if x.engine == name)
        return [OpenEngine(peer.incarnation, hello.generation, segments)]

    def _candidates(self, peer: DecodePeer, hello: Hello) -> tuple[str, ...]:
        found = candidates(self._worker.engines, hello.segments, peer.refused)
        if peer.taken is None or peer.taken[0] != hello.generation:
            return found
        # A writer that changes its engine would change what fences it.
        return tuple(name for name in found if name == peer.taken[1])

    def _give_up(self, peer: DecodePeer, hello: Hello) -> list[PrefillEffect]:
        """Unless another engine is left to try. The next `Hello` begins anew."""
        if self._candidates(peer, hello):
            return []
        why = "; ".join(f"{name}: {text}" for name, text in peer.refused.items())
        why = why or none_in_common(self._worker.engines, hello.segments) or "no engine is left"
        peer.refused.clear()
        return self._answer(peer, hello, 0, why)

    def _answer(
        self,
        peer: DecodePeer,
        hello: Hello,
        generation: int,
        refusal: str | None,
    ) -> list[PrefillEffect]:
        if peer.is_answered:
            return []
        peer.is_answered = True
        rooms = tuple(room.serial for room in peer.rooms)
        engine = peer.engines[generation] if generation else None
        return [self._welcome(hello, engine, rooms, refusal or self.refusal)]

    def _welcome(
        self,
        hello: Hello,
        engine: EngineInstance | None,
        rooms: tuple[int, ...],
        refusal: str | None,
    ) -> SendToDecode:
        """`engine`: of the generation that is shown as writable; None: none is."""
        welcome = Welcome(
            decode=hello.decode,
            seq=hello.seq,
            generation=0 if engine is None else hello.generation,
            floor=hello.floor,
            writer=self._worker.incarnation,
            ranks=self._worker.ranks,
            fingerprint=self._worker.fingerprint,
            engines=self._worker.engines,
            engine=None if engine is None else engine.name,
            passed_over=() if engine is None else engine.passed_over,
            rooms=rooms,
            load=self.load,
            refusal=refusal,
        )
        return SendToDecode(hello.decode, welcome)

    def handle_timer(self, now: float) -> tuple[list[Incarnation], list[PrefillEffect]]:
        """The decode incarnations lost by now; engines that cannot be destroyed end the worker."""
        lost = self._silence.tick(now)
        effects: list[PrefillEffect] = []
        for decode in lost:
            peer = self.known[decode]
            peer.is_lost = True
            effects += self._advance(peer, now)
        for peer in self.known.values():
            if not peer.engines:
                continue  # most are the dead ones of a long life
            for number, engine in list(peer.engines.items()):
                engine.deadline += self._silence.slept_seconds
                if now > engine.deadline:
                    effects += self._overdue(peer, number, engine, now)
        return lost, effects

    def _overdue(
        self, peer: DecodePeer, number: int, engine: EngineInstance, now: float
    ) -> list[PrefillEffect]:
        ranks = sorted(engine.waiting)
        if engine.state is EngineState.OPENING:
            why = f"ranks {ranks} did not open their engines in time"
            return self.engine_refused(peer.incarnation, number, why, now)
        if engine.state is EngineState.CLOSING:
            whose = f"generation {number} of decode worker {short(peer.incarnation)}"
            return [EndWorker(f"ranks {ranks} cannot destroy the {engine.name} engine of {whose}")]
        return []

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert len(self.known) <= self._config.decode_incarnations_max
        for peer in self.known.values():
            for room, generation in peer.rooms.items():
                assert room.decode == peer.incarnation, room
                assert generation in peer.engines, (room, generation)
                assert peer.engines[generation].state is EngineState.OPEN, (room, generation)
            for number, engine in peer.engines.items():
                assert not engine.retained or engine.is_tainted, number
                assert not engine.is_tainted or number <= peer.unsettled_generation, number
