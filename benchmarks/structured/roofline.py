"""Speeds of kernels under the roof of the machine: its multiply-adds and its copies (needs the extra `plot`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..runner import Limit, Result

COLOURS = ("#4477aa", "#ccbb44", "#228833", "#ee6677", "#aa3377", "#66ccee", "#bbbbbb", "#000000")
MARKS = "osD^vP"
Point = tuple[str, float, float]


def draw(results: Sequence[Result], path: Path) -> None:
    """Left, under the roof: kernels that multiply-adds bound. Right: the others, as a share of a copy, by bytes."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    limits = [(r, r.limit) for r in results if r.limit is not None]
    _roof(left, [(r, x) for r, x in limits if x.unit == "FLOP"], [x for _, x in limits if x.unit == "B"])
    _shares(right, [(r, x) for r, x in limits if x.unit == "B"])
    for axes in (left, right):
        axes.grid(linewidth=0.5, alpha=0.4)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    with rc_context({"svg.hashsalt": "benchmarks"}):  # the same results give the same file
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _roof(axes: Axes, limits: Sequence[tuple[Result, Limit]], copies: Sequence[Limit]) -> None:
    _scatter(axes, [(r.family, x.intensity, x.speed * 1e-9) for r, x in limits])
    if limits:
        peak = max(x.most for _, x in limits) * 1e-9
        doubles = [x.most for r, x in limits if r.family.endswith("f64")]
        for level in (peak, *([max(doubles) * 1e-9] if doubles else [])):
            axes.axhline(level, color="black", linewidth=1)
        slowest = min((x.most for x in copies), default=0.0) * 1e-9
        if slowest:
            ends = (min(x.intensity for _, x in limits) / 2, peak / slowest)
            axes.plot(ends, [slowest * i for i in ends], color="black", linewidth=1, linestyle="dashed")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte of the operands")
    axes.set_ylabel("GFLOP/s of the kernel alone")
    axes.set_title("lines: measured multiply-adds of each type, copy from memory", fontsize=8)


def _shares(axes: Axes, limits: Sequence[tuple[Result, Limit]]) -> None:
    _scatter(axes, [(r.family, x.speed * x.seconds.median, x.share.median) for r, x in limits])
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("bytes read and written")
    axes.set_ylabel("speed of the kernel alone")
    axes.set_title("relative to a copy of as many bytes", fontsize=8)


def _scatter(axes: Axes, points: Sequence[Point]) -> None:
    families = list(dict.fromkeys(family for family, _, _ in points))
    for (color, mark), family in zip(_styles(), families, strict=False):
        own = [(x, y) for name, x, y in points if name == family]
        axes.scatter([x for x, _ in own], [y for _, y in own], s=14, color=color, marker=mark, label=family)
    if families:
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=7)


def _styles() -> Iterator[tuple[str, str]]:
    """Every mark in every color."""
    for mark in MARKS:
        for color in COLOURS:
            yield color, mark
