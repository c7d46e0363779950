"""Architectures that the pool cannot hold are refused by name, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from pdrt.errors import ModelError
from pdrt.model.support import check_supported
from tests.model.conftest import LoadExecutor, TinyModel
from tests.model.tiny import FAMILIES, make_tiny_model

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
    ("BertForMaskedLM", {"model_type": "bert"}, "not a causal"),
    ("Phi3ForCausalLM", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    (
        "GemmaForCausalLM",
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
        "dynamic",
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


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_supported_families_pass(family: str, tiny_model: TinyModel) -> None:
    from pdrt.model.identity import read_identity

    assert read_identity(tiny_model(family)).architecture.endswith("ForCausalLM")


def test_a_class_without_the_attention_interface_is_refused(
    tmp_path: Any, load_executor: LoadExecutor
) -> None:
    from transformers import MptConfig

    directory = make_tiny_model(tmp_path)
    MptConfig(d_model=64, n_heads=4, n_layers=2, max_seq_len=128, architectures=["MptForCausalLM"],
              max_position_embeddings=128).save_pretrained(directory)  # fmt: skip
    with pytest.raises(ModelError, match="MptForCausalLM is not supported"):
        load_executor(directory)
