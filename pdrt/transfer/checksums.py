"""xxh3 of KV pages, for `--kv-checksum`: of what is sent, and of what has landed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from pdrt.kv.layout import SliceCopy
from pdrt.kv.pool import KvPool, bytes_at
from pdrt.protocol.messages import SliceChecksums


class _Piece(msgspec.Struct, frozen=True):
    """A slice of every page: where it is in a page of this pool, and what it is called."""

    offset: int
    name: SliceChecksums


class _HostBytes:
    """A pool in host memory, without a copy."""

    def __init__(self, pool: KvPool) -> None:
        self._memory = bytes_at(pool.address, pool.size_bytes)

    def read(self, start: int, length: int) -> Any:
        return self._memory[start : start + length]


class _DeviceBytes:
    """A pool on a GPU, read piece by piece."""

    def __init__(self, pool: KvPool) -> None:
        self._memory = pool.tensor.view(-1).view(torch.uint8)

    def read(self, start: int, length: int) -> Any:
        return self._memory[start : start + length].cpu().numpy()


class PageChecksums:
    """Checksums of one rank's pool, computed on a thread of its own: the loop does not wait for
    memory. `cli.validate` has seen that xxhash is installed."""

    def __init__(self, pool: KvPool) -> None:
        from xxhash import xxh3_64_intdigest

        self._digest = xxh3_64_intdigest
        self._pool = _HostBytes(pool) if pool.cuda is None else _DeviceBytes(pool)
        self._page_bytes = pool.layout.page_bytes
        self._thread = ThreadPoolExecutor(1, "pdrt-checksum")

    def of_source(
        self, pages: Sequence[int], copies: Sequence[SliceCopy]
    ) -> asyncio.Future[tuple[SliceChecksums, ...]]:
        """Of what `copies` take from `pages`, which stay as they are until this is done."""
        names = [SliceChecksums(x.decode_rank, x.target_offset, x.length, ()) for x in copies]
        offsets = [copy.source_offset for copy in copies]
        return self._start(pages, [*map(_Piece, offsets, names)])

    def of_target(
        self, pages: Sequence[int], slices: Sequence[SliceChecksums]
    ) -> asyncio.Future[tuple[SliceChecksums, ...]]:
        """Of the same slices as they are in `pages` here, in their order."""
        return self._start(pages, [_Piece(x.offset, x) for x in slices])

    def _start(
        self, pages: Sequence[int], pieces: Sequence[_Piece]
    ) -> asyncio.Future[tuple[SliceChecksums, ...]]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread, self._compute, pages, pieces)

    def _compute(
        self, pages: Sequence[int], pieces: Sequence[_Piece]
    ) -> tuple[SliceChecksums, ...]:
        """On the thread."""
        return tuple(
            msgspec.structs.replace(
                piece.name,
                pages=tuple(self._of(page, piece.offset, piece.name.length) for page in pages),
            )
            for piece in pieces
        )

    def _of(self, page: int, offset: int, length: int) -> int:
        assert 0 <= offset <= offset + length <= self._page_bytes, (offset, length)
        start = page * self._page_bytes + offset
        return self._digest(self._pool.read(start, length))

    def close(self) -> None:
        """At exit: the process ends with its thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
