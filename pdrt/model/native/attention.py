"""The attention backend of the transformers path over the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from pdrt.model.attention import ForwardContext, LayerCall
from pdrt.model.native.library import Kernels, dtype_code, pointer
from pdrt.model.native.step import StepArrays


class NativeAttention:
    """Implements `AttentionBackend` for pools that `can_attend`."""

    def __init__(self, kernels: Kernels) -> None:
        self._attend = kernels.lib.pdrt_attend

    def attend(self, context: ForwardContext, call: LayerCall) -> Tensor:
        """See `AttentionBackend.attend`."""
        arrays: StepArrays | None = context.plans.get(StepArrays)
        if arrays is None:
            arrays = context.plans[StepArrays] = StepArrays(context)
        query = call.query
        tokens, heads, head_dim = query.shape
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        code = dtype_code(query.dtype)
        assert code is not None, f"queries of {query.dtype}"
        out = torch.empty((tokens, heads, head_dim), dtype=query.dtype)
        status = self._attend(
            arrays.pool, arrays.step, call.layer, heads, code, pointer(query), query.stride(0),
            pointer(out), out.stride(0), call.scaling, call.softcap or 0.0, call.window or 0,
        )  # fmt: skip
        assert status == 0, f"the kernels refuse {heads} heads of {head_dim}"
        return out
