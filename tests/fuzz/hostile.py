"""Values that nobody expects, and trees and bytes with some of them in place of what was there.

Hypothesis draws a seed and all else comes from that: drawing every choice by itself takes it a
hundred times as long as what is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

INTEGERS = [0, 1, -1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, -(2**63), 2**64 - 1]
BEYOND = [2**64, -(2**64), 10**400]
"""No msgpack integers."""
FLOATS = [0.0, -0.0, 1e-300, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 0.5]
TEXTS = ["", " ", "\0", "a" * 5000, "é😀\u202e", "../../etc/passwd", "null", "$ref", "{", "1", "x"]
SURROGATE = "\ud800"
"""No UTF-8 has it."""
CHANGES_MAX = 3
DEPTH_MAX = 4
Path = tuple[Any, ...]


def value(random: Random, depth: int = 0) -> Any:
    """Anything that msgpack can say."""
    kinds = 6 if depth >= DEPTH_MAX else 8
    match random.randrange(kinds):
        case 0:
            return None
        case 1:
            return random.random() < 0.5
        case 2:
            return random.choice(INTEGERS)
        case 3:
            return random.choice(FLOATS)
        case 4:
            return random.choice(TEXTS)
        case 5:
            return random.randint(-10, 1000)
        case 6:
            return [value(random, depth + 1) for _ in range(random.randrange(5))]
        case _:
            names = [random.choice(TEXTS) for _ in range(random.randrange(4))]
            return {name: value(random, depth + 1) for name in names}


def paths_of(tree: Any, here: Path = ()) -> list[Path]:
    """Where its values are: keys and indices from the root."""
    found = [here]
    if isinstance(tree, dict):
        for key, inner in tree.items():
            found += paths_of(inner, (*here, key))
    elif isinstance(tree, list | tuple):
        for index, inner in enumerate(tree):
            found += paths_of(inner, (*here, index))
    return found


def changed(tree: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy whose value at `path` is `change(value)`."""
    if not path:
        return change(tree)
    first, rest = path[0], path[1:]
    if isinstance(tree, dict):
        return {k: changed(v, rest, change) if k == first else v for k, v in tree.items()}
    copy = [changed(v, rest, change) if i == first else v for i, v in enumerate(tree)]
    return type(tree)(copy)


def mutated(random: Random, tree: Any, others: Callable[[Random], Any] = value) -> Any:
    """A copy of which some values are others, repeated, missing or too many."""
    for _ in range(random.randint(1, CHANGES_MAX)):
        path = random.choice(paths_of(tree))
        other = others(random)
        match random.randrange(5):
            case 0 | 1:
                tree = changed(tree, path, lambda _, other=other: other)
            case 2:
                times = random.choice([2, 3, 70, 200])
                tree = changed(tree, path, lambda old, n=times: old * n if _is_many(old) else old)
            case 3 if path:
                tree = changed(tree, path[:-1], lambda old, key=path[-1]: _without(old, key))
            case _:
                name = random.choice(TEXTS)
                tree = changed(tree, path, lambda old, n=name, o=other: _with(old, n, o))
    return tree


def _is_many(thing: Any) -> bool:
    return isinstance(thing, list | tuple | str | bytes)


def _without(tree: Any, key: Any) -> Any:
    if isinstance(tree, dict):
        return {k: v for k, v in tree.items() if k != key}
    return type(tree)(v for i, v in enumerate(tree) if i != key)


def _with(tree: Any, name: str, other: Any) -> Any:
    return {**tree, name: other} if isinstance(tree, dict) else tree


def scrambled(random: Random, whole: bytes) -> bytes:
    """`whole`, cut, or with some bytes changed, inserted or doubled; or nothing of it at all."""
    if random.randrange(8) == 0:
        return random.randbytes(random.randrange(80))
    content = bytearray(whole)
    for _ in range(random.randint(1, CHANGES_MAX)):
        if not content:
            break
        place = random.randrange(len(content))
        match random.randrange(5):
            case 0:
                content[place] ^= 1 << random.randrange(8)
            case 1:
                content[place] = random.choice([0, 0x7F, 0x80, 0xC0, 0xFF])
            case 2:
                del content[place:]
            case 3:
                content[place:place] = random.randbytes(random.randint(1, 8))
            case _:
                content[place:place] = content[place : place + 16]
    return bytes(content)
