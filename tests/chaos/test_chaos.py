"""A short round of faults over real processes; `python -m tests.chaos` is the long one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.chaos import Chaos
from tests.chaos.cluster import Cluster
from tests.chaos.faults import KINDS, SHORT_ROUND
from tests.chaos.shapes import Shapes
from tests.e2e.reference import Reference
from tests.model.tiny import make_tiny_model

pytestmark = pytest.mark.e2e

OUTPUT_TOKENS = 40
LONG_TOKENS = 300
CLIENTS = 4
ABORTS = 100


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=4096, num_hidden_layers=6)
    with Cluster(tmp_path, str(model)) as cluster:
        yield cluster
        cluster.assert_holds_nothing_named()


async def test_a_storm_and_a_short_round(cluster: Cluster) -> None:
    """Of most kinds of faults one: nobody is lost, nothing is held, nothing has grown."""
    shapes = Shapes(Reference(Path(cluster.model)), OUTPUT_TOKENS, LONG_TOKENS)
    chaos = Chaos(cluster, shapes, CLIENTS)
    try:
        await chaos.begin()
        await chaos.storm(ABORTS, seed=1)
        await chaos.round(seed=1, waves=SHORT_ROUND)
    except BaseException:
        print(cluster.logs())
        raise
    finally:
        print(chaos.report)
    facts = chaos.report.facts()
    assert facts["aborts"]["decode"] > 0
    assert facts["faults"].keys() == {kind for wave in SHORT_ROUND for kind in wave}
    requests = facts["requests"]
    assert requests["lost"] == 0
    assert requests["answered"] > requests["retried"] > 0
    assert requests["left"] > 0


def test_waves_name_kinds_that_exist() -> None:
    assert {kind for wave in SHORT_ROUND for kind in wave} <= KINDS.keys()
