"""Errors of the world, each with what to do about it. Our own bugs are `assert`s instead."""

from __future__ import annotations


class PdrtError(Exception):
    """Base of every error that a user may see; its text says what to do."""


class ConfigError(PdrtError):
    """A flag, environment variable or configuration file asks for something impossible."""


class ModelError(PdrtError):
    """The model cannot be loaded or does not fit this runtime; names the reason."""


class RanksLost(PdrtError):
    """The ranks of a worker no longer compute together: one is dead, silent or has failed. None is
    replaced alone, so the worker ends; the text says what was noticed."""


class EngineError(PdrtError):
    """A transfer engine refused or failed before it accepted anything."""


class PeerRefused(PdrtError):
    """A peer cannot be paired with; the text names both sides' values."""


class PoolExhausted(PdrtError):
    """Not enough free pages. The caller queues, preempts or refuses; nothing was taken."""


class DeviceLost(PdrtError):
    """A GPU cannot say what it has written. Only the end of this process makes that certain."""


class Unavailable(PdrtError):
    """Not here, for now: another worker can do it, or this one later."""


class RequestRefused(PdrtError):
    """A client's request cannot be served; `param` names the offending field, if one does."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
