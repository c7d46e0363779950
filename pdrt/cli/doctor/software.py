"""Python, packages, and what torch says of itself (in a process of its own: it takes seconds)."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from pdrt.cli.doctor.finding import Finding, fails, ok, warning

PYTHON_MIN = (3, 11)
TORCH_SECONDS_MAX = 120.0
"""For importing torch: from a cold disk it takes long."""
OPTIONAL = {
    "xgrammar": ("xgrammar", "structured output (response_format, tool_choice) is refused"),
    "opentelemetry-sdk": ("'pdrt[otel]'", "--otlp-endpoint is refused"),
    "opentelemetry-exporter-otlp-proto-http": ("'pdrt[otel]'", "--otlp-endpoint is refused"),
}
"""By package: what to install, and what is missing without it."""
MOONCAKE = "mooncake-transfer-engine-non-cuda"
MOONCAKE_CUDA = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
ASK_TORCH = """
import json, sys
import torch
facts = {
    "version": torch.__version__,
    "cuda_build": torch.version.cuda,
    "threads": torch.get_num_threads(),
    "capability": torch.backends.cpu.get_cpu_capability(),
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.cuda.is_available() else [],
}
json.dump(facts, sys.stdout)
"""

InstalledVersion = Callable[[str], str | None]


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def python(version: Sequence[int] = sys.version_info[:3]) -> Finding:
    """The interpreter."""
    shown = ".".join(map(str, version))
    if tuple(version[:2]) < PYTHON_MIN:
        return fails("python", shown, "Python 3.11 or newer is needed")
    return ok("python", f"{shown} ({sys.executable})")


def own_requirements() -> list[Requirement]:
    """What pdrt's own metadata ask for, extras left out; empty when it is not installed."""
    try:
        texts = importlib.metadata.requires("pdrt") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = [Requirement(text) for text in texts]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def packages(
    requirements: Sequence[Requirement], version_of: InstalledVersion = installed_version
) -> list[Finding]:
    """One line for all that fit, one for each that does not."""
    if not requirements:
        return [
            warning("packages", "pdrt itself is not installed", "pip install . in its directory")
        ]
    good, bad = [], list[Finding]()
    for wanted in requirements:
        version = version_of(wanted.name)
        if version is None:
            bad.append(fails(wanted.name, "missing", f"pip install '{wanted}'"))
        elif not wanted.specifier.contains(Version(version).public, prereleases=True):
            text = f"{version} is installed, {wanted.specifier} is wanted"
            bad.append(fails(wanted.name, text, f"pip install '{wanted}'"))
        else:
            good.append(f"{wanted.name} {version}")
    return [ok("packages", ", ".join(good)), *bad] if good else bad


def optional_packages(version_of: InstalledVersion = installed_version) -> list[Finding]:
    """Those that serve more than the plain case."""
    found = []
    for package, (wanted, lost) in OPTIONAL.items():
        version = version_of(package)
        if version is None:
            found.append(warning(package, f"not installed: {lost}", f"pip install {wanted}"))
        else:
            found.append(ok(package, version))
    return found


def mooncake(has_gpu: bool, version_of: InstalledVersion = installed_version) -> Finding:
    """The transfer engine between hosts, and which of its packages fits here."""
    fitting: Sequence[str]
    others: Sequence[str]
    if has_gpu:
        fitting, others = MOONCAKE_CUDA, (MOONCAKE,)
        extra = "'pdrt[mooncake-cuda]', or 'pdrt[mooncake-cuda13]' where torch has CUDA 13"
    else:
        fitting, others, extra = (MOONCAKE,), MOONCAKE_CUDA, "'pdrt[mooncake]'"
    for other in others:
        if (wrong := version_of(other)) is not None:
            text = f"{other} {wrong} is installed; {' or '.join(fitting)} fits this machine"
            remedy = f"pip uninstall {other} && pip install {extra}"
            return warning("mooncake", text, remedy)
    for package in fitting:
        if (version := version_of(package)) is not None:
            return ok("mooncake", f"{package} {version}")
    return ok("mooncake", f"not installed (needed between hosts only): pip install {extra}")


def torch(has_gpu: bool) -> list[Finding]:
    """What torch is built for and how many threads it takes here."""
    if installed_version("torch") is None:
        return []  # `packages` has said so
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH],
            capture_output=True,
            timeout=TORCH_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [fails("torch", f"import takes over {TORCH_SECONDS_MAX:.0f} s", "look at the disk")]
    try:
        facts = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no answer"]
        return [fails("torch", f"cannot be imported: {lines[-1][:300]}", "reinstall torch")]
    return judge_torch(facts, has_gpu)


def judge_torch(facts: Mapping[str, Any], has_gpu: bool) -> list[Finding]:
    """`facts` as `ASK_TORCH` prints them."""
    build = f"CUDA {facts['cuda_build']}" if facts["cuda_build"] else "CPU only"
    shown = f"{facts['version']} ({build}), {facts['threads']} threads, {facts['capability']}"
    if not has_gpu:
        return [ok("torch", shown)]
    if not facts["cuda_build"]:
        remedy = "pip install torch from PyPI, whose build has CUDA"
        return [warning("torch", f"{shown}: the GPU cannot be used", remedy)]
    if not facts["gpus"]:
        remedy = "compare the driver (nvidia-smi) with the CUDA version that torch is built for"
        return [warning("torch", f"{shown}: torch finds no GPU", remedy)]
    return [ok("torch", f"{shown}; {', '.join(facts['gpus'])}")]
