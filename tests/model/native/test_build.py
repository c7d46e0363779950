"""setup.py: what it builds, and that every instruction set compiles, also those not built here."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import setuptools

from pdrt.model.native.library import INSTRUCTION_SETS, interface_version

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86's instruction sets")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, nothing being built."""
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_builds_what_is_loaded(script: ModuleType) -> None:
    sets = {isa: frozenset(flags) for isa, flags in script.X86_SETS.items()}
    assert sets | {"portable": frozenset()} == INSTRUCTION_SETS
    extensions = script.kernels()
    assert {script.isa_of(each.name) for each in extensions} == INSTRUCTION_SETS.keys()
    assert all(each.optional for each in extensions)
    assert f'-DPDRT_INTERFACE="{interface_version()}"' in extensions[0].extra_compile_args


def test_elsewhere_only_the_portable_one(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert [script.isa_of(each.name) for each in script.kernels()] == ["portable"]


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_compiles_without_a_warning(script: ModuleType, isa: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    (extension,) = [each for each in script.kernels() if script.isa_of(each.name) == isa]
    warnings = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    command = ["g++", *extension.extra_compile_args, *warnings, *extension.sources]
    subprocess.run(command, check=True, cwd=ROOT)
