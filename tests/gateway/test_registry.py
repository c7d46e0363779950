"""Traces of the registry: what workers say, what they are told, who may serve."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from pdrt.config import ProtocolConfig
from pdrt.gateway import readiness as readiness_module
from pdrt.gateway.readiness import mismatches, readiness
from pdrt.gateway.registry import (
    LOST_KEPT_SECONDS,
    RETRY_SECONDS_MAX,
    TRANSITIONS,
    Registry,
    WorkerEvent,
    WorkerState,
)
from pdrt.ids import Incarnation
from pdrt.protocol.messages import Load
from tests.gateway.workers import DIGEST, GATEWAY, decode, endpoint, fingerprint, prefill


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry(GATEWAY, (DIGEST,), ProtocolConfig(), workers_max=4, now=0.0)
    yield made
    made.check_invariants()


def tick_until(registry: Registry, start: float, end: float) -> list[Incarnation]:
    """Punctual ticks; the workers lost on the way."""
    lost = []
    now = start
    while now < end:
        now += 0.1
        lost += registry.on_tick(now)
    return lost


def test_a_decode_worker_is_told_the_prefill_workers_of_its_fingerprint(
    registry: Registry,
) -> None:
    registry.on_register(prefill(1), 0.0)
    registry.on_register(prefill(2, fingerprint=fingerprint(page_size=32)), 0.0)
    registry.on_register(prefill(3, healthy=False), 0.0)
    reply = registry.on_register(decode(9), 0.0)
    assert reply is not None
    assert (reply.worker, reply.seq, reply.refusal) == (9, 1, None)
    assert reply.prefill_endpoints == (endpoint(1),)


def test_a_draining_prefill_worker_is_no_longer_named(registry: Registry) -> None:
    registry.on_register(prefill(1), 0.0)
    registry.on_register(prefill(1, seq=2, draining=True), 0.0)
    reply = registry.on_register(decode(9), 0.0)
    assert reply is not None and reply.prefill_endpoints == ()


def test_decode_workers_are_told_at_once_of_prefill_workers_that_come_and_go(
    registry: Registry,
) -> None:
    registry.on_register(decode(9, seq=4), 0.0)
    assert registry.news() == []
    registry.on_register(prefill(1), 0.1)
    (news,) = registry.news()
    assert (news.worker, news.seq, news.prefill_endpoints) == (9, 4, (endpoint(1),))
    registry.on_register(prefill(1, seq=2), 0.2)
    registry.on_register(decode(9, seq=5), 0.2)
    assert registry.news() == [], "heartbeats are no news"
    registry.on_gone(Incarnation(1), WorkerEvent.LEFT, 0.3)
    (news,) = registry.news()
    assert (news.worker, news.seq, news.prefill_endpoints) == (9, 5, ())
    assert registry.news() == []


def test_lost_and_refused_workers_are_told_nothing(registry: Registry) -> None:
    registry.on_register(decode(9), 0.0)
    registry.on_register(decode(8), 0.0)
    registry.on_gone(Incarnation(9), WorkerEvent.LEFT, 0.1)
    registry.on_register(prefill(1), 0.1)
    assert [news.worker for news in registry.news()] == [8]


def test_an_old_message_changes_nothing_and_is_counted(registry: Registry) -> None:
    registry.on_register(decode(9, seq=5, load=Load(running=1)), 0.0)
    assert registry.on_register(decode(9, seq=5, draining=True), 0.1) is None
    assert registry.on_register(decode(9, seq=4, draining=True), 0.1) is None
    worker = registry.workers[Incarnation(9)]
    assert worker.state is WorkerState.LIVE and worker.register.load.running == 1
    assert registry.stale == {"old_seq": 2}


def test_silence_makes_a_worker_lost_and_a_register_brings_it_back(registry: Registry) -> None:
    registry.on_register(prefill(1), 0.0)
    registry.on_register(decode(9, pairs=(1,)), 0.0)
    assert readiness(registry) == (True, [])
    for step in range(60):
        registry.heard(Incarnation(9), step / 10)
        lost = registry.on_tick(step / 10)
        assert lost in ([], [1])
    assert registry.workers[Incarnation(1)].state is WorkerState.LOST
    silent = "prefill 0000000000000001 is silent: it hangs, is stopped, or cannot be reached"
    assert readiness(registry) == (False, ["no prefill worker", silent])
    registry.heard(Incarnation(1), 6.0)
    assert registry.workers[Incarnation(1)].state is WorkerState.LOST
    registry.on_register(prefill(1, seq=2), 6.1)
    assert readiness(registry) == (True, [])


def test_whoever_was_asleep_accuses_nobody(registry: Registry) -> None:
    registry.on_register(decode(9), 0.0)
    assert registry.on_tick(0.1) == []
    assert registry.on_tick(100.0) == []
    assert tick_until(registry, 100.0, 104.9) == []
    assert tick_until(registry, 104.9, 105.2) == [9]


def test_who_says_that_it_ends_is_lost_at_once(registry: Registry) -> None:
    registry.on_register(prefill(1), 0.0)
    registry.on_register(decode(9, pairs=(1,)), 0.0)
    assert registry.on_gone(Incarnation(1), WorkerEvent.LEFT, 0.1)
    assert registry.workers[Incarnation(1)].state is WorkerState.LOST
    left = "prefill 0000000000000001 has left"
    assert readiness(registry) == (False, ["no prefill worker", left])
    reply = registry.on_register(decode(9, seq=2), 0.2)
    assert reply is not None and reply.prefill_endpoints == ()
    assert not registry.on_gone(Incarnation(1), WorkerEvent.LEFT, 0.3)
    assert not registry.on_gone(Incarnation(77), WorkerEvent.LEFT, 0.3)
    assert registry.stale == {"gone_unknown": 2}
    assert tick_until(registry, 0.3, 4.0) == []


def test_what_is_read_after_the_last_word_was_said_before_it(registry: Registry) -> None:
    registry.on_register(decode(9), 0.0)
    registry.on_gone(Incarnation(9), WorkerEvent.LEFT, 0.1)
    assert registry.on_register(decode(9, seq=2), 0.2) is None
    assert registry.workers[Incarnation(9)].state is WorkerState.LOST
    assert registry.stale == {"left": 1}


@pytest.mark.parametrize("by", [WorkerEvent.DIED, WorkerEvent.SILENT])
def test_who_was_lost_before_its_last_word_does_not_come_back_after_it(
    registry: Registry, by: WorkerEvent
) -> None:
    registry.on_register(decode(9), 0.0)
    if by is WorkerEvent.DIED:
        assert registry.on_gone(Incarnation(9), by, 0.1)
    else:
        assert tick_until(registry, 0.0, 6.0) == [9]
    assert not registry.on_gone(Incarnation(9), WorkerEvent.LEFT, 6.0)
    assert registry.on_register(decode(9, seq=2), 6.1) is None
    registry.check_invariants()


def test_one_that_was_only_said_to_be_dead_comes_back(registry: Registry) -> None:
    registry.on_register(decode(9), 0.0)
    registry.on_gone(Incarnation(9), WorkerEvent.DIED, 0.1)
    assert registry.on_register(decode(9, seq=2), 0.2) is not None
    assert registry.workers[Incarnation(9)].state is WorkerState.LIVE


def test_a_pair_that_is_lost_is_told_from_one_that_is_not_yet_made(registry: Registry) -> None:
    registry.on_register(prefill(1), 0.0)
    registry.on_register(decode(9, pairs=(1,)), 0.0)
    registry.on_register(decode(9, seq=2), 0.1)
    lost = "decode 0000000000000009 has lost prefill 0000000000000001"
    assert readiness(registry) == (False, [lost])
    registry.on_register(decode(9, seq=3), 0.2)
    assert readiness(registry) == (False, [lost])
    registry.on_register(prefill(1, seq=2, draining=True), 0.3)
    assert readiness(registry) == (False, ["prefill 0000000000000001: draining"])
    registry.on_register(prefill(2), 0.4)
    registry.on_register(decode(9, seq=4, pairs=(2,)), 0.5)
    assert registry.workers[Incarnation(9)].unpaired == frozenset()
    assert readiness(registry) == (True, [])


def test_clients_are_told_to_wait_about_as_long_as_nobody_could_serve(registry: Registry) -> None:
    def after(now: float) -> int:
        registry.on_tick(now)
        return registry.retry_after_seconds(now)

    assert (after(0.5), after(1.4), after(2.5 + 0.1), after(12.0)) == (1, 1, 3, 12)
    assert after(1000.0) == RETRY_SECONDS_MAX
    registry.on_register(prefill(1), 1000.0)
    registry.on_register(decode(9, pairs=(1,)), 1000.0)
    assert after(1000.1) == 1
    registry.on_gone(Incarnation(9), WorkerEvent.LEFT, 1000.2)
    assert (after(1000.3), after(1004.3)) == (1, 4)


def test_workers_are_found_by_the_beginning_of_their_names(registry: Registry) -> None:
    for worker in (0xAB00000000000001, 0xAC00000000000002):
        registry.on_register(prefill(worker), 0.0)
    assert len(registry.find("a")) == 2 and registry.find("b") == []
    (found,) = registry.find("ac")
    assert found.incarnation == 0xAC00000000000002
    assert registry.find("ac00000000000002") == [found]


def test_a_full_table_refuses_in_words_but_lost_workers_make_room(registry: Registry) -> None:
    for worker in range(1, 5):
        registry.on_register(prefill(worker), 0.0)
    reply = registry.on_register(prefill(5), 0.0)
    assert reply is not None and reply.refusal is not None and "4 workers" in reply.refusal
    assert sorted(tick_until(registry, 0.0, 5.2)) == [1, 2, 3, 4]
    reply = registry.on_register(prefill(5), 5.3)
    assert reply is not None and reply.refusal is None
    assert len(registry.workers) == 4


def test_lost_workers_are_forgotten_in_the_end(registry: Registry) -> None:
    registry.on_register(decode(9), 0.0)
    tick_until(registry, 0.0, 5.2)
    assert Incarnation(9) in registry.workers
    tick_until(registry, 5.2, 6 + LOST_KEPT_SECONDS)
    assert registry.workers == {}


def test_another_protocol_version_is_refused(registry: Registry) -> None:
    old = msgspec.structs.replace(fingerprint(), protocol_version=0)
    reply = registry.on_register(decode(9, fingerprint=old), 0.0)
    assert reply is not None and reply.refusal is not None and "version 0" in reply.refusal
    assert registry.workers == {}


@pytest.mark.parametrize(
    ("messages", "reasons"),
    [
        ([], ["no prefill worker", "no decode worker"]),
        ([prefill(1)], ["no decode worker"]),
        ([decode(9)], ["no prefill worker"]),
        (
            [prefill(1), decode(9)],
            [
                "prefill 0000000000000001 and decode 0000000000000009: handshake not finished",
            ],
        ),
        (
            [prefill(1), decode(9, pairs=(1,), fingerprint=fingerprint(page_size=32))],
            [
                "prefill 0000000000000001 and decode 0000000000000009 cannot be paired: "
                "page_size: 16 != 32",
            ],
        ),
        (
            [prefill(1), decode(9, pairs=(1,), healthy=False, reasons=("quarantine full",))],
            ["decode 0000000000000009: quarantine full"],
        ),
        ([prefill(1), decode(9, pairs=(1,), draining=True)], ["decode 0000000000000009: draining"]),
        (
            [prefill(1), decode(9, refused=("tcp://h:1: layers: 3 != 4",))],
            ["decode 0000000000000009: tcp://h:1: layers: 3 != 4"],
        ),
        (
            [
                prefill(1, fingerprint=fingerprint(digest="other")),
                decode(9, pairs=(1,), fingerprint=fingerprint(digest="other")),
            ],
            [
                "prefill 0000000000000001: model digest other, the gateway's is d1",
                "decode 0000000000000009: model digest other, the gateway's is d1",
            ],
        ),
        ([prefill(1), decode(9, pairs=(1,))], []),
        (
            [prefill(1), decode(8, healthy=False), decode(9, pairs=(1,))],
            [],
        ),
    ],
)
def test_readiness_says_why_not(registry: Registry, messages: list, reasons: list[str]) -> None:
    for message in messages:
        registry.on_register(message, 0.0)
    assert readiness(registry) == (not reasons, reasons)


def test_an_unlisted_event_raises_and_changes_nothing() -> None:
    assert (WorkerState.LOST, WorkerEvent.SILENT) not in TRANSITIONS


def test_workers_that_can_never_be_paired_are_named_also_when_others_serve(
    registry: Registry,
) -> None:
    for message in (prefill(1), decode(9, pairs=(1,))):
        registry.on_register(message, 0.0)
    odd = prefill(2, fingerprint=fingerprint(page_size=32))
    registry.on_register(odd, 0.0)
    assert readiness(registry)[0]
    assert mismatches(registry, registry.workers[odd.worker]) == [
        "prefill 0000000000000002 and decode 0000000000000009 cannot be paired: page_size: 32 != 16"
    ]
    assert mismatches(registry, registry.workers[decode(9).worker]) == [
        "decode 0000000000000009 and prefill 0000000000000002 cannot be paired: page_size: 16 != 32"
    ]
    assert mismatches(registry, registry.workers[prefill(1).worker]) == []


def test_a_heartbeat_without_news_leaves_the_pairs_as_they_are(registry: Registry) -> None:
    """With a thousand workers, they were built again a thousand times a second."""
    registry.on_register(prefill(1), 0.0)
    registry.on_register(decode(9, pairs=(1,)), 0.0)
    worker = registry.workers[decode(9).worker]
    pairs = registry.prefills_for(worker)
    registry.on_register(prefill(1, seq=2, load=Load(queued=3)), 1.0)
    assert registry.prefills_for(worker) is pairs
    assert pairs[endpoint(1)].register.load.queued == 3
    for news in (prefill(1, seq=3, healthy=False), prefill(2, draining=True)):
        registry.on_register(news, 2.0)
        assert registry.prefills_for(worker) == {}
    registry.on_register(prefill(1, seq=4), 2.0)
    assert list(registry.prefills_for(worker)) == [endpoint(1)]
    registry.on_gone(prefill(1).worker, WorkerEvent.DIED, 2.0)
    assert registry.prefills_for(worker) == {}
    registry.on_register(prefill(1, seq=5), 2.0)
    assert list(registry.prefills_for(worker)) == [endpoint(1)]


def test_the_latest_losses_are_named_when_nobody_of_a_role_is_left(registry: Registry) -> None:
    registry.on_register(decode(9), 0.0)
    for worker in (1, 2):
        registry.on_register(prefill(worker), 0.0)
        registry.on_gone(Incarnation(worker), WorkerEvent.LEFT, float(worker))
    assert readiness(registry)[1] == [
        "no prefill worker",
        "prefill 0000000000000002 has left",
        "prefill 0000000000000001 has left",
    ]
    registry.on_register(prefill(3), 3.0)
    assert readiness(registry)[1] == [
        "prefill 0000000000000003 and decode 0000000000000009: handshake not finished"
    ], "who is here counts, not who was"


def test_reasons_are_looked_for_as_far_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients ask for them when nobody serves: not every pair of many workers is described."""
    registry = Registry(GATEWAY, (DIGEST,), ProtocolConfig(), 200, 0.0)
    for number in range(1, 65):
        registry.on_register(prefill(number), 0.0)
        registry.on_register(decode(1000 + number), 0.0)
    described: list[object] = []
    describe = readiness_module._pair_complaints
    monkeypatch.setattr(
        readiness_module,
        "_pair_complaints",
        lambda *pair: described.append(pair) or describe(*pair),
    )
    ready, reasons = readiness(registry)
    assert (ready, len(reasons)) == (False, readiness_module.REASONS_MAX)
    assert len(described) == readiness_module.REASONS_MAX
    assert all("handshake not finished" in reason for reason in reasons)


def test_who_can_serve_is_found_again_when_pairs_change_and_only_then(registry: Registry) -> None:
    registry.on_register(prefill(1), 0.0)
    registry.on_register(decode(9), 0.0)
    assert registry.decodes() == []
    registry.on_register(decode(9, seq=2, pairs=(1,)), 0.0)
    found = registry.decodes()
    assert [worker.incarnation for worker in found] == [9]
    registry.on_register(decode(9, seq=3, pairs=(1,), load=Load(queued=3)), 0.1)
    registry.on_register(prefill(1, seq=2, load=Load(queued=3)), 0.1)
    assert registry.decodes() is found, "heartbeats change nothing"
    registry.on_register(decode(9, seq=4), 0.2)
    assert registry.decodes() == []
    registry.on_register(decode(9, seq=5, pairs=(1,)), 0.3)
    registry.on_register(prefill(1, seq=3, healthy=False), 0.3)
    assert registry.decodes() == []
    registry.on_register(prefill(1, seq=4), 0.4)
    registry.on_gone(Incarnation(9), WorkerEvent.LEFT, 0.4)
    assert registry.decodes() == []


# Decode workers that compute prompts themselves


def test_one_that_computes_prompts_itself_serves_without_prefill_workers(
    registry: Registry,
) -> None:
    registry.on_register(decode(9, local_prefill=True), 0.0)
    assert [worker.incarnation for worker in registry.decodes()] == [9]
    is_ready, reasons = readiness(registry)
    assert is_ready
    assert reasons[0].startswith("degraded")
    assert "no prefill worker" in reasons
    registry.on_register(prefill(1), 0.0)
    registry.on_register(decode(9, seq=2, pairs=(1,), local_prefill=True), 0.0)
    assert readiness(registry) == (True, [])
    registry.on_gone(Incarnation(1), WorkerEvent.LEFT, 0.5)
    assert readiness(registry)[0], "its last prefill worker is gone"
    registry.on_register(decode(9, seq=3, local_prefill=True, healthy=False), 1.0)
    assert not readiness(registry)[0], "not healthy: nobody"


def test_without_it_the_last_prefill_workers_end_is_the_end_of_service(registry: Registry) -> None:
    registry.on_register(prefill(1), 0.0)
    registry.on_register(decode(9, pairs=(1,)), 0.0)
    assert readiness(registry) == (True, [])
    registry.on_gone(Incarnation(1), WorkerEvent.LEFT, 0.5)
    is_ready, reasons = readiness(registry)
    assert not is_ready
    assert "no prefill worker" in reasons


def test_who_cannot_be_reached_gets_nothing_until_it_is_heard(registry: Registry) -> None:
    """A dead worker has the fewest requests: every other one would be tried there first, until its
    silence is certain."""
    for message in (prefill(1), decode(8, pairs=(1,)), decode(9, pairs=(1,))):
        registry.on_register(message, 0.0)
    registry.on_unreachable(Incarnation(9))
    assert [worker.incarnation for worker in registry.decodes()] == [8]
    assert registry.is_cut_off()
    registry.on_unreachable(Incarnation(8))
    ready, reasons = readiness(registry)
    assert (ready, reasons) == (False, [f"decode {n:016x}: cannot be reached" for n in (8, 9)])
    registry.heard(Incarnation(9), 0.1)
    assert [worker.incarnation for worker in registry.decodes()] == [9]
    registry.on_register(decode(8, seq=2, pairs=(1,)), 0.2)
    assert [worker.incarnation for worker in registry.decodes()] == [8, 9]
    assert not registry.is_cut_off()
    registry.on_unreachable(Incarnation(8))
    registry.on_register(decode(8, seq=3, pairs=(1,), draining=True), 0.3)
    registry.on_unreachable(Incarnation(8))
    assert not registry.is_cut_off(), "it would serve nobody"
    registry.on_unreachable(Incarnation(77))
