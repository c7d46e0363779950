"""The compiled kernels: which library is loaded, and how its functions are called.

    kernels = load_kernels(cpu_flags())     # None: no compiler at install time, or nothing usable
    kernels.lib.pdrt_attend(pool, step, …)  # every function of kernels.h, its arguments declared
    Pool(data, dtype_code(dtype), …), Step(…)  # the structs of kernels.h, passed as they are
    pointer(tensor)                            # what a `void *` or `float *` parameter takes

setup.py builds one library per instruction set, from the same sources. OpenMP comes from the
runtime that torch has loaded: a second one in the process would start a second team of threads on
the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Collection
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from os import strerror
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
INTERFACE_BYTES = 16
"""Of the hash that tells one version of kernels.h from another, in hexadecimal."""

_AVX512 = frozenset({"avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq"})
_AVX512BF16 = _AVX512 | {"avx512_bf16"}
AMX = "amx"
INSTRUCTION_SETS = {
    AMX: _AVX512BF16 | {"amx_tile", "amx_bf16"},
    "avx512bf16": _AVX512BF16,
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma", "bmi2"}),
    "portable": frozenset[str](),
}
"""Flags of /proc/cpuinfo that each library needs, the best first."""

PAIRS_CODE = 2
"""PDRT_PAIRS, beside those of `dtype_code`: of linear layers that are bfloat16 throughout."""

WITHOUT_KERNELS = (
    "no compiled kernels: %s; attention and linear layers are plain PyTorch, several times "
    "slower. Install g++ and install pdrt again (`pip install` of the same source)"
)
RUNTIME_NAMES = ("libgomp", "libiomp5", "libomp")
"""OpenMP runtimes that torch comes with; all of them have GNU's entry points."""


class Pool(Structure):
    """PdrtPool: `[page][kv_head][layer][key, value][token][head_dim]`."""

    _fields_ = (
        ("data", c_void_p), ("type", c_int32), ("page_size", c_int32), ("kv_heads", c_int32),
        ("layers", c_int32), ("head_dim", c_int32),
    )  # fmt: skip


class Step(Structure):
    """PdrtStep: addresses of arrays that the caller keeps alive."""

    _fields_ = (
        ("rows", c_int32), ("tokens", c_int32), ("table_width", c_int32), ("first", c_void_p),
        ("context", c_void_p), ("tables", c_void_p), ("slots", c_void_p),
    )  # fmt: skip


_POOL, _STEP, _INT, _LONG, _REAL, _DATA = (
    POINTER(Pool), POINTER(Step), c_int32, c_int64, c_float, c_void_p,
)  # fmt: skip
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pdrt_isa": (c_char_p, ()),
    "pdrt_interface": (c_char_p, ()),
    "pdrt_enable": (c_int, ()),
    "pdrt_attend": (
        c_int,
        (_POOL, _STEP, _INT, _INT, _INT, _DATA, _LONG, _DATA, _LONG, _REAL, _REAL, _INT),
    ),
    "pdrt_store": (c_int, (_POOL, _STEP, _INT, _INT, _DATA, _LONG, _DATA, _LONG)),
    "pdrt_rope_store": (
        c_int,
        (_POOL, _STEP, _INT, _INT, _INT, _DATA, _LONG, _DATA, _LONG, _DATA, _LONG, _DATA, _DATA,
         _INT),
    ),
    "pdrt_head_norm": (None, (_INT, _DATA, _LONG, _INT, _INT, _INT, _DATA, _REAL)),
    "pdrt_rms_norm": (None, (_INT, _DATA, _DATA, _INT, _DATA, _INT, _INT, _REAL)),
    "pdrt_add_rms_norm": (None, (_DATA, _INT, _DATA, _DATA, _DATA, _INT, _INT, _REAL)),
    "pdrt_gate": (None, (_INT, _INT, _DATA, _DATA, _INT, _INT)),
    "pdrt_packed_bytes": (c_int64, (_INT, _INT, _INT)),
    "pdrt_pack": (c_int, (_INT, _DATA, _INT, _INT, _DATA, _INT, _INT)),
    "pdrt_linear": (
        None,
        (_INT, _DATA, _DATA, _DATA, _LONG, _DATA, _LONG, _INT, _INT, _INT),
    ),
    "pdrt_packed_rows": (None, (_INT, _DATA, _DATA, _DATA, _INT, _INT, _INT, _REAL)),
}  # fmt: skip
"""Result and parameters of everything in kernels.h."""


class Kernels(msgspec.Struct, frozen=True):
    """A loaded library."""

    lib: ctypes.CDLL
    """Calls let the GIL go. Pass structs with `ctypes.byref`, tensors with `pointer`."""
    isa: str
    """Key of `INSTRUCTION_SETS`."""


class KernelsUnusableError(Exception):
    """A library cannot be used; the message says why, for the log."""


def pointer(tensor: Tensor | None) -> int | None:
    """Address of the first element, for a pointer parameter; None is NULL."""
    return None if tensor is None else tensor.data_ptr()


def dtype_code(dtype: torch.dtype) -> int | None:
    """The PdrtType of a tensor, None where the kernels do not know its type."""
    return {torch.float32: 0, torch.bfloat16: 1}.get(dtype)


def load_kernels(
    flags: Collection[str],
    folder: Path = FOLDER,
    check: Callable[[Kernels], None] | None = None,
) -> Kernels | None:
    """The best library that the processor can run and that passes its test; the log says which.

    Args:
        flags: the processor's, as `pdrt.model.resources.cpu_flags` gives them.
        folder: where the libraries lie.
        check: called with each candidate: `check_kernels`, which raises `KernelsUnusableError` for
            one that computes wrongly.

    Returns:
        The library, or None where plain PyTorch has to do.
    """
    if not any(folder.glob("libpdrt_*.so")):
        log.warning(WITHOUT_KERNELS, "none were built when pdrt was installed")
        return None
    for isa, needed in INSTRUCTION_SETS.items():
        path = library_path(isa, folder)
        if not needed.issubset(flags) or not path.exists():
            continue
        try:
            kernels = open_kernels(path)
            if check is not None:
                check(kernels)
        except KernelsUnusableError as error:
            log.warning("kernels for %s are not used: %s", isa, error)
            continue
        log.info("kernels: %s", isa)
        return kernels
    log.warning(WITHOUT_KERNELS, f"none in {folder} works on this processor")
    return None


def library_path(isa: str, folder: Path = FOLDER) -> Path:
    """Where setup.py puts the library of an instruction set."""
    return folder / f"libpdrt_{isa}.so"


def open_kernels(path: Path) -> Kernels:
    """Load one library and declare its functions.

    Raises:
        KernelsUnusableError: it does not load, was built from another version of kernels.h, or the
            system does not let its instructions be used.
    """
    runtime = find_openmp(Path("/proc/self/maps").read_text())
    if runtime is None:
        raise KernelsUnusableError("torch brought no OpenMP runtime that they could share")
    try:
        # Loaded already; this makes its symbols visible to what is loaded next.
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnusableError(f"{path} does not load: {error}") from error
    _declare(lib)
    built_from, expected = lib.pdrt_interface().decode(), interface_version()
    if built_from != expected:
        raise KernelsUnusableError(f"{path} was built from other sources; install pdrt again")
    if refused := lib.pdrt_enable():
        raise KernelsUnusableError(f"Linux does not give them their registers: {strerror(refused)}")
    return Kernels(lib, lib.pdrt_isa().decode())


def interface_version() -> str:
    """Of the kernels.h that this file's declarations follow."""
    return hashlib.sha256((FOLDER / "kernels.h").read_bytes()).hexdigest()[:INTERFACE_BYTES]


def find_openmp(maps: str) -> str | None:
    """Path of the OpenMP runtime among the files that a process has mapped.

    Args:
        maps: contents of /proc/self/maps; torch is imported above, so its runtime is in there.
    """
    for line in maps.splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if Path(path).name.startswith(RUNTIME_NAMES):
            return path
    return None


def _declare(lib: ctypes.CDLL) -> None:
    for name, (result, parameters) in FUNCTIONS.items():
        if hasattr(lib, name):  # tests build libraries of some sources only
            function = getattr(lib, name)
            function.restype, function.argtypes = result, parameters
