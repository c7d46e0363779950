"""A decode worker that can open nothing more for a while: it pairs as soon as it can again."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from pdrt.decode import handover
from tests.decode.deployment import deployed


@pytest.mark.parametrize("name", ("ProcessHandle", "DealerChannel"))
async def test_what_cannot_be_opened_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The pidfd of a writer, or the channel to it. It says nothing about the writer: no grants
    until it is there, no blacklist after that."""
    monkeypatch.setattr(handover, "RETRY_SECONDS", 0.02)
    opens, failures = getattr(handover, name), 3

    def open_late(*arguments: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return opens(*arguments)

    monkeypatch.setattr(handover, name, open_late)
    async with deployed() as pair:
        assert not failures
        await pair.serves()
