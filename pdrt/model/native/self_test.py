"""Every kernel once, on a small case, against plain torch, before a library is used.

A library can load and still be wrong for this machine: built by a compiler with a bug, or for a
processor that only claims to have an instruction set. This takes milliseconds; the edges of every
kernel are the tests' business.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.model.native.library import (
    AMX,
    PAIRS_CODE,
    Kernels,
    KernelsUnusableError,
    Pool,
    Step,
    dtype_code,
    pointer,
)

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 6, 2, 64, 16, 2
CONTEXTS, TOKENS = (70, 45), (1, 40)
"""A decode row and a chunk over a prefix."""
TABLES = ((7, 1, 4, 0, 6), (2, 8, 3, -1, -1))
"""Pages in no order; the second row's table ends before the first one's."""
PAGES = 9
SCALE, SOFTCAP, WINDOW = HEAD_DIM**-0.5, 20.0, 33
ROTARY = 32
EPSILON = 1e-5
INPUTS, OUTPUTS = 96, 40
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def check_kernels(kernels: Kernels) -> None:
    """Compute with every function of the library.

    Raises:
        KernelsUnusableError: one of them gives something else than torch; names it.
    """
    with torch.inference_mode():
        for dtype in TOLERANCES:
            for name, case in CASES.items():
                for result, expected in case(kernels, dtype):
                    _compare(f"pdrt_{name}", dtype, result, expected)


def _compare(name: str, dtype: torch.dtype, result: Tensor, expected: Tensor) -> None:
    bound = TOLERANCES[dtype]
    if not torch.allclose(result.float(), expected.float(), rtol=bound, atol=bound):
        worst = float((result.float() - expected.float()).abs().max())
        raise KernelsUnusableError(f"{name} of {dtype} is wrong by up to {worst:.2g}")


Results = list[tuple[Tensor, Tensor]]
"""Of a kernel, and of torch."""


class _Paged:
    """A pool with the keys and values of two sequences, and the step that attends over them."""

    def __init__(self, dtype: torch.dtype) -> None:
        code = dtype_code(dtype)
        assert code is not None, "a type that the kernels know"
        self.code = code
        self.dtype = dtype
        self.pool = _random(PAGES, KV_HEADS, LAYERS, 2, PAGE_SIZE, HEAD_DIM).to(dtype)
        self._tables = np.array(TABLES, dtype=np.int32)
        self._context = np.array(CONTEXTS, dtype=np.int32)
        self._first = np.cumsum([0, *TOKENS], dtype=np.int32)
        slots = [self._slots(row)[-tokens:] for row, tokens in enumerate(TOKENS)]
        self.slots = torch.cat(slots)
        self.tokens = len(self.slots)
        self.pool_struct = Pool(
            self.pool.data_ptr(), code, PAGE_SIZE, KV_HEADS, LAYERS, HEAD_DIM
        )  # fmt: skip
        self.step = Step(
            len(TOKENS), self.tokens, self._tables.shape[1], self._first.ctypes.data,
            self._context.ctypes.data, self._tables.ctypes.data, self.slots.data_ptr(),
        )  # fmt: skip

    def _slots(self, row: int) -> Tensor:
        positions = torch.arange(CONTEXTS[row])
        pages = torch.tensor(TABLES[row])[positions // PAGE_SIZE]
        return pages * PAGE_SIZE + positions % PAGE_SIZE

    def stored(self, slots: Tensor) -> Tensor:
        """(2, tokens, kv_heads, head_dim): keys and values of the last layer in `slots`."""
        tokens = self.pool[:, :, -1].permute(2, 0, 3, 1, 4)
        return tokens.reshape(2, PAGES * PAGE_SIZE, KV_HEADS, HEAD_DIM)[:, slots]

    def expected(self, query: Tensor, softcap: float, window: int) -> Tensor:
        """Attention in float32 by plain operators."""
        outs = []
        for row, tokens in enumerate(TOKENS):
            keys, values = (
                part.float().repeat_interleave(HEADS // KV_HEADS, dim=1)
                for part in self.stored(self._slots(row))
            )
            first = int(self._first[row])
            scores = torch.einsum("qhd,khd->hqk", query[first : first + tokens].float(), keys)
            scores *= SCALE
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            key_at = torch.arange(CONTEXTS[row])
            query_at = key_at[-tokens:, None]
            seen = key_at <= query_at
            if window:
                seen &= key_at > query_at - window
            scores.masked_fill_(~seen, float("-inf"))
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        return torch.cat(outs)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _attend(kernels: Kernels, dtype: torch.dtype) -> Results:
    paged, results = _Paged(dtype), []
    query = _random(paged.tokens, HEADS, HEAD_DIM).to(dtype)
    for softcap, window in ((0.0, 0), (SOFTCAP, WINDOW)):
        out = torch.full_like(query, torch.nan)
        kernels.lib.pdrt_attend(
            paged.pool_struct, paged.step, LAYERS - 1, HEADS, paged.code, pointer(query),
            query.stride(0), pointer(out), out.stride(0), SCALE, softcap, window,
        )  # fmt: skip
        results.append((out, paged.expected(query, softcap, window)))
    return results


def _store(kernels: Kernels, dtype: torch.dtype) -> Results:
    paged = _Paged(dtype)
    key, value = _random(2, paged.tokens, KV_HEADS, HEAD_DIM).to(dtype)
    key[0, 0, 0], value[0, 0, 0] = torch.nan, torch.inf
    kernels.lib.pdrt_store(
        paged.pool_struct, paged.step, LAYERS - 1, paged.code, pointer(key), key.stride(0),
        pointer(value), value.stride(0),
    )  # fmt: skip
    return [(paged.stored(paged.slots), torch.nan_to_num(torch.stack((key, value))))]


def _rope_store(kernels: Kernels, dtype: torch.dtype) -> Results:
    paged = _Paged(dtype)
    query = _random(paged.tokens, HEADS, HEAD_DIM).to(dtype)
    key, value = _random(2, paged.tokens, KV_HEADS, HEAD_DIM).to(dtype)
    angles = _random(paged.tokens, ROTARY // 2)
    cos, sin = angles.cos(), angles.sin()
    expected = torch.stack((_rotated(key, cos, sin).to(dtype), value))
    results = [(query, _rotated(query, cos, sin))]
    kernels.lib.pdrt_rope_store(
        paged.pool_struct, paged.step, LAYERS - 1, HEADS, paged.code, pointer(query),
        query.stride(0), pointer(key), key.stride(0), pointer(value), value.stride(0),
        pointer(cos), pointer(sin), ROTARY,
    )  # fmt: skip
    return [*results, (paged.stored(paged.slots), expected)]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    half = ROTARY // 2
    first, second, rest = x.float().tensor_split((half, ROTARY), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _norms(kernels: Kernels, dtype: torch.dtype) -> Results:
    lib, code = kernels.lib, dtype_code(dtype)
    residual, added = _random(3, INPUTS), _random(3, INPUTS).to(dtype)
    weight, out = _random(INPUTS), torch.empty(3, INPUTS, dtype=dtype)
    expected = F.rms_norm(residual + added.float(), (INPUTS,), weight, EPSILON)
    lib.pdrt_add_rms_norm(
        pointer(residual), code, pointer(added), pointer(weight), pointer(out), 3, INPUTS, EPSILON
    )
    again = torch.empty_like(out)
    lib.pdrt_rms_norm(
        0, pointer(residual), pointer(weight), code, pointer(again), 3, INPUTS, EPSILON
    )
    heads = _random(3, 2, HEAD_DIM).to(dtype)
    expected_heads = F.rms_norm(heads.float(), (HEAD_DIM,), weight[:HEAD_DIM], EPSILON)
    lib.pdrt_head_norm(
        code, pointer(heads), heads.stride(0), 3, 2, HEAD_DIM, pointer(weight), EPSILON
    )
    return [(out, expected), (again, expected), (heads, expected_heads)]


def _gate(kernels: Kernels, dtype: torch.dtype) -> Results:
    both, results = _random(3, 2 * INPUTS).to(dtype), []
    gate, up = both.float().chunk(2, dim=-1)
    for kind, activated in enumerate((F.silu(gate), F.gelu(gate, approximate="tanh"))):
        out = torch.empty(3, INPUTS, dtype=dtype)
        kernels.lib.pdrt_gate(dtype_code(dtype), kind, pointer(both), pointer(out), 3, INPUTS)
        results.append((out, activated * up))
    return results


def _linear(kernels: Kernels, dtype: torch.dtype) -> Results:
    code = dtype_code(dtype)
    assert code is not None, "a type that the kernels know"
    results = _layer(kernels, dtype, code, torch.float32)
    if kernels.isa == AMX and dtype is torch.bfloat16:
        results += _layer(kernels, dtype, PAIRS_CODE, dtype)
    return results


def _layer(kernels: Kernels, dtype: torch.dtype, code: int, activations: torch.dtype) -> Results:
    lib, results = kernels.lib, list[tuple[Tensor, Tensor]]()
    weight, bias = _random(OUTPUTS, INPUTS).to(dtype), _random(OUTPUTS)
    nbytes = lib.pdrt_packed_bytes(code, INPUTS, OUTPUTS)
    alignment = 64
    memory = torch.zeros(nbytes + alignment, dtype=torch.uint8)
    packed = memory[-memory.data_ptr() % alignment :]
    lib.pdrt_pack(code, pointer(weight), INPUTS, OUTPUTS, pointer(packed), 0, OUTPUTS)
    for rows in (1, 20, 40):
        x = _random(rows, INPUTS).to(activations)
        out = torch.empty(rows, OUTPUTS, dtype=activations)
        lib.pdrt_linear(
            code, pointer(packed), pointer(bias), pointer(x), INPUTS, pointer(out), OUTPUTS, rows,
            INPUTS, OUTPUTS,
        )  # fmt: skip
        results.append((out, F.linear(x.float(), weight.float(), bias)))
    ids, out = torch.tensor([OUTPUTS - 1, 0]), torch.empty(2, INPUTS)
    lib.pdrt_packed_rows(code, pointer(packed), pointer(ids), pointer(out), 2, INPUTS, OUTPUTS, 2.0)
    return [*results, (out, 2 * weight[ids].float())]


CASES: dict[str, Callable[[Kernels, torch.dtype], Results]] = {
    "attend": _attend,
    "store": _store,
    "rope_store": _rope_store,
    "rms_norm": _norms,
    "gate": _gate,
    "linear": _linear,
}
"""By what they are named in the log; together they call every function."""
