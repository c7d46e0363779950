"""A decode rank's pool in a process of its own: prints its segment, then answers on stdin."""

from __future__ import annotations

import asyncio
import hashlib
import sys

import torch

from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.transfer.local import LocalReceiver

LAYOUT = KvLayout(page_size=4, kv_heads=2, layers=2, head_dim=8, dtype="float32")
PAGES = 64


def main() -> None:
    pool = KvPool(LAYOUT, PAGES, torch.device("cpu"))
    segment = asyncio.run(LocalReceiver(pool).open_segment(0, "tcp://127.0.0.1:1", 1))
    print(segment.descriptor.hex(), flush=True)
    for _ in sys.stdin:
        content = pool.tensor.numpy().tobytes()
        print(hashlib.sha256(content).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
