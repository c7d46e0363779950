"""Fixtures of the kernel tests: the built libraries, and one whose vectors are wider than this
processor's."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pdrt.model.native.library import (
    FOLDER,
    INSTRUCTION_SETS,
    Kernels,
    interface_version,
    library_path,
    open_kernels,
)
from pdrt.model.resources import cpu_flags

WIDE_BYTES = 64
"""AVX-512's vectors, split in two by the compiler where the processor lacks them."""

BuildKernels = Callable[..., Kernels]


@pytest.fixture(scope="session")
def build_wide_kernels(tmp_path_factory: pytest.TempPathFactory) -> BuildKernels:
    """`build_wide_kernels(["linear"], flags)`: those sources with vectors of 64 bytes, for AVX2."""

    def build(names: Sequence[str], more_flags: Sequence[str] = ()) -> Kernels:
        if shutil.which("g++") is None or not INSTRUCTION_SETS["avx2"].issubset(cpu_flags()):
            pytest.skip("needs g++ and AVX2")
        folder = tmp_path_factory.mktemp("kernels")
        sources = [str(FOLDER / f"{name}.cpp") for name in ["library", *names]]
        # -O1: split vectors overflow the registers, and optimizing that takes half a minute.
        flags = [
            "-std=c++17", "-O1", "-mavx2", "-mfma", "-Wno-psabi", "-fopenmp", "-fPIC",
            f"-DPDRT_VECTOR_BYTES={WIDE_BYTES}", '-DPDRT_ISA="wide"',
            f'-DPDRT_INTERFACE="{interface_version()}"', *more_flags,
        ]  # fmt: skip
        subprocess.run(["g++", *flags, "-c", *sources], cwd=folder, check=True)
        path = folder / "libpdrt_wide.so"
        # OpenMP's symbols come from torch's runtime: linked without.
        objects = [f"{name}.o" for name in ["library", *names]]
        subprocess.run(["g++", "-shared", *objects, "-o", str(path)], cwd=folder, check=True)
        return open_kernels(path)

    return build


def usable_libraries() -> list[str]:
    """Instruction sets whose library was built and runs here."""
    return [
        isa
        for isa, needed in INSTRUCTION_SETS.items()
        if needed.issubset(cpu_flags()) and Path(library_path(isa)).exists()
    ]
