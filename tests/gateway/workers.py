"""What tests say in a worker's name."""

from __future__ import annotations

from typing import Any

from pdrt.ids import Incarnation
from pdrt.kv.layout import KvLayout
from pdrt.protocol.gateway_messages import Register, Role
from pdrt.protocol.messages import Fingerprint

GATEWAY = Incarnation(0xAA)
DIGEST = "d1"
LAYOUT = KvLayout(16, 2, 3, 16, "float32")


def fingerprint(digest: str = DIGEST, page_size: int = 16) -> Fingerprint:
    return Fingerprint("tiny", digest, KvLayout(page_size, 2, 3, 16, "float32"))


def endpoint(worker: int) -> str:
    return f"tcp://127.0.0.1:{7000 + worker}"


def prefill(worker: int, seq: int = 1, **fields: Any) -> Register:
    return _register(Role.PREFILL, worker, seq, endpoint=endpoint(worker), **fields)


def decode(worker: int, seq: int = 1, pairs: tuple[int, ...] = (), **fields: Any) -> Register:
    """`pairs`: the prefill workers it is paired with."""
    fields.setdefault("paired", tuple(endpoint(prefill) for prefill in pairs))
    return _register(Role.DECODE, worker, seq, endpoint=None, **fields)


def _register(role: Role, worker: int, seq: int, **fields: Any) -> Register:
    fields = {"fingerprint": fingerprint(), "max_model_len": 512, "requests_max": 8, **fields}
    return Register(role=role, worker=Incarnation(worker), seq=seq, version="test", **fields)
