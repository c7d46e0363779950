"""Tiny random models on disk: real configurations, random weights, a real tokenizer.

Import as `tests.model.tiny`. No network, well under a second each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Pages pass from prefill to decode, and no page is ever reused while it can be written.",
    "What is the capital of France? The capital of France is Paris.",
    "0 1 2 3 4 5 6 7 8 9 def add(a, b): return a + b",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_ID = 2

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
}
WINDOW = 11
"""Sliding window of the families that have one: shorter than any test's sequence."""
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
}


def make_tiny_model(directory: Path, family: str = "llama", **overrides: Any) -> Path:
    """Write a random model of `family` (a key of `FAMILIES`) into `directory`; returns it.

    The same arguments give the same weights. `overrides` replace entries of its configuration.
    """
    name, particular = FAMILIES[family]
    write_model(directory, name, {**particular, **overrides})
    return directory


def write_model(
    directory: Path,
    config_name: str,
    settings: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> None:
    """Write a random model of a transformers configuration class; `settings` and `COMMON` are its
    fields, `how` goes to `save_pretrained`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    fields = {**COMMON, "vocab_size": len(tokenizer), **settings}
    config = getattr(transformers, config_name)(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(directory, **how)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `SENTENCES`, with a chat template."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(SENTENCES, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )
