"""Churn over real processes with every page compared: all answers are those of the model in one
piece, however long it lasts. `pytest tests/soak --soak-seconds 36000 --soak-report soak.json`."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdrt.model.fetch import resolve_model
from tests.chaos.cluster import Cluster
from tests.e2e.reference import Reference
from tests.model.tiny import make_tiny_model
from tests.soak.soak import FAULTS, Soak, soak_cluster

pytestmark = pytest.mark.e2e

SHORT_EPOCHS = ("kill prefill", "kill decode")
SHORT_EPOCH_SECONDS = 6.0
EPOCH_SECONDS = 45.0


@pytest.fixture
def cluster(tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[Cluster]:
    if (name := pytestconfig.getoption("--soak-model")) is None:
        tiny = {"max_position_embeddings": 4096, "num_hidden_layers": 6}
        model = make_tiny_model(tmp_path / "tiny", **tiny)
    else:
        model = resolve_model(name, print)
    with soak_cluster(tmp_path, model) as cluster:
        yield cluster
        cluster.assert_holds_nothing_named()


def epochs(seconds: float | None) -> Iterator[tuple[float, str]]:
    """How long each lasts, and its fault."""
    if seconds is None:
        yield from ((SHORT_EPOCH_SECONDS, fault) for fault in SHORT_EPOCHS)
        return
    dice, over_at = random.Random(0), time.monotonic() + seconds
    while time.monotonic() < over_at:
        yield EPOCH_SECONDS, dice.choice(FAULTS)


def show(facts: dict[str, Any], path: Path | None) -> None:
    text = json.dumps(facts, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n")


async def test_soak(cluster: Cluster, pytestconfig: pytest.Config) -> None:
    soak = Soak(cluster, Reference(Path(cluster.model)))
    seed = itertools.count()
    await soak.begin()
    try:
        for seconds, fault in epochs(pytestconfig.getoption("--soak-seconds")):
            await soak.epoch(next(seed), seconds, fault)
    finally:
        facts = soak.facts()
        show(facts, pytestconfig.getoption("--soak-report"))
    assert facts["requests"]["lost"] == facts["pages_different"] == 0
    assert facts["requests"]["answered"] > 0 and facts["requests"]["left"] > 0
    assert facts["pages_compared"] > 0
