"""Configuration files and environments: the settings, or a refusal that names the key."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from pdrt.cli.flags import parse_request
from pdrt.cli.load import dump_toml
from pdrt.cli.options import options_of
from pdrt.cli.validate import validate
from pdrt.config import GatewayConfig, UpConfig, WorkerConfig
from pdrt.errors import ConfigError
from tests.fuzz.effort import Fuzz, efforts
from tests.fuzz.hostile import TEXTS, scrambled, value

ROLES: list[tuple[str, type[UpConfig | WorkerConfig | GatewayConfig]]] = [
    ("up", UpConfig),
    ("decode", WorkerConfig),
    ("gateway", GatewayConfig),
]
REST = [
    "18446744073709551616", "-1", "1e400", "nan", "-inf", "0x7fffffffffffffff", "1979-05-27",
    "07:32:00", "'''a\nb'''", "[[1], [2]]", "{a = 1}", "[" * 200 + "]" * 200, "true", '"\\u0000"',
]  # fmt: skip
"""What TOML can say and JSON cannot."""


def parse(role: str, kind: Any, arguments: list[str], environment: dict[str, str]) -> Any:
    """A valid config, or the words of a refusal."""
    try:
        config = parse_request(role, kind, arguments, environment).config
        validate(config, has_cuda=False)
    except ConfigError as error:
        return str(error)
    return config


def keys_of(random: Random, kind: type[msgspec.Struct], count: int) -> list[str]:
    return random.sample(sorted(options_of(kind)), count)


def toml(random: Random) -> str:
    """A value of a key, as text: mostly valid TOML."""
    if random.randrange(3) == 0:
        return random.choice(REST)
    return json.dumps(value(random)).replace("null", '""')


@efforts(60)
def test_values_of_keys(tmp_path: Path, fuzz: Fuzz) -> None:
    path = tmp_path / "settings.toml"

    def refused_by_name(random: Random) -> None:
        role, kind = random.choice(ROLES)
        keys = keys_of(random, kind, random.randint(1, 3))
        path.write_text("".join(f"{key} = {toml(random)}\n" for key in keys))
        found = parse(role, kind, ["--config", str(path)], {})
        if isinstance(found, str):
            flags = [key.replace("_", "-") for key in keys]
            is_named = any(name in found for name in (*keys, *flags, "not valid TOML"))
            # What fields say together names the other one, of which the default stands.
            assert is_named or found.startswith("--"), found

    fuzz(refused_by_name)


@efforts(60)
def test_files_that_are_none(tmp_path: Path, fuzz: Fuzz) -> None:
    path = tmp_path / "settings.toml"
    whole = {role: dump_toml(kind()).encode() for role, kind in ROLES}

    def read_or_refused(random: Random) -> None:
        role, kind = random.choice(ROLES)
        path.write_bytes(scrambled(random, whole[role]))
        found = parse(role, kind, ["--config", str(path)], {})
        assert isinstance(found, kind) or found

    fuzz(read_or_refused)


@efforts(60)
def test_environments_and_flags(fuzz: Fuzz) -> None:
    def refused_by_name(random: Random) -> None:
        role, kind = random.choice(ROLES)
        environment, arguments = {}, []
        options = options_of(kind)
        for key in keys_of(random, kind, random.randint(1, 3)):
            text = random.choice([*TEXTS, str(value(random)), "1", "0.5", "true", "a:1,b:2"])
            text = text.replace("\0", "")
            if random.random() < 0.5:
                environment[options[key].variable] = text
            else:
                arguments.append(f"{options[key].flag}={text}")
        found = parse(role, kind, arguments, environment)
        if isinstance(found, str):
            names = [*environment, *(each.partition("=")[0] for each in arguments)]
            assert any(name in found for name in names) or found.startswith("--"), found

    fuzz(refused_by_name)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\0" * 100, b"=" * 1000, b"[" * 100_000])
def test_strange_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(content)
    found = parse("gateway", GatewayConfig, ["--config", str(path)], {})
    assert isinstance(found, GatewayConfig) if not content else str(path) in found
