"""Cores, threads, dtype, device and pool size: the pure decisions."""

from __future__ import annotations

import pytest
import torch

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.errors import ConfigError
from pdrt.kv.layout import KvLayout
from pdrt.model import resources
from pdrt.model.identity import ModelIdentity
from pdrt.model.placement import (
    CPU_RESERVE_BYTES,
    CUDA_RESERVE_BYTES,
    gpu_share,
    limit_identity,
    pool_pages,
    select_device,
)
from pdrt.model.resources import (
    ComputePlan,
    choose_dtype,
    parse_id_list,
    rank_count,
    share_device,
    usable_cpus,
)

LAYOUT = KvLayout(page_size=16, kv_heads=2, layers=4, head_dim=64, dtype="float32")
MIB = 2**20


@pytest.mark.parametrize(
    ("text", "ids"),
    [("0", (0,)), ("2-5", (2, 3, 4, 5)), ("0,2", (0, 2)), ("3,1-2, 2", (1, 2, 3))],
)
def test_id_lists(text: str, ids: tuple[int, ...]) -> None:
    assert parse_id_list(text, "--cpus") == ids


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "5-2", "0,,1", "1-2-3"])
def test_bad_id_lists_name_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--cpus"):
        parse_id_list(text, "--cpus")


@pytest.mark.parametrize(
    ("quota", "device", "plan"),
    [
        (None, DeviceConfig(), ComputePlan((0, 1, 2, 3), 4)),
        (2.5, DeviceConfig(), ComputePlan((0, 1, 2, 3), 2)),
        (0.5, DeviceConfig(), ComputePlan((0, 1, 2, 3), 1)),
        (None, DeviceConfig(cpus="1,3"), ComputePlan((1, 3), 2)),
        (None, DeviceConfig(cpus="1,3", threads=1), ComputePlan((1, 3), 1)),
        (None, DeviceConfig(cpus="1", threads=8), ComputePlan((1,), 1)),
        (3.0, DeviceConfig(threads=8), ComputePlan((0, 1, 2, 3), 3)),
    ],
)
def test_usable_cpus(quota: float | None, device: DeviceConfig, plan: ComputePlan) -> None:
    assert usable_cpus({0, 1, 2, 3}, quota, device) == plan


def test_unusable_cores_and_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="core 7 is not usable"):
        usable_cpus({0, 1}, None, DeviceConfig(cpus="1,7"))
    with pytest.raises(ConfigError, match="--threads 0"):
        usable_cpus({0, 1}, None, DeviceConfig(threads=0))


@pytest.mark.parametrize(
    ("requested", "checkpoint", "kind", "flags", "dtype"),
    [
        ("auto", "bfloat16", "cpu", {"avx2"}, "float32"),
        ("auto", "bfloat16", "cpu", {"avx512f"}, "float32"),
        ("auto", "bfloat16", "cpu", {"avx512_bf16"}, "bfloat16"),
        ("auto", "bfloat16", "cpu", {"bf16"}, "bfloat16"),
        ("auto", "float16", "cpu", {"avx512_bf16"}, "float32"),
        ("auto", "float32", "cpu", {"avx512_bf16"}, "float32"),
        ("auto", "float64", "cpu", set(), "float32"),
        ("auto", "float16", "cuda", set(), "float16"),
        ("bfloat16", "float32", "cpu", set(), "bfloat16"),
    ],
)
def test_dtype_rule(
    requested: str, checkpoint: str, kind: str, flags: set[str], dtype: str
) -> None:
    assert choose_dtype(requested, checkpoint, kind, flags, has_kernels=False) == dtype


@pytest.mark.parametrize(
    ("requested", "checkpoint", "dtype"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "float32"),
        ("auto", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
    ],
)
def test_kernels_store_bfloat16_on_any_processor(
    requested: str, checkpoint: str, dtype: str
) -> None:
    assert choose_dtype(requested, checkpoint, "cpu", {"avx2"}, has_kernels=True) == dtype


def test_the_processor_can_be_read() -> None:
    assert isinstance(resources.cpu_flags(), frozenset)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", [DeviceConfig(gpus="0"), DeviceConfig(device="cuda")])
def test_gpus_without_cuda_name_the_way_out(device: DeviceConfig) -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        select_device(device)


@pytest.mark.parametrize(
    ("device", "ranks"),
    [
        (DeviceConfig(), 1),
        (DeviceConfig(gpus="2"), 1),
        (DeviceConfig(gpus="0-3"), 4),
        (DeviceConfig(gpus="0-3", tensor_parallel_size=4), 4),
        (DeviceConfig(device="cpu", tensor_parallel_size=3), 3),
    ],
)
def test_ranks_are_as_told_or_one_per_gpu(device: DeviceConfig, ranks: int) -> None:
    assert rank_count(device) == ranks
    assert len(share_device(device, range(8), None)) == ranks


def test_each_rank_has_a_gpu() -> None:
    named = DeviceConfig(gpus="1,4-5", tensor_parallel_size=3)
    assert [device.gpus for device in share_device(named, range(8), None)] == ["1", "4", "5"]
    counted = DeviceConfig(device="cuda", tensor_parallel_size=2)
    assert [device.gpus for device in share_device(counted, range(8), None)] == ["0", "1"]
    assert [device.cpus for device in share_device(counted, range(8), None)] == [None, None]


@pytest.mark.parametrize(
    ("gpus", "ranks", "words"),
    [
        ("0-1", 4, "names 2 devices for --tensor-parallel-size 4: name one per rank"),
        ("5", 2, "names 1 device for --tensor-parallel-size 2: name one per rank"),
        ("0-3", 2, "names 4 devices, of which --tensor-parallel-size 2 uses 2: name 2, or leave"),
        ("0,2", 1, "names 2 devices, of which --tensor-parallel-size 1 uses 1: name 1, or leave"),
    ],
)
def test_gpus_that_are_not_one_per_rank_are_refused(gpus: str, ranks: int, words: str) -> None:
    """Silently using the first would leave the others idle, and nobody would know."""
    with pytest.raises(ConfigError, match=f"--gpus {gpus} {words}"):
        share_device(DeviceConfig(gpus=gpus, tensor_parallel_size=ranks), range(8), None)


def test_fewer_cores_than_ranks_are_refused_where_they_are_named() -> None:
    words = r"--cpus 1,3 names 2 cores for 3 ranks \(--tensor-parallel-size\): name one per rank"
    with pytest.raises(ConfigError, match=words):
        share_device(DeviceConfig(cpus="1,3", tensor_parallel_size=3), range(8), None)
    with pytest.raises(ConfigError, match="--cpus 1 names 1 core for 2 ranks"):
        share_device(DeviceConfig(cpus="1", gpus="0-1"), range(8), None)
    taking_turns = share_device(DeviceConfig(tensor_parallel_size=3), (1, 3), None)
    assert [share.cpus for share in taking_turns] == ["1", "3", "1"], "none were named"


@pytest.mark.parametrize(
    ("device", "quota", "cpus", "threads"),
    [
        (DeviceConfig(tensor_parallel_size=2), None, ["0,1,2", "3,4,5"], 3),
        (DeviceConfig(tensor_parallel_size=4), None, ["0", "1,2", "3", "4,5"], 1),
        (DeviceConfig(tensor_parallel_size=2, cpus="2-4"), None, ["2", "3,4"], 1),
        (DeviceConfig(tensor_parallel_size=3, cpus="1-3"), None, ["1", "2", "3"], 1),
        (DeviceConfig(tensor_parallel_size=2, threads=2), None, ["0,1,2", "3,4,5"], 1),
        # A quota counts time on any core.
        (DeviceConfig(tensor_parallel_size=2), 4.5, [None, None], 2),
    ],
)
def test_ranks_share_the_cores(
    device: DeviceConfig, quota: float | None, cpus: list[str | None], threads: int
) -> None:
    shares = share_device(device, range(6), quota)
    assert [share.cpus for share in shares] == cpus
    assert {share.threads for share in shares} == {threads}
    for share in shares:
        assert usable_cpus(range(6), quota, share).threads == threads


def test_one_rank_keeps_what_it_was_given() -> None:
    device = DeviceConfig(device="cpu", cpus="0-2")
    assert share_device(device, range(4), None) == [device]


def test_cpu_is_selected() -> None:
    assert select_device(DeviceConfig(device="cpu")) == torch.device("cpu")
    with pytest.raises(ConfigError, match="contradict"):
        select_device(DeviceConfig(device="cpu", gpus="0"))


def test_pool_defaults() -> None:
    page = LAYOUT.page_bytes
    assert pool_pages(LAYOUT, 64, None, "cpu", 64 * 2**30) == 2**30 // page
    assert pool_pages(LAYOUT, 64, None, "cuda", 10 * 2**30) == 10 * 2**30 // page
    assert pool_pages(LAYOUT, 64, 3 * MIB, "cpu", 64 * 2**30) == 3 * MIB // page
    # Less memory than the default: what there is; a longer sequence than the default: its size.
    assert pool_pages(LAYOUT, 64, None, "cpu", CPU_RESERVE_BYTES + 5 * MIB) == 5 * MIB // page
    long = 2 * 2**30 // page * 16
    assert pool_pages(LAYOUT, long, None, "cpu", 64 * 2**30) == long // 16


def test_pools_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="smaller --max-model-len"):
        pool_pages(LAYOUT, 8192, 1 * MIB, "cpu", 64 * 2**30)
    with pytest.raises(ConfigError, match="smaller --max-model-len"):
        pool_pages(LAYOUT, 8192, None, "cpu", CPU_RESERVE_BYTES + MIB)
    with pytest.raises(ConfigError, match="smaller --kv-cache-memory-bytes"):
        pool_pages(LAYOUT, 64, 2**40, "cpu", 2**30)


def test_the_identity_takes_name_and_length_from_the_configuration() -> None:
    identity = ModelIdentity("tiny", "d", 512, 100, (2,), "LlamaForCausalLM")
    limited = limit_identity(identity, ModelConfig(max_model_len=64, served_model_name="mine"))
    assert (limited.name, limited.max_model_len, limited.digest) == ("mine", 64, "d")
    assert limit_identity(identity, ModelConfig()) == identity
    for length in (0, 513):
        with pytest.raises(ConfigError, match="--max-model-len"):
            limit_identity(identity, ModelConfig(max_model_len=length))


def test_a_share_of_a_gpu() -> None:
    total, weights = 80 * 2**30, 2 * 2**30
    alone = gpu_share(total, total - weights, weights, 0.9)
    assert alone == int(0.9 * total) - weights - CUDA_RESERVE_BYTES
    # The second of two that share it has its share too, though the first one's is in use.
    half = gpu_share(total, total - weights, weights, 0.45)
    free = total - weights - (half + weights + 2**29)
    assert gpu_share(total, free, weights, 0.45) == half
    # What others hold beyond their share is in the way.
    assert gpu_share(total, 5 * 2**30, weights, 0.45) == 5 * 2**30 - CUDA_RESERVE_BYTES
    assert gpu_share(total, 2**29, weights, 0.45) == 0
