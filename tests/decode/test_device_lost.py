"""A GPU that cannot say what it has written ends its worker: no page of it may be another's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdrt.errors import DeviceLost
from pdrt.kv.pages import OwnerKind
from pdrt.model.batch import Row, StepResult
from pdrt.transfer.worker_loop import ExitCode
from tests.decode.deployment import Pair, in_use, prompt_of


async def lost(rows: Sequence[Row]) -> StepResult:
    raise DeviceLost("cuda:0 does not say what it has written")


async def test_of_a_prefill_worker(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.prefill_executor, "step", lost)
    pair.submit(prompt_of(10), 6)
    assert await pair.deployment.exit_code(pair.prefill) is ExitCode.BROKEN
    assert in_use(pair.prefill.pages, OwnerKind.ROOM), "nothing was given back"
    pair.deployment.forgive(pair.prefill)
    # It waits for the death of a process that is the test's own.
    pair.decode.loop.end(ExitCode.STOPPED, "the test is over")
    await pair.deployment.exit_code(pair.decode)
    pair.deployment.forgive(pair.decode)


async def test_of_a_decode_worker(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.decode_executor, "step", lost)
    pair.submit(prompt_of(10), 6)
    assert await pair.deployment.exit_code(pair.decode) is ExitCode.BROKEN
    assert in_use(pair.decode.pages, OwnerKind.SEQUENCE), "nothing was given back"
    pair.deployment.forgive(pair.decode)
