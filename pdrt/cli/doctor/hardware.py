"""Processors, memory, limits, GPUs and RDMA devices. Judgements are pure."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

from pdrt.cli.doctor.finding import GIB, Finding, fails, gib, ok, warning
from pdrt.model.resources import BF16_FLAGS

PROCESS_BYTES = 1 * GIB
"""Of a worker beside its pool: torch and the weights of a small model."""
GATEWAY_BYTES = GIB // 2
FILES_MIN, FILES_GOOD = 256, 4096
"""Open files: a worker needs dozens, and a gateway one per client."""
RDMA_LOCKED_BYTES = 64 * GIB
"""What a registered pool may take."""
SECONDS_MAX = 20.0
"""For nvidia-smi."""


def cpu_features(flags: Collection[str]) -> Finding:
    """`flags` as in /proc/cpuinfo."""
    if not flags:
        return warning("cpu features", "not known: no /proc/cpuinfo", "mount /proc")
    has_bf16 = bool(BF16_FLAGS.intersection(flags))
    names = [name for name in ("avx2", "avx512f", "amx_tile", "asimd") if name in flags]
    shown = ", ".join([*names, *(["bfloat16"] if has_bf16 else [])]) or "none that matter"
    if "avx2" not in flags and "asimd" not in flags:
        return warning(
            "cpu features", f"{shown}: no AVX2, so 128-bit vectors and slow kernels", "a newer CPU"
        )
    costs = []
    if "avx512f" not in flags and "asimd" not in flags:
        costs.append("vectors are half as wide as with AVX-512")
    if not has_bf16:
        costs.append(
            "without bfloat16 instructions such models run in float32: twice the memory, and half "
            "again the time per token"
        )
    return ok("cpu features", "; ".join([shown, *costs]))


def cores(affinity: int, present: int, quota: float | None, workers: int = 2) -> Finding:
    """Cores that may be used, of those there are, and the cgroup's share of their time."""
    usable = affinity if quota is None else min(affinity, quota)
    shown = f"{affinity} of {present} usable"
    if quota is not None:
        shown += f", cgroup quota {quota:g}"
    if usable < 1:
        return warning("cores", f"{shown}: steps will stall", "raise the cgroup's CPU quota")
    if usable < workers:
        text = f"{shown}: prefill and decode workers share a core, and disturb each other"
        return warning("cores", text, "two cores at least, one per worker")
    return ok("cores", shown)


def memory(available: int, pool: int, workers: int = 2) -> Finding:
    """What can still be allocated, of machine and cgroup, against what `pdrt up` takes."""
    wanted = workers * (pool + PROCESS_BYTES) + GATEWAY_BYTES
    shown = f"{gib(available)} available"
    plan = f"{workers} workers with a pool of {gib(pool)} each want some {gib(wanted)}"
    if available < workers * pool + GATEWAY_BYTES:
        return fails("memory", f"{shown}; {plan}", "a smaller --kv-cache-memory-bytes")
    if available < wanted:
        return warning("memory", f"{shown}; {plan}", "a smaller --kv-cache-memory-bytes")
    return ok("memory", f"{shown}; {plan}")


def open_files(soft: int, hard: int) -> Finding:
    """RLIMIT_NOFILE. A role raises its own to the hard limit."""
    name, shown = "open files", f"{_limit(soft)} (hard {_limit(hard)})"
    if _is_below(hard, FILES_MIN):
        return fails(name, shown, f"ulimit -Hn {FILES_GOOD}")
    if _is_below(hard, FILES_GOOD):
        text = f"{shown}: a gateway holds one per client and serves fewer than {hard}"
        return warning(name, text, f"ulimit -Hn {FILES_GOOD}")
    return ok(name, shown)


def locked_memory(soft: int, has_rdma: bool) -> Finding:
    """RLIMIT_MEMLOCK: only RDMA pins memory."""
    name = "locked memory"
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 2**20} MiB"
    if not has_rdma:
        return ok(name, f"{shown} (only RDMA needs more)")
    if _is_below(soft, RDMA_LOCKED_BYTES):
        text = f"{shown}: an RDMA engine cannot register the pool"
        return warning(name, text, "ulimit -l unlimited (limits.conf, or LimitMEMLOCK=infinity)")
    return ok(name, shown)


def limits(has_rdma: bool) -> list[Finding]:
    """Of this process, which its children inherit."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [open_files(*files), locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
                                              has_rdma)]  # fmt: skip


def _is_below(limit: int, bound: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < bound


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def gpu(has_gpu: bool) -> Finding:
    """NVIDIA GPUs and their driver, as nvidia-smi tells them."""
    if not has_gpu:
        return ok("gpu", "none: workers compute on the CPU")
    command = shutil.which("nvidia-smi")
    if command is None:
        return warning("gpu", "a device, but no nvidia-smi", "install the NVIDIA driver's tools")
    query = [command, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, timeout=SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired:
        return warning("gpu", "nvidia-smi does not answer", "look at the driver (dmesg)")
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    if done.returncode or not lines:
        return warning("gpu", "nvidia-smi fails", "look at the driver (dmesg)")
    return ok("gpu", "; ".join(lines))


def rdma_devices(sysfs: Path = Path("/sys")) -> list[str]:
    """Names of InfiniBand and RoCE devices."""
    try:
        return sorted(os.listdir(sysfs / "class" / "infiniband"))
    except OSError:
        return []


def rdma(devices: list[str], has_library: bool) -> Finding:
    """Devices and the library that engines use them through."""
    if not devices:
        return ok("rdma", "no device: between hosts, transfers go over TCP")
    shown = ", ".join(devices)
    if not has_library:
        return warning("rdma", f"{shown}, but no libibverbs", "apt-get install libibverbs1")
    return ok("rdma", f"{shown}; libibverbs is there")


def has_libibverbs() -> bool:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True
