"""Rows of `pdrt bench`, for people and for programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from pdrt import __version__
from pdrt.cli.bench.flags import Settings
from pdrt.cli.bench.load import Load, Shape
from pdrt.cli.bench.machine import CpuShares
from pdrt.cli.bench.summary import Quantiles, Slo, Summary
from pdrt.errors import PdrtError

OTHERS_PERCENT_MAX = 3.0
"""Beyond this share of the processors, used by others, a row is marked."""
LEGEND = """\
TTFT: request sent to first text. ITL: between two events with text. TPOT: mean time of a request's
tokens after the first. E2E: the whole request. Each p50 / p99 over the row's requests.
good: requests within the SLO. CPU others %: of this machine's processors, used by neither the
server nor this command; (!) where it is so much that the row means little."""


class Row(msgspec.Struct, frozen=True):
    """One load, and what came of it."""

    load: Load
    shape: Shape
    summary: Summary
    cpu: CpuShares | None
    """None where the kernel does not say."""


def table(rows: Sequence[Row], slo: Slo) -> Table:
    """For people; milliseconds are p50 / p99."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    columns = [
        "load",
        "prompt",
        "output",
        "requests",
        "failed",
        "TTFT ms",
        "ITL ms",
        "TPOT ms",
        "E2E ms",
        "req/s",
        "output tok/s",
        "total tok/s",
    ]
    has_slo = slo != Slo()
    columns += ["good req/s", "good %"] if has_slo else []
    for column in [*columns, "CPU others %"]:
        made.add_column(column, justify="left" if column == "load" else "right")
    for row in rows:
        s = row.summary
        cells = [
            row.load.name,
            str(row.shape.prompt_tokens),
            str(row.shape.output_tokens),
            str(s.requests),
            str(s.failed),
            _pair(s.ttft_ms),
            _pair(s.itl_ms),
            _pair(s.tpot_ms),
            _pair(s.e2e_ms),
            f"{s.requests_per_second:.2f}",
            f"{s.output_tokens_per_second:.1f}",
            f"{s.total_tokens_per_second:.1f}",
        ]
        if has_slo:
            cells += [f"{s.goodput_requests_per_second:.2f}", f"{100 * s.good_share:.0f}"]
        made.add_row(*cells, _others(row.cpu))
    failures = [
        f"{row.load.name}: {count} failed: {error}"
        for row in rows
        for error, count in row.summary.errors.items()
    ]
    made.caption = "\n".join([*failures, LEGEND])
    made.caption_justify = "left"
    return made


def _pair(found: Quantiles) -> str:
    return f"{found.p50:.0f} / {found.p99:.0f}"


def _others(cpu: CpuShares | None) -> str:
    if cpu is None:
        return "-"
    return f"{cpu.others:.1f}" + (" (!)" if cpu.others > OTHERS_PERCENT_MAX else "")


def write_json(path: Path, settings: Settings, rows: Sequence[Row]) -> None:
    """Settings and rows, without the API key.

    Raises:
        PdrtError: the file cannot be written.
    """
    target = msgspec.structs.replace(settings.target, api_key=None)
    document = {
        "pdrt": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": msgspec.structs.replace(settings, target=target),
        "rows": rows,
    }
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    except OSError as error:
        raise PdrtError(f"cannot write {path}: {error.strerror}") from error
