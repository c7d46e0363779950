"""What is asked of CUDA's library, of a fake one: calls, their errors, and memory given back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from pdrt.errors import ConfigError
from pdrt.kv import cuda as cuda_module
from pdrt.kv import pool as pool_module
from pdrt.kv.cuda import (
    ATTRIBUTE_MPS_ENABLED,
    GRANULE_BYTES,
    HANDLE_BYTES,
    CopyStream,
    CudaAllocation,
    CudaDevice,
    CudaError,
)
from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from tests.transfer.fake_cuda import FakeCuda, bytes_of

LAYOUT = KvLayout(page_size=4, kv_heads=2, layers=3, head_dim=8, dtype="bfloat16")
PAGES = 5


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(library: FakeCuda) -> Iterator[FakeCuda]:
    assert library.allocations == 0
    yield library
    library.reset()


def test_an_error_names_the_call_and_is_not_left_for_torch(cuda: FakeCuda) -> None:
    cuda.fail("cudaMalloc", status=2)
    with pytest.raises(CudaError, match=r"cudaMalloc: out of memory \(2\)") as raised:
        CudaAllocation(cuda.device(), 100)
    assert raised.value.status == 2
    cuda.runtime.call("cudaGetLastError")  # would raise


def test_a_device_is_chosen_on_every_thread(cuda: FakeCuda) -> None:
    """A current device is a thread's own."""
    device, found = cuda.device(1), list[str]()
    assert device.bus_id == "0000:1C:00.0"
    assert cuda.device(0).bus_id == "0000:1B:00.0"
    thread = threading.Thread(target=lambda: found.append(str(device.has_mps())))
    thread.start()
    thread.join()
    assert found == ["False"]
    cuda.set_attribute(ATTRIBUTE_MPS_ENABLED, 1)
    assert device.has_mps()
    with pytest.raises(CudaError, match="cudaSetDevice"):
        CudaDevice(cuda.runtime, 7).has_mps()


def test_an_allocation_is_zeroed_and_freed_with_the_last_tensor(cuda: FakeCuda) -> None:
    allocation = CudaAllocation(cuda.device(), 1000)
    assert allocation.__cuda_array_interface__["shape"] == (1000,)
    assert allocation.__cuda_array_interface__["data"] == (allocation.address, False)
    assert len(allocation.share()) == HANDLE_BYTES
    tensor = bytes_of(allocation)
    assert not tensor.any()
    view = tensor.view(torch.float32)[1:]
    del allocation, tensor
    assert cuda.allocations == 1
    view.fill_(1)
    del view
    assert cuda.allocations == 0


def test_what_is_shared_is_no_part_of_a_larger_block(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    original = CudaDevice.create

    def create(device: CudaDevice, name: str, *arguments: int) -> int:
        sizes.append(arguments[0])
        return original(device, name, *arguments)

    monkeypatch.setattr(CudaDevice, "create", create)
    for size in (1, GRANULE_BYTES, GRANULE_BYTES + 1):
        CudaAllocation(cuda.device(), size)
    assert sizes == [GRANULE_BYTES, GRANULE_BYTES, 2 * GRANULE_BYTES]


def test_nothing_leaks_where_clearing_fails(cuda: FakeCuda) -> None:
    cuda.fail("cudaMemset")
    with pytest.raises(CudaError):
        CudaAllocation(cuda.device(), 100)
    assert cuda.allocations == 0


def test_copies_settle_in_order(cuda: FakeCuda) -> None:
    source, target = (CudaAllocation(cuda.device(), 100) for _ in range(2))
    bytes_of(source).copy_(torch.arange(100, dtype=torch.uint8))
    stream = CopyStream(cuda.device())
    stream.copy(target.address, source.address, 100)
    stream.copy(target.address, source.address + 50, 10)
    assert not bytes_of(target).any()
    stream.settle()
    assert bytes_of(target)[:20].tolist() == [*range(50, 60), *range(10, 20)]


def test_a_handle_of_this_very_process_is_refused(cuda: FakeCuda) -> None:
    """As CUDA does."""
    allocation = CudaAllocation(cuda.device(), 100)
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle"):
        cuda.device().map_shared(allocation.share())


def test_without_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module.Path, "read_text", lambda *_, **__: "7f r-x 0 00:00 /lib/x.so")
    with pytest.raises(OSError, match="CUDA build"):
        cuda_module.loaded_runtime.__wrapped__()


# The pool on it


@pytest.fixture
def as_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """`torch.device("cuda", n)` is the fake's."""
    monkeypatch.setattr(pool_module, "loaded_runtime", lambda: cuda.runtime)
    monkeypatch.setattr(torch, "as_tensor", lambda allocation, device: bytes_of(allocation))
    return cuda


def test_a_pool_is_one_allocation(as_gpu: FakeCuda) -> None:
    pool = KvPool(LAYOUT, PAGES, torch.device("cuda", 1))
    assert pool.tensor.shape == (PAGES, 2, 3, 2, 4, 8)
    assert pool.tensor.dtype is torch.bfloat16
    assert pool.tensor.is_contiguous()
    assert not pool.tensor.any()
    assert pool.fd is None
    assert pool.cuda is not None
    assert pool.cuda.device.index == 1
    assert pool.address == pool.cuda.address == pool.tensor.data_ptr()
    assert pool.cuda.size_bytes == pool.size_bytes
    pool.close()
    assert pool.cuda is None
    pool.tensor[0] = 1
    assert as_gpu.allocations == 1, "the memory goes with the tensor"
    del pool
    assert as_gpu.allocations == 0


def test_a_pool_that_does_not_fit(as_gpu: FakeCuda) -> None:
    as_gpu.fail("cudaMalloc", status=2)
    with pytest.raises(ConfigError, match=r"KV pool of 5 pages.*out of memory.*smaller"):
        KvPool(LAYOUT, PAGES, torch.device("cuda", 0))


def test_without_cuda_a_pool_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise OSError("this torch has loaded no libcudart.so; install a CUDA build")

    monkeypatch.setattr(pool_module, "loaded_runtime", none)
    with pytest.raises(ConfigError, match="CUDA build"):
        KvPool(LAYOUT, PAGES, torch.device("cuda", 0))
