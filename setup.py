"""Builds the CPU kernels, one library per instruction set, and the `local` engine's copy, each of
them optional.

Everything else about the package stands in pyproject.toml. A missing or failing compiler leaves an
install that works, without them; a worker says so when it starts.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = "pdrt.model.native"
SOURCES = Path(*PACKAGE.split("."))
X86_MACHINES = {"x86_64", "AMD64"}

# -ffast-math is not among them: it would take NaN for granted never to come, and, when linking
# with it, switch the whole process to flushing small numbers to zero.
COMMON_FLAGS = [
    "-std=c++17", "-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi",
]  # fmt: skip
AVX2 = ("avx2", "fma", "bmi2")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
AVX512BF16 = (*AVX512, "avx512_bf16")
AMX = (*AVX512BF16, "amx_tile", "amx_bf16")
X86_SETS = {"avx2": AVX2, "avx512": AVX512, "avx512bf16": AVX512BF16, "amx": AMX}
"""Instruction sets besides "portable", the compiler's own default, and the flags in /proc/cpuinfo
of a processor that has them: `INSTRUCTION_SETS` of pdrt/model/native/library.py."""


class BuildKernels(build_ext):
    """Plain shared libraries: they hold no Python module and link against nothing of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or len(os.sched_getaffinity(0))
        if self.inplace:  # an editable install stays on this machine; all of them take a minute
            unusable = {isa for isa, flags in X86_SETS.items() if not has_flags(flags)}
            self.extensions = [e for e in self.extensions if isa_of(e.name) not in unusable]

    def get_ext_filename(self, fullname: str) -> str:
        *package, isa = fullname.split(".")
        return os.path.join(*package, f"libpdrt_{isa}.so")

    def build_extension(self, ext: Extension) -> None:
        # Objects of the same name for each instruction set, hence a folder for each. OpenMP is
        # compiled in, not linked: its symbols come from the runtime that torch has loaded.
        objects = self.compiler.compile(
            ext.sources,
            output_dir=os.path.join(self.build_temp, ext.name),
            extra_postargs=ext.extra_compile_args,
        )
        path = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(objects, path, target_lang="c++")


def has_flags(flags: Sequence[str]) -> bool:
    """Whether this machine's processor has these; it does, as far as one can tell without Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return set(flags).issubset(text.split())


def isa_of(extension: str) -> str:
    return extension.rpartition(".")[2]


def compiler_flags(flags: Sequence[str]) -> list[str]:
    """What turns on the instructions that /proc/cpuinfo names so."""
    names = [f"-m{flag.replace('_', '-' if flag.startswith('amx') else '')}" for flag in flags]
    return [*names, "-mprefer-vector-width=512"] if "avx512f" in flags else names


def kernels() -> list[Extension]:
    """An extension per instruction set that this kind of processor may have."""
    interface = hashlib.sha256((SOURCES / "kernels.h").read_bytes()).hexdigest()[:16]
    instruction_sets: dict[str, tuple[str, ...]] = {"portable": ()}
    if platform.machine() in X86_MACHINES:
        instruction_sets |= X86_SETS
    return [
        Extension(
            f"{PACKAGE}.{isa}",
            sources=sorted(map(str, SOURCES.glob("*.cpp"))),
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            extra_compile_args=[
                *COMMON_FLAGS,
                *compiler_flags(flags),
                f'-DPDRT_INTERFACE="{interface}"',
                f'-DPDRT_ISA="{isa}"',
            ],
            language="c++",
            optional=True,
        )
        for isa, flags in instruction_sets.items()
    ]


def copy() -> Extension:
    """Of `pdrt.transfer.host_copy`, for any processor: memcpy chooses its instructions itself."""
    sources = Path("pdrt", "transfer", "native", "copy.cpp")
    return Extension(
        "pdrt.transfer.native.copy",
        sources=[str(sources)],
        extra_compile_args=COMMON_FLAGS,
        language="c++",
        optional=True,
    )


setup(ext_modules=[*kernels(), copy()], cmdclass={"build_ext": BuildKernels})
