"""The table of supported model families: how a tiny one of each is configured.

One line per kind of model; the settings are those that change what attention, rotation or
multipliers do, at values that a mistake could not hide behind.
"""

from __future__ import annotations

from typing import Any

import msgspec
import transformers

from tests.model.tiny import ALTERNATING, WINDOW

WINDOWED = {"sliding_window": WINDOW}
MIXED = {"sliding_window": WINDOW, "layer_types": ALTERNATING}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
GPT2 = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "num_key_value_heads": None,
    "head_dim": None,
}
EVERY_HEAD = {"num_key_value_heads": None}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


class Family(msgspec.Struct, frozen=True):
    """One kind of model."""

    name: str
    config: str
    """Name of transformers' configuration class."""
    settings: dict[str, Any] = {}
    is_slow: bool = False
    """One of the many relatives: runs with `--all`."""

    @property
    def model_type(self) -> str:
        kind: str = getattr(transformers, self.config).model_type
        return kind

    @property
    def has_window(self) -> bool:
        return self.settings.get("sliding_window") == WINDOW and self.settings.get(
            "use_sliding_window", True
        )


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LONG = rope(
    "longrope",
    short_factor=[1.0 + n / 8 for n in range(8)],
    long_factor=[2.0 + n for n in range(8)],
    original_max_position_embeddings=64,
)

FAMILIES = [
    Family("llama", "LlamaConfig"),
    Family("llama-tied", "LlamaConfig", {"tie_word_embeddings": True}),
    Family("llama-llama3-rope", "LlamaConfig", LLAMA3),
    Family("llama-biases", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    Family("llama-linear-rope", "LlamaConfig", rope("linear", factor=4.0), is_slow=True),
    # Within the model's own length, which is all that is served, it is plain.
    Family("llama-dynamic-rope", "LlamaConfig", rope("dynamic", factor=4.0), is_slow=True),
    Family("mistral", "MistralConfig", WINDOWED),
    Family("ministral", "MinistralConfig", MIXED, is_slow=True),
    Family("ministral3", "Ministral3Config", is_slow=True),
    Family(
        "qwen2-upper-layers-windowed",
        "Qwen2Config",
        {**WINDOWED, "use_sliding_window": True, "max_window_layers": 1},
    ),
    Family("qwen2.5-window-off", "Qwen2Config", {**WINDOWED, "use_sliding_window": False}),
    Family(
        "qwen2.5-yarn",
        "Qwen2Config",
        rope("yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    Family("qwen3", "Qwen3Config"),
    Family(
        "qwen3-windowed",
        "Qwen3Config",
        {**WINDOWED, "use_sliding_window": True, "max_window_layers": 2},
        is_slow=True,
    ),
    Family("gemma", "GemmaConfig"),
    Family(
        "gemma2",
        "Gemma2Config",
        {
            **MIXED,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    Family("gemma3", "Gemma3TextConfig", {**MIXED}),
    Family("vaultgemma", "VaultGemmaConfig", {**MIXED}, is_slow=True),
    Family("phi", "PhiConfig", {"partial_rotary_factor": 0.5}),
    Family("phi3", "Phi3Config", WINDOWED),
    Family("phi3-partial", "Phi3Config", {"partial_rotary_factor": 0.75}),
    Family("olmo", "OlmoConfig", {"clip_qkv": 4.0}),
    Family("olmo2", "Olmo2Config"),
    Family("olmo3", "Olmo3Config", MIXED),
    Family("olmoe", "OlmoeConfig", EXPERTS),
    Family("flex-olmo", "FlexOlmoConfig", EXPERTS, is_slow=True),
    Family("granite", "GraniteConfig", MULTIPLIERS),
    Family("granite-moe", "GraniteMoeConfig", {**LOCAL_EXPERTS, **MULTIPLIERS}),
    Family(
        "granite-moe-shared",
        "GraniteMoeSharedConfig",
        {**LOCAL_EXPERTS, **MULTIPLIERS, "shared_intermediate_size": 32},
        is_slow=True,
    ),
    Family("smollm3-without-rope", "SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    Family("mixtral", "MixtralConfig", {**LOCAL_EXPERTS, **WINDOWED}),
    Family("qwen2-moe", "Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    Family("qwen3-moe", "Qwen3MoeConfig", EXPERTS),
    Family("starcoder2", "Starcoder2Config", WINDOWED),
    Family("cohere", "CohereConfig", {"use_qk_norm": True, "logit_scale": 0.5}, is_slow=True),
    Family("cohere2", "Cohere2Config", {**MIXED, "logit_scale": 0.5}, is_slow=True),
    Family("gpt-neox", "GPTNeoXConfig", {**EVERY_HEAD, "rotary_pct": 0.5}, is_slow=True),
    Family("gpt2", "GPT2Config", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, is_slow=True),
    Family("gpt-bigcode", "GPTBigCodeConfig", GPT2, is_slow=True),
    Family(
        "opt",
        "OPTConfig",
        {**EVERY_HEAD, "ffn_dim": 96, "word_embed_proj_dim": 64},
        is_slow=True,
    ),
    Family("glm", "GlmConfig", is_slow=True),
    Family("glm4", "Glm4Config", is_slow=True),
    Family("glm4-moe", "Glm4MoeConfig", {**ROUTED_EXPERTS, "first_k_dense_replace": 1}, True),
    Family("exaone4", "Exaone4Config", {**MIXED}, is_slow=True),
    Family("ernie4.5", "Ernie4_5Config", is_slow=True),
    Family(
        "ernie4.5-moe",
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
        is_slow=True,
    ),
    Family("helium", "HeliumConfig", is_slow=True),
    Family("arcee", "ArceeConfig", is_slow=True),
    Family("apertus", "ApertusConfig", is_slow=True),
    Family("seed-oss", "SeedOssConfig", is_slow=True),
    Family("hunyuan", "HunYuanDenseV1Config", is_slow=True),
    Family("hunyuan-moe", "HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": 2}, is_slow=True),
    Family("nanochat", "NanoChatConfig", is_slow=True),
    Family("minimax-m2", "MiniMaxM2Config", LOCAL_EXPERTS, is_slow=True),
    Family("cwm", "CwmConfig", MIXED, is_slow=True),
    Family("solar-open", "SolarOpenConfig", ROUTED_EXPERTS, is_slow=True),
    Family("internlm3", "InternLM3Config", is_slow=True),
]
