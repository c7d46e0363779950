"""transformers as it comes, to hold the executor and the service against."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Plain:
    """SDPA attention over a DynamicCache."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            local_files_only=True,
        ).eval()

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, cache: DynamicCache) -> float:
        """One forward and argmax; seconds. Everything beyond it is left out of the time."""
        started = time.perf_counter()
        # By position, as the cache's argument is being renamed.
        logits = self.model(token_ids, None, None, cache, logits_to_keep=1).logits
        logits[:, -1].argmax(dim=-1).tolist()
        return time.perf_counter() - started

    def prefill(self, tokens: int) -> Callable[[], float]:
        ids = torch.randint(3, 1000, (1, tokens))
        return lambda: self.forward(ids, DynamicCache(config=self.model.config))

    def decode(self, batch: int, context: int) -> Callable[[], float]:
        """Steps at `context` tokens: the cache is cut back after each."""
        config = self.model.config
        shape = (batch, config.num_key_value_heads, context - 1, config.head_dim)
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(*torch.randn(2, *shape, dtype=self.model.dtype).unbind(), layer)
        ids = torch.randint(3, 1000, (batch, 1))

        def step() -> float:
            seconds = self.forward(ids, cache)
            cache.crop(-1)
            return seconds

        return step
