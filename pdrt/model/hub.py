"""Models from Hugging Face by their id, through the official client: its cache (`HF_HOME`), its
token (`HF_TOKEN`) and its `HF_HUB_OFFLINE` are in force. Safetensors only, never pickles.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdrt.errors import ModelError

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
WEIGHTS = ("*.safetensors",)
SKIPPED = ("*/*", "consolidated*")
"""What is in folders belongs to other frameworks; consolidated weights are the same ones again."""
REPORT_SECONDS = 10.0

Progress = Callable[[str], None]


def is_hub_id(name: str) -> bool:
    """Whether this can be the id of a repository: `organization/name`."""
    return ID.fullmatch(name) is not None


def hub_id_of(directory: Path) -> str | None:
    """The id of the repository that a folder of the client's cache is a snapshot of, or None."""
    repository = directory.parent.parent.name
    if directory.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")


def download(repository: str, with_weights: bool, progress: Progress) -> Path:
    """The newest snapshot of a repository, fetched where it is not in the cache yet; what is in
    the cache where the hub cannot be reached.

    Raises:
        ModelError: there is no such repository, it needs a token, or it cannot be fetched.
    """
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError as NotFound

    patterns = (*SMALL_FILES, *WEIGHTS) if with_weights else SMALL_FILES
    try:
        return _fetch(repository, patterns, progress)
    except GatedRepoError as error:
        raise ModelError(
            f"{repository} is gated: accept its terms at https://huggingface.co/{repository}, "
            "then set HF_TOKEN or run `hf auth login`"
        ) from error
    except NotFound as error:
        raise ModelError(
            f"no model {repository!r}: there is no such directory here, and no such public "
            "repository on Hugging Face (for a private one, set HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"no model {repository!r}: there is no such directory here, {_absence(error)}; where "
            "there is no network, give --model a directory or a GGUF file"
        ) from error
    # The client raises what its HTTP library, the file system or its threads do.
    except Exception as error:
        raise ModelError(f"cannot fetch {repository} from Hugging Face: {error}") from error


def _absence(error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import IncompleteSnapshotError

    kept = "is in its cache in part only" if isinstance(error, IncompleteSnapshotError) else (
        f"is not in its cache ({constants.HF_HUB_CACHE})"
    )  # fmt: skip
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, and the repository {kept}"
    reason = error.__cause__ or error
    return f"Hugging Face cannot be reached ({reason}), and the repository {kept}"


def _fetch(repository: str, patterns: tuple[str, ...], progress: Progress) -> Path:
    from huggingface_hub import constants, snapshot_download, utils
    from huggingface_hub.errors import DryRunError
    from huggingface_hub.file_download import repo_folder_name

    # Several processes report through one terminal, which its bars would tear apart.
    bars: Any = utils
    bars.disable_progress_bars()
    wanted: dict[str, Any] = {
        "repo_id": repository,
        "allow_patterns": list(patterns),
        "ignore_patterns": list(SKIPPED),
    }
    folder = repo_folder_name(repo_id=repository, repo_type="model")
    blobs = Path(constants.HF_HUB_CACHE) / folder / "blobs"
    try:
        missing = [file for file in snapshot_download(**wanted, dry_run=True) if file.will_download]
    except DryRunError:
        # The hub cannot be reached, which its cache may make up for.
        return Path(snapshot_download(**wanted))
    size = sum(file.file_size for file in missing)
    if missing:
        progress(f"downloading {repository}: {len(missing)} files, {size / 1e6:.0f} MB")
    with _reported(repository, blobs, size, progress):
        return Path(snapshot_download(**wanted))


@contextmanager
def _reported(repository: str, blobs: Path, size: int, progress: Progress) -> Iterator[None]:
    """Say from time to time how much has come, by what is on disk."""
    done = threading.Event()
    before = _bytes_in(blobs)

    def report() -> None:
        while not done.wait(REPORT_SECONDS):
            come = min(size, _bytes_in(blobs) - before)
            progress(f"downloading {repository}: {come / 1e6:.0f} of {size / 1e6:.0f} MB")

    thread = threading.Thread(target=report, name="pdrt-download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            # Renamed, once complete, in between.
            continue
    return total
