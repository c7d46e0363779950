"""Each engine's fence, over real processes: what `pdrt torture` shows, as a test."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from pdrt.cli.torture.command import Settings, run
from pdrt.cli.torture.engines import ENGINES
from pdrt.cli.torture.network import missing
from pdrt.cli.torture.report import Verdict, is_broken, remarks
from pdrt.cli.torture.trial import Fabric, Fault
from pdrt.transfer.mooncake.library import import_failure, wheel_for_this_machine

pytestmark = pytest.mark.e2e

TIMEOUT_SECONDS = 1.0


def as_param(engine: str) -> Any:
    """The local engine's fence is shown by tests/decode/test_fences.py too, at whole workers."""
    return pytest.param(engine, marks=[pytest.mark.slow] * (engine == "local"))


def needs_mooncake() -> None:
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        pytest.skip(import_failure(str(error), wheel_for_this_machine()))


@pytest.mark.parametrize("engine", [as_param(engine) for engine in ENGINES])
async def test_nothing_lands_behind_the_fence(engine: str) -> None:
    if engine == "mooncake":
        needs_mooncake()
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
