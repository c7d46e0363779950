"""`pdrt torture`: what it refuses, and that a party dies with its nurse."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from pdrt.cli.main import EXIT_REFUSED, main
from pdrt.cli.torture import nurse
from pdrt.cli.torture.messages import NURSE_MARK
from pdrt.cli.torture.remote import Party
from pdrt.errors import PdrtError


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "--engine"),
        (["--engine", "none"], "--engine: one of local"),
        (["--engine", "local", "--trials", "0"], "above 0"),
        (["--engine", "local", "--timeout", "0"], "above 0"),
        (["--engine", "tcp", "--writer-via", "ssh other pdrt"], "go together"),
        (["--engine", "mooncake", "--mooncake-protocol", "none"], "--mooncake-protocol"),
        (
            [
                *("--engine", "local", "--writer-via", "ssh other pdrt"),
                *("--writer-host", "a", "--target-host", "b"),
            ],
            "within one host",
        ),
    ],
)
def test_refusals(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["torture", *flags]) == EXIT_REFUSED
    assert why in capsys.readouterr().err


async def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(PdrtError, match="no-such-command"):
        await Party.start("victim", "writer", ["no-such-command"])


async def test_a_party_that_ends() -> None:
    """Its words are on stderr; what it was asked is an error in words."""
    party = await Party.start("victim", "writer", [sys.executable, "-c", "pass"])
    with pytest.raises(PdrtError, match="victim has ended"):
        await party.answer(object)  # type: ignore[type-var]
    await party.close()


async def test_what_a_nurse_says_is_told_from_what_its_party_says() -> None:
    """They write to one pipe, in any order."""
    script = f"print('{{\"type\":\"Done\"}}\\n{NURSE_MARK.decode()}stop\\n', end='', flush=True)"
    script += "; input()"
    party = await Party.start("victim", "writer", [sys.executable, "-c", script])
    async with asyncio.timeout(180):
        await party.stop()
        assert type(await party.answer(object)).__name__ == "Done"  # type: ignore[type-var]
        await party.close()


def test_a_nurse_returns_once_it_is_so() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as party:
        nurse._act(party, nurse.STOP)
        assert nurse._is_stopped(party.pid)
        nurse._act(party, nurse.GO_ON)
        nurse._act(party, nurse.KILL)
        assert party.returncode == -signal.SIGKILL
        for action in nurse.ACTIONS:  # nothing that is done to the dead hangs or fails
            nurse._act(party, action)
        assert party.stdin is not None
        nurse._pass_on(party.stdin, b"")
