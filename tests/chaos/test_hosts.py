"""A short round of faults between hosts, which are network namespaces; `python -m tests.chaos
--hosts` is the long one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.chaos import Chaos
from tests.chaos.hosts import Hosts, missing
from tests.chaos.network_faults import SHORT_HOST_ROUND
from tests.chaos.shapes import Shapes
from tests.e2e.reference import Reference
from tests.model.tiny import make_tiny_model

pytestmark = pytest.mark.e2e

OUTPUT_TOKENS = 40
LONG_TOKENS = 300
CLIENTS = 3


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if (why := missing()) is not None:
        pytest.skip(why)
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=4096, num_hidden_layers=6)
    with Hosts(tmp_path, str(model)) as hosts:
        yield hosts


async def test_a_short_round_between_hosts(hosts: Hosts) -> None:
    """Nobody is lost, nothing is held, nothing has grown."""
    shapes = Shapes(Reference(Path(hosts.model)), OUTPUT_TOKENS, LONG_TOKENS)
    chaos = Chaos(hosts, shapes, CLIENTS)
    try:
        await chaos.begin()
        await chaos.round(seed=1, waves=SHORT_HOST_ROUND)
    except BaseException:
        print(hosts.logs())
        raise
    finally:
        print(chaos.report)
    facts = chaos.report.facts()
    assert facts["faults"].keys() == {kind for wave in SHORT_HOST_ROUND for kind in wave}
    assert facts["requests"]["lost"] == 0
    assert facts["requests"]["answered"] > 0
