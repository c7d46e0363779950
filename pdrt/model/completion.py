"""When what was asked of a device has been done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pdrt.errors import DeviceLost


def completion(device: torch.device) -> Callable[[], None]:
    """What waits until all that the calling thread has queued on `device` has been computed, or
    raises `DeviceLost`.

    A CPU computes while it is asked. A GPU is only told, and a forward returns, or raises, long
    before its last kernel has written KV: nobody may be given those pages, nor send them, before.
    """
    if device.type == "cpu":
        return _nothing
    events: Any = torch.cuda
    event = events.Event(blocking=True)

    def wait() -> None:
        try:
            event.record(torch.cuda.current_stream(device))
            event.synchronize()
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            raise DeviceLost(f"{device} does not say what it has written: {text}") from error

    return wait


def _nothing() -> None:
    pass
