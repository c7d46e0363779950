"""Merging Prometheus texts of several processes into one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})? \S+(?: \S+)?$")
_COMMENT = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) ?(.*)$")
_SUFFIXES = ("_bucket", "_sum", "_count")


class _Family(msgspec.Struct):
    help: str | None = None
    type: str | None = None
    samples: list[str] = []


def merge(texts: Iterable[bytes]) -> bytes:
    """One text: each family once, its HELP and TYPE first, its samples together.

    Lines that are neither comments nor samples are dropped: a worker cannot spoil the scrape.
    """
    families: dict[str, _Family] = {}
    for text in texts:
        for line in text.decode("utf-8", "replace").splitlines():
            if comment := _COMMENT.match(line):
                kind, name, rest = comment.groups()
                family = families.setdefault(name, _Family())
                if kind == "HELP" and family.help is None:
                    family.help = rest
                elif kind == "TYPE" and family.type is None:
                    family.type = rest
            elif sample := _SAMPLE.match(line):
                name = _family_of(sample.group(1), families)
                families.setdefault(name, _Family()).samples.append(line)
    lines: list[str] = []
    for name, family in families.items():
        if family.help is not None:
            lines.append(f"# HELP {name} {family.help}")
        if family.type is not None:
            lines.append(f"# TYPE {name} {family.type}")
        lines += family.samples
    return ("\n".join(lines) + "\n").encode() if lines else b""


def _family_of(sample: str, families: dict[str, _Family]) -> str:
    if sample not in families:
        for suffix in _SUFFIXES:
            stem = sample.removesuffix(suffix)
            if stem != sample and stem in families:
                return stem
    return sample
