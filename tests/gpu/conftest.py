"""All tests in this folder need a GPU, and are left out where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.sender import Sending
from tests.model.tiny import write_model

FOLDER = Path(__file__).parent
SHAPE = {
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.05,
}
"""Of SmolLM2-360M, with a small vocabulary. Weights this large make outputs depend on all of the
prompt, where smaller ones only repeat its last token."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a real shape, float32."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, "LlamaConfig", SHAPE)
    return directory


@pytest.fixture(scope="module")
def sending() -> Iterator[Sending]:
    """A prefill rank in another process, and the pool here that it sends to."""
    sending = Sending()
    yield sending
    sending.end()
