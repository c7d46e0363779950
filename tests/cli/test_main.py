"""The command itself: help, refusals in one line, nothing heavy before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdrt import __version__
from pdrt.cli.main import main
from pdrt.cli.ports import check_port
from pdrt.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["up", "prefill", "decode", "gateway", "drain", "status"])
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: pdrt {command}")
    assert "--announce-fd" not in text and "--parent-pid" not in text


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in (
        "up",
        "prefill",
        "decode",
        "gateway",
        "drain",
        "status",
        "bench",
        "doctor",
        "version",
    ):
        assert f"\n  {command} " in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"pdrt {__version__}\n"


def test_an_unknown_command_is_matched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decod"]) == 2
    assert capsys.readouterr().err == "pdrt: unknown command 'decod'; did you mean decode?\n"


def test_refusals_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--prot", "1"]) == 2
    assert capsys.readouterr().err == "pdrt: unknown flag --prot; did you mean --port?\n"


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--port", "1234", "--print-config"]) == 0
    assert "port = 1234\n" in capsys.readouterr().out


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match=r"--port 1 on 192\.0\.2\.1: Cannot assign"):
        check_port("--port", "192.0.2.1", 1)
    with pytest.raises(ConfigError, match="address 'no such host' is not known"):
        check_port("--port", "no such host", 1)


def test_help_and_refusals_import_nothing_heavy() -> None:
    code = (
        "import sys; from pdrt.cli.main import main; main(['up', '--page-size', '0']);"
        "heavy = {'torch', 'transformers', 'zmq', 'starlette', 'rich'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
