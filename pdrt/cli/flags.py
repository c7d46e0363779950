"""Flags of one command: an argparse parser made from the option table, and what it parsed.

argparse only splits the command line; values stay text until `load.convert`, so that a flag, a
variable and a TOML key are refused in the same words. (tyro reads msgspec structs too, but takes
0.4 s, shows no `Meta` description and knows neither environment nor file.)
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NoReturn

import msgspec

from pdrt.cli.load import (
    Config,
    build,
    dump_toml,
    layer_from_environment,
    layer_from_file,
    layer_from_flags,
    nearest,
)
from pdrt.cli.options import Option, bare_type, flag_of, options_of
from pdrt.config import GatewayConfig, UpConfig, WorkerConfig
from pdrt.errors import ConfigError

EPILOG = """\
Each flag is also a key of the --config file (max_num_seqs = 64) and an environment variable
(PDRT_MAX_NUM_SEQS=64). A flag wins over the environment, that over the file."""

# Keys of every role, and variables that are no role's: they pass in any role's environment.
KNOWN_KEYS = frozenset(
    name
    for config_type in (UpConfig, WorkerConfig, GatewayConfig)
    for option in options_of(config_type).values()
    for name in option.names
) | {"config", "url"}


class RankArguments(msgspec.Struct, frozen=True):
    """What makes a process one of the other ranks of a worker."""

    rank: int
    channel_fd: int
    """Its end of the channel to its leader."""
    rendezvous: str
    """Path of a file through which ranks find each other."""


class Request(msgspec.Struct, Generic[Config], frozen=True):
    """A parsed command line. `parent_pid` and `announce_fd` come from `pdrt up` alone, `rank` from
    the leader of a worker of several ranks."""

    config: Config
    print_config: bool
    parent_pid: int | None
    announce_fd: int | None
    rank: RankArguments | None = None


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are `ConfigError`s, and whose unknown flags are matched."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The given flags by destination. `--max_num_seqs` reads as `--max-num-seqs`."""
        namespace, unknown = self.parse_known_args([_hyphens(text) for text in arguments])
        if unknown:
            name = unknown[0].split("=", 1)[0]
            if not name.startswith("-"):
                raise ConfigError(f"unexpected argument {name!r}")
            known = [text for action in self._actions for text in action.option_strings]
            raise ConfigError(f"unknown flag {name}{nearest(name, known)}")
        return vars(namespace)


def _hyphens(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def parse_request(
    command: str,
    config_type: type[Config],
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> Request[Config]:
    """Flags, environment and file of one role put together, not yet validated."""
    options = options_of(config_type)
    flags = role_parser(command, config_type).parse(arguments)
    layers = [
        layer_from_flags(options, flags),
        layer_from_environment(options, KNOWN_KEYS, environment),
    ]
    if path := flags.get("config") or environment.get("PDRT_CONFIG"):
        layers.append(layer_from_file(options, KNOWN_KEYS, path))
    return Request(
        build(config_type, layers),
        flags["print_config"],
        flags.get("parent_pid"),
        flags.get("announce_fd"),
        _rank_of(flags),
    )


def _rank_of(flags: Mapping[str, Any]) -> RankArguments | None:
    if "rank" not in flags:
        return None
    rank, channel_fd, rendezvous = flags["rank"]
    return RankArguments(int(rank), int(channel_fd), rendezvous)


def role_parser(command: str, config_type: type[msgspec.Struct]) -> Parser:
    """The parser of one role: its options in groups, and the flags every role has."""
    parser = Parser(
        prog=f"pdrt {command}",
        description=(config_type.__doc__ or "").replace("`", ""),
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        usage=f"pdrt {command} [--config FILE] [flags]",
    )
    parser.add_argument("--config", metavar="FILE", help="read settings from a TOML file")
    parser.add_argument(
        "--print-config",
        action="store_true",
        default=False,
        help="print the settings in effect as TOML, and exit",
    )
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--announce-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    groups: dict[str, Any] = {"": parser}
    for option in options_of(config_type).values():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        form: dict[str, Any] = {"action": "append" if option.repeats else "store"}
        if bare_type(option.type) is bool:  # `--flag` alone means true
            form |= {"nargs": "?", "const": "true"}
        groups[option.group].add_argument(
            *(flag_of(name) for name in option.names),
            dest=option.key,
            metavar=option.metavar,
            help=_help(option),
            **form,
        )
    return parser


def _help(option: Option) -> str:
    default = ",".join(option.default) if option.repeats else option.default
    shown = option.help if default is None else f"{option.help} (default: {default})"
    return shown.replace("%", "%%")


def print_config(config: msgspec.Struct) -> None:
    print(dump_toml(config), end="")
