"""`pdrt doctor` on a machine with a GPU, which is a fake one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pdrt.cli.doctor import cuda
from pdrt.cli.doctor.finding import Finding, Verdict
from pdrt.kv.cuda import ATTRIBUTE_COMPUTE_MODE, ATTRIBUTE_MPS_ENABLED
from tests.transfer.fake_cuda import FakeCuda, bytes_of

EXCLUSIVE_PROCESS = 3
WRITER = """
import sys
from pdrt.cli.doctor import cuda
from pdrt.kv.cuda import CudaRuntime
runtime = CudaRuntime(sys.argv.pop())
cuda._runtime = lambda: runtime
cuda.write()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda.build(tmp_path)

    def run(code: str, handle: str) -> str:
        assert code == cuda.CALL.format("write")
        command = [sys.executable, "-c", WRITER, handle, str(fake.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return (done.stdout or done.stderr).strip().splitlines()[-1]

    monkeypatch.setattr(cuda, "_runtime", lambda: fake.runtime)
    monkeypatch.setattr(cuda, "_run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "as_tensor", lambda allocation, device: bytes_of(allocation))
    return fake


def found(capsys: pytest.CaptureFixture[str]) -> Finding:
    cuda.own()
    (finding,) = cuda.judge(json.loads(capsys.readouterr().out))
    assert bool(finding.remedy) == (finding.verdict is not Verdict.OK)
    return finding


def test_two_processes_share_memory(fake: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    finding = found(capsys)
    assert finding.verdict is Verdict.OK
    assert str(fake.path) in finding.text
    assert "0000:1B:00.0" in finding.text


def test_what_is_not_written_is_noticed(
    fake: FakeCuda, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_run", lambda code, handle: "CudaError: cudaIpcOpenMemHandle")
    finding = found(capsys)
    assert finding.verdict is Verdict.WARNING
    assert "cudaIpcOpenMemHandle" in finding.text


def test_mps(fake: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    fake.set_attribute(ATTRIBUTE_MPS_ENABLED, 1)
    assert "MPS" in found(capsys).text


def test_one_process_per_gpu(fake: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    fake.set_attribute(ATTRIBUTE_COMPUTE_MODE, EXCLUSIVE_PROCESS)
    assert "one process only" in found(capsys).text


def test_memory_that_cannot_be_had(fake: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fail("cudaMalloc", status=2)
    assert "out of memory" in found(capsys).text


def test_a_torch_without_cuda(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> Any:
        raise OSError("this torch has loaded no libcudart.so")

    monkeypatch.setattr(cuda, "loaded_runtime", none)
    assert "libcudart" in found(capsys).text


def test_a_probe_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(code: str) -> str:
        raise subprocess.TimeoutExpired(code, cuda.SECONDS_MAX)

    monkeypatch.setattr(cuda, "_run", hang)
    (finding,) = cuda.sharing(has_gpu=True)
    assert finding.verdict is Verdict.WARNING
    assert cuda.sharing(has_gpu=False) == []
