"""Linear layers of the fused decoder: packed once, used at every number of rows.

Three kinds stand behind one protocol, and `choose_linear` says which:

- `NativeLinear`, our kernels: float32, and bfloat16 where the processor has no instructions for it
  (stored so, computed in float32);
- `MkldnnLinear`, oneDNN's prepacked layers: bfloat16 where the processor does have them;
- `TorchLinear`, plain `torch.nn.functional.linear`: everything else.

Each holds the only copy of the weights that it needs: the caller drops the originals once packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL
from enum import Enum
from typing import Protocol

import msgspec
import torch
from torch import Tensor

__all__ = ["Linear", "LinearKind", "LinearPart", "LinearPlan", "choose_linear"]


class LinearPart(msgspec.Struct, frozen=True):
    """One `nn.Linear` of those that are fused; their outputs come one after another."""

    weight: Tensor
    """(outputs, inputs), on the CPU for all kinds but `TORCH`; need not be contiguous."""
    bias: Tensor | None = None
    """(outputs,) of any floating type."""


class LinearKind(Enum):
    """Whose code computes a layer."""

    NATIVE = "native"
    MKLDNN = "mkldnn"
    TORCH = "torch"


class Linear(Protocol):
    """`x @ weight.T + bias` over weights that it owns."""

    @property
    def inputs(self) -> int:
        """Width of what comes in."""
        ...

    @property
    def outputs(self) -> int:
        """Width of what comes out: the sum of the parts'."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that the layer holds."""
        ...

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the layer.

        Args:
            x: (rows, inputs) of the plan's `activations`; its last dimension must be contiguous.
            out: (rows, outputs) of the same type, last dimension contiguous. An offer that spares
                an allocation: kinds that cannot write into given memory leave it alone.

        Returns:
            (rows, outputs): `out` if it was used, else a fresh tensor. Always use what is returned.
        """
        ...

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """`scale` times rows of the weight: the embedding of a model whose head is tied to it.

        Args:
            ids: (tokens,) int64, each in `[0, outputs)`; the caller checks.

        Returns:
            (tokens, inputs) float32.
        """
        ...


class LinearPlan(msgspec.Struct, frozen=True):
    """How the linear layers of one model are computed."""

    kind: LinearKind
    activations: torch.dtype
    """What layers take and give."""
    pack: Callable[[Sequence[LinearPart]], Linear]
    """Makes one layer of several; refers to none of the tensors given, except for `TORCH`."""
    pack_tied: Callable[[LinearPart], Linear]
    """The same for a head that is the embedding too: the only one whose `rows` may be used."""


def choose_linear(dtype: torch.dtype, device: torch.device, kernels: CDLL | None) -> LinearPlan:
    """The best kind for weights of `dtype` on `device`.

    Args:
        kernels: the loaded native library, None where there is none.
    """
    raise NotImplementedError
