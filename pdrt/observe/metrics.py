"""Prometheus metrics of one process, the same names in every role.

Each process has one `Metrics`. A worker renders it into its `Report`; the gateway merges the
reports with its own, so that one scrape shows the whole deployment. Used on the loop only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdrt import __version__
from pdrt.observe import families as f
from pdrt.observe.families import Family
from pdrt.observe.logs import lines_dropped
from pdrt.observe.process import read_process
from pdrt.observe.store import Store


class Metrics:
    """What one process counts. All series carry `role` and `worker`; those whose value belongs to
    one device carry `rank` too."""

    def __init__(self, role: str, worker: str, rank: int = 0) -> None:
        """`role` is `prefill`, `decode` or `gateway`; `worker` an incarnation as `ids.short`."""
        self._rank = str(rank)
        self._store = Store(role, worker)
        self._store.set(f.INFO, 1, __version__)
        # Of every token and every step: looked up once.
        self._ttft = self._store.distribution(f.TTFT)
        self._itl = self._store.distribution(f.ITL)
        self._steps = self._store.distribution(f.STEP)
        self._step_sequences = self._store.distribution(f.STEP_SEQUENCES)
        self._step_tokens = self._store.distribution(f.STEP_TOKENS)
        self._lag = self._store.distribution(f.LOOP_LAG)
        self._requests = self._store.distribution(f.REQUEST)
        self._drains = self._store.distribution(f.DRAIN)
        for family in (
            f.PROMPT_TOKENS,
            f.OUTPUT_TOKENS,
            f.CACHED_TOKENS,
            f.PREEMPTIONS,
            f.LOCAL_PREFILL_TOKENS,
        ):
            self._store.add(family, 0)  # `rate` needs a zero to begin from
        self._ticked_at: float | None = None

    # Now

    def set_pages(self, owners: Mapping[str, int]) -> None:
        """Pages by owner: `free`, `sequence`, `cache`, `lease`, `room`."""
        for owner, count in owners.items():
            self._store.set(f.PAGES, count, self._rank, owner)

    def set_leases(self, states: Mapping[str, int]) -> None:
        """Leases by state; a state that is not named keeps its last value."""
        self._set_all(f.LEASES, states)

    def set_rooms(self, states: Mapping[str, int]) -> None:
        """Rooms by state; a state that is not named keeps its last value."""
        self._set_all(f.ROOMS, states)

    def set_in_flight(self, states: Mapping[str, int]) -> None:
        """Requests by state; a state that is not named keeps its last value."""
        self._set_all(f.IN_FLIGHT, states)

    def set_quarantine(self, pages: int, leases: Mapping[str, int]) -> None:
        """Quarantined pages, and leases by why they were revoked; a reason that is not named has
        none any more."""
        self._store.set(f.QUARANTINED_PAGES, pages)
        gone = {reason: 0 for (reason,) in self._store.numbers(f.QUARANTINED_LEASES)}
        self._set_all(f.QUARANTINED_LEASES, {**gone, **leases})

    def set_queue(self, count: int) -> None:
        self._store.set(f.QUEUE, count)

    def set_workers(self, states: Mapping[tuple[str, str], int]) -> None:
        """Registered workers by (role, state); a pair that is not named has none any more."""
        for role, state in self._store.numbers(f.WORKERS):
            self._store.set(f.WORKERS, 0, role, state)
        for (role, state), count in states.items():
            self._store.set(f.WORKERS, count, role, state)

    def set_pairs(self, count: int) -> None:
        self._store.set(f.PAIRS, count)

    def set_ready(self, is_ready: bool) -> None:
        self._store.set(f.READY, int(is_ready))

    def set_unhealthy(self, reasons: Mapping[str, int]) -> None:
        """1 for each reason that there is, 0 for all others that there may be."""
        self._set_all(f.UNHEALTHY, reasons)

    def set_writers(self, engines: Mapping[str, int]) -> None:
        """Prefill workers that can be granted to, by engine."""
        self._set_all(f.WRITERS, engines)

    def set_ranks(self, states: Mapping[str, int]) -> None:
        """Ranks of this worker by state."""
        self._set_all(f.RANKS, states)

    def set_attempts(self, count: int) -> None:
        self._store.set(f.ATTEMPTS, count)

    def _set_all(self, family: Family, values: Mapping[str, int]) -> None:
        for label, value in values.items():
            self._store.set(family, value, label)

    # How long

    def observe_drain(self, seconds: float) -> None:
        self._drains.observe(seconds)

    def observe_ttft(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def observe_itl(self, seconds: float, times: int = 1) -> None:
        """`times`: gaps of that length, when several tokens came at once."""
        self._itl.observe(seconds, times)

    def observe_request(self, seconds: float) -> None:
        self._requests.observe(seconds)

    def observe_handover(self, phase: str, seconds: float) -> None:
        """`phase`: queued, prefill, transfer, decode; on prefill workers queued, compute, drain."""
        self._store.distribution(f.HANDOVER, phase).observe(seconds)

    def observe_step(self, seconds: float, sequences: int, tokens: int) -> None:
        """One forward with its sampling; `tokens` were computed."""
        self._steps.observe(seconds)
        self._step_sequences.observe(sequences)
        self._step_tokens.observe(tokens)

    def observe_tick(self, now: float, period: float) -> None:
        """Called by the timer that sleeps for `period` between two calls."""
        if self._ticked_at is not None:
            self._lag.observe(max(0.0, now - self._ticked_at - period))
        self._ticked_at = now

    # How many

    def count_prompt_tokens(self, count: int) -> None:
        self._store.add(f.PROMPT_TOKENS, count)

    def count_output_tokens(self, count: int) -> None:
        self._store.add(f.OUTPUT_TOKENS, count)

    def count_cached_tokens(self, count: int) -> None:
        self._store.add(f.CACHED_TOKENS, count)

    def count_transfer(self, engine: str, byte_count: int, rank: int) -> None:
        """`rank`: whose bytes they are."""
        self._store.add(f.TRANSFERRED, byte_count, str(rank), engine)

    def count_rejected_frame(self, reason: str, count: int = 1) -> None:
        self._store.add(f.REJECTED, count, reason)

    def count_refused_peer(self, reason: str, count: int = 1) -> None:
        """A handshake between processes that failed."""
        self._store.add(f.REFUSED_PEERS, count, reason)

    def count_refused_write(self, rank: int, reason: str, count: int = 1) -> None:
        """A piece of a write that a receiver of `rank` did not take."""
        self._store.add(f.REFUSED_WRITES, count, str(rank), reason)

    def count_stale_message(self, reason: str, count: int = 1) -> None:
        self._store.add(f.STALE, count, reason)

    def count_recomputed_prompt_tokens(self, count: int) -> None:
        self._store.add(f.RECOMPUTED, count)

    def count_local_prefill_request(self, reason: str) -> None:
        """A decode worker begins to compute a prompt itself."""
        self._store.add(f.LOCAL_PREFILL_REQUESTS, 1, reason)

    def count_local_prefill_tokens(self, count: int) -> None:
        self._store.add(f.LOCAL_PREFILL_TOKENS, count)

    def count_request(self, outcome: str) -> None:
        self._store.add(f.REQUESTS, 1, outcome)

    def count_room_end(self, reason: str) -> None:
        """Of a room that ended before all of its KV had landed."""
        self._store.add(f.ROOM_ENDS, 1, reason)

    def count_fence(self, engine: str, count: int = 1) -> None:
        self._store.add(f.FENCES, count, engine)

    def count_checksum_pages(self, result: str, pages: int) -> None:
        """`result`: equal or different."""
        self._store.add(f.CHECKSUM_PAGES, pages, result)

    def count_preemption(self) -> None:
        self._store.add(f.PREEMPTIONS, 1)

    def count_prefix_cache_pages(self, event: str, pages: int) -> None:
        """`event`: a key of `PrefixCache.counts`."""
        self._store.add(f.PREFIX_CACHE_PAGES, pages, event)

    def count_prefix_cache_tokens(self, result: str, tokens: int) -> None:
        """`result`: a key of `PrefixCache.tokens`."""
        self._store.add(f.PREFIX_CACHE_TOKENS, tokens, result)

    # All of it

    def render(self) -> bytes:
        """Prometheus text, one HELP and TYPE per family."""
        process = read_process()
        for family, value in (
            (f.RESIDENT, process.resident_bytes),
            (f.OPEN_FDS, process.open_fds),
            (f.THREADS, process.threads),
            (f.CPU_SECONDS, process.cpu_seconds),
            (f.START_TIME, process.started_at),
        ):
            if value is not None:
                self._store.set(family, value)
        self._store.set(f.LOG_LINES_DROPPED, lines_dropped())
        return self._store.render()

    def transferred(self) -> dict[int, dict[str, int]]:
        """KV bytes since the start, by rank and engine."""
        sums: dict[int, dict[str, int]] = {}
        for (rank, engine), count in self._store.numbers(f.TRANSFERRED).items():
            sums.setdefault(int(rank), {})[engine] = int(count)
        return sums

    def totals(self) -> dict[str, Any]:
        """For `/status`, whose readers make rates and quantiles from two of these: counters since
        the start, and histograms as `bounds` and `counts` (one more, not cumulated)."""
        store = self._store
        return {
            "prompt_tokens": store.numbers(f.PROMPT_TOKENS).get((), 0),
            "output_tokens": store.numbers(f.OUTPUT_TOKENS).get((), 0),
            "cached_tokens": store.numbers(f.CACHED_TOKENS).get((), 0),
            "preemptions": store.numbers(f.PREEMPTIONS).get((), 0),
            "local_prefill_tokens": store.numbers(f.LOCAL_PREFILL_TOKENS).get((), 0),
            "local_prefill_requests": sum(store.numbers(f.LOCAL_PREFILL_REQUESTS).values()),
            "requests": {label: n for (label,), n in store.numbers(f.REQUESTS).items()},
            "histograms": {
                name: {
                    "bounds": list(series.bounds),
                    "counts": list(series.counts),
                    "sum": series.sum,
                }
                for name, series in (
                    ("ttft_seconds", self._ttft),
                    ("itl_seconds", self._itl),
                    ("request_seconds", self._requests),
                    ("step_seconds", self._steps),
                    ("step_tokens", self._step_tokens),
                    ("event_loop_lag_seconds", self._lag),
                )
                if sum(series.counts)
            },
        }
