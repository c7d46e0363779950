"""Each engine's fence, over real processes: what `pdrt torture` shows, as a test."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from pdrt.cli.torture.command import Settings, run
from pdrt.cli.torture.engines import ENGINES
from pdrt.cli.torture.network import missing
from pdrt.cli.torture.report import Verdict, is_broken, remarks
from pdrt.cli.torture.trial import Fabric, Fault

pytestmark = pytest.mark.e2e

TIMEOUT_SECONDS = 1.0


@pytest.mark.parametrize("engine", ENGINES)
async def test_nothing_lands_behind_the_fence(engine: str) -> None:
    if engine == "mooncake" and find_spec("mooncake") is None:
        pytest.skip("mooncake is not installed")
    rows = await run(Settings(Fabric(engine), trials=1, timeout_seconds=TIMEOUT_SECONDS))
    assert not is_broken(rows), remarks(rows)
    found = {row.fault: row for row in rows}
    assert found.keys() == set(Fault)
    has_network = engine != "local" and missing() is None
    for fault, row in found.items():
        is_run = has_network or not fault.is_of_network
        assert row.verdict is (Verdict.HOLDS if is_run else Verdict.NOT_RUN), row
    # The same trial, with a timeout in place of the fence, is one that bytes get through.
    stopped = found[Fault.STOP].timed_out
    assert stopped is not None and stopped.late_bytes > 0
    if has_network:
        dropped = found[Fault.DROP].timed_out
        assert dropped is not None and dropped.late_bytes > 0
