"""The `pdrt` command: picks the subcommand and turns errors of the world into one line.

Nothing heavy is imported before a role runs, so that help and refusals come at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from pdrt import __version__
from pdrt.cli.load import nearest
from pdrt.errors import ConfigError, PdrtError

EXIT_REFUSED = 2  # an error of the world, told in one line; `pdrt up` does not restart it at start
EXIT_INTERRUPTED = 130

USAGE = """\
usage: pdrt COMMAND [flags]

Async prefill/decode disaggregation runtime for LLM serving.

  up        gateway, prefill and decode workers on this machine, supervised
  prefill   one prefill worker; it dials --gateway
  decode    one decode worker; it dials --gateway
  gateway   the OpenAI-compatible HTTP server that workers register with
  drain     have a worker finish what it has and leave
  status    workers, rooms, leases and pages of a running gateway
  bench     latency, throughput and goodput of this or any OpenAI-compatible endpoint
  keygen    make the key that keeps strangers out of a cluster
  doctor    what this machine lacks, and what to do about it
  torture   whether a transfer engine's fence holds here: faults in mid-write, late bytes counted
  version   print the version

`pdrt COMMAND --help` lists the flags of a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Never raises an error of the world."""
    try:
        return _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except PdrtError as error:
        print(f"pdrt: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # as in `pdrt --help | head`
        sys.stderr.close()
        return EXIT_INTERRUPTED


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    command, *rest = arguments
    if command in ("version", "--version"):
        print(f"pdrt {__version__}")
        return 0
    commands: dict[str, Callable[[list[str]], int]] = {
        "up": _up,
        "prefill": _prefill,
        "decode": _decode,
        "gateway": _gateway,
        "drain": _drain,
        "status": _status,
        "bench": _bench,
        "doctor": _doctor,
        "keygen": _keygen,
        "torture": _torture,
    }
    if command not in commands:
        hint = nearest(command, [*commands, "version"]) or "; see pdrt --help"
        raise ConfigError(f"unknown command {command!r}{hint}")
    return commands[command](rest)


def _up(arguments: list[str]) -> int:
    from pdrt.cli.up import up

    return up(arguments)


def _prefill(arguments: list[str]) -> int:
    from pdrt.cli.roles import run_prefill

    return run_prefill(arguments)


def _decode(arguments: list[str]) -> int:
    from pdrt.cli.roles import run_decode

    return run_decode(arguments)


def _gateway(arguments: list[str]) -> int:
    from pdrt.cli.roles import run_gateway

    return run_gateway(arguments)


def _drain(arguments: list[str]) -> int:
    from pdrt.cli.drain import drain

    return drain(arguments)


def _status(arguments: list[str]) -> int:
    from pdrt.cli.status import status

    return status(arguments)


def _bench(arguments: list[str]) -> int:
    from pdrt.cli.bench.command import bench

    return bench(arguments)


def _doctor(arguments: list[str]) -> int:
    from pdrt.cli.doctor.command import doctor

    return doctor(arguments)


def _keygen(arguments: list[str]) -> int:
    from pdrt.cli.keygen import keygen

    return keygen(arguments)


def _torture(arguments: list[str]) -> int:
    from pdrt.cli.torture.command import torture

    return torture(arguments)
