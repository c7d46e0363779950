"""What a model's weights and attention cost, read from its files: bytes and floating-point
operations. Dense decoders with full attention only; with windows, attention is counted too high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from safetensors import safe_open

from pdrt.kv.layout import DTYPE_BYTES, KvLayout
from pdrt.model.identity import read_json

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class ModelShape(msgspec.Struct, frozen=True):
    """Counts of elements."""

    parameters: int
    """All of them, once."""
    embedding: int
    """Read row by row, so not in a step, unless it is the head too."""
    is_tied: bool
    head: int
    matrices: int
    """Of linear layers, without embedding and head."""
    heads: int
    """Query heads."""
    layout: KvLayout

    @property
    def kv_token_bytes(self) -> int:
        return self.layout.page_bytes // self.layout.page_size

    @property
    def weight_bytes(self) -> int:
        """Held by a worker that holds each weight once."""
        return self.parameters * DTYPE_BYTES[self.layout.dtype]

    @property
    def step_weight_bytes(self) -> int:
        """Read once by a step."""
        unread = 0 if self.is_tied else self.embedding
        return (self.parameters - unread) * DTYPE_BYTES[self.layout.dtype]

    def decode_bytes(self, batch: int, context: int) -> int:
        """Weights once, and each sequence's KV once."""
        return self.step_weight_bytes + batch * context * self.kv_token_bytes

    def decode_flops(self, batch: int, context: int) -> int:
        linear = 2 * (self.matrices + self.head) * batch
        return linear + self._attention_flops(batch * context)

    def prefill_bytes(self, tokens: int) -> int:
        return self.step_weight_bytes + tokens * self.kv_token_bytes

    def prefill_flops(self, tokens: int) -> int:
        """Causal attention; the head for the last token only."""
        linear = 2 * self.matrices * tokens + 2 * self.head
        return linear + self._attention_flops(tokens * (tokens + 1) // 2)

    def _attention_flops(self, scores: int) -> int:
        """Query times key, and weight times value, for so many pairs of positions."""
        return 4 * scores * self.heads * self.layout.head_dim * self.layout.layers


def model_shape(directory: Path, layout: KvLayout) -> ModelShape:
    """Of the model in `directory`, whose KV pages are `layout`.

    Raises:
        ModelError: its configuration cannot be read.
    """
    config = read_json(directory / "config.json")
    config = config.get("text_config", config)
    shapes: dict[str, Sequence[int]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if config.get("tie_word_embeddings"):  # some files hold the head all the same
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(HEAD)}
    return count(shapes, config["num_attention_heads"], layout)


def count(shapes: dict[str, Sequence[int]], heads: int, layout: KvLayout) -> ModelShape:
    """Of tensors by name. Pure."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    embedding = sum(size for name, size in sizes.items() if name.endswith(EMBEDDING))
    own_head = sum(size for name, size in sizes.items() if name.endswith(HEAD))
    matrices = sum(sizes[name] for name, shape in shapes.items() if len(shape) == 2)
    return ModelShape(
        parameters=sum(sizes.values()),
        embedding=embedding,
        is_tied=own_head == 0,
        head=own_head or embedding,
        matrices=matrices - embedding - own_head,
        heads=heads,
        layout=layout,
    )
