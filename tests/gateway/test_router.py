"""Whom the router prefers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from pdrt.config import ProtocolConfig
from pdrt.gateway.prefix_index import Prompt
from pdrt.gateway.registry import Registry
from pdrt.gateway.router import Demand, Route, Router
from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import Register
from pdrt.protocol.messages import Load
from tests.gateway.workers import DIGEST, GATEWAY, decode, endpoint, fingerprint, prefill

NO_DEMAND = Demand({}, {})
IDLE = Load(pages_free=1000, pages_total=1000)
PAGE = 16


def prompt(tokens: int, first: int = 0, salt: str = "") -> Prompt:
    """Prompts with different `first` share nothing; with the same one, the shorter's tokens."""
    return Prompt([first, *range(1, tokens)], salt)


def router_of(*messages: Register) -> Router:
    registry = Registry(GATEWAY, (DIGEST,), ProtocolConfig(), workers_max=16, now=0.0)
    for message in messages:
        registry.on_register(message, 0.0)
    registry.check_invariants()
    return Router(registry)


def choose(
    router: Router,
    demand: Demand = NO_DEMAND,
    tried: Collection[int] = (),
    refused: Collection[int] = (),
    asked: Prompt | None = None,
) -> Route:
    route = router.choose(
        demand,
        asked or prompt(5),
        {Incarnation(worker) for worker in tried},
        {Incarnation(worker) for worker in refused},
    )
    assert route is not None
    router.index.check_invariants()
    return route


def two_prefills(*loads: Load) -> Router:
    first, second = loads or (IDLE, IDLE)
    return router_of(prefill(1, load=first), prefill(2, load=second), decode(9, pairs=(1, 2)))


# Decode workers: by load


def test_nobody_without_a_pair() -> None:
    router = router_of(prefill(1), decode(9))
    assert router.choose(NO_DEMAND, prompt(5), (), ()) is None


def test_the_least_loaded_decode_worker_by_report_or_by_own_count() -> None:
    router = router_of(
        prefill(1),
        decode(8, pairs=(1,), load=Load(running=2, queued=1)),
        decode(9, pairs=(1,), load=Load(running=2)),
    )
    assert choose(router).decode == 9
    assert choose(router, Demand({Incarnation(9): 4}, {})).decode == 8


def test_load_is_a_share_of_what_a_worker_takes_and_pages_break_ties() -> None:
    router = router_of(
        prefill(1),
        decode(8, pairs=(1,), load=Load(running=4), requests_max=64),
        decode(9, pairs=(1,), load=Load(running=2), requests_max=8),
    )
    assert choose(router).decode == 8
    router = router_of(
        prefill(1),
        decode(8, pairs=(1,), load=Load(pages_free=1, pages_total=10)),
        decode(9, pairs=(1,), load=Load(pages_free=9, pages_total=10)),
    )
    assert choose(router).decode == 9


def test_equal_decode_workers_take_turns() -> None:
    router = router_of(prefill(1), *(decode(n, pairs=(1,), load=IDLE) for n in (7, 8, 9)))
    assert [choose(router).decode for _ in range(6)] == [7, 8, 9, 7, 8, 9]


def test_tried_workers_come_last_and_refused_ones_never() -> None:
    router = router_of(
        prefill(1), decode(8, pairs=(1,)), decode(9, pairs=(1,), load=Load(running=7))
    )
    assert choose(router, tried=(8,)).decode == 9
    assert choose(router, tried=(8, 9), refused=(9,)).decode == 8
    assert router.choose(NO_DEMAND, prompt(5), (), (Incarnation(8), Incarnation(9))) is None


def test_a_draining_or_unhealthy_worker_gets_nothing() -> None:
    router = router_of(
        prefill(1),
        prefill(2, draining=True),
        prefill(3, healthy=False),
        decode(7, pairs=(1, 2, 3), draining=True),
        decode(8, pairs=(1, 2, 3), healthy=False),
        decode(9, pairs=(1, 2, 3), load=Load(running=8, queued=100)),
    )
    route = choose(router)
    assert (route.decode, route.prefill_endpoints) == (9, (endpoint(1),))
    assert router.choose(NO_DEMAND, prompt(5), (), (Incarnation(9),)) is None


# Prefill workers: by what the prompt costs there


def test_paired_prefill_workers_first_then_by_queue() -> None:
    router = router_of(
        prefill(1, load=Load(queued=3)),
        prefill(2),
        prefill(3),
        prefill(4, fingerprint=fingerprint(page_size=32)),
        decode(9, pairs=(1, 3)),
    )
    assert choose(router).prefill_endpoints == (endpoint(3), endpoint(1), endpoint(2))
    route = choose(router, Demand({}, {endpoint(3): 50}))
    assert route.prefill_endpoints == (endpoint(1), endpoint(3), endpoint(2))


def test_prompts_that_begin_alike_go_where_the_first_one_went() -> None:
    router = two_prefills()
    first = choose(router, asked=prompt(10 * PAGE))
    assert first.prefill_tokens == 10 * PAGE
    for length in (10 * PAGE, 6 * PAGE, 20 * PAGE):
        route = choose(router, asked=prompt(length))
        assert route.prefill == first.prefill
    other = choose(router, asked=prompt(10 * PAGE, salt="somebody else"))
    assert other.prefill != first.prefill and other.prefill_tokens == 10 * PAGE


def test_the_last_token_is_computed_in_any_case() -> None:
    router = two_prefills()
    choose(router, asked=prompt(10 * PAGE))
    assert choose(router, asked=prompt(10 * PAGE)).prefill_tokens == PAGE
    assert choose(router, asked=prompt(10 * PAGE + 1)).prefill_tokens == PAGE + 1
    assert choose(router, asked=prompt(10 * PAGE + 1)).prefill_tokens == 1


def test_a_queue_that_costs_more_than_the_prefix_saves_wins_over_it() -> None:
    router = two_prefills()
    home = choose(router, asked=prompt(10 * PAGE + 1)).prefill_endpoints[0]
    saved = 10 * PAGE
    route = choose(router, Demand({}, {home: saved - 1}), asked=prompt(10 * PAGE + 1))
    assert route.prefill_endpoints[0] == home
    route = choose(router, Demand({}, {home: saved + 1}), asked=prompt(10 * PAGE + 1))
    assert route.prefill_endpoints[0] != home


def test_a_queue_that_the_worker_reports_counts_by_what_prompts_usually_cost() -> None:
    router = two_prefills()
    for first in range(200):
        choose(router, asked=prompt(PAGE, first=first))
    home = choose(router, asked=prompt(10 * PAGE + 1)).prefill
    assert home is not None
    for queued, stays in ((5, True), (30, False)):
        load = Load(queued=queued, pages_free=1000, pages_total=1000)
        seq = 1 + queued
        router._registry.on_register(prefill(home, seq=seq, load=load), 0.0)
        route = choose(router, asked=prompt(10 * PAGE + 1))
        assert (route.prefill == home) is stays, queued
        router.forget(Incarnation(3 - home))  # it has the prefix too, from now on


def test_who_finds_less_than_expected_is_expected_to_save_less() -> None:
    router = two_prefills()
    home = choose(router, asked=prompt(10 * PAGE + 1)).prefill
    for _ in range(60):
        route = choose(router, asked=prompt(10 * PAGE + 1))
        router.learn(route, route.prefill, 0)
    assert router.index.trust(Incarnation(1)) < 0.1 and router.index.trust(Incarnation(2)) < 0.1
    assert home is not None
    for _ in range(60):
        route = choose(router, asked=prompt(10 * PAGE + 1))
        router.learn(route, route.prefill, 10 * PAGE)
    route = choose(router, asked=prompt(10 * PAGE + 1))
    assert route.prefill is not None and router.index.trust(route.prefill) > 0.9
    assert route.prefill_tokens < PAGE


def test_what_another_worker_found_says_nothing_of_this_one() -> None:
    router = two_prefills()
    route = choose(router, asked=prompt(10 * PAGE))
    route = choose(router, asked=prompt(10 * PAGE))
    router.learn(route, Incarnation(77), 0)
    router.learn(route, None, 0)
    assert route.prefill is not None and router.index.trust(route.prefill) == 1.0


def test_a_prompt_that_is_computed_whole_knows_no_prefix() -> None:
    router = two_prefills()
    choose(router, asked=prompt(10 * PAGE))
    asked = Prompt([0, *range(1, 10 * PAGE)], "", may_reuse=False)
    assert choose(router, asked=asked).prefill_tokens == 10 * PAGE


def test_a_lost_worker_comes_back_without_its_prefixes() -> None:
    router = two_prefills()
    home = choose(router, asked=prompt(10 * PAGE)).prefill
    assert home is not None
    router.forget(home)
    route = choose(router, asked=prompt(10 * PAGE))
    assert route.prefill_tokens == 10 * PAGE


# Whatever comes

LOADS = st.builds(
    Load,
    running=st.integers(0, 50),
    queued=st.integers(0, 50),
    pages_free=st.integers(0, 50),
    pages_total=st.just(50),
)
WORKERS = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.booleans(), LOADS), min_size=1, max_size=5
)
PROMPTS = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 3)), min_size=1, max_size=30)


def messages_of(prefills: list, decodes: list) -> list[Register]:
    """(healthy, draining, wide pages, load) of each."""
    made: list[Register] = []
    for number, (healthy, draining, wide, load) in enumerate(prefills + decodes):
        print_ = fingerprint(page_size=32 if wide else 16)
        fields = {"healthy": healthy, "draining": draining, "fingerprint": print_, "load": load}
        if number < len(prefills):
            made.append(prefill(1 + number, **fields))
        else:
            pairs = tuple(range(1, 1 + len(prefills)))
            made.append(decode(100 + number, pairs=pairs, **fields))
    return made


@given(WORKERS, WORKERS, PROMPTS)
def test_only_usable_workers_of_one_fingerprint_and_always_the_same(
    prefills: list, decodes: list, prompts: list[tuple[int, int]]
) -> None:
    messages = messages_of(prefills, decodes)
    router, again = router_of(*messages), router_of(*messages)
    by_name = {message.endpoint or message.worker: message for message in messages}
    usable = [m for m in messages if m.healthy and not m.draining]
    for tokens, first in prompts:
        route = router.choose(NO_DEMAND, prompt(tokens, first), (), ())
        assert route == again.choose(NO_DEMAND, prompt(tokens, first), (), ())
        if route is None:
            kinds = {m.fingerprint for m in usable if m.endpoint is not None}
            assert not [m for m in usable if m.endpoint is None and m.fingerprint in kinds]
            continue
        chosen = by_name[route.decode]
        assert chosen in usable and 1 <= route.prefill_tokens <= tokens
        for name in route.prefill_endpoints:
            assert by_name[name] in usable and by_name[name].fingerprint == chosen.fingerprint
        router.index.check_invariants()


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 5)), min_size=1, max_size=60),
)
def test_outstanding_tokens_differ_by_one_prompt_at_most(
    workers: int, prompts: list[tuple[int, int]]
) -> None:
    """Prompts that share a lot, and prompts that share nothing; nothing is computed meanwhile."""
    names = tuple(range(1, 1 + workers))
    router = router_of(*(prefill(n, load=IDLE) for n in names), decode(9, pairs=names))
    queued: Counter[str] = Counter({endpoint(n): 0 for n in names})
    for tokens, first in prompts:
        route = choose(router, Demand({}, queued), asked=prompt(tokens, first))
        queued[route.prefill_endpoints[0]] += route.prefill_tokens
        longest = max(tokens for tokens, _ in prompts)
        assert max(queued.values()) - min(queued.values()) <= longest


@given(st.integers(2, 6), st.integers(1, 8), st.integers(1, 40))
def test_idle_workers_keep_their_conversations(workers: int, clients: int, turns: int) -> None:
    """Conversations that grow turn by turn, nobody waiting: each stays with one worker, and they
    are shared out."""
    names = tuple(range(1, 1 + workers))
    router = router_of(*(prefill(n, load=IDLE) for n in names), decode(9, pairs=names))
    homes: dict[int, set[Incarnation | None]] = {client: set() for client in range(clients)}
    for turn in range(min(turns, 8)):
        for client in range(clients):
            asked = prompt(PAGE * (2 + turn), first=client)
            homes[client].add(choose(router, asked=asked).prefill)
    assert all(len(home) == 1 for home in homes.values())
    counts = Counter(worker for home in homes.values() for worker in home)
    assert max(counts.values()) <= -(-clients // workers)


# Decode workers that compute prompts themselves


def test_one_that_is_paired_is_preferred_to_one_that_would_compute_the_prompt() -> None:
    busy = Load(running=7, pages_free=0, pages_total=1000)
    router = router_of(
        prefill(1),
        decode(8, load=IDLE, local_prefill=True),
        decode(9, pairs=(1,), load=busy, local_prefill=True),
    )
    assert choose(router).decode == 9
    assert choose(router, refused=(9,)).decode == 8
    assert choose(router, tried=(9,)).decode == 8, "one that was tried comes last"


def test_a_route_without_prefill_workers() -> None:
    router = router_of(
        decode(8, load=IDLE, local_prefill=True), decode(9, load=IDLE, local_prefill=True)
    )
    route = choose(router)
    assert (route.prefill_endpoints, route.prefill, route.prefill_tokens) == ((), None, 0)
    assert choose(router).decode != route.decode, "equals take turns"
