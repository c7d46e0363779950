"""What `pdrt doctor` says of one thing."""

from __future__ import annotations

from enum import Enum

import msgspec

GIB = 1024**3


class Verdict(Enum):
    OK = "ok"
    WARNING = "warning"
    """It serves, but slower or less than it could."""
    FAILS = "fails"
    """It cannot serve."""


class Finding(msgspec.Struct, frozen=True):
    """One line."""

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""
    """What to do about it; empty when nothing is to be done."""


def ok(name: str, text: str) -> Finding:
    return Finding(name, Verdict.OK, text)


def warning(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, Verdict.WARNING, text, remedy)


def fails(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, Verdict.FAILS, text, remedy)


def gib(byte_count: float) -> str:
    return f"{byte_count / GIB:.1f} GiB"
