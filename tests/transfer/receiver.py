"""A decode rank's pool in a process of its own: says its segment, then its content's digest to
whoever asks."""

from __future__ import annotations

import asyncio
import hashlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.transfer.local import LocalReceiver
from tests.transfer.fake_cuda import FakeCuda, FakePool

LAYOUT = KvLayout(page_size=4, kv_heads=2, layers=2, head_dim=8, dtype="float32")
PAGES = 64


def main(connection: Connection) -> None:
    """In host memory."""
    pool = KvPool(LAYOUT, PAGES, torch.device("cpu"))
    _serve(connection, pool, pool.tensor)


def cuda(connection: Connection, library: Path) -> None:
    """On the GPU that is none."""
    pool = FakePool(FakeCuda(library).device(), PAGES * LAYOUT.page_bytes)
    _serve(connection, pool, pool.bytes)


def _serve(connection: Connection, pool: Any, content: torch.Tensor) -> None:
    segment = asyncio.run(LocalReceiver(pool).open_segment(0, "tcp://127.0.0.1:1", 1))
    connection.send(segment.descriptor)
    while True:
        connection.recv()
        connection.send(hashlib.sha256(content.numpy().tobytes()).hexdigest())
