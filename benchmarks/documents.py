"""What benchmarks leave behind: a JSON file each, with the machine it was taken on."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from bars import BARS, Document, is_failed, judge, lines

from pdrt import __version__
from pdrt.cli.bench.machine import CpuShares
from pdrt.cli.bench.report import OTHERS_PERCENT_MAX
from pdrt.errors import ConfigError

FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")
"""Of a processor: those that decide which kernels run."""


def machine() -> dict[str, Any]:
    """What figures depend on."""
    import torch
    import transformers

    info = _cpu_info()
    return {
        "cpu": info.get("model name", platform.processor()),
        "flags": [flag for flag in FLAGS if flag in info.get("flags", "").split()],
        "cores": sorted(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "pdrt": __version__,
    }


def _cpu_info(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Of the first core."""
    try:
        block = path.read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def is_clean(cpu: CpuShares | None) -> bool:
    """Others left the processors alone. Not known counts as not clean."""
    return cpu is not None and cpu.others <= OTHERS_PERCENT_MAX


class Output(msgspec.Struct, frozen=True):
    """What is wanted of a benchmark's figures besides the printed ones."""

    path: Path | None = None
    check: bool = False
    """Hold them against the bars."""
    peer: Path | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--check`."""
    add = parser.add_argument
    add("--json", metavar="FILE", type=Path, help="also write the figures here")
    add("--check", action="store_true", help="print bars; exit code 1 if one falls short")


def finish(document: Document, detail: Mapping[str, Any], output: Output) -> int:
    """Write the document, and check its bars if asked to. The exit code.

    Raises:
        ConfigError: the peer's file cannot be read.
    """
    if output.path is not None:
        head = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": machine()}
        content = {**msgspec.to_builtins(document), **head, "detail": detail}
        output.path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    if document.unclean:
        rows = ", ".join(document.unclean)
        print(f"not clean, others used the processors: {rows}", file=sys.stderr)
    if not output.check:
        return 0
    mine = [bar for bar in BARS if bar.benchmark == document.benchmark]
    peer = None if output.peer is None else read(output.peer)
    results = judge(mine, {document.benchmark: document}, peer)
    print("\n" + "\n".join(lines(results)))
    return int(is_failed(results))


def read(path: Path) -> Document:
    """Raises ConfigError if it is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Document)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from error
