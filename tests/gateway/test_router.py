"""Whom the router prefers."""

from __future__ import annotations

from pdrt.config import ProtocolConfig
from pdrt.gateway.registry import Registry
from pdrt.gateway.router import Demand, choose_route
from pdrt.protocol.gateway_messages import Register
from pdrt.protocol.messages import Load
from tests.gateway.workers import DIGEST, GATEWAY, decode, endpoint, fingerprint, prefill

NO_DEMAND = Demand({}, {})


def registry_of(*messages: Register) -> Registry:
    registry = Registry(GATEWAY, (DIGEST,), ProtocolConfig(), workers_max=16, now=0.0)
    for message in messages:
        registry.on_register(message, 0.0)
    registry.check_invariants()
    return registry


def test_nobody_without_a_pair() -> None:
    registry = registry_of(prefill(1), decode(9))
    assert choose_route(registry, NO_DEMAND, (), ()) is None


def test_the_least_loaded_decode_worker_by_report_or_by_own_count() -> None:
    registry = registry_of(
        prefill(1),
        decode(8, pairs=(1,), load=Load(running=2, queued=1)),
        decode(9, pairs=(1,), load=Load(running=2)),
    )
    route = choose_route(registry, NO_DEMAND, (), ())
    assert route is not None and route.decode == 9
    route = choose_route(registry, Demand({9: 4}, {}), (), ())
    assert route is not None and route.decode == 8


def test_load_is_a_share_of_what_a_worker_takes_and_pages_break_ties() -> None:
    registry = registry_of(
        prefill(1),
        decode(8, pairs=(1,), load=Load(running=4), requests_max=64),
        decode(9, pairs=(1,), load=Load(running=2), requests_max=8),
    )
    route = choose_route(registry, NO_DEMAND, (), ())
    assert route is not None and route.decode == 8
    registry = registry_of(
        prefill(1),
        decode(8, pairs=(1,), load=Load(pages_free=1, pages_total=10)),
        decode(9, pairs=(1,), load=Load(pages_free=9, pages_total=10)),
    )
    route = choose_route(registry, NO_DEMAND, (), ())
    assert route is not None and route.decode == 9


def test_tried_workers_come_last_and_refused_ones_never() -> None:
    registry = registry_of(
        prefill(1), decode(8, pairs=(1,)), decode(9, pairs=(1,), load=Load(running=7))
    )
    route = choose_route(registry, NO_DEMAND, (8,), ())
    assert route is not None and route.decode == 9
    route = choose_route(registry, NO_DEMAND, (8, 9), (9,))
    assert route is not None and route.decode == 8
    assert choose_route(registry, NO_DEMAND, (), (8, 9)) is None


def test_paired_prefill_workers_first_then_by_load() -> None:
    registry = registry_of(
        prefill(1, load=Load(queued=3)),
        prefill(2),
        prefill(3),
        prefill(4, fingerprint=fingerprint(page_size=32)),
        decode(9, pairs=(1, 3)),
    )
    route = choose_route(registry, NO_DEMAND, (), ())
    assert route is not None
    assert route.prefill_endpoints == (endpoint(3), endpoint(1), endpoint(2))
    route = choose_route(registry, Demand({}, {endpoint(3): 5}), (), ())
    assert route is not None
    assert route.prefill_endpoints == (endpoint(1), endpoint(3), endpoint(2))
