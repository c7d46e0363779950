"""Packed linear layers against float64, at every edge of their tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from pdrt.model.native.library import (
    AMX,
    PAIRS_CODE,
    Kernels,
    dtype_code,
    library_path,
    open_kernels,
    pointer,
)
from pdrt.model.native.linear import (
    Linear,
    LinearKind,
    LinearPart,
    MkldnnLinear,
    NativeLinear,
    TorchLinear,
    choose_linear,
    mkldnn_works,
)
from pdrt.model.resources import BF16_FLAGS, cpu_flags
from tests.model.native.conftest import BuildKernels, usable_libraries

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16]
HALF = torch.bfloat16
SMOLLM2_SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)]
UNTOUCHED = 12345.0


@pytest.fixture(scope="module", params=[*usable_libraries(), "wide"])
def kernels(request: pytest.FixtureRequest, build_wide_kernels: BuildKernels) -> Kernels:
    if request.param == "wide":
        return build_wide_kernels(["linear", "pack"])
    return open_kernels(library_path(request.param))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pair_kernels(kernels: Kernels) -> Kernels:
    """Those that take layers of bfloat16 throughout."""
    weight, packed = torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.uint8)
    if kernels.lib.pdrt_pack(PAIRS_CODE, pointer(weight), 32, 1, pointer(packed), 0, 1):
        pytest.skip("its vectors are not as wide as a tile")
    return kernels


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part(outputs: int, inputs: int, dtype: torch.dtype, bias: bool = True) -> LinearPart:
    weight = (random(outputs, inputs, seed=outputs) / inputs**0.5).to(dtype)
    return LinearPart(weight, random(outputs, seed=1) if bias else None)


def exact(x: Tensor, parts: list[LinearPart]) -> Tensor:
    """The layer in float64."""
    results = []
    for one in parts:
        result = x.double() @ one.weight.double().T
        results.append(result if one.bias is None else result + one.bias.double())
    return torch.cat(results, dim=1)


def assert_close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double(), expected, rtol=2e-5, atol=2e-5)


def assert_same_in_every_batch(layer: Linear, x: Tensor, counts: Sequence[int]) -> None:
    """To the bit, for so many rows from either end."""
    together = layer(x)
    for rows in counts:
        assert torch.equal(layer(x[:rows]), together[:rows])
        assert torch.equal(layer(x[-rows:]), together[-rows:])


def assert_same_with_one_thread(layer: Linear, x: Tensor) -> None:
    """Called with two."""
    two = layer(x)
    torch.set_num_threads(1)
    assert torch.equal(layer(x), two)


def assert_stays_in_its_row(layer: Linear, x: Tensor, bad: float) -> None:
    """What is made of it. Spoils a row of `x`."""
    clean, spoiled_row = layer(x), len(x) // 2
    x[spoiled_row, 11] = bad
    spoiled = layer(x)
    assert not torch.isfinite(spoiled[spoiled_row]).any()
    others = torch.arange(len(x)) != spoiled_row
    assert torch.equal(spoiled[others], clean[others])


@pytest.mark.parametrize("dtype", TYPES)
def test_every_number_of_rows_and_outputs(kernels: Kernels, dtype: torch.dtype) -> None:
    for outputs in range(1, 71):
        layer = NativeLinear(kernels, [part(outputs, 37, dtype)])
        for rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 24, 25, 40):
            x = random(rows, 37, seed=rows)
            assert_close(layer(x), exact(x, [part(outputs, 37, dtype)]))


@pytest.mark.parametrize("dtype", TYPES)
def test_every_number_of_rows_and_inputs(kernels: Kernels, dtype: torch.dtype) -> None:
    for inputs in range(1, 71):
        layer = NativeLinear(kernels, [part(33, inputs, dtype)])
        for rows in range(1, 41, 3 if inputs % 8 else 1):
            x = random(rows, inputs, seed=rows)
            assert_close(layer(x), exact(x, [part(33, inputs, dtype)]))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SMOLLM2_SHAPES)
def test_shapes_of_a_model(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, outputs = shape
    layer = NativeLinear(kernels, [part(outputs, inputs, dtype)])
    for rows in (1, 2, 3, 8, 32, 130):
        x = random(rows, inputs)
        assert_close(layer(x), exact(x, [part(outputs, inputs, dtype)]))


@pytest.mark.parametrize("dtype", TYPES)
def test_many_inputs_are_computed_in_blocks(kernels: Kernels, dtype: torch.dtype) -> None:
    x = random(70, 2500)
    layer = NativeLinear(kernels, [part(50, 2500, dtype)])
    assert_close(layer(x), exact(x, [part(50, 2500, dtype)]))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_is_the_same_to_the_bit_in_every_batch(
    kernels: Kernels, dtype: torch.dtype, two_threads: None
) -> None:
    layer = NativeLinear(kernels, [part(600, 1100, dtype)])
    assert_same_in_every_batch(layer, random(150, 1100), (1, 2, 3, 5, 7, 12, 13, 40))


@pytest.mark.parametrize("rows", [1, 8, 70])
def test_two_threads_equal_one(kernels: Kernels, rows: int, two_threads: None) -> None:
    layer = NativeLinear(kernels, [part(1000, 600, torch.float32)])
    assert_same_with_one_thread(layer, random(rows, 600))


@pytest.mark.parametrize("dtype", TYPES)
def test_parts_are_packed_one_after_another(kernels: Kernels, dtype: torch.dtype) -> None:
    """None of them begins or ends at a panel, and only one has a bias."""
    parts = [part(outputs, 40, dtype, bias=outputs == 7) for outputs in (5, 7, 90, 1)]
    layer = NativeLinear(kernels, parts)
    assert layer.outputs == 103
    for rows in (1, 20):
        assert_close(layer(random(rows, 40)), exact(random(rows, 40), parts))


@pytest.mark.parametrize("rows", [1, 5, 30])
def test_what_bfloat16_holds_exactly_is_kept_in_it(kernels: Kernels, rows: int) -> None:
    """Half the memory; the same to the bit as beside a part that keeps all of it in float32."""
    full = part(90, 700, torch.float32)
    narrow = LinearPart(full.weight.bfloat16().float(), full.bias)
    layer, wide = NativeLinear(kernels, [narrow]), NativeLinear(kernels, [narrow, full])
    assert layer.nbytes < 0.3 * wide.nbytes
    x = random(rows, 700)
    assert torch.equal(layer(x), wide(x)[:, :90])


@pytest.mark.parametrize("rows", [1, 3, 9, 30])
def test_strides_and_nothing_else_is_written(kernels: Kernels, rows: int) -> None:
    layer = NativeLinear(kernels, [part(35, 50, torch.float32)])
    x = random(rows, 64)[:, 7:57]
    memory = torch.full((rows + 2, 60), UNTOUCHED)
    out = memory[1:-1, 10:45]
    assert layer(x, out).data_ptr() == out.data_ptr()
    assert_close(out, exact(x, [part(35, 50, torch.float32)]))
    out.fill_(UNTOUCHED)
    assert torch.all(memory == UNTOUCHED)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_come_out_in_their_row_only(
    kernels: Kernels, rows: int, dtype: torch.dtype, bad: float
) -> None:
    layer = NativeLinear(kernels, [part(41, 30, dtype)])
    assert_stays_in_its_row(layer, random(rows, 30), bad)


def test_small_numbers_are_not_flushed_to_zero(kernels: Kernels) -> None:
    tiny = torch.full((1, 1), 1e-40)
    assert NativeLinear(kernels, [LinearPart(torch.ones(1, 1))])(tiny).item() == tiny.item()


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_the_packed_weight(kernels: Kernels, dtype: torch.dtype) -> None:
    table = part(1000, 300, dtype, bias=False)
    layer = NativeLinear(kernels, [table])
    ids = torch.randint(0, 1000, (2000,), generator=torch.Generator().manual_seed(0))
    ids[:3] = torch.tensor([999, 0, 999])
    assert torch.equal(layer.rows(ids, 2.5), table.weight[ids].float() * 2.5)
    assert layer.rows(ids[:0]).shape == (0, 300)


def test_no_rows(kernels: Kernels) -> None:
    assert NativeLinear(kernels, [part(20, 10, torch.float32)])(torch.empty(0, 10)).shape == (0, 20)


def test_weights_need_not_be_contiguous(kernels: Kernels) -> None:
    weight = random(30, 20).T
    assert not weight.is_contiguous()
    assert_close(
        NativeLinear(kernels, [LinearPart(weight)])(random(2, 30)),
        exact(random(2, 30), [LinearPart(weight)]),
    )


@pytest.mark.parametrize(
    "arguments",
    [(0, 0, 4, 0, 4), (0, 4, 0, 0, 4), (0, 4, 4, 1, 4), (0, 4, 4, -1, 4), (3, 4, 4, 0, 4)],
    ids=["no inputs", "no outputs", "beyond the end", "before the start", "unknown type"],
)
def test_what_does_not_fit_is_not_packed(kernels: Kernels, arguments: tuple[int, ...]) -> None:
    kind, inputs, outputs, at, total = arguments
    packed = torch.full((4096,), UNTOUCHED)
    weight = torch.ones(8, 8)
    refused = kernels.lib.pdrt_pack(
        kind, pointer(weight), inputs, outputs, pointer(packed), at, total
    )
    assert refused == -1
    assert torch.all(packed == UNTOUCHED)


def test_packing_overwrites_all_of_its_memory(kernels: Kernels) -> None:
    """Outputs that pad the last panel too: what memory held before is never computed with."""
    lib, code = kernels.lib, dtype_code(torch.float32)
    packed = torch.full((lib.pdrt_packed_bytes(code, 5, 3) // 4,), torch.nan)
    weight = random(3, 5)
    assert lib.pdrt_pack(code, pointer(weight), 5, 3, pointer(packed), 0, 3) == 0
    assert not torch.isnan(packed).any()
    np.testing.assert_array_equal(packed[packed != 0].sort()[0], weight.flatten().sort()[0])


class TestPairs:
    """Bfloat16 throughout."""

    @pytest.mark.parametrize("outputs", [1, 15, 31, 32, 33, 64, 100])
    def test_every_number_of_rows(self, pair_kernels: Kernels, outputs: int) -> None:
        for inputs in (32, 96, 576):
            layer = pair_layer(pair_kernels, [part(outputs, inputs, HALF)])
            for rows in (1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 100):
                x = random(rows, inputs, seed=rows).to(HALF)
                assert_rounded(layer(x), exact(x, [part(outputs, inputs, HALF)]))

    def test_a_row_is_the_same_to_the_bit_in_every_batch(
        self, pair_kernels: Kernels, two_threads: None
    ) -> None:
        layer = pair_layer(pair_kernels, [part(600, 1120, HALF)])
        x = random(150, 1120).to(HALF)
        assert_same_in_every_batch(layer, x, (1, 2, 3, 15, 16, 17, 32, 33, 40, 64))

    @pytest.mark.parametrize("rows", [1, 20, 70])
    def test_two_threads_equal_one(
        self, pair_kernels: Kernels, rows: int, two_threads: None
    ) -> None:
        layer = pair_layer(pair_kernels, [part(1000, 576, HALF)])
        assert_same_with_one_thread(layer, random(rows, 576).to(HALF))

    def test_parts_are_packed_one_after_another(self, pair_kernels: Kernels) -> None:
        parts = [part(outputs, 64, HALF, bias=outputs == 7) for outputs in (5, 7, 90, 1)]
        layer = pair_layer(pair_kernels, parts)
        for rows in (1, 40):
            x = random(rows, 64).to(HALF)
            assert_rounded(layer(x), exact(x, parts))

    @pytest.mark.parametrize("rows", [1, 20, 33])
    def test_strides_and_nothing_else_is_written(self, pair_kernels: Kernels, rows: int) -> None:
        layer = pair_layer(pair_kernels, [part(35, 64, HALF)])
        x = random(rows, 100).to(HALF)[:, 6:70]
        memory = torch.full((rows + 2, 60), UNTOUCHED, dtype=HALF)
        untouched = memory.clone()
        out = memory[1:-1, 11:46]
        assert layer(x, out).data_ptr() == out.data_ptr()
        assert_rounded(out, exact(x, [part(35, 64, HALF)]))
        out.fill_(UNTOUCHED)
        assert torch.equal(memory, untouched)

    @pytest.mark.parametrize("rows", [1, 20, 33])
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_nan_and_infinity_come_out_in_their_row_only(
        self, pair_kernels: Kernels, rows: int, bad: float
    ) -> None:
        layer = pair_layer(pair_kernels, [part(41, 32, HALF)])
        assert_stays_in_its_row(layer, random(rows, 32).to(HALF), bad)

    def test_rows_of_the_packed_weight(self, pair_kernels: Kernels) -> None:
        table = part(1000, 96, HALF, bias=False)
        layer = pair_layer(pair_kernels, [table])
        ids = torch.tensor([999, 0, 999, 33])
        assert torch.equal(layer.rows(ids, 2.5), table.weight[ids].float() * 2.5)

    def test_inputs_that_fill_no_tile(self, pair_kernels: Kernels) -> None:
        packed = torch.zeros(4096, dtype=torch.uint8)
        weight = torch.ones(8, 48, dtype=HALF)
        pack = pair_kernels.lib.pdrt_pack
        assert pack(PAIRS_CODE, pointer(weight), 48, 8, pointer(packed), 0, 8) == -1
        amx = msgspec.structs.replace(pair_kernels, isa=AMX)
        plan = choose_linear(HALF, CPU, frozenset(), amx)
        assert isinstance(plan.pack([part(8, 48, HALF)]), TorchLinear)
        assert isinstance(plan.pack([part(8, 64, HALF)]), NativeLinear)

    def test_a_row_that_begins_within_a_pair(self, pair_kernels: Kernels) -> None:
        layer = pair_layer(pair_kernels, [part(8, 32, HALF)])
        with pytest.raises(AssertionError, match="within a pair"):
            layer(torch.zeros(3, 33, dtype=HALF)[:, :32])


def pair_layer(kernels: Kernels, parts: list[LinearPart]) -> NativeLinear:
    return NativeLinear(kernels, parts, HALF)


def assert_rounded(result: Tensor, expected: Tensor) -> None:
    assert result.dtype is HALF
    torch.testing.assert_close(result.double(), expected, rtol=2**-7, atol=2**-10)


def test_onednn_packs_float32() -> None:
    assert mkldnn_works(torch.float32)
    parts = [part(20, 30, torch.float32), part(9, 30, torch.float32, bias=False)]
    for rows in (1, 7):
        assert_close(MkldnnLinear(parts)(random(rows, 30)), exact(random(rows, 30), parts))


@pytest.mark.parametrize("make", [MkldnnLinear, TorchLinear])
def test_rows_of_kinds_that_keep_a_table(make: type[MkldnnLinear | TorchLinear]) -> None:
    table = part(50, 30, torch.float32, bias=False)
    layer: Linear = make([table], tied=True) if make is MkldnnLinear else make([table])
    ids = torch.tensor([3, 49, 3])
    assert torch.equal(layer.rows(ids, 0.5), table.weight[ids] * 0.5)
    assert_close(layer(random(2, 30)), exact(random(2, 30), [table]))


def plan_kind(kernels: Kernels, dtype: torch.dtype, flags: frozenset[str]) -> LinearKind:
    return choose_linear(dtype, CPU, flags, kernels).kind


def without_amx(kernels: Kernels) -> Kernels:
    return msgspec.structs.replace(kernels, isa="avx512bf16")


def test_the_choice(kernels: Kernels) -> None:
    assert plan_kind(kernels, torch.float32, frozenset()) is LinearKind.NATIVE
    of_halves = LinearKind.AMX if kernels.isa == AMX else LinearKind.NATIVE
    assert plan_kind(kernels, torch.bfloat16, frozenset()) is of_halves
    assert plan_kind(kernels, torch.float16, frozenset()) is LinearKind.TORCH
    meta = choose_linear(torch.float32, torch.device("meta"), frozenset(), kernels)
    assert meta.kind is LinearKind.TORCH


def test_onednn_is_not_chosen_where_it_refuses(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags that promise bfloat16, and an operator that refuses it: as another torch might."""

    class Refusing:
        @staticmethod
        def _reorder_linear_weight(weight: Tensor) -> Tensor:
            raise RuntimeError("mkldnn_reorder_linear_weight: not here")

    monkeypatch.setattr("pdrt.model.native.linear._operators", Refusing)
    plan = choose_linear(torch.bfloat16, CPU, BF16_FLAGS, without_amx(kernels))
    assert plan.kind is LinearKind.TORCH
    assert plan.activations is torch.bfloat16


def test_onednn_is_not_chosen_where_it_computes_wrongly(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        @staticmethod
        def _reorder_linear_weight(weight: Tensor) -> Tensor:
            return weight.flip(0)

        @staticmethod
        def _linear_pointwise(x: Tensor, weight: Tensor, bias: Tensor, *_: object) -> Tensor:
            return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr("pdrt.model.native.linear._operators", Wrong)
    assert plan_kind(without_amx(kernels), torch.bfloat16, BF16_FLAGS) is LinearKind.TORCH


@pytest.mark.skipif(
    not BF16_FLAGS.isdisjoint(cpu_flags()), reason="this processor multiplies bfloat16"
)
def test_onednn_refuses_bfloat16_without_the_instructions() -> None:
    assert not mkldnn_works(torch.bfloat16)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_plan_packs_layers_and_heads(kernels: Kernels, kind: str) -> None:
    dtype = torch.float32 if kind == "native" else torch.float64
    plan = choose_linear(dtype, CPU, frozenset(), kernels)
    assert plan.kind.value == kind
    head = part(40, 30, dtype, bias=False)
    x = random(3, 30).to(plan.activations)
    assert_close(plan.pack([head, head])(x), exact(x, [head, head]))
    tied = plan.pack_tied(head)
    assert_close(tied(x), exact(x, [head]))
    assert_close(tied.rows(torch.tensor([7])), head.weight[[7]].double())
    assert tied.nbytes >= head.weight.nbytes
