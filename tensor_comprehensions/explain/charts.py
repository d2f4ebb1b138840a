"""Pictures of a page as SVG, without style attributes, which the page's content security policy does not allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from math import log10

from .dependences import number_kernels
from .format_numbers import format_bytes, format_count
from .kernel_report import Grid, Report, Roofline, StatementDependence

BAR = 60
WIDTH, HEIGHT, MARGIN = 560, 260, 44
CELL = 16


def draw_bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Bars of rivals as HTML. rows: (text, cost relative to the chosen plan, why it was not chosen)."""
    most = max(1.0, *(ratio for _, ratio, _ in rows))
    parts = []
    for text, ratio, why in rows:
        own = f'<path class="axis" d="M{BAR / most:.0f} 0 V10"/>'
        inside = f'<rect width="{BAR * ratio / most:.0f}" height="10"/>{own}'
        bar = f'<svg class="bar" width="{BAR}" height="10">{inside}</svg>'
        parts.append(f"<div>{bar}<b>{ratio:.2f}</b> {escape(text)}<br><small>{escape(why)}</small></div>")
    return "".join(parts)


def draw_roofline(r: Roofline) -> str:
    """The roofline plot as HTML: operations per second over operations per byte, with a roof per memory, and the call.

    Without operations, only the numbers, since a logarithmic axis has no zero.
    """
    caption = _describe_call(r)
    return caption + _draw_roofs(r) if r.flops else caption


def _describe_call(r: Roofline) -> str:
    text = f"{format_count(r.flops)} operations, {format_bytes(r.bytes)}: {r.intensity:.1f} operations per byte"
    if r.seconds is not None and r.share is not None:
        text += f"; {r.seconds * 1e6:.1f} us, {100 * r.share:.0f} % of what the limits allow"
    return f"<p>{escape(text)}</p>"


def _draw_roofs(r: Roofline) -> str:
    low, high = min(0.1, r.intensity / 4), max(100.0, r.intensity * 4)
    top = r.peak * 2
    points = [r.attainable_flops, *((r.flops / r.seconds,) if r.seconds else ())]
    bottom = min(*points, low * r.rates[-1][1]) / 2

    def x(value: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * log10(value / low) / log10(high / low)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * log10(value / bottom) / log10(top / bottom)

    parts = [
        f'<path class="axis" d="M{MARGIN} {MARGIN} V{HEIGHT - MARGIN} H{WIDTH - MARGIN}"/>',
        f'<text x="{WIDTH // 2 - 60}" y="{HEIGHT - 8}">operations per byte</text>',
        f'<text x="4" y="{MARGIN - 14}">operations per second</text>',
    ]
    for name, rate in r.rates:
        edge = min(high, r.peak / rate)
        start = max(low, bottom / rate)
        parts.append(
            f'<path class="roof" d="M{x(start):.0f} {y(rate * start):.0f} L{x(edge):.0f} {y(rate * edge):.0f}"/>'
        )
        parts.append(
            f'<text x="{x(start) + 4:.0f}" y="{y(rate * start) + 13:.0f}">{escape(name)} {format_bytes(rate)}/s</text>'
        )
    parts.append(f'<path class="roof" d="M{x(min(high, r.peak / r.rates[0][1])):.0f} {y(r.peak):.0f} H{x(high):.0f}"/>')
    parts.append(f'<text x="{x(high) - 130:.0f}" y="{y(r.peak) - 6:.0f}">{format_count(r.peak)} operations/s</text>')
    parts.append(f'<path class="drop" d="M{x(r.intensity):.0f} {y(r.attainable_flops):.0f} V{HEIGHT - MARGIN}"/>')
    parts.append(f'<circle class="limit" cx="{x(r.intensity):.0f}" cy="{y(r.attainable_flops):.0f}" r="4"/>')
    if r.seconds is not None:
        reached = r.flops / r.seconds
        parts.append(f'<circle class="own" cx="{x(r.intensity):.0f}" cy="{y(reached):.0f}" r="5"/>')
    return f'<svg class="chart" width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'


def draw_grid(g: Grid) -> str:
    """The numbers of a grid as HTML, in boxes of eight colors; neighbors of one color share a box."""
    left = 8 * max((len(name) + 1 for name in g.rows), default=0)
    width = max(CELL, *(7 * len(name) + 4 for name in g.columns), 7 * len(str(g.count - 1)) + 2)
    top = CELL if g.columns else 0
    parts = [_name(left + n * width + 2, 0, name) for n, name in enumerate(g.columns)]
    parts += [_name(0, top + n * CELL, name) for n, name in enumerate(g.rows)]
    for row, cells in enumerate(g.cells):
        y, tones = top + row * CELL, [f"t{cell * 8 // g.count}" if cell >= 0 else "pad" for cell in cells]
        first = 0
        for tone, same in groupby(tones):
            length = len(list(same))
            box = f'x="{left + first * width}" y="{y}" width="{length * width}" height="{CELL}"'
            parts.append(f'<rect class="{tone}" {box}/>')
            first += length
        parts += [_text(left + n * width + 2, y, cell) for n, cell in enumerate(cells) if cell >= 0]
    size = f'width="{left + width * max(map(len, g.cells))}" height="{top + CELL * len(g.cells)}"'
    return f'<p>{escape(g.title)}:</p><svg class="banks" {size} role="img">{"".join(parts)}</svg>'


def _text(x: int, y: int, n: int) -> str:
    return f'<text x="{x}" y="{y + 11}">{n}</text>'


def _name(x: int, y: int, name: str) -> str:
    return f'<text class="name" x="{x}" y="{y + 11}">{escape(name)}</text>'


ROW, LEFT, BOW = 30, 200, 80
"""Pixels in the graph of dependences: height of a row, width of the statements, width of the first arc."""


def draw_dependences(report: Report) -> str:
    """The graph of dependences as SVG: the statements in order, boxed by kernel, and an arc for each dependence.

    The arc is dashed if it connects two kernels.
    """
    order = {s.name: n for n, s in enumerate(report.statements)}
    kernels = number_kernels(report.find_listing("loops"))
    parts = [*_kernel_boxes(report, kernels)]
    for s, n in zip(report.statements, order.values(), strict=True):
        parts.append(f'<circle class="node s{n % 8}" cx="{LEFT - 14}" cy="{_compute_row_center(n)}" r="5"/>')
        parts.append(f'<text class="end" x="{LEFT - 26}" y="{_compute_row_center(n) + 4}">{escape(s.label)}</text>')
    widest = 0
    pairs: dict[tuple[str, str], list[StatementDependence]] = {}
    for e in report.edges:
        pairs.setdefault((e.source, e.sink), []).append(e)
    for (source, sink), edges in pairs.items():
        first, last = order[source], order[sink]
        bow = BOW * max(1, last - first)
        widest = max(widest, bow)
        middle = (_compute_row_center(first) + _compute_row_center(last)) // 2
        top, bottom = _compute_row_center(first) + 3, _compute_row_center(last) - 3
        ends = f"{LEFT - 8} {top} Q {LEFT + bow} {middle} {LEFT - 8} {bottom}"
        about = "; ".join(
            f"{e.tensor}: {', '.join(e.kinds)}, distances {', '.join(e.distances) or 'none'}" for e in edges
        )
        apart = "" if edges[0].is_fused else " apart"
        parts.append(f'<path class="edge{apart}" d="M{ends}"><title>{escape(about)}</title></path>')
        if last > first:
            place = f'x="{LEFT + bow // 2}" y="{middle + 4}"'
            parts.append(f"<text {place}>{escape(', '.join(e.tensor for e in edges))}</text>")
    width, height = LEFT + widest + 160, ROW * len(report.statements) + 10
    return f'<svg class="graph" width="{width}" height="{height}" role="img">{"".join(parts)}</svg>'


def _compute_row_center(n: int) -> int:
    return ROW * n + ROW // 2 + 5


def _kernel_boxes(report: Report, kernels: dict[str, int]) -> Iterator[str]:
    """A box around each run of adjacent statements of one kernel."""
    names = [s.name for s in report.statements]
    start = 0
    for n, name in enumerate(names):
        own = kernels.get(name)
        if n + 1 < len(names) and kernels.get(names[n + 1]) == own:
            continue
        place = f'x="4" y="{ROW * start + 7}" width="{LEFT - 4}" height="{ROW * (n + 1 - start) - 4}" rx="5"'
        yield f'<rect class="kernel" {place}/>'
        yield f'<text class="dim" x="10" y="{ROW * start + 24}">kernel {"" if own is None else own + 1}</text>'
        start = n + 1
