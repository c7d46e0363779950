"""The fused decoder: one compact forward for RMS-norm decoders with a gated MLP, over our kernels.

It computes what transformers does with the same weights, in fewer and larger pieces: queries, keys
and values are one product, gate and up another; residual and norm are one pass; keys are rotated
on their way into their pages. Weights are packed once, and no second copy is held. The residual is
always float32; what flows between layers is of the linear layers' type.
"""

from __future__ import annotations

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.kv.layout import KvLayout
from pdrt.model.attention import ForwardContext
from pdrt.model.collectives import Collectives
from pdrt.model.fused_kernels import AttendOptions, FusedKernels, Rotation
from pdrt.model.fused_structure import Layer, Norm, Structure
from pdrt.model.native.library import Kernels
from pdrt.model.native.linear import Linear, LinearPlan
from pdrt.model.native.step import StepArrays

LOGITS_KEPT_ROWS = 64
"""Rows of logits whose memory is kept between steps. A prompt that is scored may want as many as a
step has tokens, half a megabyte each with a large vocabulary: those are given back."""


MLP_ROWS = 512
"""Tokens that go through an MLP together: what lies between its products, several times as wide as
the residual, stays in a cache of some MB."""


class PackedLayer(msgspec.Struct, frozen=True):
    """One layer with its weights packed; `Layer` says what the norms are for."""

    index: int
    input_norm: Norm | None
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    rope: str | None
    attend: AttendOptions
    output: Linear
    attention_norm: Norm | None
    mlp_norm: Norm | None
    gate_up: Linear
    is_gelu: bool
    down: Linear
    output_norm: Norm | None


class Buffers(msgspec.Struct, frozen=True):
    """Where a step's intermediate results go, (tokens, …) each."""

    normed: Tensor
    projected: Tensor
    """Queries, keys and values."""
    attended: Tensor
    added: Tensor
    """To the residual next."""
    gate_up: Tensor
    """Of `MLP_ROWS` tokens at most, as `gated`."""
    gated: Tensor


class FusedDecoder:
    """Implements `Model` for what `fused_structure.recognize` knows."""

    def __init__(
        self,
        structure: Structure,
        layout: KvLayout,
        kernels: Kernels,
        plan: LinearPlan,
        collectives: Collectives | None = None,
    ) -> None:
        """Pack the weights of `structure`, whose layers are taken out of it one by one. With
        `collectives` they are one rank's part of them, as `layout` is of its pages."""
        self._collectives = collectives
        self._vocabulary = len(structure.embedding)
        self._ropes = structure.ropes
        self._norm = structure.norm
        self._embedding_scale = structure.embedding_scale
        self._residual_multiplier = structure.residual_multiplier
        self._logits_divisor = structure.logits_divisor
        self._logits_softcap = structure.logits_softcap
        self._layers: list[PackedLayer] = []
        while structure.layers:
            self._layers.append(_pack(len(self._layers), structure.layers.pop(0), plan))
        self._embedding = None if structure.is_tied else structure.embedding
        head = structure.head
        self._head = plan.pack_tied(head) if structure.is_tied else plan.pack([head])
        self._activations = plan.activations
        self._head_dim, self._kv_heads = layout.head_dim, layout.kv_heads
        self._heads = self._layers[0].output.inputs // layout.head_dim
        self._kernels = FusedKernels(kernels, plan.activations, self._heads)
        self._scratch: dict[str, Tensor] = {}
        computed = str(plan.activations).removeprefix("torch.")
        self.description = (
            f"fused decoder, native {kernels.isa} kernels, {plan.kind.value} linears "
            f"({layout.dtype} stored, {computed} computed)"
        )

    @property
    def nbytes(self) -> int:
        """Memory of the weights."""
        linears = [
            linear
            for layer in self._layers
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        embedding = 0 if self._embedding is None else self._embedding.nbytes
        return embedding + sum(linear.nbytes for linear in [*linears, self._head])

    def logits(self, context: ForwardContext) -> Tensor:
        """See `Model.logits`."""
        step = StepArrays(context)
        rotations = {
            name: Rotation(rope.cos[context.positions], rope.sin[context.positions])
            for name, rope in self._ropes.items()
        }
        buffers = self._buffers(context.tokens)
        residual = self._embed(context.token_ids)
        added: Tensor | None = None
        for layer in self._layers:
            normed = self._enter(residual, added, layer.input_norm, buffers)
            rotation = None if layer.rope is None else rotations[layer.rope]
            attended = self._attend(layer, step, rotation, normed, buffers)
            if layer is self._layers[-1] and not context.keeps_all_logits:
                # Nothing attends to what the last layer puts out: only what is wanted goes on.
                if len(context.logits_to_keep) == 0:
                    return normed.new_empty(0, self._head.outputs)
                attended = attended[context.logits_to_keep]
                residual = residual[context.logits_to_keep]
                buffers = self._buffers(len(residual))
            added = self._sum(layer.output(attended, buffers.added))
            added = self._leave(added, layer.attention_norm)
            normed = self._enter(residual, added, layer.mlp_norm, buffers)
            added = self._sum(self._mlp(layer, normed, buffers))
            added = self._leave(added, layer.output_norm)
        return self._logits(self._enter(residual, added, self._norm, buffers))

    # Parts of a layer

    def _attend(
        self,
        layer: PackedLayer,
        step: StepArrays,
        rotation: Rotation | None,
        normed: Tensor,
        buffers: Buffers,
    ) -> Tensor:
        projected = layer.qkv(normed, buffers.projected)
        width = self._heads * self._head_dim
        if layer.query_norm is not None:
            self._kernels.head_norm(projected, 0, width, layer.query_norm)
        if layer.key_norm is not None:
            key_width = self._kv_heads * self._head_dim
            self._kernels.head_norm(projected, width, key_width, layer.key_norm)
        self._kernels.rope_store(step, layer.index, projected, rotation)
        return self._kernels.attend(step, layer.index, projected, layer.attend, buffers.attended)

    def _mlp(self, layer: PackedLayer, normed: Tensor, buffers: Buffers) -> Tensor:
        gate_up, gated = buffers.gate_up, buffers.gated
        if len(normed) <= MLP_ROWS:
            return self._mlp_rows(layer, normed, gate_up, gated, buffers.added)
        for first in range(0, len(normed), MLP_ROWS):
            rows = normed[first : first + MLP_ROWS]
            added = buffers.added[first : first + MLP_ROWS]
            count = len(rows)
            added.copy_(self._mlp_rows(layer, rows, gate_up[:count], gated[:count], added))
        return buffers.added

    def _mlp_rows(
        self, layer: PackedLayer, normed: Tensor, gate_up: Tensor, gated: Tensor, added: Tensor
    ) -> Tensor:
        gate_up = layer.gate_up(normed, gate_up)
        return layer.down(self._kernels.gate(gate_up, layer.is_gelu, gated), added)

    def _enter(
        self, residual: Tensor, added: Tensor | None, norm: Norm | None, buffers: Buffers
    ) -> Tensor:
        """`residual += added`, in place; then its norm, which is what the next product takes."""
        if norm is None:
            if added is not None:
                residual += added
            return residual.to(self._activations)
        if added is None:
            return self._kernels.rms_norm(residual, norm, buffers.normed)
        return self._kernels.add_rms_norm(residual, added, norm, buffers.normed)

    def _sum(self, added: Tensor) -> Tensor:
        """Over all ranks, in place."""
        return added if self._collectives is None else self._collectives.add(added)

    def _leave(self, added: Tensor, norm: Norm | None) -> Tensor:
        """What is added to the residual, in place of what a part of the layer puts out."""
        if norm is not None:
            self._kernels.rms_norm(added, norm, added)
        if self._residual_multiplier != 1:
            added *= self._residual_multiplier
        return added

    # Both ends

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._embedding is None:
            return self._head.rows(token_ids, self._embedding_scale)
        return F.embedding(token_ids, self._embedding).float().mul_(self._embedding_scale)

    def _logits(self, normed: Tensor) -> Tensor:
        out = None
        if len(normed) <= LOGITS_KEPT_ROWS:
            out = self._take("logits", len(normed), self._head.outputs)
        logits = self._head(normed, out)
        if self._logits_divisor != 1:
            logits /= self._logits_divisor
        if self._logits_softcap is not None:
            logits.div_(self._logits_softcap).tanh_().mul_(self._logits_softcap)
        if self._collectives is not None:
            return self._collectives.gather(logits, self._vocabulary)
        return logits

    # Memory

    def _buffers(self, tokens: int) -> Buffers:
        layer = self._layers[0]
        gate_up, mlp_rows = layer.gate_up.outputs, min(tokens, MLP_ROWS)
        return Buffers(
            normed=self._take("normed", tokens, layer.qkv.inputs),
            projected=self._take("projected", tokens, layer.qkv.outputs),
            attended=self._take("attended", tokens, layer.output.inputs),
            added=self._take("added", tokens, layer.output.outputs),
            gate_up=self._take("gate_up", mlp_rows, gate_up),
            gated=self._take("gated", mlp_rows, gate_up // 2),
        )

    def _take(self, name: str, rows: int, width: int) -> Tensor:
        """(rows, width) of memory that only grows, and that the next step uses again."""
        memory = self._scratch.get(name)
        if memory is None or memory.numel() < rows * width:
            memory = torch.empty(rows * width, dtype=self._activations)
            self._scratch[name] = memory
        return memory[: rows * width].view(rows, width)


def _pack(index: int, layer: Layer, plan: LinearPlan) -> PackedLayer:
    attention, mlp = layer.attention, layer.mlp
    return PackedLayer(
        index=index,
        input_norm=layer.input_norm,
        qkv=plan.pack(attention.qkv),
        query_norm=attention.query_norm,
        key_norm=attention.key_norm,
        rope=attention.rope,
        attend=AttendOptions(attention.scaling, attention.softcap or 0.0, attention.window or 0),
        output=plan.pack([attention.output]),
        attention_norm=layer.attention_norm,
        mlp_norm=layer.mlp_norm,
        gate_up=plan.pack(mlp.gate_up),
        is_gelu=mlp.is_gelu,
        down=plan.pack([mlp.down]),
        output_norm=layer.output_norm,
    )
