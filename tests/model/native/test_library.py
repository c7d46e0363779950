"""Which library is loaded, what keeps one from being used, and what the log says then."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdrt.model.native.library import (
    FOLDER,
    FUNCTIONS,
    INSTRUCTION_SETS,
    Kernels,
    KernelsUnusableError,
    find_openmp,
    interface_version,
    library_path,
    load_kernels,
    open_kernels,
)
from pdrt.model.native.self_test import CASES, check_kernels
from pdrt.model.resources import cpu_flags
from tests.model.native.conftest import usable_libraries

pytestmark = pytest.mark.skipif(not usable_libraries(), reason="no kernels were built")


def build(
    folder: Path, isa: str, interface: str, more_source: str = "", flags: Sequence[str] = ()
) -> Path:
    """A library that only says what it is."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    path = library_path(isa, folder)
    source = folder / f"{isa}.cpp"
    source.write_text(f'#include "library.cpp"\n{more_source}')
    definitions = [f'-DPDRT_ISA="{isa}"', f'-DPDRT_INTERFACE="{interface}"']
    command = ["g++", "-shared", "-fPIC", f"-I{FOLDER}", *definitions, *flags, str(source)]
    subprocess.run([*command, "-o", str(path)], check=True)
    return path


@pytest.fixture
def best() -> str:
    return usable_libraries()[0]


def test_the_best_that_the_processor_has(best: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        kernels = load_kernels(cpu_flags(), check=check_kernels)
    assert kernels is not None
    assert kernels.isa == best
    assert caplog.messages == [f"kernels: {best}"]


def test_a_processor_without_the_flags_gets_the_portable_one() -> None:
    kernels = load_kernels(frozenset({"sse2"}))
    assert kernels is not None
    assert kernels.isa == "portable"


def test_every_library_passes_its_test() -> None:
    for isa in usable_libraries():
        check_kernels(open_kernels(library_path(isa)))


def test_the_self_test_calls_every_function() -> None:
    called: set[str] = set()

    class Spy:
        def __init__(self, lib: object) -> None:
            self._lib = lib

        def __getattr__(self, name: str) -> object:
            called.add(name)
            return getattr(self._lib, name)

    kernels = open_kernels(library_path("portable"))
    check_kernels(Kernels(Spy(kernels.lib), kernels.isa))  # type: ignore[arg-type]
    assert called == FUNCTIONS.keys() - {"pdrt_isa", "pdrt_interface", "pdrt_enable"}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_result_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]

    def spoiled(*arguments: object) -> object:
        results = case(*arguments)  # type: ignore[arg-type]
        result, expected = results[-1]
        result.view(-1)[-1] += 1
        return [*results[:-1], (result, expected)]

    monkeypatch.setitem(CASES, name, spoiled)  # type: ignore[arg-type]
    with pytest.raises(KernelsUnusableError, match=f"pdrt_{name}"):
        check_kernels(open_kernels(library_path("portable")))


def test_one_that_computes_wrongly_gives_way_to_the_next(
    best: str, caplog: pytest.LogCaptureFixture
) -> None:
    if best == "portable":
        pytest.skip("only one library runs here")

    def check(kernels: Kernels) -> None:
        if kernels.isa == best:
            raise KernelsUnusableError("pdrt_gate of torch.float32 is wrong")

    kernels = load_kernels(cpu_flags(), check=check)
    assert kernels is not None
    assert kernels.isa != best
    assert f"kernels for {best} are not used: pdrt_gate of torch.float32 is wrong" in caplog.text


def test_nothing_built(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_kernels(cpu_flags(), tmp_path) is None
    assert "none were built when pdrt was installed" in caplog.text
    assert "several times slower. Install g++" in caplog.text


def test_one_of_other_sources_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path, "portable", interface="0123456789abcdef")
    assert load_kernels(cpu_flags(), tmp_path) is None
    assert "was built from other sources; install pdrt again" in caplog.text
    assert "works on this processor" in caplog.text


def assert_gives_way(folder: Path) -> None:
    """The library for AVX2 there, to the portable one."""
    build(folder, "portable", interface_version())
    kernels = load_kernels(INSTRUCTION_SETS["avx2"], folder)
    assert kernels is not None
    assert kernels.isa == "portable"


def test_one_that_does_not_load_gives_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    needs_more = 'extern "C" int nobody_has_this();\nint needs() { return nobody_has_this(); }'
    build(tmp_path, "avx2", interface_version(), needs_more)
    assert_gives_way(tmp_path)
    assert "kernels for avx2 are not used" in caplog.text
    assert "nobody_has_this" in caplog.text


def test_one_that_the_system_refuses_gives_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Linux may refuse AMX's registers: 28 is ENOSPC, of a thread's stack for signals."""
    refuses = '#undef pdrt_enable\nextern "C" int pdrt_enable(void) { return 28; }'
    build(tmp_path, "avx2", interface_version(), refuses, ["-Dpdrt_enable=other"])
    assert_gives_way(tmp_path)
    assert "kernels for avx2 are not used: Linux does not give them" in caplog.text
    assert "No space left" in caplog.text


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    library_path("portable", tmp_path).write_bytes(b"half a lib")
    with pytest.raises(KernelsUnusableError, match="does not load"):
        open_kernels(library_path("portable", tmp_path))


MAPS = """\
7f00-7f01 r-xp 00000000 08:01 17 /opt/lib/libgompish/libtorch_cpu.so
7f02-7f03 rw-p 00000000 00:00 0
7f04-7f05 r-xp 00000000 08:01 18 {}
"""


@pytest.mark.parametrize(
    "path",
    [
        "/venv/torch/lib/libgomp.so.1",
        "/venv/torch.libs/libgomp-a34b3233.so.1",
        "/conda/lib/libiomp5.so",
        "/with a space/libgomp.so.1",
    ],
)
def test_the_openmp_runtime_is_the_one_that_is_mapped(path: str) -> None:
    assert find_openmp(MAPS.format(path)) == path


def test_no_openmp_runtime() -> None:
    assert find_openmp(MAPS.format("/lib/libc.so.6")) is None
