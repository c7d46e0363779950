"""Architectures that the pool cannot hold are refused by name, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import transformers

from pdrt.errors import ModelError
from pdrt.model import support
from pdrt.model.batch import Row
from pdrt.model.support import check_supported, longrope_limit
from tests.model.conftest import LoadExecutor, TinyModel, UseForward
from tests.model.tiny import write_model

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("JambaForCausalLM", {"model_type": "jamba"}, "state-space"),
    ("MambaForCausalLM", {"model_type": "mamba"}, "state-space"),
    ("Qwen3NextForCausalLM", {"model_type": "qwen3_next"}, "state-space"),
    ("NewForCausalLM", {"layer_types": ["full_attention", "linear_attention"]}, "state-space"),
    ("NewForCausalLM", {"mamba_d_state": 16}, "state-space"),
    ("DeepseekV3ForCausalLM", {"kv_lora_rank": 512}, "MLA"),
    ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "encoder-decoder"),
    ("GptOssForCausalLM", {"model_type": "gpt_oss"}, "attention sinks"),
    ("Llama4ForCausalLM", {"layer_types": ["chunked_attention"]}, "chunked"),
    ("Gemma3nForCausalLM", {"num_kv_shared_layers": 10}, "share KV"),
    ("OpenELMForCausalLM", {"num_kv_heads": [3, 4, 5]}, "differ"),
    ("DeciLMForCausalLM", {"block_configs": [{}]}, "differ"),
    ("OddForCausalLM", {"head_dim": 64, "v_head_dim": 128}, "128 elements"),
    ("OddForCausalLM", {"layer_types": ["indexed_attention"]}, "'indexed_attention'"),
    ("Gemma3ForConditionalGeneration", {"text_config": {}, "vision_config": {}}, "multimodal"),
    ("Qwen2VLForConditionalGeneration", {"vision_config": {"depth": 2}}, "text-only version"),
    ("Llama4ForConditionalGeneration", {"text_config": {}}, "multimodal"),
    ("BertForMaskedLM", {"model_type": "bert"}, "not a causal"),
    ("LlamaForSequenceClassification", {"model_type": "llama"}, "not a causal"),
    ("BloomForCausalLM", {"model_type": "bloom"}, "'bloom' has not been tested"),
    (
        "PlamoForCausalLM",
        {"model_type": "plamo", "auto_map": {"AutoModelForCausalLM": "modeling_plamo.Plamo"}},
        "such code is never run",
    ),
    ("PhimoeForCausalLM", {"model_type": "phimoe"}, "'phimoe' has not been tested"),
    (
        "GemmaForCausalLM",
        {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
        "longrope",
    ),
]


@pytest.mark.parametrize(("architecture", "config", "reason"), REFUSED)
def test_refused_by_name(architecture: str, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError) as refusal:
        check_supported({"architectures": [architecture], **config})
    assert architecture in str(refusal.value)
    assert reason in str(refusal.value)


def test_no_architecture_is_refused() -> None:
    with pytest.raises(ModelError, match="no architectures"):
        check_supported({"model_type": "llama"})


def test_code_of_a_repository_is_not_needed_where_transformers_has_the_model() -> None:
    """Phi-3's says so too."""
    auto_map = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    check_supported(
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "auto_map": auto_map}
    )


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 8}}, None),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 4096),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 8}},
            8,
        ),
    ],
)
def test_where_long_factors_begin(config: dict[str, Any], limit: int | None) -> None:
    assert longrope_limit(config) == limit


def test_long_factors_that_begin_nowhere() -> None:
    with pytest.raises(ModelError, match="no original_max_position_embeddings"):
        longrope_limit({"rope_scaling": {"type": "longrope"}})


NOTICED: list[tuple[str, dict[str, Any], str]] = [
    ("DiffLlamaConfig", {}, "does not attend once per layer"),
    ("StableLmConfig", {}, "does not hand keyword arguments down"),
    ("DogeConfig", {}, "builds its own attention mask"),
    ("JetMoeConfig", {"num_local_experts": 4, "kv_channels": 16}, "its KV is not uniform"),
    ("BloomConfig", {"n_head": 4, "n_layer": 2}, "only 0 of 3 layers attend over pages"),
]


@pytest.mark.parametrize(("name", "settings", "reason"), NOTICED)
def test_what_a_configuration_does_not_show_is_noticed_at_load(
    tmp_path: Path, load_executor: LoadExecutor, name: str, settings: dict[str, Any], reason: str
) -> None:
    """Even a type that were admitted by mistake would not be served."""
    write_model(tmp_path, name, settings)
    with pytest.raises(ModelError, match="has not been tested"):
        load_executor(tmp_path)
    admitted = {getattr(transformers, name).model_type}
    with (
        patch.object(support, "TESTED_TYPES", admitted),
        pytest.raises(ModelError, match=reason),
    ):
        load_executor(tmp_path)


def test_layers_that_do_not_attend_are_noticed(
    tiny_model: TinyModel, load_executor: LoadExecutor, use_forward: UseForward
) -> None:
    use_forward("sdpa")
    executor = load_executor(tiny_model("llama"))
    model: Any = executor._model
    del model._module.model.layers[-1]
    model._module.config.num_hidden_layers -= 1
    with pytest.raises(ModelError, match="only 2 of 3 layers attend"):
        executor.step_blocking([Row(token_ids=[5, 6], start=0, pages=[0], sampling=None)])
