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
        self._passes = threading.Semaphore(0)
        self._is_open = threading.Event()
        self._is_open.set()
        self.waiting = 0
        self.failures = 0
        original = LocalSender._copy

        def copy(sender: LocalSender, instance: Instance, request: WriteRequest) -> None:
            self.waiting += 1
            while not self._is_open.is_set() and not self._passes.acquire(timeout=0.01):
                pass
            self.waiting -= 1
            if self.failures:
                self.failures -= 1
                raise OSError("the copy failed on purpose")
            original(sender, instance, request)

        monkeypatch.setattr(LocalSender, "_copy", copy)

    def close(self) -> None:
        self._is_open.clear()

    def step(self) -> None:
        """Let one through."""
        self._passes.release()

    def open(self) -> None:
        self._is_open.set()
