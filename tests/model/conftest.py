"""Fixtures of the model tests: tiny models, made once per session, and executors over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.model import loader
from pdrt.model.executor import Executor
from pdrt.model.fused_structure import NotFusedError
from pdrt.model.native.library import load_kernels
from pdrt.model.resources import cpu_flags
from tests.model.tiny import make_tiny_model

POOL_BYTES = 8 * 2**20

TinyModel = Callable[..., Path]
LoadExecutor = Callable[..., Executor]
UseForward = Callable[[str], None]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model(family, **overrides)`: the directory of a tiny model."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", **overrides: Any) -> Path:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return make


@pytest.fixture
def load_executor() -> Iterator[LoadExecutor]:
    """`load_executor(directory, **ModelConfig fields)`: an executor that is closed at the end."""
    executors: list[Executor] = []

    def load(directory: Path | str, **settings: Any) -> Executor:
        settings = {"dtype": "float32", "kv_cache_memory_bytes": POOL_BYTES, **settings}
        executor = Executor.load(
            ModelConfig(model=str(directory), **settings),
            DeviceConfig(device="cpu", threads=1),
            lambda text: None,
        )
        executors.append(executor)
        return executor

    yield load
    for executor in executors:
        executor.close()


FORWARDS = ("fused", "native", "sdpa")
"""The fused decoder; transformers' forward over the attention kernels; the same without any."""


@pytest.fixture
def use_forward(monkeypatch: pytest.MonkeyPatch) -> UseForward:
    """`use_forward(one of FORWARDS)`: what is loaded from here on computes so."""

    def use(forward: str) -> None:
        if forward == "sdpa":
            monkeypatch.setattr(loader, "load_kernels", lambda flags, check: None)
        elif load_kernels(cpu_flags()) is None:
            pytest.skip("no compiled kernels")
        elif forward == "native":
            monkeypatch.setattr(loader, "fuse", _refuse)

    return use


def _refuse(*arguments: Any) -> None:
    raise NotFusedError("it is another forward's turn")
