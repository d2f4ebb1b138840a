"""Ratios as a horizontal bar chart (needs the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .runner import Result

COLOURS = ("#4477aa", "#ccbb44", "#228833", "#ee6677")
TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32)


def draw(results: Sequence[Result], path: Path) -> None:
    """One group of bars per kernel, one bar per number of threads, quartiles as whiskers; on a logarithmic axis."""
    shown = [r for r in results if r.ratio is not None]
    names = list(dict.fromkeys(r.name for r in shown))
    threads = sorted({r.threads for r in shown})
    figure = Figure(figsize=(8, 1.2 + 0.2 * len(names)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / max(1, len(threads))
    for place, count in enumerate(threads):
        _bars(axes, [r for r in shown if r.threads == count], names, (place - (len(threads) - 1) / 2) * height, height,
              COLOURS[place % len(COLOURS)], f"{count} thread{'s' if count > 1 else ''}")  # fmt: skip
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.grid(axis="x", linewidth=0.5, alpha=0.4)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False, labelsize=8)
    axes.set_xlabel("times as fast as the better of torch eager and torch.compile")
    if shown:
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(threads), fontsize=8)
    with rc_context({"svg.hashsalt": "benchmarks"}):  # the same results give the same file
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(
    axes: Axes,
    results: Sequence[Result],
    names: Sequence[str],
    shift: float,
    height: float,
    color: str,
    label: str,
) -> None:
    known = {r.name: r.ratio for r in results if r.ratio is not None}
    at = [names.index(name) + shift for name in known]
    medians = [r.median for r in known.values()]
    whiskers = ([r.median - r.low for r in known.values()], [r.high - r.median for r in known.values()])
    axes.barh(at, [m - 1 for m in medians], height, left=1, xerr=whiskers, color=color, label=label,
              error_kw={"linewidth": 0.7, "ecolor": "#555555"})  # fmt: skip
