"""Which device a worker computes on, and how many pages its pool has. Decisions, before loading."""

from __future__ import annotations

import msgspec
import torch

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.errors import ConfigError
from pdrt.kv.layout import KvLayout
from pdrt.model.identity import ModelIdentity, check_length
from pdrt.model.resources import parse_id_list

CPU_POOL_BYTES = 2**30
"""Pool on a CPU when no size is given."""
CPU_RESERVE_BYTES = 256 * 2**20
"""Left for activations, logits and the rest of the process when a CPU pool is sized."""
CUDA_RESERVE_BYTES = 2**30
"""The same on a GPU, where CUDA itself takes half a gigabyte per process."""


def select_device(device: DeviceConfig) -> torch.device:
    """The torch device of one rank. `auto` is the CPU unless `--gpus` names a device: the fence
    of GPU memory has not been shown to hold anywhere yet (docs/protocol.md), a CPU's has.

    Raises:
        ConfigError: CUDA is asked for and absent.
    """
    gpus = None if device.gpus is None else parse_id_list(device.gpus, "--gpus")
    has_cuda = torch.cuda.is_available()
    assert gpus is None or len(gpus) == 1, "a rank has one device"
    if device.device == "cpu":
        if gpus is not None:
            raise ConfigError("--gpus and --device cpu contradict each other; give one of them")
        return torch.device("cpu")
    if device.device == "auto" and gpus is None:
        return torch.device("cpu")
    if not has_cuda and (device.device == "cuda" or gpus is not None):
        flag = "--device cuda" if gpus is None else f"--gpus {device.gpus}"
        raise ConfigError(f"{flag}: torch sees no CUDA device here; use --device cpu")
    index = 0 if gpus is None else gpus[0]
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"--gpus {device.gpus}: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", index)


def limit_identity(identity: ModelIdentity, model: ModelConfig) -> ModelIdentity:
    """The identity under the configured name and length, its digest with what they change.

    Raises:
        ConfigError: `max_model_len` is longer than the model's own, or not positive.
    """
    check_length(identity, model.max_model_len)
    length = model.max_model_len or identity.max_model_len
    variants = [] if model.quantization is None else [model.quantization]
    if identity.longrope_limit is not None and length > identity.longrope_limit:
        variants.append("longrope")
    return msgspec.structs.replace(
        identity,
        name=model.served_model_name or identity.name,
        max_model_len=length,
        digest="+".join((identity.digest, *variants)),
    )


def pool_pages(
    layout: KvLayout,
    max_model_len: int,
    wanted_bytes: int | None,
    device_kind: str,
    available_bytes: int,
) -> int:
    """Pages of the pool: as configured, else 1 GiB on a CPU and all that is available on a GPU.

    Never fewer than one sequence of `max_model_len` needs: it could never run.

    Raises:
        ConfigError: that does not fit what is configured or available; says what to change.
    """
    needed = layout.pages_for(max_model_len) * layout.page_bytes
    if wanted_bytes is not None:
        size, source = wanted_bytes, "--kv-cache-memory-bytes"
    elif device_kind == "cpu":
        available_bytes = max(0, available_bytes - CPU_RESERVE_BYTES)
        size, source = max(needed, min(CPU_POOL_BYTES, available_bytes)), "the memory available"
    else:
        size, source = available_bytes, "the memory left on the device"
    limit = min(size, available_bytes)
    if needed > limit:
        raise ConfigError(
            f"one sequence of {max_model_len} tokens needs {_mib(needed)} of KV, and "
            f"{source if size <= available_bytes else 'the memory available'} gives "
            f"{_mib(limit)}; give a smaller --max-model-len or more memory"
        )
    if size > available_bytes:
        raise ConfigError(
            f"a KV pool of {_mib(size)} does not fit the {_mib(available_bytes)} that are "
            "available; give a smaller --kv-cache-memory-bytes"
        )
    return size // layout.page_bytes


def cuda_pool_bytes(device: torch.device, utilization: float) -> int:
    """Bytes left for the pool once this process has loaded its weights.

    Raises:
        ConfigError: `utilization` is not in (0, 1].
    """
    if not 0 < utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization {utilization}: must be in (0, 1]")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return gpu_share(total, free, torch.cuda.memory_reserved(device), utilization)


def gpu_share(total: int, free: int, weights: int, utilization: float) -> int:
    """Of a GPU, bytes for a pool. `utilization` is this process's share of it: what others hold
    there (`pdrt up` deals each its own) is not counted against it, unless it is in the way."""
    share = int(total * utilization) - weights - CUDA_RESERVE_BYTES
    return max(0, min(share, free - CUDA_RESERVE_BYTES))


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
