"""Which class of transformers reads a model's tokenizer.

`AutoTokenizer` decides it, and imports torch for that: 3 s and 230 MB that a gateway has no other
use for. For most models its decision is a small table, which stands here and which
tests/model/test_tokenizer_class.py compares with it; every other case is left to it. The classes,
and so all that they do, are transformers' own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PLAIN = "PreTrainedTokenizerFast"
"""Reads tokenizer.json as it is. `TokenizersBackend` is its other name."""
PLAIN_NAMES = frozenset({"PreTrainedTokenizer", "TokenizersBackend"})
PLAIN_TYPES = frozenset({
    "ernie4_5", "ernie4_5_moe", "flex_olmo", "glm", "glm4", "glm4_moe", "gpt_bigcode", "granite",
    "granitemoe", "granitemoeshared", "internlm3", "minimax_m2", "ministral", "ministral3",
    "mistral", "mixtral", "olmo2", "olmo3", "phi3",
})  # fmt: skip
"""Values of config.json's `model_type` that get the plain class, whatever theirs is said to be."""
PARTICULAR_NAMES = frozenset({
    "CohereTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "GemmaTokenizer", "Qwen2Tokenizer",
})  # fmt: skip
"""Classes that the other types get when tokenizer_config.json names them."""
MISTRAL_FILE = "tekken.json"
"""Where it is, Mistral's own library may be used instead."""


def tokenizer_class(directory: Path) -> str | None:
    """Name, in transformers, of the class that `AutoTokenizer` takes for the tokenizer of a model;
    None where only it can tell."""
    if not (directory / "tokenizer.json").is_file() or (directory / MISTRAL_FILE).exists():
        return None
    settings = _read(directory / "tokenizer_config.json")
    named = settings.get("tokenizer_class")
    model_type = _read(directory / "config.json").get("model_type")
    if "auto_map" in settings or not isinstance(named, str) or not isinstance(model_type, str):
        return None
    return _choose(named.removesuffix("Fast"), model_type)


def _choose(name: str, model_type: str) -> str | None:
    if model_type == "qwen2":
        return "Qwen2Tokenizer"
    if model_type in PLAIN_TYPES or name in PLAIN_NAMES:
        return PLAIN
    return name if name in PARTICULAR_NAMES else None


def _read(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty if there is none, whatever is there instead."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
