"""Whether a file is a whole GGUF file, told from its header before anybody reads it in earnest.

The reader that converts it trusts counts and lengths: those of a damaged file would have it
allocate or loop without end. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from pdrt.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ITEMS_MAX = 20_000_000
"""Keys, strings and tensors together: a hundred times those of the largest vocabulary."""
DIMENSIONS_MAX = 8
DEPTH_MAX = 4
"""Arrays within arrays."""
ALIGNMENT_KEY = b"general.alignment"
ALIGNMENT_DEFAULT = 32

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


class _Damaged(Exception):
    """What is wrong with it, in words."""


def check_gguf(path: Path) -> None:
    """Walk through the header; nothing of the weights is read.

    Raises:
        ModelError: it is no GGUF file, is damaged, or is cut short.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            _Header(content).check()
    # An empty file cannot be mapped.
    except (OSError, ValueError, _Damaged) as error:
        raise ModelError(f"cannot read {path}: {error}; is it a whole GGUF file?") from error


class _Header:
    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._place = 0
        self._items = 0

    def check(self) -> None:
        if self._bytes(len(MAGIC)) != MAGIC:
            raise _Damaged("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in VERSIONS:
            raise _Damaged(f"version {version}, of which {VERSIONS[0]} and {VERSIONS[1]} are read")
        tensors, keys = self._scalar("Q"), self._scalar("Q")
        alignment: int | None = ALIGNMENT_DEFAULT
        for _ in range(self._count(keys)):
            name, kind = self._string(), self._scalar("I")
            given = self._value(kind, 0)
            alignment = given if name == ALIGNMENT_KEY and kind in _SCALARS else alignment
        ends = [self._tensor() for _ in range(self._count(tensors))]
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise _Damaged(f"alignment {alignment}")
        first = -(-self._place // alignment) * alignment
        missing = first + max(ends, default=0) - len(self._content)
        if missing > 0:
            raise _Damaged(f"it is cut short, {missing} bytes of weights are missing")

    def _count(self, count: int) -> int:
        self._items += count
        if self._items > ITEMS_MAX:
            raise _Damaged(f"its header counts {count} things")
        return count

    def _bytes(self, count: int) -> bytes:
        end = self._place + count
        if end > len(self._content):
            raise _Damaged("its header is cut short, or damaged")
        found = self._content[self._place : end]
        self._place = end
        return found

    def _skip(self, count: int) -> None:
        if count > len(self._content) - self._place:
            raise _Damaged("its header is cut short, or damaged")
        self._place += count

    def _scalar(self, code: str) -> int:
        (value,) = struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))
        found: int = value
        return found

    def _string(self) -> bytes:
        length = self._scalar("Q")
        if length > 1 << 16:
            self._skip(length)
            return b""
        return self._bytes(length)

    def _value(self, kind: int, depth: int) -> int | None:
        """Read a scalar, skip the rest."""
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            self._skip(self._scalar("Q"))
        elif kind == _ARRAY and depth < DEPTH_MAX:
            self._array(depth)
        else:
            raise _Damaged(f"a value of type {kind}")
        return None

    def _array(self, depth: int) -> None:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in _SCALARS:
            self._skip(count * struct.calcsize(f"<{_SCALARS[kind]}"))
            return
        for _ in range(self._count(count)):
            self._value(kind, depth + 1)

    def _tensor(self) -> int:
        """Where its data ends, from the beginning of all data."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        self._string()
        dimensions = self._scalar("I")
        if dimensions > DIMENSIONS_MAX:
            raise _Damaged(f"a tensor of {dimensions} dimensions")
        elements = math.prod(self._scalar("Q") for _ in range(dimensions))
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in GGMLQuantizationType.__members__.values():
            raise _Damaged(f"a tensor of type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        return offset + elements // block * block_bytes
