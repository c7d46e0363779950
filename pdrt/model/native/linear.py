"""Linear layers of the fused decoder: packed once, used at every number of rows.

Three kinds stand behind one protocol, and `choose_linear` says which:

- `NativeLinear`, our kernels: float32, bfloat16 where the processor has no instructions for it
  (stored so, computed in float32), and bfloat16 throughout where it has AMX;
- `MkldnnLinear`, oneDNN's prepacked layers: bfloat16 where the processor has other instructions;
- `TorchLinear`, plain `torch.nn.functional.linear`: everything else.

Each holds the only copy of the weights that it needs: the caller drops the originals once packed.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import partial
from typing import Any, Protocol

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.model.native.library import AMX, PAIRS_CODE, Kernels, dtype_code, pointer
from pdrt.model.resources import BF16_FLAGS

log = logging.getLogger(__name__)

SELF_TEST_SHAPE = (5, 48, 80)
"""Rows, inputs and outputs of the layer that oneDNN is tried with."""
SELF_TEST_TOLERANCE = 2e-2
"""Of outputs around 1: some rounding of bfloat16, and far from a wrong result."""


PAIR_INPUTS = 32
"""Inputs of a layer that is bfloat16 throughout are a multiple of these."""


class LinearPart(msgspec.Struct, frozen=True):
    """One `nn.Linear` of those that are fused; their outputs come one after another."""

    weight: Tensor
    """(outputs, inputs), on the CPU for all kinds but `TORCH`; need not be contiguous."""
    bias: Tensor | None = None
    """(outputs,) of any floating type."""


class LinearKind(Enum):
    """Whose code computes a layer."""

    NATIVE = "native"
    AMX = "native AMX"
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


def choose_linear(
    dtype: torch.dtype,
    device: torch.device,
    flags: Collection[str],
    kernels: Kernels,
) -> LinearPlan:
    """The best kind for weights of `dtype` on `device`; the log says which.

    Args:
        flags: the processor's, as `pdrt.model.resources.cpu_flags` gives them.
        kernels: the loaded native library.
    """
    kind = _choose_kind(dtype, device, flags, kernels)
    log.info("linear layers: %s, %s", kind.value, str(dtype).removeprefix("torch."))
    match kind:
        case LinearKind.NATIVE:
            pack = partial(NativeLinear, kernels)
            return LinearPlan(kind, torch.float32, pack, lambda part: pack([part]))
        case LinearKind.AMX:
            pairs = partial(_pack_pairs, kernels)
            return LinearPlan(kind, dtype, pairs, lambda part: pairs([part]))
        case LinearKind.MKLDNN:
            tied = partial(MkldnnLinear, tied=True)
            return LinearPlan(kind, dtype, MkldnnLinear, lambda part: tied([part]))
        case LinearKind.TORCH:
            return LinearPlan(kind, dtype, TorchLinear, lambda part: TorchLinear([part]))


def _choose_kind(
    dtype: torch.dtype, device: torch.device, flags: Collection[str], kernels: Kernels
) -> LinearKind:
    if device.type != "cpu" or dtype_code(dtype) is None:
        return LinearKind.TORCH
    if dtype is torch.bfloat16 and kernels.isa == AMX:
        return LinearKind.AMX
    if dtype is torch.bfloat16 and BF16_FLAGS.intersection(flags):
        return LinearKind.MKLDNN if mkldnn_works(dtype) else LinearKind.TORCH
    return LinearKind.NATIVE


def _pack_pairs(kernels: Kernels, parts: Sequence[LinearPart]) -> Linear:
    if parts[0].weight.shape[1] % PAIR_INPUTS:
        return TorchLinear(parts)
    return NativeLinear(kernels, parts, torch.bfloat16)


class NativeLinear:
    """Our kernels (linear.cpp): weights float32 or bfloat16, everything else float32. Float32
    weights that bfloat16 holds exactly are kept in it. With bfloat16 `activations` all is bfloat16,
    multiplied as such in AMX's registers and summed in float32.

    A row's result is the same to the bit whatever else is in the batch, and however many threads
    compute it.
    """

    def __init__(
        self,
        kernels: Kernels,
        parts: Sequence[LinearPart],
        activations: torch.dtype = torch.float32,
    ) -> None:
        is_float = activations is torch.float32
        if is_float:
            parts = _narrowed(parts)
        self.inputs, self.outputs = _shape(parts)
        code = dtype_code(parts[0].weight.dtype) if is_float else PAIRS_CODE
        assert code is not None, "neither float32 nor bfloat16"
        assert is_float or parts[0].weight.dtype is activations, "bfloat16 throughout"
        self._type = code
        self._activations = activations
        self._lib = kernels.lib
        self._linear = kernels.lib.pdrt_linear
        self._packed = _allocate(self._lib.pdrt_packed_bytes(code, self.inputs, self.outputs))
        self._packed_address = pointer(self._packed)
        self._bias = _bias(parts, torch.float32)
        self._bias_address = pointer(self._bias)
        at = 0
        for part in parts:
            # A part at a time: packed rows may begin anywhere, so that nothing is concatenated.
            weight = part.weight.detach().contiguous()
            refused = self._lib.pdrt_pack(
                code, pointer(weight), self.inputs, len(weight), pointer(self._packed), at,
                self.outputs,
            )  # fmt: skip
            assert not refused, "the library does not take this shape"
            at += len(weight)

    @property
    def nbytes(self) -> int:
        """See `Linear.nbytes`."""
        return self._packed.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Linear.__call__`; writes into `out`."""
        # Called some hundred times in a step of a few milliseconds: no more than a microsecond or
        # two here. What the kernel would misread is asserted all the same.
        rows, inputs = x.shape
        if out is None:
            out = torch.empty(rows, self.outputs, dtype=self._activations)
        assert x.dtype is self._activations, "another type than the layer's"
        assert out.dtype is self._activations, "another type than the layer's"
        assert inputs == self.inputs, "another width than the layer's"
        assert out.shape == (rows, self.outputs), "another shape than the result's"
        x_stride, x_step = x.stride()
        out_stride, out_step = out.stride()
        assert x_step == 1, "rows of x must be contiguous"
        assert out_step == 1, "rows of out must be contiguous"
        assert x_stride % 2 == 0 or self._type != PAIRS_CODE, "a row begins within a pair"
        self._linear(
            self._type, self._packed_address, self._bias_address, x.data_ptr(), x_stride,
            out.data_ptr(), out_stride, rows, inputs, self.outputs,
        )  # fmt: skip
        return out

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """See `Linear.rows`; reads the packed weights, so that no table is kept."""
        assert ids.dtype is torch.int64, "ids are int64"
        ids = ids.contiguous()
        out = torch.empty(len(ids), self.inputs)
        self._lib.pdrt_packed_rows(
            self._type, pointer(self._packed), pointer(ids), pointer(out), len(ids), self.inputs,
            self.outputs, scale,
        )  # fmt: skip
        return out


class MkldnnLinear:
    """oneDNN's prepacked layers, through operators that torch keeps to itself (`mkldnn_works`)."""

    def __init__(self, parts: Sequence[LinearPart], tied: bool = False) -> None:
        self.inputs, self.outputs = _shape(parts)
        weight = _weight(parts)
        self.nbytes = weight.nbytes * (2 if tied else 1)
        self._table = weight if tied else None
        self._packed = _operators()._reorder_linear_weight(weight)
        self._bias = _bias(parts, weight.dtype)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Linear.__call__`; cannot write into `out`."""
        result: Tensor = _operators()._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return result

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """See `Linear.rows`."""
        assert self._table is not None, "only a tied layer keeps its table"
        return F.embedding(ids, self._table).float() * scale


class TorchLinear:
    """`torch.nn.functional.linear`, on any device and of any type."""

    def __init__(self, parts: Sequence[LinearPart]) -> None:
        self.inputs, self.outputs = _shape(parts)
        self._weight = _weight(parts)
        self._bias = _bias(parts, self._weight.dtype)
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Linear.__call__`; does not write into `out`."""
        return F.linear(x, self._weight, self._bias)

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """See `Linear.rows`."""
        return F.embedding(ids, self._weight).float() * scale


def mkldnn_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and computes a layer of `dtype` here, correctly.

    The operators are torch's own (its compiler emits them): they may be missing or changed in
    another version, and they refuse types that the processor has no instructions for.
    """
    rows, inputs, outputs = SELF_TEST_SHAPE
    # Exact in every type, and no result is like its neighbour.
    x = (torch.arange(rows * inputs) % 7 - 3).view(rows, inputs) / 8
    weight = (torch.arange(outputs * inputs) % 11 - 5).view(outputs, inputs) / 16
    bias = (torch.arange(outputs) % 5).float()
    expected = F.linear(x, weight, bias)
    try:
        layer = MkldnnLinear([LinearPart(weight.to(dtype), bias)])
        result = layer(x.to(dtype)).float()
    except (AttributeError, RuntimeError, TypeError) as error:
        log.info("oneDNN's packed layers are not used for %s: %s", dtype, error)
        return False
    close = torch.allclose(result, expected, rtol=SELF_TEST_TOLERANCE, atol=SELF_TEST_TOLERANCE)
    if not close:
        log.warning("oneDNN's packed layers are not used for %s: wrong results", dtype)
    return close


def _operators() -> Any:
    return torch.ops.mkldnn


def _shape(parts: Sequence[LinearPart]) -> tuple[int, int]:
    """Inputs and outputs of parts that are fused."""
    inputs = parts[0].weight.shape[1]
    for part in parts:
        assert part.weight.shape[1] == inputs, "parts of different widths"
        assert part.weight.dtype == parts[0].weight.dtype, "parts of different types"
    return inputs, sum(len(part.weight) for part in parts)


def _narrowed(parts: Sequence[LinearPart]) -> Sequence[LinearPart]:
    """Float32 weights that bfloat16 holds exactly, in bfloat16: what a checkpoint was trained in
    often is. Half the bytes to read at every step, for the same result to the bit."""
    narrow = []
    for part in parts:
        weight = part.weight.detach()
        if weight.dtype is not torch.float32 or not _is_exact(weight[:1]) or not _is_exact(weight):
            return parts
        narrow.append(LinearPart(weight.bfloat16(), part.bias))
    return narrow


def _is_exact(weight: Tensor) -> bool:
    return torch.equal(weight.bfloat16().float(), weight)


def _weight(parts: Sequence[LinearPart]) -> Tensor:
    """All parts' weights in one tensor; a single one as it is."""
    if len(parts) == 1:
        return parts[0].weight.detach()
    return torch.cat([part.weight.detach() for part in parts])


def _bias(parts: Sequence[LinearPart], dtype: torch.dtype) -> Tensor | None:
    """All parts' biases, zero for those without; None where no part has one."""
    if all(part.bias is None for part in parts):
        return None
    return torch.cat(
        [
            part.weight.new_zeros(len(part.weight), dtype=dtype)
            if part.bias is None
            else part.bias.detach().to(dtype)
            for part in parts
        ]
    )


def _allocate(nbytes: int) -> Tensor:
    """Zeroed memory in huge pages where the kernel gives them: a stream over 4 KB pages is slower
    by what it takes to look them up, and prefetching stops at their ends.

    Returns:
        (nbytes,) uint8, aligned to a page, which owns the mapping.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        # Not Linux, or a kernel without them: slower, and no more than that.
        log.debug("no huge pages for packed weights")
    return torch.frombuffer(memory, dtype=torch.uint8)
