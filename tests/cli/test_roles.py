"""What a role's process does before it is one."""

from __future__ import annotations

import gc

import pytest

from pdrt.cli.roles import no_garbage


def test_imports_are_not_collected_meanwhile_nor_later() -> None:
    before = gc.get_freeze_count()
    with no_garbage():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)
    gc.unfreeze()


def test_a_failing_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), no_garbage():
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()
