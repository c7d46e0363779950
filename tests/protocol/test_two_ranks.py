"""One of two prefill ranks never acknowledges, both halves of the hand-over together."""

from __future__ import annotations

from pdrt.protocol.effects import CloseRoom, EndLease, KillWriter
from pdrt.protocol.messages import Grant, Outcome, Reason, Revoke
from tests.protocol.traces import (
    CONFIG,
    ENDPOINT,
    LOCAL,
    WRITER,
    Decode,
    Prefill,
    ends_worker,
    one,
    only,
)


def test_a_rank_that_never_ends_is_named_and_fenced_and_the_pages_are_freed() -> None:
    prefill, decode = Prefill(ranks=2), Decode(LOCAL)
    prefill.pair()
    decode.pair()
    room = decode.grant([1, 2, 3])
    grant = decode.sent[-1].message
    assert isinstance(grant, Grant)
    prefill.receive(grant)
    assert prefill.rank_ended(room, Outcome.COMPLETE, rank=0) == []
    assert prefill.table.rooms[room].waiting == {1}, "who is missing has a name"

    # The client leaves; every rank is told, and the silent one is still waited for.
    decode.revoke(room, Reason.CLIENT_GONE)
    revoke = decode.sent[-1].message
    assert isinstance(revoke, Revoke)
    assert prefill.receive(revoke) == [CloseRoom(room, Reason.CLIENT_GONE, "")]
    assert prefill.drained == []

    effects = decode.wait(CONFIG.fence_after_seconds + 1)
    assert one(only(effects, KillWriter)) == KillWriter(
        ENDPOINT, WRITER, "its writer does not drain"
    )
    assert decode.freed == [], "killed is not dead"
    died = decode.note(decode.table.writer_dead(ENDPOINT, WRITER, decode.now))
    assert only(died, EndLease) == [EndLease(room)]
    assert decode.freed == [room]


def test_its_own_leader_names_it_and_ends_the_worker() -> None:
    prefill = Prefill(ranks=2)
    prefill.pair()
    prefill.grant()
    ticks = [prefill.tick(0.5) for _ in range(round(CONFIG.silence_seconds / 0.5) + 2)]
    why = ends_worker([effect for effects in ticks for effect in effects])
    assert "1" in why
