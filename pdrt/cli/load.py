"""Settings from flags, environment, file and defaults, in this order of precedence.

Each source yields `Given`s that remember where they stood, so that every refusal names the source
and the key, and an unknown name its nearest match.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import msgspec

from pdrt.cli.options import Option, bare_type, flag_of, options_of, value_of, variable_of
from pdrt.errors import ConfigError

Config = TypeVar("Config", bound=msgspec.Struct)


class Given(msgspec.Struct, frozen=True):
    """One value as it was given. `where` is for messages. `is_text`: a flag or a variable, which
    can only write numbers as text; a file has numbers of its own, so there `"64"` is refused."""

    value: Any
    where: str
    is_text: bool


Layer = dict[str, Given]


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing when no known name is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def layer_from_flags(options: Mapping[str, Option], flags: Mapping[str, Any]) -> Layer:
    """`flags` holds texts, or lists of texts for a repeated flag, by key."""
    return {key: Given(value, flag_of(key), True) for key, value in flags.items() if key in options}


def layer_from_environment(
    options: Mapping[str, Option], known: Iterable[str], environment: Mapping[str, str]
) -> Layer:
    """Variables PDRT_*. `known` are the keys of every role: one environment may serve them all.
    An empty variable counts as not set, as compose files write it.
    """
    keys = {variable_of(name): o.key for o in options.values() for name in o.names}
    accepted = {variable_of(key) for key in known} | keys.keys()
    layer: Layer = {}
    for variable in sorted(v for v in environment if v.startswith("PDRT_")):
        if variable not in accepted:
            hint = nearest(variable, accepted)
            raise ConfigError(f"unknown environment variable {variable}{hint}")
        if variable in keys and environment[variable]:
            where = f"environment variable {variable}"
            _add(layer, keys[variable], Given(environment[variable], where, True))
    return layer


def layer_from_file(options: Mapping[str, Option], known: Iterable[str], path: str) -> Layer:
    """A flat TOML file: one key per option, named as in the struct."""
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error
    keys = {name: option.key for option in options.values() for name in option.names}
    layer: Layer = {}
    for name, value in table.items():
        if isinstance(value, dict):
            raise ConfigError(f"{path}: table [{name}]: write its keys at the top level instead")
        if name in keys:
            _add(layer, keys[name], Given(value, f"{path}: {name}", False))
        elif name in known:
            raise ConfigError(f"{path}: key {name} is for another role than this one")
        else:
            raise ConfigError(f"{path}: unknown key {name}{nearest(name, keys)}")
    return layer


def _add(layer: Layer, key: str, given: Given) -> None:
    if key in layer:
        raise ConfigError(f"{layer[key].where} and {given.where} are the same setting")
    layer[key] = given


def build(config_type: type[Config], layers: Sequence[Layer]) -> Config:
    """The config of `layers`, strongest first; defaults stand in for what none of them gives."""
    options = options_of(config_type)
    values: dict[str, Any] = {}
    for layer in reversed(layers):
        values.update({key: convert(options[key], given) for key, given in layer.items()})
    config = _assemble(config_type, (), {options[key].path: v for key, v in values.items()})
    assert isinstance(config, config_type)
    return config


def _assemble(
    struct: type[msgspec.Struct], path: tuple[str, ...], values: dict[tuple[str, ...], Any]
) -> msgspec.Struct:
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        where = (*path, field.name)
        if where in values:
            fields[field.name] = values[where]
        elif isinstance(field.default, msgspec.Struct):
            fields[field.name] = _assemble(type(field.default), where, values)
    return struct(**fields)


def convert(option: Option, given: Given) -> Any:
    """The value in the option's type. Raises `ConfigError` naming the source and what fits."""
    value, bare = given.value, bare_type(option.type)
    if given.is_text and option.repeats:
        texts = [value] if isinstance(value, str) else value
        value = [part.strip() for text in texts for part in text.split(",")]
    try:
        # msgspec's lax mode reads numbers from text, but it would also turn "null" into None.
        lax = given.is_text and bare in (int, float, bool)
        return msgspec.convert(value, option.type, strict=not lax)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{given.where}: {_complaint(bare, value, error)}") from error


def _complaint(bare: Any, value: Any, error: msgspec.ValidationError) -> str:
    if choices := get_args(bare):
        if all(isinstance(choice, str) for choice in choices):
            return f"{value!r} is not one of {', '.join(choices)}"
        return f"{value!r} is not a list of texts"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    text = str(error)
    if ">" in text or "<" in text:  # the type fits, the range does not
        limit = text.removeprefix("Expected ").split(" ", 1)[1]
        return f"{value!r} is out of range, must be {limit}"
    return f"{value!r} is not {words[bare]}"


def dump_toml(config: msgspec.Struct) -> str:
    """The config as a TOML file that loads back to the same; unset options are comments."""
    lines: list[str] = []
    group = ""
    for option in options_of(type(config)).values():
        if option.group != group:
            group = option.group
            lines += ["", f"# {group}"]
        value = value_of(config, option)
        if value is None:
            assert option.default is None, f"{option.key} cannot be unset in a file"
            lines.append(f"# {option.key} is not set")
        else:
            lines.append(f"{option.key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    match value:
        case tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case str():  # JSON's escapes are TOML's, but for DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
    raise AssertionError(f"no TOML for {value!r}")
