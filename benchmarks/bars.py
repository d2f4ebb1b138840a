"""Speeds of contractions as grouped bars, as the GETT paper draws them (needs the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from .contractions import BOUND, CONTENDERS, EINSUM, NUMPY, SEARCHED, VIEW, Measured
from .runner import OURS

COLOURS = {OURS: "#4477aa", SEARCHED: "#66ccee", EINSUM: "#ccbb44", VIEW: "#ddcc77", NUMPY: "#228833"}


def draw(results: Sequence[Measured], path: Path) -> None:
    """One group of bars per contraction, in GFLOP/s; the equally sized `torch.mm` as a line across each group."""
    bars = [who for who in CONTENDERS if who != BOUND and any(m.speed(who) for m in results)]
    width = 0.8 / max(1, len(bars))
    figure = Figure(figsize=(max(6.0, 1.5 + 0.32 * len(results)), 4.5), layout="constrained")
    axes = figure.subplots()
    for place, who in enumerate(bars):
        at = [n + (place - (len(bars) - 1) / 2) * width for n in range(len(results))]
        axes.bar(at, [m.speed(who) or 0.0 for m in results], width, color=COLOURS[who], label=who)
    for n, m in enumerate(results):
        if (bound := m.speed(BOUND)) is not None:
            axes.plot([n - 0.45, n + 0.45], [bound, bound], color="black", linewidth=1.2,
                      label=f"{BOUND} of equal size" if n == 0 else None)  # fmt: skip
    axes.set_xticks(range(len(results)), [m.name for m in results], rotation=90, fontsize=7)
    axes.margins(x=0.01)
    axes.grid(axis="y", linewidth=0.5, alpha=0.4)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_ylabel("GFLOP/s")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(bars) + 1, fontsize=8)
    with rc_context({"svg.hashsalt": "benchmarks"}):  # the same results give the same file
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
