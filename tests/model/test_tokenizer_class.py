"""The class that reads a tokenizer is the one that transformers takes, and needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from pdrt.model.support import TESTED_TYPES
from pdrt.model.tokenizer import Tokenizer
from pdrt.model.tokenizer_class import PARTICULAR_NAMES, tokenizer_class
from tests.model.tiny import make_tokenizer

NAMES = (
    *sorted(PARTICULAR_NAMES), "GPT2TokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast",
    "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "NoSuchTokenizer", None,
)  # fmt: skip
TEXTS = ("Hello, world", "  two spaces\n\ttab", "<|im_start|>user\nhé 😀<|im_end|>", "")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def change(directory: Path, **entries: Any) -> None:
    """Entries of tokenizer_config.json; None takes one away."""
    path = directory / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_class_that_transformers_takes(directory: Path, name: str | None) -> None:
    change(directory, tokenizer_class=name)
    for model_type in sorted(TESTED_TYPES):
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
        chosen = tokenizer_class(directory)
        if chosen is not None:
            taken = transformers.AutoTokenizer.from_pretrained(directory)
            assert getattr(transformers, chosen) is type(taken), model_type


@pytest.mark.parametrize(
    ("name", "model_type", "chosen"),
    [
        ("PreTrainedTokenizerFast", "llama", "PreTrainedTokenizerFast"),
        ("TokenizersBackend", "qwen3", "PreTrainedTokenizerFast"),
        ("GPT2Tokenizer", "llama", "GPT2Tokenizer"),
        ("LlamaTokenizer", "mistral", "PreTrainedTokenizerFast"),
        ("Qwen2Tokenizer", "qwen3", "Qwen2Tokenizer"),
        ("PreTrainedTokenizerFast", "qwen2", "Qwen2Tokenizer"),
        ("GemmaTokenizerFast", "gemma2", "GemmaTokenizer"),
    ],
)
def test_well_known_models_are_told_without_asking(
    directory: Path, name: str, model_type: str, chosen: str
) -> None:
    change(directory, tokenizer_class=name)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert tokenizer_class(directory) == chosen


def test_what_is_unusual_is_left_to_transformers(directory: Path) -> None:
    assert tokenizer_class(directory) is not None
    change(directory, tokenizer_class="LlamaTokenizer")
    assert tokenizer_class(directory) is None, "depends on what is in tokenizer.json"
    change(directory, tokenizer_class="PreTrainedTokenizerFast", auto_map={"AutoTokenizer": []})
    assert tokenizer_class(directory) is None
    change(directory, auto_map=None)
    (directory / "tekken.json").write_text("{}")
    assert tokenizer_class(directory) is None
    (directory / "tekken.json").unlink()
    (directory / "config.json").unlink()
    assert tokenizer_class(directory) is None


@pytest.mark.parametrize("broken", ["", "[]", '{"tokenizer_class": 7}', "\udcff"])
def test_broken_files_are_left_to_transformers(directory: Path, broken: str) -> None:
    path = directory / "tokenizer_config.json"
    path.write_bytes(broken.encode(errors="surrogateescape"))
    assert tokenizer_class(directory) is None


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"])
def test_it_reads_as_transformers_does(directory: Path, name: str) -> None:
    change(directory, tokenizer_class=name)
    ours, theirs = Tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids) == theirs.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
    messages = [{"role": "user", "content": "Hello"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == expected


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", *sorted(PARTICULAR_NAMES)])
def test_no_torch_comes_along(directory: Path, name: str) -> None:
    """Not with the gateway's modules either; a chat is rendered, for what is imported only then."""
    change(directory, tokenizer_class=name)
    # Gemma's makes a vocabulary of another kind out of the file's, in which this text is nothing.
    text = "" if name == "GemmaTokenizer" else "Hello"
    code = f"""
import sys
from pathlib import Path
import pdrt.gateway.server
from pdrt.model.tokenizer import Tokenizer
tokenizer = Tokenizer(Path({str(directory)!r}))
tokenizer.render_chat([{{"role": "user", "content": "Hello"}}])
tokenizer.decode(tokenizer.encode({text!r}))
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
