"""Which architectures the KV pool can hold: refused by name, with the reason. Pure.

The pool knows one shape of KV for all layers: keys and values of `kv_heads * head_dim` per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdrt.errors import ModelError

ENCODER_DECODER = "it is an encoder-decoder model; only decoder-only models are supported"
MULTIMODAL = "it is a multimodal model; only text models are supported (use its text-only version)"
STATE_LAYERS = (
    "it has state-space or linear-attention layers, whose state is not KV that pages can hold"
)
LATENT = "its multi-head latent attention (MLA) keeps compressed KV of another shape"
SINKS = "its attention sinks are not known to the attention backends"
CHUNKED = "its chunked attention is not known to the attention backends"
UNEVEN = "its layers differ in the number or size of KV heads"
SHARED = "its layers share KV with each other"

STATE_MODELS = frozenset({
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_next",
    "recurrent_gemma", "rwkv", "rwkv7", "xlstm", "zamba", "zamba2",
})  # fmt: skip
STATE_KEYS = (
    "attn_layer_period", "conv_L_cache", "d_state", "hybrid_override_pattern", "layers_block_type",
    "linear_attn_config", "linear_num_key_heads", "mamba_d_state", "mamba_expand", "ssm_cfg",
    "state_size",
)  # fmt: skip
MULTIMODAL_KEYS = ("vision_config", "audio_config", "text_config", "speech_config")
TESTED_TYPES = frozenset({
    "apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "ernie4_5_moe", "exaone4",
    "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2",
    "gpt_bigcode", "gpt_neox", "granite", "granitemoe", "granitemoeshared", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm3", "llama", "minimax_m2", "ministral",
    "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "solar_open", "starcoder2", "vaultgemma",
})  # fmt: skip
"""Values of `model_type` that tests/model/test_families.py compares with transformers. Another one
may run, and may be silently wrong: whoever needs it adds a line here and one there."""
UNEVEN_KEYS = ("block_configs", "global_head_dim", "num_global_key_value_heads", "num_query_heads")
SINK_MODELS = frozenset({"gpt_oss", "mimo_v2", "mimo_v2_flash"})
PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
LONGROPE_TYPES = frozenset({"longrope", "su"})
CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")


def check_supported(config: Mapping[str, Any]) -> None:
    """Refuse a model, given its config.json, that the pool or the attention cannot serve.

    What a configuration does not show (a model that ignores the attention interface) is refused
    when the model is loaded.

    Raises:
        ModelError: names the architecture and the reason.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelError("config.json names no architectures; is this a Hugging Face model?")
    reason = _refusal(str(architectures[0]), config)
    if reason is not None:
        raise ModelError(f"{architectures[0]} is not supported: {reason}")


def longrope_limit(config: Mapping[str, Any]) -> int | None:
    """Tokens up to which a `longrope` model (Phi-3 and 4) rotates by its short factors, or None
    for a model of another kind. Which set of factors is used is fixed at load, by whether
    `max_model_len` is above this: a sequence never changes over, as its earlier keys could not.

    Raises:
        ModelError: the model has such factors and does not say where they begin.
    """
    rope = _rope(config)
    if not _is_longrope(rope):
        return None
    key = "original_max_position_embeddings"
    limit = config.get(key) or rope.get(key)
    if not isinstance(limit, int) or limit < 1:
        raise ModelError(f"config.json has rope_type longrope, but no {key}")
    return limit


def _refusal(architecture: str, config: Mapping[str, Any]) -> str | None:
    model_type = config.get("model_type")
    if any(isinstance(config.get(key), dict) for key in MULTIMODAL_KEYS):
        return MULTIMODAL
    if config.get("is_encoder_decoder"):
        return ENCODER_DECODER
    if model_type in STATE_MODELS or any(config.get(key) for key in STATE_KEYS):
        return STATE_LAYERS
    if config.get("kv_lora_rank"):
        return LATENT
    if model_type in SINK_MODELS:
        return SINKS
    return (
        _refused_layers(config)
        or _refused_heads(config)
        or _refused_rope(config)
        or _refused_type(architecture, config)
    )


def _refused_type(architecture: str, config: Mapping[str, Any]) -> str | None:
    model_type = config.get("model_type")
    if model_type in TESTED_TYPES:
        if architecture.endswith(CAUSAL_SUFFIXES):
            return None
        return "it is not a causal language model (…ForCausalLM)"
    if "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        return "it needs code from its own repository (auto_map), and such code is never run"
    if not architecture.endswith(CAUSAL_SUFFIXES):
        return "it is not a causal language model (…ForCausalLM)"
    return (
        f"its model_type {model_type!r} has not been tested against transformers; "
        f"tested are {', '.join(sorted(TESTED_TYPES))}"
    )


def _refused_layers(config: Mapping[str, Any]) -> str | None:
    kinds = set(config.get("layer_types") or ())
    if "chunked_attention" in kinds or config.get("attention_chunk_size"):
        return CHUNKED
    if kinds & {"linear_attention", "conv", "mamba", "recurrent"}:
        return STATE_LAYERS
    if other := sorted(kinds - PLAIN_LAYERS):
        return f"its layers of type {other[0]!r} are not known"
    return None


def _refused_heads(config: Mapping[str, Any]) -> str | None:
    if config.get("num_kv_shared_layers") or (config.get("cla_share_factor") or 1) > 1:
        return SHARED
    heads = (config.get("num_key_value_heads"), config.get("num_kv_heads"))
    if any(isinstance(count, list) for count in heads):
        return UNEVEN
    if any(config.get(key) for key in UNEVEN_KEYS):
        return UNEVEN
    value_dim, head_dim = config.get("v_head_dim"), config.get("head_dim")
    if value_dim and head_dim and value_dim != head_dim:
        return f"its values have {value_dim} elements per head where its keys have {head_dim}"
    return None


def _refused_rope(config: Mapping[str, Any]) -> str | None:
    # `dynamic` changes only beyond the model's own length, which is never served.
    nested = [value for value in _rope(config).values() if isinstance(value, dict)]
    if any(_is_longrope(value) for value in nested):
        return "its rope_type 'longrope' differs by type of layer, which is not known"
    return None


def _is_longrope(rope: Mapping[str, Any]) -> bool:
    return rope.get("rope_type", rope.get("type")) in LONGROPE_TYPES


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}
