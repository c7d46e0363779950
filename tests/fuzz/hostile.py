"""Values that nobody expects, and trees with some of their values replaced by these."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

INTEGERS = [0, 1, -1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, -(2**63), 2**64 - 1]
BEYOND = [2**64, -(2**64), 10**400]
"""No msgpack integers."""
FLOATS = [0.0, -0.0, 1e-300, 1e308, -1e308, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", " ", "\0", "a" * 5000, "\ud800", "é😀\u202e", "../../etc/passwd", "null", "$ref", "{"]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(INTEGERS),
    st.sampled_from(FLOATS),
    st.sampled_from([text for text in TEXTS if text != "\ud800"]),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=20),
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


def paths_of(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where its values are: keys and indices from the root."""
    found = [here]
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += paths_of(value, (*here, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            found += paths_of(value, (*here, index))
    return found


def changed(tree: Any, path: tuple[Any, ...], change: Any) -> Any:
    """A copy whose value at `path` is `change(value)`."""
    if not path:
        return change(tree)
    first, rest = path[0], path[1:]
    if isinstance(tree, dict):
        return {k: changed(v, rest, change) if k == first else v for k, v in tree.items()}
    copy = [changed(v, rest, change) if i == first else v for i, v in enumerate(tree)]
    return type(tree)(copy)


@st.composite
def mutations(draw: st.DrawFn, valid: st.SearchStrategy[Any], values: Any = trees) -> Any:
    """A valid tree, of which one to three values are others, repeated, or missing."""
    tree = draw(valid)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths_of(tree)))
        match draw(st.sampled_from(["replace", "replace", "repeat", "drop", "add"])):
            case "replace":
                other = draw(values)
                tree = changed(tree, path, lambda _, other=other: other)
            case "repeat":
                times = draw(st.sampled_from([2, 3, 70, 200]))
                tree = changed(tree, path, lambda old, n=times: old * n if _is_many(old) else old)
            case "drop":
                tree = changed(tree, path[:-1], lambda old, key=path[-1:]: _without(old, key))
            case "add":
                name, other = draw(st.text(max_size=8)), draw(values)
                tree = changed(tree, path, lambda old, n=name, o=other: _with(old, n, o))
    return tree


def _is_many(value: Any) -> bool:
    return isinstance(value, list | tuple | str | bytes)


def _without(tree: Any, key: tuple[Any, ...]) -> Any:
    if isinstance(tree, dict):
        return {k: v for k, v in tree.items() if (k,) != key}
    if isinstance(tree, list | tuple):
        return type(tree)(v for i, v in enumerate(tree) if (i,) != key)
    return tree


def _with(tree: Any, name: str, other: Any) -> Any:
    return {**tree, name: other} if isinstance(tree, dict) else tree


@st.composite
def scrambled(draw: st.DrawFn, whole: bytes, first: int = 0) -> bytes:
    """`whole`, cut, or with some bytes from `first` on changed, inserted or doubled."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        if len(content) <= first:
            break
        place = draw(st.integers(first, len(content) - 1))
        match draw(st.sampled_from(["flip", "set", "cut", "insert", "double"])):
            case "flip":
                content[place] ^= 1 << draw(st.integers(0, 7))
            case "set":
                content[place] = draw(st.sampled_from([0, 0x7F, 0x80, 0xC0, 0xFF]))
            case "cut":
                del content[place:]
            case "insert":
                content[place:place] = draw(st.binary(min_size=1, max_size=8))
            case "double":
                content[place:place] = content[place : place + 16]
    return bytes(content)
