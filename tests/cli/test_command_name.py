"""How `pdrt up` tells a user to call pdrt: as whoever started it did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdrt.cli.up import command


@pytest.mark.parametrize("is_in_checkout", [True, False])
def test_from_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_checkout: bool
) -> None:
    (tmp_path / "run").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.chdir(tmp_path if is_in_checkout else tmp_path.parent)
    assert command() == ("./run" if is_in_checkout else str(tmp_path / "run"))


@pytest.mark.parametrize("prefix", [".venv", "venv"])
def test_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    if prefix == "venv":
        (tmp_path / "run").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / prefix))
    assert command() == "pdrt"
