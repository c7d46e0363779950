"""docs/cases.md: every case has its tests, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "cases.md"
ROW = re.compile(r"^\| (?P<elsewhere>[^|]+) \| (?P<here>[^|]+) \| (?P<tests>[^|]+) \|$", re.M)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def cases() -> dict[str, list[tuple[str, str]]]:
    """Files and names of each case's tests."""
    found = list(ROW.finditer(DOCUMENT.read_text(encoding="utf-8")))[1:]  # but for the head
    assert len({row["elsewhere"] for row in found}) == len(found), "a case stands there twice"
    return {row["elsewhere"]: TEST.findall(row["tests"]) for row in found}


@pytest.mark.parametrize(("case", "tests"), cases().items(), ids=cases().keys())
def test_every_case_has_tests_that_exist(case: str, tests: list[tuple[str, str]]) -> None:
    assert tests, "nothing shows it"
    for file, name in tests:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {getattr(node, "name", None) for node in tree.body}, f"{file}::{name}"


def test_every_row_is_read() -> None:
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    assert len(cases()) == len(rows) - 2
