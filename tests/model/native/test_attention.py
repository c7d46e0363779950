"""Paged attention against float64, with NaN in every slot and page that is not to be read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdrt.model.native.library import Kernels, dtype_code, library_path, open_kernels, pointer
from tests.model.native.attention_cases import Case, Shape
from tests.model.native.conftest import BuildKernels, usable_libraries

FLOAT, HALF = torch.float32, torch.bfloat16
TYPES = [(FLOAT, FLOAT), (HALF, FLOAT), (HALF, HALF)]
"""Of the pool and of the queries."""
MIXED = ((0, 1), (17, 1), (63, 1), (64, 1), (200, 1), (0, 2), (0, 70), (5, 33), (130, 61))
"""Decode rows and chunks, at the edges of pages and of blocks of keys."""
LONG = ((1023, 1), (1024, 1), (2600, 1), (3000, 40))
"""Around the parts that a long sequence is attended in."""
LIBRARIES = [*usable_libraries(), "wide", "pairs", "tiles"]
EMULATE_PAIRS, EMULATE_TILES = "-DPDRT_EMULATE_BF16_PAIRS", "-DPDRT_EMULATE_TILES"


@pytest.fixture(scope="module", params=LIBRARIES)
def kernels(request: pytest.FixtureRequest, build_wide_kernels: BuildKernels) -> Kernels:
    """Each library; the AVX-512 width; and that with products of bfloat16 pairs, of single ones and
    of tiles, emulated."""
    match request.param:
        case "wide":
            return build_wide_kernels(["attention"])
        case "pairs":
            return build_wide_kernels(["attention"], [EMULATE_PAIRS])
        case "tiles":
            return build_wide_kernels(["attention"], [EMULATE_PAIRS, EMULATE_TILES])
        case isa:
            return open_kernels(library_path(isa))


@pytest.fixture(params=TYPES, ids=lambda types: "/".join(str(each)[6:] for each in types))
def types(request: pytest.FixtureRequest) -> tuple[torch.dtype, torch.dtype]:
    pool_type, query_type = request.param
    return pool_type, query_type


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_attends(kernels: Kernels, shape: Shape) -> None:
    case = Case(shape)
    result, expected = case.attend(kernels).double(), case.expected()
    if shape.query_type is FLOAT:
        # Sums of a head's products have an error that grows with how large the parts are.
        bound = 1e-6 * shape.head_dim**0.5
        torch.testing.assert_close(result, expected, rtol=bound, atol=bound)
    else:
        # Probabilities may be rounded to bfloat16 too, where pairs are multiplied.
        torch.testing.assert_close(result, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.usefixtures("one_thread")
class TestShapes:
    @pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 80, 96, 128, 256])
    def test_head_sizes(
        self, kernels: Kernels, types: tuple[torch.dtype, ...], head_dim: int
    ) -> None:
        assert_attends(kernels, _shape(types, MIXED, head_dim=head_dim))

    @pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16, 33])
    def test_groups(self, kernels: Kernels, types: tuple[torch.dtype, ...], group: int) -> None:
        assert_attends(kernels, _shape(types, MIXED, group=group, kv_heads=1))

    @pytest.mark.parametrize("page_size", [1, 4, 5, 32, 128])
    def test_page_sizes(
        self, kernels: Kernels, types: tuple[torch.dtype, ...], page_size: int
    ) -> None:
        assert_attends(kernels, _shape(types, MIXED, page_size=page_size))

    @pytest.mark.parametrize("window", [1, 2, 20, 64, 65, 1000])
    def test_windows(self, kernels: Kernels, types: tuple[torch.dtype, ...], window: int) -> None:
        assert_attends(kernels, _shape(types, MIXED, window=window))

    @pytest.mark.parametrize("window", [0, 33])
    def test_softcap(self, kernels: Kernels, types: tuple[torch.dtype, ...], window: int) -> None:
        assert_attends(kernels, _shape(types, MIXED, softcap=5.0, window=window))

    @pytest.mark.parametrize("window", [0, 1500])
    def test_long_sequences(
        self, kernels: Kernels, types: tuple[torch.dtype, ...], window: int
    ) -> None:
        assert_attends(kernels, _shape(types, LONG, kv_heads=1, window=window))

    @pytest.mark.parametrize("head_dim", [8, 64])
    def test_a_single_token_or_chunk(
        self, kernels: Kernels, types: tuple[torch.dtype, ...], head_dim: int
    ) -> None:
        for row in ((0, 1), (0, 3), (15, 1), (16, 1), (3, 300)):
            assert_attends(kernels, _shape(types, (row,), head_dim=head_dim))


def _shape(
    types: tuple[torch.dtype, ...], rows: tuple[tuple[int, int], ...], **fields: int | float
) -> Shape:
    pool_type, query_type = types
    return Shape(rows=rows, pool_type=pool_type, query_type=query_type, **fields)  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_thread")
def test_as_exact_as_torch(kernels: Kernels) -> None:
    """Float32 loses no more than scaled_dot_product_attention in float32 does, give or take."""
    case = Case(Shape(rows=((0, 300),), group=1))
    keys, values = (part[0].transpose(0, 1)[None] for part in (case.keys, case.values))
    query = case.query[:, :-1].transpose(0, 1)[None]
    torchs = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=case.scale)
    expected = case.expected()
    ours = (case.attend(kernels).double() - expected).abs().max()
    assert ours < 2 * (torchs[0].transpose(0, 1).double() - expected).abs().max()


@pytest.mark.usefixtures("one_thread")
def test_a_row_does_not_depend_on_its_batch(kernels: Kernels) -> None:
    together = Case(Shape(rows=MIXED)).attend(kernels)
    alone = Case(Shape(rows=MIXED))
    for row in range(len(MIXED)):
        first, last = alone.first[row : row + 2].tolist()
        assert torch.equal(together[first:last], _only(alone, row).attend(kernels))


def _only(case: Case, row: int) -> Case:
    """The same case with one of its rows."""
    one = Case.__new__(Case)
    one.__dict__.update(case.__dict__)
    first, last = case.first[row : row + 2].tolist()
    one.tables, one.context = case.tables[row : row + 1].copy(), case.context[row : row + 1].copy()
    one.first = case.first[row : row + 2] - case.first[row]
    one.query = case.query[first:last].clone()
    return one


@pytest.mark.parametrize("rows", [MIXED, LONG, LONG[2:3], ((4000, 1), (2, 1))])
def test_threads_change_nothing(kernels: Kernels, rows: tuple[tuple[int, int], ...]) -> None:
    """With few rows and long contexts, the keys are shared out: to the same result, to the bit."""
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(Case(Shape(rows=rows, kv_heads=1)).attend(kernels))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.usefixtures("one_thread")
def test_nan_of_one_query_stays_with_it(kernels: Kernels) -> None:
    case = Case(Shape(rows=((5, 33), (9, 1))))
    case.query[3, 2, 7] = torch.nan
    result = case.attend(kernels)
    is_nan = result.isnan().any(-1)
    assert is_nan[3, 2]
    assert is_nan.sum() == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 12},
        {"head_dim": 264},
        {"pool_type": FLOAT, "query_type": HALF},
    ],
    ids=["odd", "wide", "types"],
)
def test_what_is_not_known_is_refused(kernels: Kernels, fields: dict[str, object]) -> None:
    case = Case(Shape(rows=((0, 2),), **fields))  # type: ignore[arg-type]
    out = torch.zeros_like(case.query)
    status = kernels.lib.pdrt_attend(
        case.pool_struct(), case.step_struct(), 0, case.heads, dtype_code(case.query.dtype),
        pointer(case.query), case.query.stride(0), pointer(out), out.stride(0), 1.0, 0.0, 0,
    )  # fmt: skip
    assert status == -1
    assert not out.any()


@pytest.mark.parametrize("head_dim", [8, 24, 64])
@pytest.mark.parametrize("page_size", [4, 16])
def test_store(
    kernels: Kernels, types: tuple[torch.dtype, ...], head_dim: int, page_size: int
) -> None:
    pool_type, source_type = types
    case = Case(Shape(rows=((0, 30), (9, 1)), head_dim=head_dim, page_size=page_size))
    pool = torch.zeros_like(case.pool, dtype=pool_type)
    slots = torch.cat([_slots(case, row) for row in range(2)])
    key, value = torch.randn(2, len(slots), 2, head_dim).to(source_type)
    key[0, 0, 0], key[1, 1, 1] = torch.nan, torch.inf
    value[2, 0, -1], value[-1, -1, -1] = -torch.inf, 3.4e38
    shape, step = case.shape, case.step_struct()
    step.slots = slots.data_ptr()
    struct = case.pool_struct()
    struct.data, struct.type = pool.data_ptr(), dtype_code(pool_type)
    status = kernels.lib.pdrt_store(
        struct, step, 1, dtype_code(source_type), pointer(key), key.stride(0), pointer(value),
        value.stride(0),
    )  # fmt: skip
    assert status == 0
    expected = torch.zeros_like(pool)
    stored = torch.stack((key, value)).float().nan_to_num_()
    limit = torch.finfo(pool_type).max
    stored = stored.clamp_(-limit, limit).to(pool_type)
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, shape.page_size)
        expected[page, :, 1, :, offset] = stored[:, token].transpose(0, 1)
    assert torch.equal(pool, expected)


def _slots(case: Case, row: int) -> Tensor:
    start, tokens = case.shape.rows[row]
    positions = torch.arange(start, start + tokens)
    pages = torch.from_numpy(case.tables[row]).long()[positions // case.shape.page_size]
    return pages * case.shape.page_size + positions % case.shape.page_size
