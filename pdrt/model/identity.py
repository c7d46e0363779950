"""Which model a directory holds, and whether this runtime can serve it. Imports no torch.

Prefill and decode pair only if their identities are equal; the gateway reads names and limits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from pdrt.errors import ConfigError, ModelError
from pdrt.model.hub import hub_id_of
from pdrt.model.support import check_supported, longrope_limit
from pdrt.sampling import SamplingDefaults

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
LoadFormat = Literal["auto", "dummy"]
VOLATILE_KEYS = ("transformers_version", "_name_or_path")
"""Keys of config.json that say who wrote it, not what the model is."""
SAMPLE_BYTES = 4096
SAMPLES_PER_FILE = 64
"""A fine-tune has its base's shapes: a few bytes of every file of weights tell them apart."""


class ModelIdentity(msgspec.Struct, frozen=True):
    """What both sides of a hand-over must agree on about the model."""

    name: str
    """The directory's name; clients see it unless a served name is configured."""
    digest: str
    """Hex digits: configuration, tokenizer, shapes and samples of the weights; then, each after a
    `+`, how a worker differs from the model as it is (`+int8`, `+longrope`)."""
    max_model_len: int
    """Prompt and output tokens at most."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    architecture: str
    """Class name, as in LlamaForCausalLM."""
    longrope_limit: int | None = None
    """See `pdrt.model.support.longrope_limit`."""
    sampling: SamplingDefaults = SamplingDefaults()
    """As vLLM takes them from generation_config.json."""


def read_identity(directory: Path, load_format: LoadFormat = "auto") -> ModelIdentity:
    """Identity of the model in `directory`.

    Raises:
        ModelError: a file is missing or unreadable, or the architecture is not supported.
    """
    config = read_json(directory / "config.json")
    check_supported(config)
    generation = {}
    if (directory / "generation_config.json").exists():
        generation = read_json(directory / "generation_config.json")
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    return ModelIdentity(
        name=hub_id_of(directory) or directory.name,
        digest=_digest(directory, config, load_format),
        max_model_len=_integer(config, ("max_position_embeddings", "n_positions", "n_ctx")),
        vocab_size=_integer(config, ("vocab_size",)),
        eos_token_ids=tuple(_as_ids(eos)),
        architecture=config["architectures"][0],
        longrope_limit=longrope_limit(config),
        sampling=_sampling_defaults(generation),
    )


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Values that a client could not ask for are left out."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(SamplingDefaults):
        try:
            found[field.name] = msgspec.convert(generation[field.name], field.type)
        except (KeyError, msgspec.ValidationError):
            continue
    return SamplingDefaults(**found)


def base_digest(digest: str) -> str:
    """The digest without what a worker's own flags add: what a gateway compares with its own."""
    return digest.partition("+")[0]


def check_length(identity: ModelIdentity, max_model_len: int | None) -> None:
    """Raises ConfigError when `--max-model-len` is longer than the model's own, or not positive."""
    if max_model_len is not None and not 1 <= max_model_len <= identity.max_model_len:
        raise ConfigError(
            f"--max-model-len {max_model_len}: {identity.name} takes 1 to "
            f"{identity.max_model_len} tokens"
        )


def read_served_identity(directory: Path) -> tuple[ModelIdentity, tuple[str, ...]]:
    """Identity of the model in `directory` as a gateway serves it, and the base digests that its
    workers may have: with its weights, if it has any, and with dummies (`--load-format dummy`).

    Raises:
        ModelError: as `read_identity`.
    """
    dummy = read_identity(directory, "dummy")
    if not any(directory.glob("*.safetensors")):
        return dummy, (dummy.digest,)
    identity = read_identity(directory)
    return identity, (identity.digest, dummy.digest)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: it is missing or is not a JSON object; names the file.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"cannot read {path}: it holds no JSON object")
    return value


def _integer(config: Mapping[str, Any], names: Iterable[str]) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"config.json has no {' or '.join(names)}")


def _as_ids(eos: object) -> list[int]:
    if eos is None:
        return []
    ids: list[Any] = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(f"eos_token_id is {eos!r}, expected a token id or a list of them")
    return ids


def _digest(directory: Path, config: Mapping[str, Any], load_format: str) -> str:
    digest = hashlib.sha256()
    stable = {key: value for key, value in config.items() if key not in VOLATILE_KEYS}
    _add(digest, "config", json.dumps(stable, sort_keys=True).encode())
    _add(digest, "load_format", load_format.encode())
    for name in TOKENIZER_FILES:
        if (directory / name).exists():
            _add(digest, name, (directory / name).read_bytes())
    if load_format == "auto":
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{directory} has no *.safetensors weights")
        for path in files:
            _add_weights(digest, path)
    return digest.hexdigest()[:32]


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    # Length-prefixed, so that no two sequences of parts read as the same bytes.
    digest.update(f"{name}\0{len(content)}\0".encode())
    digest.update(content)


def _add_weights(digest: hashlib._Hash, path: Path) -> None:
    """The header of a safetensors file (names, shapes, dtypes) and samples of what follows."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= size - 8:
            raise ModelError(
                f"{path} is not a safetensors file, or is cut short (or a pointer of git lfs: "
                "`git lfs pull` fetches what it points to)"
            )
        _add(digest, path.name, file.read(header_bytes))
        first = 8 + header_bytes
        for index in range(SAMPLES_PER_FILE):
            file.seek(first + (size - first) * index // SAMPLES_PER_FILE)
            _add(digest, str(size), file.read(SAMPLE_BYTES))
