"""Plots of what scale.py measured: `python benchmarks/plots.py scale.json docs/plots`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdrt.errors import ConfigError

INCHES, DOTS_PER_INCH = (6.4, 4.0), 120
GROWING = {
    "prompt": ("prompt, tokens", "Prefill of one prompt, one core"),
    "context": ("context, tokens", "Decode step, batch 8, one core"),
    "batch": ("sequences", "Decode step, context 256, one core"),
}
"""By group of figures: what grows, and the title."""
Figures = Mapping[str, float | None]


def points(figures: Figures, group: str, figure: str) -> tuple[list[int], list[float]]:
    """Sizes and values of `group.SIZE.figure`, by size. Pure."""
    found = {}
    for name, value in figures.items():
        words = name.split(".")
        if len(words) == 3 and words[0] == group and words[2] == figure and value is not None:
            found[int(words[1])] = value
    return sorted(found), [found[size] for size in sorted(found)]


def plot(figures: Figures, cores: int, directory: Path) -> None:
    """A file per thing that grows.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    for group, (label, title) in GROWING.items():
        figure, axes = pyplot.subplots(figsize=INCHES)
        axes.plot(*points(figures, group, "ms"), marker="o", label="pdrt")
        axes.plot(*points(figures, group, "floor_ms"), linestyle="--", label="floor")
        axes.set(xlabel=label, ylabel="ms", title=title)
        axes.set_ylim(bottom=0)
        _save(pyplot, figure, axes, directory / f"{group}.png")
    _plot_workers(pyplot, figures, cores, directory / "workers.png")


def _plot_workers(pyplot: Any, figures: Figures, cores: int, path: Path) -> None:
    figure_name = ".output_tokens_per_second"
    rates = {n.split(".")[1]: v for n, v in figures.items() if n.endswith(figure_name) and v}
    figure, axes = pyplot.subplots(figsize=INCHES)
    axes.bar(list(rates), list(rates.values()), label="16 clients, prompts of 256 tokens")
    axes.set(ylabel="output tokens/s", title=f"Workers, {cores} cores in all")
    axes.set_xlabel(f"prefill and decode workers; more than {cores} share cores")
    _save(pyplot, figure, axes, path)


def _save(pyplot: Any, figure: Any, axes: Any, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install pdrt[bench]") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    document = msgspec.json.decode(options.file.read_bytes())
    plot(document["figures"], document["detail"]["cores"], options.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
