"""A step is over when its device says so, whatever it drew, and however its forward ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from pdrt.errors import DeviceLost
from pdrt.model.batch import Row
from pdrt.model.completion import completion
from pdrt.model.executor import Executor
from pdrt.sampling import Sampling
from tests.model.conftest import LoadExecutor, TinyModel

HANG_SECONDS = 120.0


class Device:
    """Stands for what a GPU still has to compute when a forward returns."""

    def __init__(self, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_done = threading.Event()
        self.is_asked = threading.Event()
        monkeypatch.setattr(executor, "_wait", self._wait)

    def _wait(self) -> None:
        self.is_asked.set()
        self._is_done.wait()

    def finish(self) -> None:
        self._is_done.set()


@pytest.fixture
def executor(tiny_model: TinyModel, load_executor: LoadExecutor) -> Executor:
    return load_executor(tiny_model("llama"))


@pytest.fixture
def device(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device(executor, monkeypatch)
    yield device
    device.finish()


CHUNK = Row(token_ids=list(range(16)), start=0, pages=[0], sampling=None)
PROMPT = Row(token_ids=[1, 2], start=0, pages=[0], sampling=Sampling(max_tokens=1))


@pytest.mark.parametrize("row", [CHUNK, PROMPT], ids=["no token", "a token"])
def test_it_waits_for_its_device(executor: Executor, device: Device, row: Row) -> None:
    step = executor._submit([row])
    assert device.is_asked.wait(HANG_SECONDS)
    assert not step.done()
    device.finish()
    assert (step.result(HANG_SECONDS).tokens == [None]) == (row is CHUNK)


def test_a_forward_that_fails_waits_too(
    executor: Executor, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had queued before is still written into its pages."""

    def forward(context: object) -> torch.Tensor:
        raise MemoryError("in the middle")

    monkeypatch.setattr(executor, "forward", forward)
    step = executor._submit([CHUNK])
    assert device.is_asked.wait(HANG_SECONDS)
    assert not step.done()
    device.finish()
    with pytest.raises(MemoryError):
        step.result(HANG_SECONDS)


class Event:
    """Of torch.cuda, recorded on the stream that is current."""

    log: list[str] = []  # noqa: RUF012

    def __init__(self, blocking: bool) -> None:
        assert blocking, "a thread that spins takes a core from the loop"

    def record(self, stream: str) -> None:
        self.log.append(f"record on {stream}")

    def synchronize(self) -> None:
        self.log.append("synchronize")


def test_a_gpu_is_waited_for_by_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    Event.log.clear()
    wait = completion(torch.device("cuda", 1))
    assert Event.log == []
    wait()
    wait()
    assert Event.log == ["record on stream of cuda:1", "synchronize"] * 2


def test_a_cpu_has_done_it() -> None:
    completion(torch.device("cpu"))()


def test_a_gpu_that_cannot_say_so_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ran the step must not go on with its pages, nor with others'."""

    def fail(event: Event) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(Event, "synchronize", fail)
    with pytest.raises(DeviceLost, match=r"cuda:0 does not say.*illegal memory access$"):
        completion(torch.device("cuda", 0))()
