"""Holding the local engine's copies back, and letting them go."""

from __future__ import annotations

import threading

import pytest

from pdrt.transfer.engine import WriteRequest
from pdrt.transfer.local import LocalSender
from pdrt.transfer.local import _Instance as Instance


class CopyGate:
    """Copies wait before their first byte while it is closed; `failures` of them raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = 0
        self.failures = 0
        original = LocalSender._copy

        def copy(sender: LocalSender, instance: Instance, request: WriteRequest) -> None:
            self.waiting += 1
            self._open.wait()
            self.waiting -= 1
            if self.failures:
                self.failures -= 1
                raise OSError("the copy failed on purpose")
            original(sender, instance, request)

        monkeypatch.setattr(LocalSender, "_copy", copy)

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()
