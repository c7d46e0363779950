"""What the `local` engine needs of CUDA: a process that writes into another one's GPU memory.
Tried in small, in two processes of their own, since to import torch takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pdrt.cli.child import die_with_parent
from pdrt.cli.doctor.finding import Finding, ok, warning
from pdrt.kv.cuda import (
    ATTRIBUTE_COMPUTE_MODE,
    COMPUTE_MODE_DEFAULT,
    GRANULE_BYTES,
    CopyStream,
    CudaAllocation,
    CudaDevice,
    CudaError,
    CudaRuntime,
    loaded_runtime,
)

NAME = "cuda"
SECONDS_MAX = 120.0
"""For importing torch twice, and for two contexts on a GPU."""
WORD = 0x5A
"""Every byte that the writer writes."""
CALL = "from pdrt.cli.doctor import cuda; cuda.{}()"


def sharing(has_gpu: bool) -> list[Finding]:
    """Nothing where there is no GPU."""
    if not has_gpu:
        return []
    try:
        return judge(json.loads(_run(CALL.format("own"))))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        text = f"two processes that share GPU memory come to no end: {error}"
        return [warning(NAME, text, "look at the driver (dmesg), or compute with --device cpu")]


def judge(facts: Mapping[str, Any]) -> list[Finding]:
    """`facts` as `own` prints them."""
    if error := facts.get("error"):
        remedy = "look at the lines gpu and torch above, or compute with --device cpu"
        return [warning(NAME, f"no memory that can be shared: {error}", remedy)]
    shown = f"{facts['runtime']}; GPU {', '.join(facts['gpus'])}"
    found = []
    if facts["mps"]:
        text = f"{shown}: under MPS, where copies outlive their process; engine local is refused"
        remedy = "echo quit | nvidia-cuda-mps-control, or --transfer tcp"
        found.append(warning(NAME, text, remedy))
    if facts["exclusive"]:
        text = f"{shown}: takes one process only, so no two workers share it"
        found.append(warning(NAME, text, "nvidia-smi -c DEFAULT, or one GPU per worker"))
    if not facts["landed"]:
        text = f"{shown}: another process cannot write into its memory ({facts['writer']})"
        remedy = "in containers: --pid and --ipc in common; else --transfer tcp"
        found.append(warning(NAME, text, remedy))
    return found or [ok(NAME, f"{shown}: another process can write into its memory")]


def own() -> None:
    """In a process of its own: memory of the first GPU, shared with a writer; prints the facts."""
    try:
        facts = _facts(_runtime())
    except (OSError, CudaError) as error:
        facts = {"error": str(error)}
    print(json.dumps(facts))


def _facts(runtime: CudaRuntime) -> dict[str, Any]:
    import torch

    devices = [CudaDevice(runtime, index) for index in range(torch.cuda.device_count())]
    if not devices:
        return {"error": "torch finds no GPU"}
    memory = CudaAllocation(devices[0], GRANULE_BYTES)
    said = _run(CALL.format("write"), memory.share().hex())
    content = torch.as_tensor(memory, device=torch.device("cuda", 0))
    modes = [device.attribute(ATTRIBUTE_COMPUTE_MODE) for device in devices]
    return {
        "runtime": runtime.path,
        "gpus": [device.bus_id for device in devices],
        "mps": any(device.has_mps() for device in devices),
        "exclusive": any(mode != COMPUTE_MODE_DEFAULT for mode in modes),
        "writer": said[:300],
        "landed": bool((content == WORD).all()),
    }


def write() -> None:
    """In another one: fill the memory whose handle is the argument."""
    die_with_parent(os.getppid())
    device = CudaDevice(_runtime(), 0)
    word = CudaAllocation(device, GRANULE_BYTES)
    device.call("cudaMemset", word.address, WORD, GRANULE_BYTES)
    device.call("cudaDeviceSynchronize")
    stream = CopyStream(device)
    stream.copy(device.map_shared(bytes.fromhex(sys.argv[1])), word.address, GRANULE_BYTES)
    stream.settle()
    print("written")


def _runtime() -> CudaRuntime:
    """torch brings it."""
    import torch  # noqa: F401

    return loaded_runtime()


def _run(code: str, *arguments: str) -> str:
    """The last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    return (done.stdout.strip() or done.stderr.strip() or "no word").splitlines()[-1]
