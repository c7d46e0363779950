"""Documents that follow the code: generated tables are fresh, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs_tables import DOCUMENTS as WITH_TABLES
from tests.docs_tables import MARKED, TABLES, generated

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["docs/protocol.md", "docs/architecture.md", "docs/style.md", "CONTRIBUTING.md",
             "CHANGELOG.md", "docs/metrics.md", "docs/models.md", "docs/status.md",
             "docs/fences.md"]  # fmt: skip
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
CODE_PATH = re.compile(r"`((?:pdrt/|tests/|docs/|kv/|protocol/|transfer/)[\w./-]+)`")


@pytest.mark.parametrize("document", WITH_TABLES, ids=lambda path: path.stem)
def test_generated_tables_are_fresh(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert text == generated(text), "run python -m tests.docs_tables --write"


def test_every_table_is_used_once() -> None:
    texts = [document.read_text(encoding="utf-8") for document in WITH_TABLES]
    used = [found[2] for text in texts for found in MARKED.finditer(text)]
    assert sorted(used) == sorted(TABLES)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    document = ROOT / name
    text = document.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{name} links to {target}"
    for path in CODE_PATH.findall(text):
        assert (ROOT / path).exists() or (ROOT / "pdrt" / path).exists(), f"{name} names {path}"
