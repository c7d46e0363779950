"""Deployments that many tests share, and what must be true after each of these tests."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdrt.model.fetch import DEFAULT_MODEL, resolve_model
from tests.e2e import deployment as deployments
from tests.e2e.deployment import Deployment
from tests.e2e.reference import Reference
from tests.model.tiny import make_tiny_model

POOL_BYTES = str(64 * 2**20)
TINY_LENGTH = 8192
REAL_FLAGS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "200000000"),
    # Chunks that end in the middle of a page.
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "40"),
)
TINY_FLAGS = (
    *("--dtype", "float32", "--kv-cache-memory-bytes", POOL_BYTES),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "32"),
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for deployment in deployments.live:
            report.sections.append((f"processes of {deployment.name}", deployment.logs()))
    return report


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct, downloaded and converted once into the cache."""
    return resolve_model(DEFAULT_MODEL, print)


@pytest.fixture(scope="session")
def real_reference(real_model: Path) -> Reference:
    return Reference(real_model)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, long context: where only behaviour matters."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_model(folder, max_position_embeddings=TINY_LENGTH, num_hidden_layers=6)


@pytest.fixture(scope="session")
def tiny_reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="session")
def _real_up(tmp_path_factory: pytest.TempPathFactory, real_model: Path) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("real"), str(real_model)) as deployment:
        deployment.up(*REAL_FLAGS)
        deployment.wait_ready()
        yield deployment
        deployment.assert_holds_nothing_named()


@pytest.fixture
def real(_real_up: Deployment) -> Iterator[Deployment]:
    """The real model in float32 under `pdrt up`, with small chunks. Whole after every test."""
    yield _real_up
    _real_up.wait_whole()


@pytest.fixture(scope="session")
def _tiny_up(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("up"), str(tiny_model)) as deployment:
        deployment.up(*TINY_FLAGS, "--hang-seconds-max", "8")
        deployment.wait_ready()
        yield deployment
        deployment.assert_holds_nothing_named()


@pytest.fixture
def tiny_up(_tiny_up: Deployment) -> Iterator[Deployment]:
    """The tiny model under `pdrt up`, which kills what hangs for 8 s. Ready before every test, as
    the one before may have killed a worker and ended without it; whole after every test."""
    _tiny_up.wait_ready()
    yield _tiny_up
    _tiny_up.wait_whole()


class Cluster(Deployment):
    """Two prefill and two decode workers, one gateway; all dial a second gateway too."""

    def __init__(self, folder: Path, model: str) -> None:
        super().__init__(folder, model)
        self.second_port = deployments.free_port()
        self.second_worker_port = deployments.free_port()

    def start(self, name: str) -> None:
        """Start, or start again."""
        flags = (*TINY_FLAGS, "--gateway", f"127.0.0.1:{self.second_worker_port}")
        if name == "gateway":
            self.gateway()
        elif name.startswith("prefill"):
            self.prefill(name, *flags)
        else:
            # A stopped prefill worker is not killed before a test has woken it up.
            self.decode(name, *flags, "--kill-lost-after-seconds", "100")

    def start_missing(self) -> None:
        for name in ("decode-0", "prefill-0", "decode-1", "prefill-1", "gateway"):
            if name not in self.processes or not self.processes[name].is_running:
                self.start(name)
        deployments.wait(self.is_complete, "all workers to be paired")


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), str(tiny_model)) as cluster:
        yield cluster
        cluster.assert_holds_nothing_named()


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """Complete before every test, whatever the one before did to it; whole after every test."""
    _cluster.start_missing()
    yield _cluster
    _cluster.wait_whole()
