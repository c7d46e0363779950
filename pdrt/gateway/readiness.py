"""Whether anybody can serve, and why no full pair can, in words. Pure; reads the registry only."""

from __future__ import annotations

from collections.abc import Iterator

from pdrt.gateway.registry import Registry, Worker, WorkerEvent, WorkerState
from pdrt.model.identity import base_digest
from pdrt.protocol.gateway_messages import Role

LOSSES_MAX = 4
"""Lost workers of a role that /ready names when none is left."""
REASONS_MAX = 16
"""Reasons that /ready lists: enough for a person, however many workers there are."""
DEGRADED = "degraded"
"""How the first reason begins when requests are served, but not by a full pair."""
LOST_WORDS = {
    WorkerEvent.SILENT: "is silent: it hangs, is stopped, or cannot be reached",
    WorkerEvent.DIED: "has died, says who started it",
    WorkerEvent.LEFT: "has left",
}


def readiness(registry: Registry) -> tuple[bool, list[str]]:
    """Whether anybody can serve; and why no full pair can, in words, if none can."""
    able = registry.decodes()
    if any(map(registry.is_paired, able)):
        return True, []
    # As far as they are told: there are as many as pairs, and clients ask when nobody serves.
    degraded = [f"{DEGRADED}: decode workers compute prompts themselves"] if able else []
    told = dict.fromkeys(degraded)
    for reason in _reasons(registry):
        told[reason] = None
        if len(told) == REASONS_MAX:
            break
    return bool(able), list(told)


def mismatches(registry: Registry, worker: Worker) -> list[str]:
    """Live workers of the other role that `worker` can never be paired with, and why."""
    role, other = worker.register.role, Role.PREFILL
    if role is Role.PREFILL:
        other = Role.DECODE
    found = (_mismatch(worker, peer) for peer in registry.of_role(other))
    return [words for words in found if words is not None][:REASONS_MAX]


def _mismatch(one: Worker, other: Worker) -> str | None:
    differences = one.register.fingerprint.differences(other.register.fingerprint)
    if not differences:
        return None
    return f"{one.name} and {other.name} cannot be paired: {', '.join(differences)}"


def _reasons(registry: Registry) -> Iterator[str]:
    """Why no full pair can serve; the same one may come again."""
    present = {role: registry.of_role(role) for role in Role}
    for role, workers in present.items():
        if not workers:
            yield from (f"no {role.value} worker", *_losses(registry, role))
        for worker in workers:
            yield from _complaints(registry, worker)
    prefills = [w for w in present[Role.PREFILL] if w.state is WorkerState.LIVE]
    for decode in present[Role.DECODE]:
        said, paired = decode.register, frozenset(decode.register.paired)
        for prefill in prefills:
            is_same = prefill.register.fingerprint == said.fingerprint
            if not is_same or prefill.register.endpoint not in paired:
                yield from _pair_complaints(prefill, decode)


def _losses(registry: Registry, role: Role) -> list[str]:
    """What has become of those who were here, as long as that is known; the latest first."""
    lost = [
        (w.lost_at, f"{w.name} {LOST_WORDS[w.lost_by]}")
        for w in registry.workers.values()
        if w.lost_by is not None and w.register.role is role
    ]
    return [words for _, words in sorted(lost, reverse=True)[:LOSSES_MAX]]


def _complaints(registry: Registry, worker: Worker) -> list[str]:
    if worker.state is WorkerState.DRAINING:
        return [f"{worker.name}: draining"]
    if not worker.is_reachable:
        return [f"{worker.name}: cannot be reached"]
    theirs = worker.register.fingerprint.digest
    if base_digest(theirs) not in registry.digests:
        ours = " or ".join(registry.digests)
        return [f"{worker.name}: model digest {theirs}, the gateway's is {ours}"]
    if not worker.register.healthy:
        return [f"{worker.name}: {r}" for r in worker.register.reasons or ("not healthy",)]
    return []


def _pair_complaints(prefill: Worker, decode: Worker) -> list[str]:
    """Of two that are not paired."""
    if (mismatch := _mismatch(prefill, decode)) is not None:
        return [mismatch]
    if decode.register.refused:
        return [f"{decode.name}: {refused}" for refused in decode.register.refused]
    if prefill.register.endpoint in decode.unpaired:
        return [f"{decode.name} has lost {prefill.name}"]
    return [f"{prefill.name} and {decode.name}: handshake not finished"]
