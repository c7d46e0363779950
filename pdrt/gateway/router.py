"""Which workers a request goes to. Pure.

Prefill workers are compared in one unit, prompt tokens: those to compute for this request, which a
cached prefix lowers, plus those to compute before its turn, which a queue raises. The sum is what
the client waits for, so nothing needs to be tuned: a worker that holds the whole prefix loses
against an idle one exactly when its queue costs more than the prefix saves. Rejected were a
threshold that switches between "by prefix" and "by load" (SGLang's cache-aware router), which
herds just below it, and a weighted sum (Dynamo's KV router), whose weights somebody must find. The
attention of long prompts makes their tokens dearer, here and in the queue alike.

As each prompt goes where the sum is least, two workers' outstanding tokens never differ by more
than one prompt for this reason alone, whatever prefixes they share: a list schedule's bound.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec

from pdrt.gateway.prefix_index import PrefixIndex, Prompt
from pdrt.gateway.registry import Registry, Worker
from pdrt.ids import Incarnation

ENDPOINTS_MAX = 16
"""Prefill endpoints that a `Submit` names: more would only make every frame longer."""
TYPICAL_SHARE = 1 / 32
"""Weight of the newest prompt in what a queued one is taken for."""


class Route(msgspec.Struct, frozen=True):
    """A decode worker, and prefill endpoints in order of preference: none where it computes the
    prompt itself, as far as is known now."""

    decode: Incarnation
    prefill_endpoints: tuple[str, ...]
    prefill: Incarnation | None = None
    """Who answers on the first of them."""
    prefill_tokens: int = 1
    """Of the prompt, likely to be computed there: at least the last one, where there is one."""
    expected_pages: int = 0
    """Of the prompt, that `prefill` has been sent before."""
    page_size: int = 1


class Demand(msgspec.Struct, frozen=True):
    """What this gateway has itself given to workers and not had back: fresher than any load that
    a worker reported."""

    decode: Mapping[Incarnation, int]
    """Attempts by decode worker."""
    prefill: Mapping[str, int]
    """`prefill_tokens` of attempts without a token yet, by the endpoint preferred for them."""


class Routing(Protocol):
    """What requests ask of a router; see `Router`."""

    def choose(
        self,
        demand: Demand,
        prompt: Prompt,
        tried: Collection[Incarnation],
        refused: Collection[Incarnation],
    ) -> Route | None: ...

    def is_cut_off(self) -> bool: ...

    def learn(self, route: Route, prefill: Incarnation | None, cached_tokens: int) -> None: ...


class Router:
    """Chooses among a registry's workers; remembers what it sent where."""

    def __init__(self, registry: Registry, index: PrefixIndex | None = None) -> None:
        self.index = PrefixIndex() if index is None else index
        self._registry = registry
        self._typical_tokens = 0.0
        """To compute of a prompt: a moving average over those routed; 0 before the first."""
        self._turn = 0
        self._turns: dict[Incarnation, int] = {}
        """When each was last chosen: equals take turns. Of workers that are not lost."""

    def choose(
        self,
        demand: Demand,
        prompt: Prompt,
        tried: Collection[Incarnation],
        refused: Collection[Incarnation],
    ) -> Route | None:
        """The least loaded decode worker, with prefill workers by what `prompt` costs there; None
        when none can serve.

        Decode workers in `tried` come last; those in `refused`, which answered that they cannot,
        never. Those that would compute the prompt themselves come after those that need not.
        """
        candidates = [w for w in self._registry.decodes() if w.incarnation not in refused]
        if not candidates:
            return None
        decode = min(
            candidates,
            key=lambda worker: (
                worker.incarnation in tried,
                not self._registry.is_paired(worker),
                _decode_load(worker, demand),
                self._last(worker),
            ),
        )
        usable, paired = self._registry.prefills_for(decode), frozenset(decode.register.paired)
        if not usable:
            self._take_turn(decode.incarnation)
            return Route(decode.incarnation, (), prefill_tokens=0)
        costs = {e: self._cost(worker, prompt, e, demand) for e, worker in usable.items()}
        # One that is not paired yet is named for later: rooms may fail elsewhere.
        order = sorted(usable, key=lambda e: (e not in paired, costs[e], self._last(usable[e])))
        return self._take(decode, usable[order[0]], order[:ENDPOINTS_MAX], prompt)

    def _cost(self, worker: Worker, prompt: Prompt, endpoint: str, demand: Demand) -> int:
        """Prompt tokens computed there until this one is: its own, and those queued before it.

        The queue that the worker reports knows other gateways' prompts, but is a heartbeat old;
        what it runs just now is left out, as most of that is over before we hear of it.
        """
        typical_tokens = self._typical_tokens or prompt.tokens
        reported = int(worker.register.load.queued * typical_tokens)
        return self._to_compute(worker, prompt) + max(demand.prefill.get(endpoint, 0), reported)

    def _to_compute(self, worker: Worker, prompt: Prompt) -> int:
        page_size = worker.register.fingerprint.layout.page_size
        pages = self.index.pages(worker.incarnation, prompt.keys(page_size))
        if not pages:
            return prompt.tokens
        return prompt.tokens - int(pages * page_size * self.index.trust(worker.incarnation))

    def _take(self, decode: Worker, prefill: Worker, order: list[str], prompt: Prompt) -> Route:
        """Remember the choice."""
        layout = prefill.register.fingerprint.layout
        keys = prompt.keys(layout.page_size)
        route = Route(
            decode.incarnation,
            tuple(order),
            prefill.incarnation,
            self._to_compute(prefill, prompt),
            self.index.pages(prefill.incarnation, keys),
            layout.page_size,
        )
        self.index.record(prefill.incarnation, keys, prefill.register.load.pages_total)
        typical_tokens = self._typical_tokens or route.prefill_tokens
        change = TYPICAL_SHARE * (route.prefill_tokens - typical_tokens)
        self._typical_tokens = typical_tokens + change
        self._take_turn(decode.incarnation, prefill.incarnation)
        return route

    def _take_turn(self, *workers: Incarnation) -> None:
        self._turn += 1
        self._turns.update(dict.fromkeys(workers, self._turn))

    def _last(self, worker: Worker) -> tuple[int, Incarnation]:
        return self._turns.get(worker.incarnation, 0), worker.incarnation

    def is_cut_off(self) -> bool:
        """See `Registry.is_cut_off`: who can serve may be there again in a moment."""
        return self._registry.is_cut_off()

    def learn(self, route: Route, prefill: Incarnation | None, cached_tokens: int) -> None:
        """`prefill` has computed a prompt sent by `route`, but for `cached_tokens` that it had."""
        if prefill == route.prefill and prefill is not None:
            self.index.found(prefill, route.expected_pages, cached_tokens // route.page_size)

    def forget(self, worker: Incarnation) -> None:
        """It is lost. Idempotent."""
        self.index.forget(worker)
        self._turns.pop(worker, None)


def _decode_load(worker: Worker, demand: Demand) -> tuple[float, float]:
    """Share of its requests in use, then share of its pages."""
    register, load = worker.register, worker.register.load
    # The report lags behind our own count, but knows other gateways' requests.
    requests = max(demand.decode.get(worker.incarnation, 0), load.running + load.queued)
    pages = 1.0 - load.pages_free / load.pages_total if load.pages_total else 1.0
    return requests / max(1, register.requests_max), pages
