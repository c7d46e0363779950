"""Norms, rotation and store, and gates, against float64."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pdrt.model.native.library import (
    Kernels,
    Pool,
    Step,
    dtype_code,
    library_path,
    open_kernels,
    pointer,
)
from tests.model.native.conftest import BuildKernels, usable_libraries

TYPES = [torch.float32, torch.bfloat16]
WIDTHS = [*range(1, 41), 64, 576, 1000]
EPSILON = 1e-5
SILU, GELU_TANH = 0, 1
UNTOUCHED = 12345.0
LARGE_ROWS = 700
"""Enough that a second thread takes part."""


@pytest.fixture(scope="module", params=[*usable_libraries(), "wide"])
def kernels(request: pytest.FixtureRequest, build_wide_kernels: BuildKernels) -> Kernels:
    if request.param == "wide":
        return build_wide_kernels(["pointwise"])
    return open_kernels(library_path(request.param))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(result: Tensor, expected: Tensor) -> None:
    """Within one rounding of the result's type."""
    bound = {torch.float32: 2e-6, torch.bfloat16: 2**-8}[result.dtype]
    torch.testing.assert_close(
        result.double(), expected.double(), rtol=bound, atol=1e-6, equal_nan=True
    )


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight.double()


def rms_norm(kernels: Kernels, x: Tensor, weight: Tensor, out: Tensor) -> None:
    kernels.lib.pdrt_rms_norm(
        dtype_code(x.dtype), pointer(x), pointer(weight), dtype_code(out.dtype), pointer(out),
        *x.shape, EPSILON,
    )  # fmt: skip


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("out_type", TYPES)
def test_rms_norm(kernels: Kernels, x_type: torch.dtype, out_type: torch.dtype) -> None:
    for width in WIDTHS:
        x, weight = random(3, width, dtype=x_type), random(width, seed=1)
        memory = torch.full((5, width), UNTOUCHED, dtype=out_type)
        rms_norm(kernels, x, weight, memory[1:4])
        assert_close(memory[1:4], exact_norm(x, weight))
        assert torch.all(memory[[0, 4]] == memory.new_tensor(UNTOUCHED))


@pytest.mark.parametrize("dtype", TYPES)
def test_rms_norm_in_place(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight = random(LARGE_ROWS, 90, dtype=dtype), random(90, seed=1)
    expected = exact_norm(x, weight)
    rms_norm(kernels, x, weight, x)
    assert_close(x, expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_add_rms_norm(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, width in [*((3, width) for width in WIDTHS), (LARGE_ROWS, 90)]:
        residual, weight = random(rows, width), random(width, seed=1)
        add, out = random(rows, width, seed=2, dtype=dtype), torch.empty(rows, width, dtype=dtype)
        total = residual + add.float()
        kernels.lib.pdrt_add_rms_norm(
            pointer(residual), dtype_code(dtype), pointer(add), pointer(weight), pointer(out),
            rows, width, EPSILON,
        )  # fmt: skip
        assert torch.equal(residual, total)
        assert_close(out, exact_norm(total, weight))


@pytest.mark.parametrize("dtype", TYPES)
def test_add_rms_norm_of_nothing_leaves_the_residual(kernels: Kernels, dtype: torch.dtype) -> None:
    residual, weight = random(4, 50), random(50, seed=1)
    before, out = residual.clone(), torch.empty(4, 50, dtype=dtype)
    kernels.lib.pdrt_add_rms_norm(
        pointer(residual), dtype_code(dtype), None, pointer(weight), pointer(out), 4, 50, EPSILON
    )
    assert torch.equal(residual, before)
    assert_close(out, exact_norm(before, weight))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 128])
def test_head_norm(kernels: Kernels, head_dim: int, dtype: torch.dtype) -> None:
    """Of some heads of each token only, as in fused queries, keys and values."""
    heads, weight = 3, random(head_dim, seed=1)
    for tokens in (1, 5, LARGE_ROWS):
        fused = random(tokens, 2 * heads, head_dim, dtype=dtype)
        before = fused.clone()
        kernels.lib.pdrt_head_norm(
            dtype_code(dtype), pointer(fused), fused.stride(0), tokens, heads, head_dim,
            pointer(weight), EPSILON,
        )  # fmt: skip
        assert_close(fused[:, :heads], exact_norm(before[:, :heads], weight))
        assert torch.equal(fused[:, heads:], before[:, heads:])


def test_norms_hand_on_nan_in_its_row_only(kernels: Kernels) -> None:
    x, weight, out = random(3, 70), torch.ones(70), torch.empty(3, 70)
    x[1, 69] = torch.nan
    rms_norm(kernels, x, weight, out)
    assert torch.isnan(out[1]).all()
    assert torch.isfinite(out[[0, 2]]).all()


def gate(kernels: Kernels, kind: int, gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    kernels.lib.pdrt_gate(
        dtype_code(gate_up.dtype), kind, pointer(gate_up), pointer(out), rows, width
    )
    return out


def exact_gate(kind: int, gate_up: Tensor) -> Tensor:
    x, up = gate_up.double().chunk(2, dim=1)
    if kind == SILU:
        return torch.nn.functional.silu(x) * up
    # 0.5 * (1 + tanh(z)) is sigmoid(2 z), which does not cancel for negative z, in float64 either.
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)) * up


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [SILU, GELU_TANH])
def test_gate(kernels: Kernels, kind: int, dtype: torch.dtype) -> None:
    for rows, width in [*((2, width) for width in WIDTHS), (LARGE_ROWS, 90)]:
        gate_up = random(rows, 2 * width, dtype=dtype) * 3
        assert_close(gate(kernels, kind, gate_up), exact_gate(kind, gate_up))


@pytest.mark.parametrize("kind", [SILU, GELU_TANH])
def test_gate_over_the_whole_range(kernels: Kernels, kind: int) -> None:
    """Also where an exponential leaves the range of a float, and where 1 + tanh cancels."""
    x = torch.cat([torch.linspace(-30, 30, 20001), torch.tensor([-1e4, -200.0, 200.0, 1e4, 0.0])])
    gate_up = torch.stack([x, torch.ones_like(x)]).reshape(1, -1)
    result, expected = gate(kernels, kind, gate_up), exact_gate(kind, gate_up)
    # The exponent of gelu is a cube: its rounding counts for as much as it is large.
    rtol = 2e-6 if kind == SILU else 3e-5
    torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=1e-30)


@pytest.mark.parametrize("kind", [SILU, GELU_TANH])
def test_gate_hands_on_nan_and_infinity(kernels: Kernels, kind: int) -> None:
    x = torch.tensor([torch.nan, torch.inf, 1.0, 1.0, 0.0])
    up = torch.tensor([1.0, 2.0, torch.nan, -torch.inf, 5.0])
    result = gate(kernels, kind, torch.cat([x, up])[None])[0]
    assert torch.isnan(result).tolist() == [True, False, True, False, False]
    assert result[[1, 3, 4]].tolist() == [math.inf, -math.inf, 0.0]


class Case:
    """Tokens with queries, keys and values side by side, and a pool whose slots are untouched."""

    layers, kv_heads, heads, page_size, pages, layer = 3, 2, 4, 8, 6, 1

    def __init__(
        self, head_dim: int, rotary: int, tokens: int, dtype: torch.dtype, pool_type: torch.dtype
    ) -> None:
        self.head_dim, self.rotary, self.tokens, self.dtype = head_dim, rotary, tokens, dtype
        shape = (self.pages, self.kv_heads, self.layers, 2, self.page_size, head_dim)
        self.pool = torch.full(shape, UNTOUCHED, dtype=pool_type)
        self.fused = random(tokens, self.heads + 2 * self.kv_heads, head_dim, dtype=dtype)
        slots = np.random.default_rng(0).permutation(self.pages * self.page_size)
        self.slots = np.ascontiguousarray(slots[:tokens], dtype=np.int64)
        angles = random(tokens, rotary // 2, seed=3)
        self.cos, self.sin = angles.cos(), angles.sin()

    def store(self, kernels: Kernels, rotary: int | None = None) -> int:
        query = self.fused
        key, value = query[:, self.heads :], query[:, self.heads + self.kv_heads :]
        code, stride = dtype_code(self.dtype), query.stride(0)
        pool_code = dtype_code(self.pool.dtype)
        assert pool_code is not None
        pool = Pool(
            self.pool.data_ptr(), pool_code, self.page_size, self.kv_heads, self.layers,
            self.head_dim,
        )  # fmt: skip
        step = Step(0, self.tokens, 0, None, None, None, self.slots.ctypes.data)
        result: int = kernels.lib.pdrt_rope_store(
            ctypes.byref(pool), ctypes.byref(step), self.layer, self.heads, code, pointer(query),
            stride, pointer(key), stride, pointer(value), stride, pointer(self.cos),
            pointer(self.sin), self.rotary if rotary is None else rotary,
        )  # fmt: skip
        return result

    def stored(self) -> Tensor:
        """(tokens, k/v, kv_heads, head_dim)."""
        pages, offsets = self.slots // self.page_size, self.slots % self.page_size
        return self.pool[pages, :, self.layer, :, offsets].transpose(1, 2)

    def rotated(self, x: Tensor) -> Tensor:
        """(tokens, heads, head_dim), in float64."""
        half = self.rotary // 2
        x, cos, sin = x.double(), self.cos.double()[:, None], self.sin.double()[:, None]
        first, second = x[..., :half], x[..., half : self.rotary]
        turned = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat([*turned, x[..., self.rotary :]], dim=-1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("pool_type", TYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary"), [(64, 64), (64, 32), (20, 20), (80, 30), (128, 128), (96, 2), (16, 0)]
)
def test_rope_store(
    kernels: Kernels, head_dim: int, rotary: int, dtype: torch.dtype, pool_type: torch.dtype
) -> None:
    for tokens in (1, 3, 40):
        case = Case(head_dim, rotary, tokens, dtype, pool_type)
        before = case.fused.clone()
        query, key, value = before.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
        assert case.store(kernels) == 0
        assert_close(case.fused[:, : case.heads], case.rotated(query))
        assert torch.equal(case.fused[:, case.heads :], before[:, case.heads :])
        assert_close(case.stored()[:, 0], case.rotated(key))
        assert torch.equal(case.stored()[:, 1], value.to(pool_type))
        written = case.pool != case.pool.new_tensor(UNTOUCHED)
        assert written.sum() == tokens * 2 * case.kv_heads * head_dim


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("pool_type", TYPES)
def test_pages_hold_finite_numbers_only(
    kernels: Kernels, dtype: torch.dtype, pool_type: torch.dtype
) -> None:
    case = Case(16, 0, 1, dtype, pool_type)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, 1.0])
    case.fused[0, case.heads :, :5] = bad.to(dtype)
    assert case.store(kernels) == 0
    largest = torch.finfo(pool_type).max
    expected = [0.0, largest, -largest, min(largest, torch.finfo(dtype).max), 1.0]
    for stored in case.stored()[0, :, :, :5].reshape(-1, 5).tolist():
        assert stored == expected


def test_a_rotated_nan_is_stored_as_zero_and_stays_in_the_query(kernels: Kernels) -> None:
    case = Case(16, 16, 1, torch.float32, torch.float32)
    case.fused[0, [0, case.heads], 3] = torch.nan
    assert case.store(kernels) == 0
    assert torch.isnan(case.fused[0, 0, [3, 11]]).all()
    assert case.stored()[0, 0, 0, [3, 11]].tolist() == [0.0, 0.0]
    assert torch.isfinite(case.pool).all()


@pytest.mark.parametrize("rotary", [-2, 3, 66])
def test_a_rotation_that_no_head_has_is_refused(kernels: Kernels, rotary: int) -> None:
    case = Case(64, 64, 2, torch.float32, torch.float32)
    before = case.fused.clone()
    assert case.store(kernels, rotary) == -1
    assert torch.equal(case.fused, before)
    assert torch.all(case.pool == UNTOUCHED)


def test_two_threads_equal_one(kernels: Kernels) -> None:
    x, weight = random(LARGE_ROWS, 90), random(90, seed=1)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = torch.empty_like(x)
        rms_norm(kernels, x, weight, out)
        results.append((out, gate(kernels, SILU, x)))
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
