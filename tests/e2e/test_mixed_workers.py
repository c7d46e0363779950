"""Workers that cannot hand over to each other, started for real: each is refused with the values of
both sides, nobody hangs, and the pair that fits serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.e2e.deployment import Deployment, run_command, until
from tests.e2e.reference import Reference
from tests.e2e.streams import assert_serves

pytestmark = pytest.mark.e2e

REFUSED = 2


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Deployment]:
    """One decode worker, and prefill workers of which one fits."""
    with Deployment(tmp_path_factory.mktemp("mixed"), str(tiny_model)) as deployment:
        deployment.gateway()
        deployment.decode("decode", *TINY_FLAGS, "--transfer", "local")
        deployment.prefill("fits", *TINY_FLAGS)
        deployment.prefill("pages", *TINY_FLAGS, "--page-size", "32")
        deployment.prefill("engine", *TINY_FLAGS, "--transfer", "tcp")
        yield deployment


async def test_each_is_refused_in_words_and_the_one_that_fits_serves(
    mixed: Deployment, tiny_reference: Reference
) -> None:
    def has_said_which_engines() -> bool:
        said = [why for worker in mixed.workers("decode") for why in worker["refused"]]
        return any("decode offers local, prefill has tcp; see --transfer" in why for why in said)

    mixed.processes["gateway"].wait_for("cannot be paired: page_size: (16 != 32|32 != 16)")
    await until(has_said_which_engines, "the refusal of an engine")
    await assert_serves(mixed, tiny_reference)


@pytest.mark.parametrize("command", ("prefill", "decode", "up"))
def test_fewer_cores_than_ranks(command: str, tiny_model: Path) -> None:
    code, _, errors = run_command(
        *(command, "--model", str(tiny_model), "--port", "0"),
        *("--tensor-parallel-size", "2", "--cpus", "0"),
    )
    assert code == REFUSED, errors
    assert "--cpus 0 names 1 core for 2 ranks (--tensor-parallel-size)" in errors
