"""The kernels as the fused decoder calls them: on tensors, in one type of activations."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from pdrt.errors import ModelError
from pdrt.model.fused_structure import Norm
from pdrt.model.native.library import Kernels, dtype_code
from pdrt.model.native.step import StepArrays

FLOAT32 = 0
"""PDRT_F32."""
GATE_SILU, GATE_GELU_TANH = 0, 1
"""PDRT_SILU and PDRT_GELU_TANH."""


class AttendOptions(msgspec.Struct, frozen=True):
    """How one layer attends."""

    scaling: float
    softcap: float
    """0 for none."""
    window: int
    """Tokens, the query's own included; 0 for all."""


class Rotation(msgspec.Struct, frozen=True):
    """Cosines and sines of a step's tokens, (tokens, rotary / 2) float32, contiguous."""

    cos: Tensor
    sin: Tensor


class FusedKernels:
    """Calls the library. Tensors are on the CPU; their last dimension is contiguous."""

    def __init__(self, kernels: Kernels, activations: torch.dtype, heads: int) -> None:
        """Activations are float32 or bfloat16; `heads` are query heads."""
        code = dtype_code(activations)
        assert code is not None, activations
        self.isa = kernels.isa
        lib = kernels.lib
        self._rms_norm, self._add_rms_norm = lib.pdrt_rms_norm, lib.pdrt_add_rms_norm
        self._head_norm, self._gate = lib.pdrt_head_norm, lib.pdrt_gate
        self._rope_store, self._attend = lib.pdrt_rope_store, lib.pdrt_attend
        self._type = code
        self._itemsize = activations.itemsize
        self._heads = heads

    def rms_norm(self, x: Tensor, norm: Norm, out: Tensor) -> Tensor:
        """`out = norm(x)`, both (rows, width); may be the same tensor. `x` is of the activations'
        type, or float32."""
        rows, width = x.shape
        x_type = FLOAT32 if x.dtype is torch.float32 else self._type
        self._rms_norm(
            x_type, x.data_ptr(), norm.weight.data_ptr(), self._type, out.data_ptr(),
            rows, width, norm.epsilon,
        )  # fmt: skip
        return out

    def add_rms_norm(self, residual: Tensor, added: Tensor, norm: Norm, out: Tensor) -> Tensor:
        """`residual += added; out = norm(residual)`, all (rows, hidden), contiguous."""
        rows, width = residual.shape
        self._add_rms_norm(
            residual.data_ptr(), self._type, added.data_ptr(), norm.weight.data_ptr(),
            out.data_ptr(), rows, width, norm.epsilon,
        )  # fmt: skip
        return out

    def head_norm(self, projected: Tensor, first: int, width: int, norm: Norm) -> None:
        """Norm in place of elements `[first, first + width)` of each row: per head, or of all
        heads at once, as the norm's weight is wide."""
        each = norm.weight.shape[0]
        self._head_norm(
            self._type, projected.data_ptr() + first * self._itemsize, projected.stride(0),
            projected.shape[0], width // each, each, norm.weight.data_ptr(), norm.epsilon,
        )  # fmt: skip

    def rope_store(
        self, step: StepArrays, layer: int, projected: Tensor, rotation: Rotation | None
    ) -> None:
        """Rotate the queries of (tokens, heads and twice KV heads, head_dim) in place and the keys
        on their way into the pool; store the values.

        Raises:
            ModelError: the kernels do not know the shape.
        """
        stride = projected.stride(0)
        query = projected.data_ptr()
        key = query + self._heads * step.head_dim * self._itemsize
        value = key + step.kv_heads * step.head_dim * self._itemsize
        cos, sin, rotary = None, None, 0
        if rotation is not None:
            cos, sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
            rotary = 2 * rotation.cos.shape[1]
        refused = self._rope_store(
            step.pool, step.step, layer, self._heads, self._type, query, stride, key, stride,
            value, stride, cos, sin, rotary,
        )  # fmt: skip
        if refused:
            raise ModelError("the kernels cannot store KV of this shape")

    def attend(
        self, step: StepArrays, layer: int, projected: Tensor, call: AttendOptions, out: Tensor
    ) -> Tensor:
        """Attention of the queries in `projected` over the pages; `out` is (tokens, heads *
        head_dim).

        Raises:
            ModelError: the kernels do not know the shape.
        """
        refused = self._attend(
            step.pool, step.step, layer, self._heads, self._type, projected.data_ptr(),
            projected.stride(0), out.data_ptr(), out.stride(0), call.scaling, call.softcap,
            call.window,
        )  # fmt: skip
        if refused:
            raise ModelError("the kernels cannot attend with heads of this shape")
        return out

    def gate(self, gate_up: Tensor, is_gelu: bool, out: Tensor) -> Tensor:
        """`out = act(gate) * up`; (rows, 2 * width) to (rows, width), contiguous."""
        rows, width = out.shape
        kind = GATE_GELU_TANH if is_gelu else GATE_SILU
        self._gate(self._type, kind, gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out
