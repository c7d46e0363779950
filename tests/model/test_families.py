"""Every supported family, loaded from disk as a user's would be, against plain transformers.

Float32; prompts in chunks that end inside of pages and beyond the window, then decoding in one
batch: the same greedy tokens and, within 1e-4, the same logits. tests/model/test_parity.py tries
more ways of batching on a few of them.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pdrt.errors import ConfigError
from pdrt.model.executor import Executor
from pdrt.model.fetch import resolve_model
from pdrt.model.fused_structure import FUSED_TYPES
from pdrt.model.identity import read_identity
from pdrt.model.native.library import load_kernels
from pdrt.model.resources import cpu_flags
from pdrt.model.support import TESTED_TYPES
from tests.model.conftest import LoadExecutor
from tests.model.families import FAMILIES, LONG, Family
from tests.model.sequences import PageSource, Run, run_step
from tests.model.tiny import EOS_ID, write_model

TOLERANCE = 1e-4
PROMPTS = (45, 18)
CHUNK = 7
OUTPUT_TOKENS = 10
HAS_KERNELS = load_kernels(cpu_flags()) is not None


def reference_logits(directory: Path, tokens: list[int], **changes: Any) -> torch.Tensor:
    """Logits (tokens, vocabulary) by transformers' eager attention, under a changed config."""
    config = AutoConfig.from_pretrained(directory, **changes)
    model = AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def generate(executor: Executor, prompts: tuple[int, ...] = PROMPTS) -> list[Run]:
    """Random prompts of these lengths, prefilled chunk by chunk side by side, decoded together."""
    rng = random.Random(1)
    source = PageSource(executor)
    vocabulary = executor.identity.vocab_size
    runs = [
        Run(
            executor,
            source,
            [rng.randrange(EOS_ID + 1, vocabulary) for _ in range(length)],
            length + OUTPUT_TOKENS,
        )
        for length in prompts
    ]
    while pending := [run for run in runs if run.computed < run.prompt]:
        run_step(executor, [(run, CHUNK) for run in pending])
    while pending := [run for run in runs if len(run.output) < OUTPUT_TOKENS]:
        run_step(executor, [(run, 1) for run in pending])
    return runs


def check(directory: Path, runs: list[Run], **changes: Any) -> None:
    for run in runs:
        expected = reference_logits(directory, run.tokens[:-1], **changes)[run.prompt - 1 :]
        torch.testing.assert_close(torch.stack(run.logits), expected, atol=TOLERANCE, rtol=0)
        assert run.output == expected.argmax(dim=-1).tolist()


def is_fused(executor: Executor) -> bool:
    return executor.description.startswith("fused decoder")


def as_param(family: Family) -> Any:
    return pytest.param(family, id=family.name, marks=[pytest.mark.slow] * family.is_slow)


@pytest.mark.parametrize("family", [as_param(family) for family in FAMILIES])
def test_a_family_is_what_transformers_computes(
    tmp_path: Path, load_executor: LoadExecutor, family: Family
) -> None:
    # Small enough that rounding is not blown up, large enough that every layer tells.
    settings = {"initializer_range": 0.12, **family.settings}
    write_model(tmp_path, family.config, settings)
    executor = load_executor(tmp_path, page_size=4)
    assert is_fused(executor) == (HAS_KERNELS and family.model_type in FUSED_TYPES)
    runs = generate(executor)
    check(tmp_path, runs)
    if family.has_window:
        tokens = runs[0].tokens[:-1]
        seen = reference_logits(tmp_path, tokens)[-1]
        unseen = reference_logits(tmp_path, tokens, sliding_window=512)[-1]
        assert (seen - unseen).abs().max() > 100 * TOLERANCE, "the window changes nothing here"


def test_the_table_holds_what_is_admitted() -> None:
    assert {family.model_type for family in FAMILIES} == TESTED_TYPES


def test_the_document_names_what_is_admitted() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    table = text.partition("## Families")[2].partition("A kind that is not listed")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", column(line))}
    assert named == TESTED_TYPES


def column(line: str) -> str:
    """The one of the types, of a line of the table."""
    cells = line.split("|")
    return cells[2] if len(cells) == 5 and cells[2].strip() != "`model_type`" else ""


def test_shards_are_read(tmp_path: Path, load_executor: LoadExecutor) -> None:
    write_model(tmp_path, "LlamaConfig", {}, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert (tmp_path / "model.safetensors.index.json").is_file()
    check(tmp_path, generate(load_executor(tmp_path, page_size=4)))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_bfloat16_checkpoint_computed_in_float32(
    tmp_path: Path, load_executor: LoadExecutor, key: str
) -> None:
    """Both names of the key that transformers has had."""
    write_model(tmp_path, "Qwen2Config", {}, dtype=torch.bfloat16)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("dtype") == "bfloat16"
    path.write_text(json.dumps({**config, key: "bfloat16"}))
    executor = load_executor(tmp_path, page_size=4)
    assert executor.layout.dtype == "float32"
    check(tmp_path, generate(executor))
    in_its_own = load_executor(tmp_path, page_size=4, dtype="bfloat16")
    assert in_its_own.layout.dtype == "bfloat16"
    assert len(generate(in_its_own, (9,))[0].output) == OUTPUT_TOKENS


def test_a_list_of_ends(tmp_path: Path) -> None:
    write_model(tmp_path, "LlamaConfig", {})
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, 7]}))
    directory = resolve_model(str(tmp_path), pytest.fail)
    assert read_identity(directory).eos_token_ids == (2, 7)


class TestLongrope:
    """Phi-3-128k and Phi-4-mini: which factors is fixed when the model is loaded."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        write_model(tmp_path, "Phi3Config", {**LONG, "original_max_position_embeddings": 64})
        return tmp_path

    def test_short_factors_up_to_the_original_length(
        self, directory: Path, load_executor: LoadExecutor
    ) -> None:
        executor = load_executor(directory, page_size=4, max_model_len=64)
        runs = generate(executor, (54, 18))
        assert max(len(run.tokens) for run in runs) == 64
        check(directory, runs)

    def test_long_factors_for_all_where_more_may_come(
        self, directory: Path, load_executor: LoadExecutor
    ) -> None:
        executor = load_executor(directory, page_size=4)
        runs = generate(executor, (90, 18))
        check(directory, runs[:1])
        # The short one is rotated as the long ones are, whatever else is in the batch.
        long = LONG["rope_parameters"]["long_factor"]
        always_long = {**LONG["rope_parameters"], "short_factor": long}
        check(directory, runs[1:], rope_parameters=always_long)

    def test_workers_that_rotate_differently_are_never_paired(
        self, directory: Path, load_executor: LoadExecutor
    ) -> None:
        short, long = (load_executor(directory, max_model_len=n).identity for n in (64, 65))
        assert long.digest == f"{short.digest}+longrope"


def test_the_models_length_is_the_longest(tmp_path: Path, load_executor: LoadExecutor) -> None:
    """Dynamic rope would change beyond it."""
    write_model(tmp_path, "LlamaConfig", {"max_position_embeddings": 64})
    with pytest.raises(ConfigError, match="takes 1 to 64 tokens"):
        load_executor(tmp_path, max_model_len=65)
