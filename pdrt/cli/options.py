"""One table of options per config struct: what each flag, TOML key and variable is called.

The three names of an option follow from its field: `max_num_seqs` in a file, `--max-num-seqs` as
a flag, `PDRT_MAX_NUM_SEQS` in the environment. Nested structs only group the help text.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of one role. Its `type` carries the range that `msgspec.convert` enforces."""

    key: str
    path: tuple[str, ...]
    type: Any
    default: Any
    help: str
    group: str
    alias: str | None

    @property
    def flag(self) -> str:
        return flag_of(self.key)

    @property
    def variable(self) -> str:
        return variable_of(self.key)

    @property
    def names(self) -> tuple[str, ...]:
        """The key and its alias."""
        return (self.key,) if self.alias is None else (self.key, self.alias)

    @property
    def repeats(self) -> bool:
        """True for a tuple: the flag may be repeated, text is split at commas."""
        return get_origin(bare_type(self.type)) is tuple

    @property
    def metavar(self) -> str:
        """What stands for the value in the help text."""
        bare = bare_type(self.type)
        if get_origin(bare) is Literal:
            return "{" + ",".join(get_args(bare)) + "}"
        return {int: "INT", float: "NUMBER", bool: "{true,false}"}.get(bare, "TEXT")


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def variable_of(key: str) -> str:
    return "PDRT_" + key.upper()


def bare_type(annotated: Any) -> Any:
    """The type without `Annotated` and without `| None`."""
    if get_origin(annotated) is Annotated:
        return bare_type(get_args(annotated)[0])
    if get_origin(annotated) in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(annotated) if arg is not type(None))
        return bare_type(inner)
    return annotated


@cache
def options_of(config_type: type[msgspec.Struct]) -> dict[str, Option]:
    """Every option of a config struct by its key, in the order of definition."""
    options: dict[str, Option] = {}
    for option in _walk(config_type, (), ""):
        assert option.key not in options, f"two options are named {option.key}"
        options[option.key] = option
    return options


def _walk(struct: type[msgspec.Struct], path: tuple[str, ...], group: str) -> list[Option]:
    hints = get_type_hints(struct, include_extras=True)
    found: list[Option] = []
    nested: list[Option] = []
    for field in msgspec.structs.fields(struct):
        where = (*path, field.name)
        annotated = hints[field.name]
        if isinstance(annotated, type) and issubclass(annotated, msgspec.Struct):
            nested += _walk(annotated, where, field.name)
            continue
        metas = [meta for meta in get_args(annotated)[1:] if isinstance(meta, Meta)]
        found.append(
            Option(
                key=field.name,
                path=where,
                type=annotated,
                default=field.default,
                help=" ".join(meta.description for meta in metas if meta.description),
                group=group,
                alias=next((meta.extra["alias"] for meta in metas if meta.extra), None),
            )
        )
    return found + nested


def value_of(config: msgspec.Struct, option: Option) -> Any:
    """The option's value in a config."""
    value: Any = config
    for name in option.path:
        value = getattr(value, name)
    return value
