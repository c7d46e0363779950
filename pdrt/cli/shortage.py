"""What `pdrt up` has too little of, and what that costs, in one line each. Pure."""

from __future__ import annotations

POOL_BYTES = 2**30
"""Of a worker on a CPU that is given no size: what `pdrt.model.placement` takes at most."""
PROCESS_BYTES = 400 * 2**20
"""Of a worker, without weights and pool: the libraries, and the activations of a step."""
GATEWAY_BYTES = 200 * 2**20
WEIGHTS_GROWTH = 2
"""Of weights in memory, against those on disk, at most: 16 bits become 32 where the processor
computes nothing else."""


def of_cores(cores: int, quota: float | None, workers: int) -> str | None:
    """`cores` may be used, for as much of their time as `quota` of them have.

    Returns:
        What is lost; None where every worker has a core to itself.
    """
    usable = cores if quota is None else min(cores, quota)
    have = f"{usable:g} core{'' if usable == 1 else 's'} for {workers} workers"
    if usable < workers:
        return (
            f"{have}: they take turns, so that answers slow down while prompts are computed; with "
            f"{workers} each has its own, as for the figures in docs/performance.md"
        )
    if usable < cores:
        return (
            f"{have}, as time on any of {cores}: none is pinned to its own, so that steps vary "
            "more; a cpuset (docker --cpuset-cpus) instead of a quota gives each its own"
        )
    return None


def pool_share(available_bytes: int, weights_bytes: int, workers: int) -> int | None:
    """The size of each worker's KV pool where all of them, at the usual size, do not fit into the
    memory that is available; None where they do. Each by itself would take what there is.

    Args:
        weights_bytes: of the model's files.
    """
    each = (available_bytes - GATEWAY_BYTES) // workers
    left = each - weights_bytes * WEIGHTS_GROWTH - PROCESS_BYTES
    return None if left >= POOL_BYTES else left


def of_memory(available_bytes: int, share_bytes: int, workers: int) -> str:
    """What is lost with pools of `share_bytes`, which is what `pool_share` returned."""
    have = f"{_mib(available_bytes)} of memory for {workers} workers"
    if share_bytes <= 0:
        return (
            f"{have} may not hold the model {workers} times: the kernel kills who takes more than "
            "there is; a smaller model, or more memory, is safe"
        )
    return (
        f"{have}: KV pools of {_mib(share_bytes)} each instead of {_mib(POOL_BYTES)}, so that "
        "fewer requests run at once and less is cached"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
