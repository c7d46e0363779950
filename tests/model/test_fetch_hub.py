"""Models by their id on Hugging Face: fetched from a hub in miniature by the official client, found
in its cache when the hub cannot be reached, and refused in words.

The client reads its environment once, so each case is a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdrt.model.hub import hub_id_of, is_hub_id
from pdrt.model.identity import read_identity
from tests.model.conftest import TinyModel
from tests.model.hub_server import COMMIT, Hub, serve
from tests.model.tiny import write_model

NAME = "Tiny/Llama-0.1M_v1.5"
NOWHERE = "http://127.0.0.1:9"
"""The discard port: nobody listens."""

HANG_SECONDS = 120
PATIENCE = dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), str(HANG_SECONDS))
"""Of the client: the hub has no more of a processor than the tests beside it leave."""

RESOLVE = """
import sys
from pdrt.errors import ModelError
from pdrt.model.fetch import resolve_model
try:
    name, load_format = sys.argv[1:]
    print(resolve_model(name, lambda text: print("progress:", text), load_format=load_format))
except ModelError as error:
    sys.exit(f"refused: {error}")
"""


class Client:
    """Resolves models in a process of its own, with a cache of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def run(
        self, endpoint: str, name: str = NAME, load_format: str = "auto", **environment: str
    ) -> tuple[Path | None, str]:
        """The directory, if any, and everything that was said."""
        given = {**os.environ, "HF_HOME": str(self.home), "HF_ENDPOINT": endpoint, **PATIENCE}
        result = subprocess.run(
            [sys.executable, "-c", RESOLVE, name, load_format],
            env=given | environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * HANG_SECONDS,
        )
        said = result.stdout + result.stderr
        if result.returncode != 0:
            assert "refused:" in said, said
            return None, said
        return Path(result.stdout.splitlines()[-1]), said


@pytest.fixture
def client(tmp_path: Path) -> Client:
    home = tmp_path / "home"
    home.mkdir()
    return Client(home)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A sharded model, with what a repository holds beside it."""
    folder = tmp_path / "repository"
    write_model(folder, "LlamaConfig", {}, max_shard_size="200KB")
    for other in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "model.onnx"):
        (folder / other).write_bytes(b"not wanted")
    return folder


def test_a_repository_is_fetched_once_and_found_again_without_a_hub(
    client: Client, repository: Path
) -> None:
    with serve(Hub({NAME: repository})) as hub:
        directory, said = client.run(hub.url)
        assert directory is not None
        assert f"progress: downloading {NAME}: " in said
        fetched = sorted(set(hub.fetched))
        again, said_again = client.run(hub.url)
        assert again == directory
        assert "progress" not in said_again
    unwanted = {"pytorch_model.bin", "consolidated.safetensors", "README.md", "model.onnx"}
    assert fetched == sorted({file.name for file in repository.iterdir()} - unwanted)
    identity = read_identity(directory)
    assert identity.name == NAME
    assert client.run(NOWHERE)[0] == directory
    assert client.run(NOWHERE, HF_HUB_OFFLINE="1")[0] == directory


def test_dummy_weights_need_no_weights(client: Client, repository: Path) -> None:
    with serve(Hub({NAME: repository})) as hub:
        directory, _ = client.run(hub.url, load_format="dummy")
        assert directory is not None
        assert not [name for name in hub.fetched if name.endswith(".safetensors")]
        assert read_identity(directory, "dummy") == read_identity(directory, "dummy")


def test_a_cache_that_others_filled(client: Client, tiny_model: TinyModel) -> None:
    """As `hf download` leaves it."""
    folder = client.home / "hub" / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(tiny_model("llama"), folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    directory, _ = client.run(NOWHERE)
    assert directory == folder / "snapshots" / COMMIT
    assert hub_id_of(directory) == NAME
    (directory / "model.safetensors").unlink()
    assert "has no *.safetensors" in client.run(NOWHERE)[1]


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({}, "cannot be reached"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")],
)
def test_no_hub_and_no_cache(client: Client, environment: dict[str, str], reason: str) -> None:
    directory, said = client.run(NOWHERE, **environment)
    assert directory is None
    for words in (NAME, "no such directory here", reason, "not in its cache", "give --model"):
        assert words in said


def test_refusals_of_the_hub(client: Client, repository: Path) -> None:
    with serve(Hub({NAME: repository}, gated=(NAME,))) as hub:
        assert f"{NAME} is gated: accept its terms" in client.run(hub.url)[1]
        said = client.run(hub.url, "Tiny/Nothing")[1]
        assert "no model 'Tiny/Nothing'" in said
        assert "no such public repository" in said


def test_a_repository_of_pickles_is_refused(client: Client, repository: Path) -> None:
    for file in repository.glob("*.safetensors*"):
        file.unlink()
    with serve(Hub({NAME: repository})) as hub:
        directory, said = client.run(hub.url)
        assert directory is None
        assert "has no *.safetensors" in said
        assert "pytorch_model.bin" not in hub.fetched


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", True),
        ("./models/tiny", False),
        ("/models/tiny", False),
        ("models/tiny/1", False),
        ("tiny", False),
        ("a/..", False),
        ("https://huggingface.co/Qwen/Qwen3-8B", False),
    ],
)
def test_what_looks_like_an_id(name: str, is_id: bool) -> None:
    assert is_hub_id(name) == is_id


def test_only_snapshots_of_the_cache_have_an_id() -> None:
    assert hub_id_of(Path("/cache/models--a--b/snapshots/c0ffee")) == "a/b"
    assert hub_id_of(Path("/models/snapshots/c0ffee")) is None
    assert hub_id_of(Path("/models--a--b/c0ffee")) is None
