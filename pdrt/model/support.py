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
UNEVEN_KEYS = ("block_configs", "global_head_dim", "num_global_key_value_heads", "num_query_heads")
SINK_MODELS = frozenset({"gpt_oss", "mimo_v2", "mimo_v2_flash"})
PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
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
        or (
            None
            if architecture.endswith(CAUSAL_SUFFIXES)
            else "it is not a causal language model (…ForCausalLM)"
        )
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
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict):
        return None
    # One set of parameters, or one per type of layer.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in BATCH_DEPENDENT_ROPE:
            return (
                f"its rope_type {kind!r} rotates keys by the longest sequence of a batch, "
                "so that KV computed in chunks, or elsewhere, would differ"
            )
    return None
