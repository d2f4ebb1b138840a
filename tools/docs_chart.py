"""The chart of the first page, from the table of kernels on the page of benchmarks: `python -m tools.docs_chart`."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from math import exp, log
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
CHART = DOCS / "summary.svg"
GROUPS = {
    "matrix products": ("matmul*", "tmm*", "tbmm*", "c3*"),
    "layers, Kronecker": ("mlp*", "kronecker*"),
    "convolutions": ("conv*", "gconv*"),
    "lookup tables": ("lut*",),
    "softmax, norms": ("softmax*", "layernorm*", "rmsnorm*", "moments*", "batchnorm*", "groupnorm*"),
    "pooling": ("maxpool*", "avgpool*"),
    "transposes, copies": ("transpose*", "heads*", "channels*", "copy*"),
    "pointwise": ("gelu*", "mul_add*", "bias_relu*", "add_*"),
}
"""The kernels of each bar, by their names."""
WIDTH, LEFT, BAR, STEP, TOP = 560, 150, 18, 30, 44
SCALE = 120
"""Pixels for a speedup of 1."""


def read_speedups(page: str) -> dict[str, float]:
    """The ratio with one thread of each kernel."""
    rows = re.findall(r"^\| (\w[\w^+.]*) \| [\d.]+ [µm]s \| ([\d.]+) \(", page, re.MULTILINE)
    return {name: float(ratio) for name, ratio in rows}


def render_chart(page: str) -> str:
    """Geometric means of the groups as an SVG. Every kernel is in one group."""
    speedups = read_speedups(page)
    members = {group: [n for n in speedups if any(fnmatch(n, p) for p in names)] for group, names in GROUPS.items()}
    assert sorted(n for group in members.values() for n in group) == sorted(speedups)
    height = TOP + STEP * len(GROUPS) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        'font-family="sans-serif" font-size="14">',
        "<title>Speedup over the better of torch eager and torch.compile, by group of kernels</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" fill="#333">speedup over the better of eager and torch.compile</text>',
    ]
    for place, (group, names) in enumerate(members.items()):
        mean = exp(sum(log(speedups[n]) for n in names) / len(names))
        y = TOP + STEP * place
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#111">{group}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{mean * SCALE:.0f}" height="{BAR}" fill="#4472a8"/>',
            f'<text x="{LEFT + mean * SCALE + 6:.0f}" y="{y + 14}" fill="#111">{mean:.2f}</text>',
        ]
    x = LEFT + SCALE
    lines += [f'<path d="M{x} {TOP - 8} V{height - 8}" stroke="#c0392b" stroke-dasharray="4 3"/>', "</svg>"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    CHART.write_text(render_chart((DOCS / "benchmarks.md").read_text()))
