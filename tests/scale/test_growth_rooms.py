"""Rooms, writers and endpoints that come and go a million times leave nothing behind."""

from __future__ import annotations

import msgspec

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation
from pdrt.protocol.effects import EndLease, LeaseReady, ReleaseSource
from pdrt.protocol.messages import Reason
from pdrt.protocol.writers import HELLO_SEQS_MAX
from tests.protocol.traces import ENDPOINT, LOCAL, Decode, only
from tests.scale.growth import BLOCKS_MAX, left_by
from tests.scale.handover import Handover


def test_rooms_that_are_opened_and_drained(times: int) -> None:
    handover = Handover()

    def work(numbers: range) -> None:
        for number in numbers:
            handover.live(number)

    assert left_by(work, times) < BLOCKS_MAX
    lives = times + times // 10
    assert handover.ends[LeaseReady] + handover.ends[EndLease] == lives
    assert handover.ends[ReleaseSource] == lives
    leases, rooms = handover.leases, handover.rooms
    assert (leases.leases, leases._by_endpoint, leases._revoking) == ({}, {}, {})
    (peer,) = leases.pairing.peers.values()
    assert len(peer.fences) == 1
    assert len(peer.hello_seqs) <= HELLO_SEQS_MAX
    (decode,) = rooms.peers.known.values()
    assert (rooms.rooms, decode.rooms, len(decode.engines)) == ({}, {}, 1)
    assert not leases.stale and not rooms.stale
    leases.check()
    rooms.check()


class Writers(Decode):
    """Without its ledger of everything that was ever sent or freed."""

    def come_and_go(self, writer: Incarnation, endpoint: str) -> None:
        """One writer is paired, granted a room, and dies; another one answers in its place, and
        the endpoint is let go."""
        self.pair(writer, endpoint)
        self.grant((1, 2), endpoint)
        died = self.note(self.table.writer_dead(endpoint, writer, self.now))
        assert len(only(died, EndLease)) == 1
        self.tick(2.0)
        self.welcome(Incarnation(writer + 1), endpoint)
        self.fence_opened(Incarnation(writer + 1), endpoint)
        self.revoke(room := self.grant((1, 2), endpoint), Reason.CLIENT_GONE)
        self.note(self.table.writer_dead(endpoint, Incarnation(writer + 1), self.now))
        assert room not in self.table.leases
        self.table.unwant(endpoint)
        self.tick()
        self.close_segments(self.pairing.peers[endpoint].newest_generation, endpoint)
        self.tick()
        self.freed.clear()
        del self.sent[:-8]
        self.closing.clear()


def test_writers_and_endpoints_that_come_and_go(times: int) -> None:
    config = msgspec.structs.replace(ProtocolConfig(), prefill_endpoints_max=16)
    decode = Writers(LOCAL, config=config)
    decode.pair()

    def work(numbers: range) -> None:
        for number in numbers:
            # Another host than that of the pair which stays: a number may be its port.
            decode.come_and_go(Incarnation(1000 + 2 * number), f"tcp://127.0.0.2:{number}")

    # Each is twenty events and as many checks of everything.
    assert left_by(work, times // 100) < BLOCKS_MAX
    assert len(decode.pairing.peers) <= 16
    assert ENDPOINT in decode.pairing.peers
    assert decode.table.leases == {}
    assert sum(len(peer.fences) for peer in decode.pairing.peers.values()) == 1
