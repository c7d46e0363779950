"""Which engine a pair uses, what is said of it, and that its fence follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pdrt.protocol.decode_peers import EngineState
from pdrt.protocol.effects import (
    CloseEngine,
    CloseOffers,
    CloseSegment,
    EndLease,
    FailRoom,
    KillWriter,
    OpenEngine,
    OpenFence,
    OpenSegment,
)
from pdrt.protocol.engine_choice import candidates, in_order, none_in_common, on_offer, passed_over
from pdrt.protocol.messages import Outcome, Segment, Welcome
from pdrt.protocol.writers import PairState
from tests.protocol.traces import (
    DECODE,
    ENDPOINT,
    FINGERPRINT,
    LAYOUT,
    LOCAL,
    NEXT_WRITER,
    RETIRE,
    WRITER,
    Decode,
    Prefill,
    one,
    only,
    sent,
)

ALL = ("local", "mooncake", "tcp")
KINDS = {"local": LOCAL, "mooncake": RETIRE, "tcp": RETIRE}


def shown(engines: Sequence[str], ranks: int = 1) -> tuple[Segment, ...]:
    return tuple(Segment(r, name, f"{r}".encode()) for r in range(ranks) for name in engines)


# The choice


def test_the_best_that_both_have_comes_first() -> None:
    assert candidates(("tcp", "mooncake", "local"), shown(("tcp", "local")), ()) == ("local", "tcp")
    assert candidates(("tcp", "local"), shown(ALL), {"local"}) == ("tcp",)
    assert candidates(("mooncake",), shown(("tcp",)), ()) == ()
    assert in_order({"zzz", "tcp", "aaa", "local"}) == ("local", "tcp", "aaa", "zzz")


def test_an_engine_is_on_offer_where_every_rank_shows_it_once() -> None:
    assert on_offer(shown(("tcp", "local"), ranks=3)) == ("local", "tcp")
    assert on_offer((*shown(("tcp",), ranks=2), Segment(1, "local", b""))) == ("tcp",)
    assert on_offer((*shown(("tcp",)), *shown(("tcp", "local")))) == ("local",), "twice"
    assert on_offer(()) == ()
    assert on_offer((Segment(2**62, "tcp", b""),)) == (), "ranks below are missing"


def test_what_is_passed_over_says_who_lacks_it() -> None:
    refused = {"local": "another host"}
    assert passed_over("tcp", ("local", "tcp"), shown(ALL), refused) == (
        "local: another host",
        "mooncake: prefill does not offer it",
    )
    assert passed_over("tcp", ALL, shown(("tcp",)), {}) == (
        "local: decode does not offer it",
        "mooncake: decode does not offer it",
    )
    assert passed_over("tcp", ("tcp",), shown(("tcp",)), {})[0] == (
        "local: decode and prefill do not offer it"
    )
    assert passed_over("local", ALL, shown(ALL), {}) == ()


def test_a_pair_without_a_common_engine_names_both_lists() -> None:
    assert none_in_common(("tcp", "local"), shown(("mooncake",))) == (
        "no transfer engine in common: decode offers mooncake, prefill has local, tcp; "
        "see --transfer"
    )
    assert none_in_common(("tcp",), shown(ALL)) is None


# On the prefill side


def welcome_of(effects: Sequence[object]) -> Welcome:
    return one([x for x in sent(effects) if isinstance(x, Welcome)])


def refuse(prefill: Prefill, why: str, generation: int = 1) -> list[object]:
    return [*prefill.note(prefill.table.engine_refused(DECODE, generation, why, prefill.now))]


def close_all(prefill: Prefill, generation: int = 1) -> list[object]:
    return [x for r in range(prefill.ranks) for x in prefill.engine_closed(r, generation)]


def test_it_opens_the_best_and_says_so() -> None:
    prefill = Prefill(ranks=2, engines=ALL)
    effects = prefill.hello(segments=shown(ALL, ranks=2))
    assert effects == [OpenEngine(DECODE, 1, shown(("local",), ranks=2))]
    welcome = welcome_of(prefill.engine_opened())
    assert (welcome.generation, welcome.engine, welcome.passed_over) == (1, "local", ())
    assert welcome.engines == ALL


def test_it_falls_back_once_every_rank_has_let_go_of_what_one_could_not_open() -> None:
    prefill = Prefill(ranks=2, engines=ALL)
    prefill.hello(segments=shown(ALL))
    prefill.table.engine_opened(DECODE, 1, 0, prefill.now)
    assert refuse(prefill, "another host") == [CloseEngine(DECODE, 1)]
    assert prefill.engine_closed(0) == []
    assert prefill.engine_closed(1) == [OpenEngine(DECODE, 1, shown(("mooncake",)))]
    refuse(prefill, "no RDMA there")
    assert one(only(close_all(prefill), OpenEngine)).segments == shown(("tcp",))
    welcome = welcome_of(prefill.engine_opened())
    assert (welcome.generation, welcome.engine, welcome.refusal) == (1, "tcp", None)
    assert welcome.passed_over == ("local: another host", "mooncake: no RDMA there")


def test_when_none_can_be_opened_all_reasons_are_said_and_all_tried_again() -> None:
    prefill = Prefill(engines=("local", "tcp"))
    prefill.hello(segments=shown(ALL))
    refuse(prefill, "another host")
    close_all(prefill)
    welcome = welcome_of(refuse(prefill, "the port is blocked"))
    assert welcome.refusal == "local: another host; tcp: the port is blocked"
    assert (welcome.generation, welcome.engine) == (0, None)
    assert close_all(prefill) == [], "not before the next Hello"
    effects = prefill.hello(segments=shown(ALL))
    assert one(only(effects, OpenEngine)).segments == shown(("local",))


def test_a_later_generation_may_have_a_better_engine() -> None:
    prefill = Prefill(engines=("local", "tcp"))
    prefill.hello(segments=shown(ALL))
    refuse(prefill, "out of descriptors")
    close_all(prefill)
    assert welcome_of(prefill.engine_opened()).engine == "tcp"
    prefill.hello(generation=2, segments=shown(ALL))
    assert welcome_of(prefill.engine_opened(2)).engine == "local"


def test_a_generation_keeps_its_engine_when_its_decode_worker_comes_back() -> None:
    """Another one would have another fence, under leases that have not ended."""
    prefill = Prefill(engines=("local", "tcp"))
    prefill.hello(segments=shown(ALL))
    refuse(prefill, "out of descriptors")
    close_all(prefill)
    prefill.engine_opened()
    for _ in range(70):
        prefill.tick(0.1)
    assert prefill.table.peers.known[DECODE].is_lost
    close_all(prefill)
    effects = prefill.hello(segments=shown(ALL))
    assert one(only(effects, OpenEngine)).segments == shown(("tcp",))
    assert welcome_of(prefill.engine_opened()).engine == "tcp"


def test_no_common_engine_is_refused_without_a_trace() -> None:
    prefill = Prefill(engines=("local",))
    welcome = welcome_of(prefill.hello(segments=shown(("tcp", "mooncake"))))
    assert welcome.refusal is not None
    assert "decode offers mooncake, tcp, prefill has local" in welcome.refusal
    assert prefill.table.peers.known == {}
    assert welcome_of(prefill.hello(segments=())).refusal is not None


@pytest.mark.parametrize("ranks", [3, 6])
def test_heads_that_do_not_divide_are_refused_with_both_numbers(ranks: int) -> None:
    prefill = Prefill(ranks=2)
    assert LAYOUT.kv_heads == 4
    welcome = welcome_of(prefill.hello(segments=shown(("test",), ranks=ranks)))
    assert welcome.refusal is not None
    assert f"4 KV heads do not divide over {ranks} decode ranks" in welcome.refusal
    assert "2 prefill ranks" in welcome.refusal
    assert prefill.table.peers.known == {}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 12])
def test_heads_that_are_divided_or_shared_evenly_are_not(ranks: int) -> None:
    prefill = Prefill(ranks=2)
    assert only(prefill.hello(segments=shown(("test",), ranks=ranks)), OpenEngine)


def test_a_refused_engine_of_an_older_generation_answers_nobody() -> None:
    prefill = Prefill(engines=("tcp",))
    prefill.hello(segments=shown(ALL))
    prefill.hello(generation=2, floor=2, segments=shown(ALL))
    assert not sent(refuse(prefill, "retired meanwhile"))
    assert prefill.table.peers.known[DECODE].engines[1].state is EngineState.CLOSING
    assert welcome_of(prefill.engine_opened(2)).engine == "tcp"


# On the decode side


def mixed() -> Decode:
    decode = Decode(engines=KINDS)
    decode.want()
    decode.open_segments(1)
    return decode


def test_no_grant_before_the_engine_is_known() -> None:
    decode = mixed()
    effects = decode.welcome(generation=0, engine=None)
    assert only(effects, OpenFence) == []
    assert not decode.table.is_usable(ENDPOINT)
    decode.tick(1.0)
    decode.welcome(engine="tcp", passed_over=("local: another host",))
    assert decode.table.is_usable(ENDPOINT), "its generation can be retired"
    peer = decode.pairing.peers[ENDPOINT]
    assert (peer.engine, peer.passed_over) == ("tcp", ("local: another host",))


def test_a_refusal_is_seen_until_the_writer_has_got_over_it() -> None:
    """Also while it tries again, which takes seconds where packets are dropped."""
    decode = mixed()
    peer = decode.pairing.peers[ENDPOINT]
    decode.welcome(generation=0, engine=None, refusal="tcp: the port is blocked")
    decode.tick(1.0)
    decode.welcome(generation=0, engine=None)
    assert (peer.state, peer.refusal) == (PairState.REFUSED, "tcp: the port is blocked")
    decode.tick(1.0)
    decode.welcome(NEXT_WRITER, generation=0, engine=None)
    assert peer.refusal is None, "of another writer"
    decode.tick(1.0)
    decode.welcome(NEXT_WRITER, generation=0, engine=None, refusal="tcp: the port is blocked")
    decode.tick(1.0)
    decode.welcome(NEXT_WRITER, engine="tcp")
    assert peer.refusal is None
    assert decode.table.is_usable(ENDPOINT)


def test_a_local_writer_is_granted_to_once_its_processes_are_in_hand() -> None:
    decode = mixed()
    assert only(decode.welcome(engine="local"), OpenFence)
    assert not decode.table.is_usable(ENDPOINT)
    decode.fence_opened()
    assert decode.table.is_usable(ENDPOINT)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("smoke", "prefill writes through smoke, decode offers local, mooncake, tcp"),
        (None, "prefill writes through None"),
    ],
)
def test_an_engine_that_was_not_offered_is_refused(engine: str | None, words: str) -> None:
    decode = mixed()
    decode.welcome(engine=engine)
    peer = decode.pairing.peers[ENDPOINT]
    assert peer.refusal is not None
    assert words in peer.refusal
    assert peer.state is PairState.REFUSED


@pytest.mark.parametrize("engine", ["smoke", "local"])
def test_an_engine_named_for_no_generation_is_not_taken(engine: str) -> None:
    decode = mixed()
    assert only(decode.welcome(generation=0, engine=engine), OpenFence) == []
    peer = decode.pairing.peers[ENDPOINT]
    assert (peer.engine, peer.refusal) == (None, None)
    assert not decode.table.is_usable(ENDPOINT)
    decode.table.check()


def test_a_writer_that_changes_its_engine_within_a_generation_is_refused() -> None:
    decode = mixed()
    decode.welcome(engine="tcp")
    decode.tick(1.0)
    decode.welcome(engine="local")
    refusal = decode.pairing.peers[ENDPOINT].refusal
    assert refusal == "prefill writes through local, this generation is of tcp"
    assert not decode.table.is_usable(ENDPOINT)


def test_fingerprints_that_differ_are_refused_before_any_fence_is_taken() -> None:
    decode = mixed()
    layout = msgspec.structs.replace(LAYOUT, page_size=32, dtype="float16")
    theirs = msgspec.structs.replace(FINGERPRINT, layout=layout, protocol_version=99)
    effects = decode.welcome(engine="local", fingerprint=theirs)
    assert only(effects, OpenFence) == []
    refusal = decode.pairing.peers[ENDPOINT].refusal
    assert refusal is not None
    for words in ("dtype: bfloat16 != float16", "page_size: 16 != 32", "!= 99"):
        assert words in refusal


def test_a_death_fences_what_was_written_through_memory_and_nothing_else() -> None:
    """The same writer, local in one generation and tcp in the next."""
    decode = mixed()
    decode.welcome(engine="local")
    decode.fence_opened()
    by_memory = decode.grant([1, 2])
    decode.note(decode.pairing.retire(ENDPOINT, decode.now))
    decode.open_segments(2)
    decode.welcome(engine="tcp")
    by_socket = decode.grant([3, 4])
    decode.close_segments(1)
    assert decode.freed == [], "a torn down segment proves nothing of mapped memory"
    effects = decode.note(decode.table.writer_dead(ENDPOINT, WRITER, decode.now))
    assert decode.freed == [by_memory]
    assert one(only(effects, CloseSegment)).generation == 2
    decode.close_segments(2)
    assert decode.freed == [by_memory, by_socket]


def test_offers_beside_what_was_taken_are_closed() -> None:
    decode = mixed()
    assert only(decode.welcome(generation=0, engine=None), CloseOffers) == []
    decode.tick(1.0)
    effects = decode.welcome(engine="tcp")
    assert only(effects, CloseOffers) == [CloseOffers(ENDPOINT, 1, "tcp")]
    decode.tick(1.0)
    assert only(decode.welcome(engine="tcp"), CloseOffers) == [], "once"
    decode.tick(1.0)
    assert only(decode.welcome(NEXT_WRITER, engine="tcp"), CloseOffers) == [], "for all writers"
    assert decode.table.is_usable(ENDPOINT)


def test_nothing_is_closed_beside_the_only_engine() -> None:
    decode = Decode()
    decode.want()
    decode.open_segments(1)
    assert only(decode.welcome(), CloseOffers) == []


def test_offers_of_a_generation_that_is_torn_down_go_with_it() -> None:
    decode = mixed()
    hello = decode.last_hello()
    decode.note(decode.pairing.retire(ENDPOINT, decode.now))
    assert only(decode.welcome(hello=hello, engine="tcp"), CloseOffers) == []


@pytest.mark.parametrize(
    "answer",
    [
        {"engine": "local"},
        {"engine": None, "generation": 0, "refusal": "tcp: the port is blocked"},
    ],
)
def test_a_successor_that_cannot_take_what_was_taken_is_shown_all_again(
    answer: dict[str, object],
) -> None:
    decode = mixed()
    decode.welcome(engine="tcp")
    decode.tick(1.0)
    effects = decode.welcome(NEXT_WRITER, **answer)
    assert not decode.table.is_usable(ENDPOINT), "what it has opened is closed by now"
    assert only(effects, OpenFence) == []
    assert only(effects, OpenSegment) == [OpenSegment(ENDPOINT, 2)]
    assert only(effects, CloseSegment) == [CloseSegment(ENDPOINT, 1)]
    decode.open_segments(2)
    assert only(decode.welcome(NEXT_WRITER, **answer), CloseSegment) == [], "all were shown"
    decode.close_segments(1)
    decode.tick(1.0)
    decode.welcome(NEXT_WRITER, engine="local")
    decode.fence_opened(NEXT_WRITER)
    assert decode.table.is_usable(ENDPOINT)


def test_a_writer_that_leaves_keeps_its_generation() -> None:
    """Its rooms go on; only new ones are refused."""
    decode = mixed()
    decode.welcome(engine="tcp")
    room = decode.grant([1, 2])
    decode.tick(1.0)
    effects = decode.welcome(generation=1, engine="tcp", refusal="it drains")
    assert only(effects, CloseSegment) == only(effects, FailRoom) == []
    decode.drained(room, Outcome.ENDED)
    assert decode.freed == [room]


def test_each_writer_is_fenced_by_its_own_means() -> None:
    decode = mixed()
    decode.welcome(WRITER, engine="local")
    decode.fence_opened(WRITER)
    old = decode.grant([1, 2])
    decode.tick(1.0)
    effects = decode.welcome(NEXT_WRITER, engine="tcp")
    assert [x.room for x in only(effects, FailRoom)] == [old]
    assert one(only(effects, CloseSegment)).generation == 1
    decode.open_segments(2)
    decode.close_segments(1)
    assert decode.freed == [], "the old one's memory is still mapped"
    decode.welcome(NEXT_WRITER, engine="tcp")
    new = decode.grant([3, 4])
    effects = decode.drained(new, Outcome.UNSETTLED, NEXT_WRITER)
    assert only(effects, KillWriter) == []
    assert one(only(effects, CloseSegment)).generation == 2
    decode.close_segments(2)
    assert decode.freed == [new]
    effects = decode.wait(16, answering=False)
    assert one(only(effects, KillWriter)).writer == WRITER
    assert decode.freed == [new]
    decode.note(decode.table.writer_dead(ENDPOINT, WRITER, decode.now))
    assert decode.freed == [new, old]
    assert decode.table.fences_by_engine == {"tcp": 1, "local": 1}
    assert only(effects, EndLease) == []
