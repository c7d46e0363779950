"""What benchmarks compute from what they measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from executor import DECODE, LONG, PREFILL, SHORT, figures_of
from floors import Floor, compile_library
from local import one_core_each, pool_mb, up_config
from plots import plot, points
from rows import Attempt, flat, settle, unclean
from shapes import count

from pdrt.cli.bench.machine import CpuShares
from pdrt.kv.layout import KvLayout

CLEAN, BUSY = CpuShares(50.0, 1.0), CpuShares(90.0, 40.0)
LAYOUT = KvLayout(page_size=16, kv_heads=2, layers=3, head_dim=8, dtype="bfloat16")
TENSORS = {
    "model.embed_tokens.weight": (100, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.norm.weight": (32,),
}
MATRICES, EMBEDDING = 32 * 32 + 64 * 32, 100 * 32


def attempt(cpu: CpuShares | None, **figures: float) -> Attempt:
    return Attempt(figures, cpu)


def test_a_row_is_the_median_of_its_clean_attempts() -> None:
    attempts = [attempt(CLEAN, ms=1.0), attempt(BUSY, ms=99.0), attempt(CLEAN, ms=3.0)]
    row = settle("row", [*attempts, attempt(CLEAN, ms=2.0)], 3)
    assert (row.figures, row.is_clean) == ({"ms": 2.0}, True)
    assert flat([row]) == {"row.ms": 2.0}


@pytest.mark.parametrize("cpu", [BUSY, None], ids=["busy", "unknown"])
def test_a_row_without_enough_clean_attempts_is_marked(cpu: CpuShares | None) -> None:
    row = settle("row", [attempt(CLEAN, ms=1.0), attempt(cpu, ms=3.0)], 2)
    assert (row.figures, row.is_clean) == ({"ms": 2.0}, False)
    assert unclean([row]) == ("row",)


def test_what_some_attempts_lack_is_left_out() -> None:
    row = settle("row", [attempt(CLEAN, ms=1.0), attempt(CLEAN, ms=1.0, rate=2.0)], 2)
    assert row.figures == {"ms": 1.0}
    assert settle("row", [], 1).figures == {}


def test_a_tied_head_is_read_and_an_embedding_is_not() -> None:
    tied = count(TENSORS, 4, LAYOUT)
    assert tied.weight_bytes == tied.step_weight_bytes == 2 * (EMBEDDING + MATRICES + 32)
    untied = count({**TENSORS, "lm_head.weight": (100, 32)}, 4, LAYOUT)
    assert untied.weight_bytes == 2 * (2 * EMBEDDING + MATRICES + 32)
    assert untied.step_weight_bytes == tied.step_weight_bytes
    assert untied.decode_flops(1, 1) == tied.decode_flops(1, 1)


def test_bytes_and_operations_of_a_step() -> None:
    shape = count(TENSORS, 4, LAYOUT)
    token = 3 * 2 * 2 * 8 * 2  # layers, keys and values, heads, head_dim, bytes
    assert shape.decode_bytes(8, 100) - shape.step_weight_bytes == 8 * 100 * token
    attention = 4 * 4 * 8 * 3  # two products of two operations, heads, head_dim, layers
    assert shape.decode_flops(8, 100) == 2 * 8 * (MATRICES + EMBEDDING) + 8 * 100 * attention
    linear = 2 * (10 * MATRICES + EMBEDDING)  # the head for the last token only
    assert shape.prefill_flops(10) == linear + 55 * attention


def test_a_floor_is_the_longer_of_reading_and_computing() -> None:
    floor = Floor(bytes_per_second=100.0, flops_per_second=1000.0)
    assert floor.seconds(200.0, 1.0) == 2.0
    assert floor.seconds(1.0, 5000.0) == 5.0


def test_figures_of_steps() -> None:
    shape = count(TENSORS, 4, LAYOUT)
    slow_memory = Floor(bytes_per_second=1e6, flops_per_second=1e15)
    floors = {case: case.floor(shape, slow_memory) for case in DECODE}
    found = figures_of({case: 2 * floors[case] for case in DECODE}, shape, slow_memory)
    assert [found[f"{case.name}.to_floor"] for case in DECODE] == pytest.approx([2.0] * 4)
    assert found[f"{LONG.name}.added_to_floor"] == pytest.approx(2.0)
    alone = figures_of({SHORT: 1.0, PREFILL[0]: 1.0}, shape, slow_memory)
    assert f"{LONG.name}.added_to_floor" not in alone, "nothing was added"


def test_the_floors_source_compiles_and_reads_all() -> None:
    library = compile_library()
    if library is None:
        pytest.skip("no C compiler")
    import torch

    memory = torch.ones(4096 * 2 + 4096, dtype=torch.uint8)
    start = -(-memory.data_ptr() // 64) * 64
    ones = 0x0101010101010101
    assert library.floors_read(start, 8192) == ones * 1024 % 2**64
    assert library.floors_float_flops(6) == 2 * library.floors_float_flops(3) > 0


def test_floors_count_the_bfloat16_products_that_ran() -> None:
    library = compile_library()
    if library is None or not hasattr(library, "floors_bfloat16"):
        pytest.skip("no C compiler, or no products of bfloat16")
    added = library.floors_bfloat16(5) - library.floors_bfloat16(2)  # sums of ones, exact
    assert 2 * added == library.floors_bfloat16_flops(3) > 0


SMAPS = """\
7f0000000000-7f0000100000 rw-s 00000000 00:01 5  /memfd:pdrt-kv (deleted)
Rss:                1000 kB
Pss:                 500 kB
7f0000200000-7f0000300000 r-xp 00000000 00:01 6  /usr/lib/libtorch_cpu.so
Rss:                9000 kB
7f0000400000-7f0000500000 rw-s 00000000 00:01 7  /memfd:pdrt-kv (deleted)
Rss:                  24 kB
""".splitlines()


def test_the_resident_pool() -> None:
    assert pool_mb(SMAPS) == pytest.approx(1024 * 1024 / 1e6)
    assert pool_mb([]) == 0.0


def test_one_core_for_each_worker_unless_told() -> None:
    assert one_core_each(["--cpus", "0"]) == ["--cpus", "0"]
    flags = one_core_each(["--prefill-workers", "1", "--decode-workers", "1"])
    cpus = up_config(flags).device.cpus
    assert cpus is not None and 1 <= len(cpus.split(",")) <= 2


def test_points_of_a_plot() -> None:
    figures = {"batch.8.ms": 3.0, "batch.16.ms": 5.0, "batch.8.floor_ms": 1.0, "x": 1.0}
    assert points({**figures, "batch.32.ms": None}, "batch", "ms") == ([8, 16], [3.0, 5.0])


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = {f"{group}.{size}.{kind}": 1.0 for group in ("prompt", "context", "batch")
               for size in (8, 16) for kind in ("ms", "floor_ms")}  # fmt: skip
    plot({**figures, "workers.1P1D.output_tokens_per_second": 9.0}, 2, tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["batch.png", "context.png", "prompt.png", "workers.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
