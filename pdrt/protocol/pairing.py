"""The decode worker's pairings: handshake, heartbeat, generations and means to fence. Pure.

Knows nothing of leases. What leases must hear about comes back as notices among the effects:
`WriterLost`, `WriterDied` and `GenerationRetired`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation
from pdrt.protocol.clock import SilenceClock
from pdrt.protocol.effects import (
    CloseFence,
    CloseOffers,
    CloseSegment,
    Connect,
    DecodeEffect,
    Disconnect,
    EndWorker,
    KillWriter,
    OpenFence,
    OpenSegment,
    SendToPrefill,
)
from pdrt.protocol.messages import Fingerprint, Hello, Load, Segment, Welcome
from pdrt.protocol.writers import FenceKind, FenceState, Generation, SegmentState, WriterPeer

HELLO_SECONDS_MIN = 0.1
"""Pause before the second `Hello` to an endpoint that has not answered yet; doubles."""


class DecodeWorkerInfo(msgspec.Struct, frozen=True):
    """What the tables must know of their own worker."""

    incarnation: Incarnation
    fingerprint: Fingerprint
    ranks: int
    engines: Mapping[str, FenceKind]
    """Those on offer, and what fences a writer that takes one, as their adapters declare."""
    quarantine_pages_max: int


class WriterLost(msgspec.Struct, frozen=True):
    """Notice: this incarnation is silent, or another one answers in its place. Proves nothing."""

    endpoint: str
    writer: Incarnation


class WriterDied(msgspec.Struct, frozen=True):
    """Notice: every process of this incarnation is gone. Proof for `PROCESS_DEATH`."""

    endpoint: str
    writer: Incarnation


class GenerationRetired(msgspec.Struct, frozen=True):
    """Notice: torn down on every decode rank. Proof for `RETIRE_GENERATION`."""

    endpoint: str
    generation: int


class WriterWelcomed(msgspec.Struct, frozen=True):
    """Notice: a `Welcome` was accepted; its list of rooms can be believed."""

    endpoint: str
    welcome: Welcome


PairingEffect = DecodeEffect | WriterLost | WriterDied | GenerationRetired | WriterWelcomed


class Pairing:
    """All prefill endpoints of one decode worker."""

    def __init__(self, worker: DecodeWorkerInfo, config: ProtocolConfig, now: float) -> None:
        self.incarnation = worker.incarnation
        self.fingerprint = worker.fingerprint
        self.ranks = worker.ranks
        self.engines = worker.engines
        self.peers: dict[str, WriterPeer] = {}
        self.load = Load()
        self.stale: Counter[str] = Counter()
        self._config = config
        # One counter for all endpoints: higher than any before on each of them.
        self._seq = 0
        # The newest generation of any endpoint that has been forgotten.
        self._forgotten_generation = 0
        self._silence: SilenceClock[str] = SilenceClock(
            config.silence_seconds, config.tick_late_seconds, now
        )

    @property
    def slept_seconds(self) -> float:
        """How long this worker was asleep before its last tick."""
        return self._silence.slept_seconds

    def next_seq(self) -> int:
        """Fresh for every message, taken in the same step as the send."""
        self._seq += 1
        return self._seq

    # Wanted and unwanted

    def want(self, endpoint: str, now: float) -> list[PairingEffect]:
        """Pair with whoever answers on `endpoint`. Idempotent; refused beyond the bound."""
        peer = self.peers.get(endpoint)
        if peer is None:
            if not self._make_place():
                self.stale["prefill_endpoints_max"] += 1
                return []
            peer = self.peers[endpoint] = WriterPeer(endpoint)
            # An endpoint that was forgotten and comes back never sees an old name again.
            peer.newest_generation = self._forgotten_generation
            peer.last_seq = self._seq
        peer.is_wanted = True
        if peer.is_connected:
            return [] if peer.generations else self._open_generation(peer, now)
        peer.is_connected = True
        effects: list[PairingEffect] = [Connect(endpoint)]
        if not peer.generations:
            effects += self._open_generation(peer, now)
        return effects

    def _make_place(self) -> bool:
        """Forget an endpoint that was let go, when there are too many."""
        if len(self.peers) < self._config.prefill_endpoints_max:
            return True
        for endpoint, peer in self.peers.items():
            if not peer.is_connected and not peer.generations:
                newest = max(self._forgotten_generation, peer.newest_generation)
                self._forgotten_generation = newest
                del self.peers[endpoint]
                return True
        return False

    def unwant(self, endpoint: str) -> None:
        """No gateway lists it any more; it is let go once no lease and no fence needs it."""
        if peer := self.peers.get(endpoint):
            peer.is_wanted = False

    # Segments

    def segment_opened(
        self, endpoint: str, generation: int, rank: int, segments: tuple[Segment, ...], now: float
    ) -> list[PairingEffect]:
        """One rank exposes the pool, through every engine; once all do, `Hello` says so."""
        peer = self.peers[endpoint]
        current = peer.generations.get(generation)
        if current is None or current.state is not SegmentState.OPENING:
            return []
        return self._hello(peer, now) if current.opened(rank, segments) else []

    def segment_closed(
        self, endpoint: str, generation: int, rank: int, now: float
    ) -> list[PairingEffect]:
        """One rank has torn down; once all have, the generation is retired and the floor rises."""
        peer = self.peers[endpoint]
        closing = peer.generations.get(generation)
        if closing is None or closing.state is not SegmentState.CLOSING:
            return []
        if not closing.closed(rank):
            return []
        del peer.generations[generation]
        peer.floor = min(peer.generations, default=peer.newest_generation + 1)
        is_next = peer.is_wanted and not peer.generations
        effects = self._open_generation(peer, now) if is_next else self._hello(peer, now)
        # Last, as what follows from it may retire the generation that the `Hello` shows.
        return [*effects, GenerationRetired(endpoint, generation)]

    def segments_on(self, rank: int) -> list[tuple[str, int]]:
        """Endpoint and generation of every segment that `rank` has not said to have torn down."""
        return [
            (peer.endpoint, number)
            for peer in self.peers.values()
            for number, generation in peer.generations.items()
            if generation.state is not SegmentState.CLOSING or rank in generation.waiting
        ]

    def retire(self, endpoint: str, now: float) -> list[PairingEffect]:
        """Fence whoever writes into the newest generation: no new grants on it, the next one in
        its place, and its teardown on every rank. Waits while another teardown is under way, or
        while ranks are opening it (nobody knows it then), so that no two steps of one segment
        overlap."""
        peer = self.peers[endpoint]
        newest = peer.newest
        if newest is None or newest.state is SegmentState.OPENING or peer.is_retiring:
            return []
        effects: list[PairingEffect] = []
        newest.close(self.ranks, now + self._config.retire_seconds_max)
        if peer.is_wanted:
            effects += self._open_generation(peer, now)
        return [*effects, CloseSegment(endpoint, newest.number)]

    def _open_generation(self, peer: WriterPeer, now: float) -> list[PairingEffect]:
        peer.newest_generation += 1
        number = peer.newest_generation
        deadline = now + self._config.retire_seconds_max
        peer.generations[number] = Generation(number, self.ranks, deadline)
        peer.floor = min(peer.generations)
        return [OpenSegment(peer.endpoint, number)]

    # Heartbeat

    def welcome(self, endpoint: str, message: Welcome, now: float) -> list[PairingEffect]:
        """An answer to a `Hello`. The only message that switches the writer."""
        peer = self.peers.get(endpoint)
        if peer is None or message.decode != self.incarnation:
            self.stale["other_incarnation"] += 1
            return []
        if not peer.is_connected:
            # Still queued when the endpoint was let go; nobody watches it any more.
            self.stale["not_connected"] += 1
            return []
        if message.seq <= peer.last_seq:
            self.stale["old_seq"] += 1
            return []
        if message.seq not in peer.hello_seqs:
            self.stale["other_endpoint"] += 1
            return []
        if peer.fences.get(message.writer) is FenceState.DEAD:
            self.stale["dead_writer"] += 1
            return []
        peer.last_seq = message.seq
        effects = self._switch_writer(peer, message)
        peer.is_lost = False
        peer.echoed_generation = message.generation
        peer.refusal = self._refusal(peer, message)
        if peer.refusal is None and message.generation and message.engine is not None:
            effects += self._take_engine(peer, message, message.engine)
        if peer.refusal is not None:
            effects += self._offer_anew(peer, message.writer, now)
        peer.hello_pause = self._config.hello_interval_seconds
        self._silence.heard(endpoint, now)
        return [*effects, WriterWelcomed(endpoint, message)]

    def _switch_writer(self, peer: WriterPeer, message: Welcome) -> list[PairingEffect]:
        effects: list[PairingEffect] = []
        old = peer.writer
        if old is not None and old != message.writer:
            effects.append(WriterLost(peer.endpoint, old))
            peer.forget_engine()
            peer.refusal = None
        peer.writer = message.writer
        return effects

    def _take_engine(self, peer: WriterPeer, message: Welcome, engine: str) -> list[PairingEffect]:
        """The writer has said what it writes through, and with that what fences it. No lease is
        granted before the means are in hand."""
        peer.engine, peer.passed_over = engine, message.passed_over
        peer.fence_kind = self.engines[engine]
        effects: list[PairingEffect] = []
        generation = peer.generations.get(message.generation)
        is_first = generation is not None and generation.take(message.writer, engine)
        if is_first and len(self.engines) > 1:
            effects.append(CloseOffers(peer.endpoint, message.generation, engine))
        if peer.fence_kind is not FenceKind.PROCESS_DEATH:
            return effects
        if message.writer not in peer.fences:
            peer.fences[message.writer] = FenceState.OPENING
            effects.append(OpenFence(peer.endpoint, message.writer, message.ranks))
        elif peer.fences[message.writer] is FenceState.REFUSED:
            peer.refusal = peer.fence_refusal
        return effects

    def _offer_anew(self, peer: WriterPeer, writer: Incarnation, now: float) -> list[PairingEffect]:
        """Of the newest generation one engine is left, which another writer took. One that cannot
        take it is shown all of them in the next. (Who did take it may refuse for as long as it
        leaves: its rooms go on.)"""
        newest = peer.newest
        if newest is None or newest.engine is None or writer in newest.writers:
            return []
        return self.retire(peer.endpoint, now)

    def _refusal(self, peer: WriterPeer, message: Welcome) -> str | None:
        if message.refusal is not None:
            return message.refusal
        if differences := self.fingerprint.differences(message.fingerprint):
            return "; ".join(differences)
        if not message.generation:
            # It tries again, and has not got over what it refused for: that is still to be seen.
            return peer.refusal
        if message.engine not in self.engines:
            offered = ", ".join(self.engines)
            return f"prefill writes through {message.engine}, decode offers {offered}"
        generation = peer.generations.get(message.generation)
        taken = generation and generation.engine
        if taken not in (None, message.engine):
            return f"prefill writes through {message.engine}, this generation is of {taken}"
        return None

    def _hello(self, peer: WriterPeer, now: float) -> list[PairingEffect]:
        """`Hello` now, if there is something to show."""
        newest = peer.newest
        if not peer.is_connected or newest is None or newest.state is not SegmentState.OPEN:
            return []
        peer.hello_pause = min(
            max(2 * peer.hello_pause, HELLO_SECONDS_MIN), self._config.hello_interval_seconds
        )
        peer.hello_due = now + peer.hello_pause
        seq = self.next_seq()
        peer.hello_seqs.append(seq)
        hello = Hello(
            decode=self.incarnation,
            seq=seq,
            fingerprint=self.fingerprint,
            generation=newest.number,
            segments=tuple(x for rank in range(self.ranks) for x in newest.segments[rank]),
            floor=peer.floor,
            load=self.load,
        )
        return [SendToPrefill(peer.endpoint, hello)]

    def turned_away(self, endpoint: str, writer: Incarnation, now: float) -> None:
        """This writer takes no grants for now: none is sent before its next `Welcome`."""
        peer = self.peers[endpoint]
        if peer.writer == writer:
            peer.echoed_generation = 0
            peer.hello_due = now

    # Fences

    def fence_opened(self, endpoint: str, writer: Incarnation) -> None:
        """The means to fence this writer are in hand."""
        peer = self.peers.get(endpoint)
        if peer and peer.fences.get(writer) is FenceState.OPENING:
            peer.fences[writer] = FenceState.HELD

    def fence_refused(self, endpoint: str, writer: Incarnation, why: str) -> None:
        """They cannot be had, so this writer is never granted anything."""
        peer = self.peers.get(endpoint)
        if peer and peer.fences.get(writer) is FenceState.OPENING:
            peer.fences[writer] = FenceState.REFUSED
            peer.fence_refusal = why
            if peer.writer == writer:
                peer.refusal = why

    def writer_dead(self, endpoint: str, writer: Incarnation, now: float) -> list[PairingEffect]:
        """Every process of this writer is gone."""
        peer = self.peers.get(endpoint)
        if peer is None or writer not in peer.fences:
            return []
        peer.fences[writer] = FenceState.DEAD
        if peer.writer == writer:
            self._silence.forget(endpoint)
            self._lose(peer, now)
        return [WriterDied(endpoint, writer)]

    def kill(self, endpoint: str, writer: Incarnation, why: str) -> list[PairingEffect]:
        """Kill this writer through the means in hand. Once."""
        peer = self.peers[endpoint]
        if peer.fences.get(writer) is not FenceState.HELD:
            return []
        peer.fences[writer] = FenceState.KILLED
        return [KillWriter(endpoint, writer, why)]

    def let_go(self, endpoint: str, writers: set[Incarnation]) -> list[PairingEffect]:
        """Give up what `writers`, those that still have leases, and the current one don't need."""
        peer = self.peers[endpoint]
        effects: list[PairingEffect] = []
        for writer in [w for w in peer.fences if w not in writers and w != peer.writer]:
            del peer.fences[writer]
            effects.append(CloseFence(endpoint, writer))
        return effects

    # Time

    def attended(self) -> list[str]:
        """Endpoints that time matters to. Of the others, which may be a hundred times as many,
        nothing is left but the count of their generations."""
        return [e for e, p in self.peers.items() if p.is_connected or p.generations or p.fences]

    def handle_timer(self, now: float) -> list[PairingEffect]:
        """Judge silence, send heartbeats, bound what ranks may take. The caller has read
        everything inbound first."""
        effects: list[PairingEffect] = []
        silent = self._silence.tick(now)
        for endpoint in self.attended():
            peer = self.peers[endpoint]
            if now >= peer.hello_due and peer.is_connected:
                effects += self._hello(peer, now)
            effects += self._overdue(peer, now)
        # Last, as a notice becomes `Revoke`s, whose seq is taken after that of the `Hello`s.
        for endpoint in silent:
            peer = self.peers[endpoint]
            self._lose(peer, now)
            assert peer.writer is not None, endpoint
            effects.append(WriterLost(endpoint, peer.writer))
        return effects

    def _lose(self, peer: WriterPeer, now: float) -> None:
        peer.is_lost = True
        # Its successor, or itself come back, is to be found soon.
        peer.hello_pause = 0.0
        peer.hello_due = now

    def _overdue(self, peer: WriterPeer, now: float) -> Iterator[PairingEffect]:
        for generation in peer.generations.values():
            generation.deadline += self.slept_seconds
            if generation.waiting and now > generation.deadline:
                yield EndWorker(
                    f"ranks {sorted(generation.waiting)} did not confirm {generation.state.value} "
                    f"generation {generation.number} of {peer.endpoint} in time"
                )

    def disconnect(self, endpoint: str, now: float) -> list[PairingEffect]:
        """Called when no lease is left here: an unwanted endpoint is retired, then let go."""
        peer = self.peers[endpoint]
        if peer.is_wanted or not peer.is_connected:
            return []
        if peer.newest is not None:
            return self.retire(endpoint, now)
        if peer.generations:
            return []
        peer.is_connected = False
        peer.writer = None
        peer.forget_engine()
        peer.echoed_generation = 0
        self._silence.forget(endpoint)
        return [*self.let_go(endpoint, set()), Disconnect(endpoint)]

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        for peer in self.peers.values():
            peer.check(self.ranks)
