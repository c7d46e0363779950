"""The control plane with many workers of each role: real workers and the gateway's real core, over
real channels and copies; only the forward is a stand-in."""

from __future__ import annotations

import msgspec
import pytest

from tests.scale.scenario import PATIENT, Shape, play

# Rooms of a decode worker that was killed may end with its silence.
SMALL_PROTOCOL = msgspec.structs.replace(PATIENT, hello_interval_seconds=1.0, silence_seconds=10.0)
SMALL = Shape(8, 1, 200, 2, SMALL_PROTOCOL)
FULL = Shape(64, 4, 2000, 4, PATIENT)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "shape", [pytest.param(SMALL, id="8x8"), pytest.param(FULL, id="64x64", marks=pytest.mark.slow)]
)
async def test_every_request_is_answered_while_workers_come_and_go(shape: Shape) -> None:
    figures = await play(shape)
    assert figures.pairs == shape.workers**2
    assert figures.rooms_open == shape.rooms
    assert figures.answers >= 3 * shape.rooms
    print(msgspec.json.format(msgspec.json.encode(figures)).decode())
