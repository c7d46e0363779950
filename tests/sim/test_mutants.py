"""Every broken rule is noticed, for what it breaks; the unbroken product passes the same runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.run import run_calm_seed, run_seed
from tests.sim.stage import run_schedule


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    result = mutant.hunt()
    assert result is not None, f"{mutant.name} escapes {mutant.caught_by}: {mutant.rule}"
    assert result.kind in mutant.kinds
    if mutant.schedule is not None:
        unbroken = run_schedule(mutant.schedule)
    else:
        unbroken = (run_calm_seed if mutant.is_calm else run_seed)(result.seed)
    assert unbroken.violation is None, unbroken


def test_readme_lists_every_mutant() -> None:
    text = Path(__file__).with_name("README.md").read_text()
    assert [name for name in MUTANTS if f"| `{name}` |" not in text] == []


def test_every_mutant_says_which_rule_it_breaks() -> None:
    assert all(mutant.rule for mutant in MUTANTS.values())
