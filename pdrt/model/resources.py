"""What this process may use: cores, threads, memory, and the dtype its CPU computes fast in.

Decisions, pure; what there is, `pdrt.model.cgroup` reads.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pdrt.config import DeviceConfig
from pdrt.errors import ConfigError

log = logging.getLogger(__name__)

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""x86 and Arm names, in /proc/cpuinfo, of instructions that multiply bfloat16."""
FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})


class ComputePlan(msgspec.Struct, frozen=True):
    """Cores that the compute thread is pinned to, and how many threads it may use."""

    cpus: tuple[int, ...]
    threads: int


def parse_id_list(text: str, flag: str) -> tuple[int, ...]:
    """Ids named by `0`, `2-5` or `0,2`: sorted, each once.

    Raises:
        ConfigError: the text is not such a list; names `flag`.
    """
    ids: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"{flag} {text!r}: expected a list such as 0 or 2-5 or 0,2")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high - low > 65536:
            raise ConfigError(f"{flag} {text!r}: the range {part.strip()!r} is not ascending")
        ids.update(range(low, high + 1))
    return tuple(sorted(ids))


def usable_cpus(
    affinity: Collection[int], quota: float | None, device: DeviceConfig
) -> ComputePlan:
    """The cores and threads to compute with, out of what the system allows.

    Never more threads than cores, nor than the cgroup's CPU quota: threads beyond either preempt
    each other at every barrier, and a step gets slower by orders of magnitude, not by a share.

    Args:
        affinity: cores this process may run on.
        quota: cores' worth of time that the cgroup grants, or None for no limit.

    Raises:
        ConfigError: `cpus` names a core outside of `affinity`, or `threads` is below 1.
    """
    cpus = tuple(sorted(affinity))
    if device.cpus is not None:
        cpus = parse_id_list(device.cpus, "--cpus")
        if outside := sorted(set(cpus) - set(affinity)):
            raise ConfigError(
                f"--cpus {device.cpus}: core {outside[0]} is not usable by this process; "
                f"usable are {','.join(map(str, sorted(affinity)))}"
            )
    limit = len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))
    if device.threads is None:
        return ComputePlan(cpus, limit)
    if device.threads < 1:
        raise ConfigError(f"--threads {device.threads}: at least 1 is needed")
    if device.threads > limit:
        log.warning("%d compute threads instead of %d: no more cores", limit, device.threads)
    return ComputePlan(cpus, min(device.threads, limit))


def rank_count(device: DeviceConfig) -> int:
    """Ranks of a worker: as told, else one per GPU that is named."""
    if device.tensor_parallel_size is not None:
        return device.tensor_parallel_size
    return 1 if device.gpus is None else len(parse_id_list(device.gpus, "--gpus"))


def share_device(
    device: DeviceConfig, affinity: Collection[int], quota: float | None
) -> list[DeviceConfig]:
    """What each rank of a worker computes on: a GPU, where there are any, and its share of cores
    and threads. With more ranks than cores, and none named, several take turns on one.

    Args:
        affinity: cores this process may run on.
        quota: cores' worth of time that the cgroup grants, or None for no limit.

    Raises:
        ConfigError: what is named is not one GPU for each rank, or fewer cores than ranks.
    """
    ranks = rank_count(device)
    _check_gpus(device, ranks)
    if ranks == 1:
        return [replace(device, gpus=_gpu_of(device, 0, 1))]
    named = named_cpus(device, ranks)
    is_gpu = device.gpus is not None or device.device == "cuda"
    cpus = sorted(affinity) if named is None else named
    # Of a quota, or beside GPUs, nobody said which cores are whose.
    is_pinned = named is not None or not (is_gpu or (quota is not None and quota < len(cpus)))
    limit = len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))
    threads = max(1, min(device.threads or limit, limit) // ranks)
    return [
        replace(
            device,
            gpus=_gpu_of(device, rank, ranks),
            cpus=_listed(_cores_of(cpus, rank, ranks)) if is_pinned else None,
            threads=threads,
        )
        for rank in range(ranks)
    ]


def named_cpus(device: DeviceConfig, ranks: int) -> tuple[int, ...] | None:
    """The cores of `--cpus`, which every one of `ranks` ranks has a share of; None: not given.

    Raises:
        ConfigError: they are fewer than ranks.
    """
    if device.cpus is None:
        return None
    cpus = parse_id_list(device.cpus, "--cpus")
    if len(cpus) < ranks:
        raise ConfigError(
            f"--cpus {device.cpus} names {_counted(len(cpus), 'core')} for {ranks} ranks "
            "(--tensor-parallel-size): name one per rank at least, or leave --cpus out, and ranks "
            "take turns on the cores that there are"
        )
    return cpus


def _check_gpus(device: DeviceConfig, ranks: int) -> None:
    """Neither is a rank left without a GPU nor a GPU without a rank, which nobody would notice."""
    if device.gpus is None:
        return
    count = len(parse_id_list(device.gpus, "--gpus"))
    if count == ranks:
        return
    names = f"--gpus {device.gpus} names {_counted(count, 'device')}"
    if count < ranks:
        raise ConfigError(f"{names} for --tensor-parallel-size {ranks}: name one per rank")
    raise ConfigError(
        f"{names}, of which --tensor-parallel-size {ranks} uses {ranks}: name {ranks}, or leave "
        f"--tensor-parallel-size out, and the worker has {count} ranks; for several workers, start "
        "each with devices of its own"
    )


def device_words(device: DeviceConfig, pool: str) -> str:
    """What a rank computes on, for people. `pool`: where its KV is, as torch names it."""
    if not pool.startswith("cpu"):
        return pool
    if device.cpus is None:
        return "any core"
    cpus = parse_id_list(device.cpus, "--cpus")
    is_range = len(cpus) > 1 and cpus == tuple(range(cpus[0], cpus[-1] + 1))
    shown = f"{cpus[0]}-{cpus[-1]}" if is_range else ",".join(map(str, cpus))
    return f"core{'' if len(cpus) == 1 else 's'} {shown}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _gpu_of(device: DeviceConfig, rank: int, ranks: int) -> str | None:
    if device.gpus is None:
        return str(rank) if device.device == "cuda" and ranks > 1 else None
    return str(parse_id_list(device.gpus, "--gpus")[rank])


def _cores_of(cpus: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    if len(cpus) < ranks:
        return [cpus[rank % len(cpus)]]
    return cpus[len(cpus) * rank // ranks : len(cpus) * (rank + 1) // ranks]


def _listed(cpus: Sequence[int]) -> str:
    return ",".join(map(str, cpus))


def choose_dtype(
    requested: str,
    checkpoint: str,
    device_kind: str,
    cpu_flags: Collection[str],
    has_kernels: bool,
) -> str:
    """The dtype of weights and KV: a key of `pdrt.kv.layout.DTYPE_BYTES`.

    "auto" takes the checkpoint's. On a CPU that is bfloat16 where it has the instructions for it,
    or where our kernels compute the whole model: they only store bfloat16, half the bytes of every
    decode step, and compute in float32. torch emulates 16-bit products, and float32 is the faster
    one there: measured on one AVX2 core, a 1536x576 linear takes 6.7 ms for 256 tokens in float32
    and 55 ms in bfloat16. Prefill and decode must agree: on mixed machines give --dtype.

    Args:
        has_kernels: the fused decoder knows this kind of model, and its kernels are there.
    """
    if requested != "auto":
        return requested
    if checkpoint not in {"float32", "bfloat16", "float16"}:
        return "float32"
    if device_kind != "cpu" or checkpoint == "float32":
        return checkpoint
    if checkpoint == "bfloat16" and has_kernels:
        return checkpoint
    needed = BF16_FLAGS if checkpoint == "bfloat16" else FP16_FLAGS
    return checkpoint if needed.intersection(cpu_flags) else "float32"


def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of the first core, as in /proc/cpuinfo; empty if there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()
