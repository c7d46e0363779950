"""What an executor of any rank is made of: a compute thread, a loaded model and a pool."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.kv.pool import KvPool
from pdrt.model.batch import Row
from pdrt.model.cgroup import available_memory_bytes, cpu_quota
from pdrt.model.collectives import RankPlace
from pdrt.model.fetch import resolve_model
from pdrt.model.identity import ModelIdentity, read_identity
from pdrt.model.loader import LoadedModel, load_model
from pdrt.model.placement import cuda_pool_bytes, limit_identity, pool_pages, select_device
from pdrt.model.resources import ComputePlan, usable_cpus
from pdrt.sampling import Sampling


class Prepared(msgspec.Struct, frozen=True):
    """All that is loaded and allocated of one rank."""

    directory: Path
    """Of the model."""
    identity: ModelIdentity
    loaded: LoadedModel
    pool: KvPool
    thread: ThreadPoolExecutor
    """Of one thread, which computes."""


def prepare(
    model: ModelConfig,
    device: DeviceConfig,
    progress: Callable[[str], None],
    place: RankPlace | None,
) -> Prepared:
    """Fetch and load the model, and allocate the pool. Blocks; with other ranks, until they are as
    far.

    Args:
        device: of this rank alone, as `pdrt.model.resources.share_device` gives it.
        place: among the worker's ranks; None where it has one.

    Raises:
        ConfigError: the device, its cores or the pool's memory cannot be had.
        ModelError: the model cannot be found, loaded, split or served.
        RanksLost: another rank failed to load.
    """
    target = select_device(device)
    plan = usable_cpus(os.sched_getaffinity(0), cpu_quota(), device)
    directory = resolve_model(model.model, progress, load_format=model.load_format)
    identity = limit_identity(read_identity(directory, model.load_format), model)
    thread = ThreadPoolExecutor(1, "pdrt-compute", _prepare_thread, (plan, target))
    try:
        progress(f"loading {identity.name}")
        # On the compute thread, so that its cores' memory holds the weights and the pool.
        loaded, pool = thread.submit(_load, directory, model, identity, target, place).result()
    except BaseException:
        thread.shutdown()
        raise
    return Prepared(directory, identity, loaded, pool, thread)


def _prepare_thread(plan: ComputePlan, device: torch.device) -> None:
    """Pin this thread and size its OpenMP team, whose threads inherit the cores when the first
    operator starts them."""
    os.sched_setaffinity(0, plan.cpus)
    torch.set_num_threads(plan.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _load(
    directory: Path,
    model: ModelConfig,
    identity: ModelIdentity,
    device: torch.device,
    place: RankPlace | None,
) -> tuple[LoadedModel, KvPool]:
    loaded = load_model(directory, model, device, identity.max_model_len, place)
    collectives = loaded.collectives
    if device.type == "cuda":
        available = cuda_pool_bytes(device, model.gpu_memory_utilization)
    else:
        available = available_memory_bytes()
        if collectives is not None:
            # The same memory for all, and looked at when all have their weights.
            available = collectives.least(available) // collectives.ranks
    wanted, layout = model.kv_cache_memory_bytes, loaded.rank_layout
    pages = pool_pages(layout, identity.max_model_len, wanted, device.type, available)
    if collectives is not None:
        # A page is a page on every rank.
        pages = collectives.least(pages)
    return loaded, KvPool(layout, pages, device)


def warm_up_rows(page_size: int, pages: int, max_model_len: int) -> list[Row]:
    """A prefill chunk and a decode row: both paths, and whatever the model refuses, at load."""
    greedy = Sampling(max_tokens=1, temperature=0.0)
    chunk = min(page_size, max_model_len)
    if pages < 2 or chunk < 2:
        return [Row(token_ids=[0], start=0, pages=[0], sampling=greedy)]
    return [
        Row(token_ids=[0] * chunk, start=0, pages=[0], sampling=greedy),
        Row(token_ids=[0], start=0, pages=[1], sampling=greedy),
    ]
