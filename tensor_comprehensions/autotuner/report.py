"""The report of a search: an HTML page without dependencies, and JSON beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from math import log10
from pathlib import Path
from typing import Any

from ..cache.key import toolchain_versions
from ..core.errors import ArgumentError
from ..explain.kernel_report import SearchCurve
from ..explain.search_report import draw_search
from .search_history import trace_search
from .search_loop import TuningResult

WIDTH, HEIGHT, MARGIN = 640, 260, 46
BARS = 24
Results = Sequence[tuple[str, TuningResult[Any]]]


def write_report(path: Path, results: Results) -> tuple[Path, Path]:
    """Write the report as HTML and as JSON; return both paths. Raises ArgumentError if that is not possible."""
    try:
        page, data = path.with_suffix(".html"), path.with_suffix(".json")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("\n".join(_render_page(results)), encoding="utf-8")
        data.write_text(
            json.dumps([result_facts(name, found) for name, found in results], indent=1) + "\n", encoding="utf-8"
        )
    except (OSError, ValueError) as error:  # ValueError: no file name, or a NUL in it
        raise ArgumentError(f"the report cannot be written: {error}") from error
    return page, data


def result_facts(name: str, found: TuningResult[Any]) -> dict[str, Any]:
    """Everything about a search that JSON can hold."""
    return {
        "name": name,
        "options": repr(found.options),
        "seconds": found.seconds,
        "seconds_in_search": best_candidate_seconds(found),
        "default_seconds": found.default_seconds,
        "speedup": found.speedup,
        "validated": found.validated,
        "interrupted": found.interrupted,
        "elapsed": found.elapsed,
        "compiling": sum(o.compiling for o in found.outcomes),
        "running": sum(o.running for o in found.outcomes),
        "statuses": dict(Counter(o.kind for o in found.outcomes)),
        "versions": dict(toolchain_versions()),
        "candidates": [
            {
                "options": repr(o.options),
                "status": o.kind,
                "message": o.message,
                "seconds": o.seconds,
                "generation": o.generation,
                "elapsed": o.elapsed,
            }
            for o in found.outcomes
        ],
    }


def best_candidate_seconds(found: TuningResult[Any]) -> float | None:
    """The winner's time in the search, scaled as if the default took its first time; None if it was not timed."""
    return next((o.seconds for o in found.outcomes if o.options == found.options), None)


# --- the page ----------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
h2 { margin-top: 2em; border-bottom: 1px solid #ccc } code { background: #f4f4f4; padding: 0 .2em }
.axis, .roof, .drop, .limit { fill: none; stroke: #888 } .roof { stroke: #2a6; stroke-width: 2 } .own { fill: #48c }
.drop { stroke-dasharray: 3 3 } .limit { stroke: #2a6; stroke-width: 2 } .failed { fill: #c43 }
.end { text-anchor: end }
td, th { text-align: left; padding: .1em 1em .1em 0; vertical-align: top } svg { background: #fcfcfc }
"""


def _render_page(results: Results) -> Iterator[str]:
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Tuning</title><style>{_STYLE}</style>'
    yield "</head><body><h1>Tuning</h1><table>"
    yield "<tr><th>def</th><th>untuned, in the race</th><th>tuned, in the race</th><th>gain</th></tr>"
    for name, found in results:
        yield (
            f"<tr><td>{escape(name)}</td><td>{format_seconds(found.default_seconds)}</td><td>{format_seconds(found.seconds)}</td>"
            f"<td>{found.speedup:.2f} x</td></tr>"
        )
    yield "</table>"
    for name, found in results:
        yield from _render_section(name, found)
    yield "</body></html>"


def _render_section(name: str, found: TuningResult[Any]) -> Iterator[str]:
    yield f"<h2>{escape(name)}</h2><p>{len(found.outcomes)} candidates in {found.elapsed:.0f} s"
    yield f"{', ended early' if found.interrupted else ''}. The best options"
    yield (
        f" took {format_seconds(found.seconds)} in the race,"
        f" where untuned ones took {format_seconds(found.default_seconds)}"
    )
    yield f":</p><p><code>{escape(repr(found.options))}</code></p>"
    traced = trace_search(found)
    yield f"<h3>The candidates over time</h3>{draw_search(traced)}"
    yield "<p>Times of the search are scaled so that the default options take as long as in the final race.</p>"
    yield "<h3>All times of the search</h3>" + _render_time_histogram(traced)
    yield "<h3>What became of them</h3><table>"
    examples = {o.kind: o.message for o in reversed(found.outcomes)}
    for kind, count in Counter(o.kind for o in found.outcomes).most_common():
        yield f"<tr><td>{count}</td><td>{kind}</td><td>{escape(examples[kind])}</td></tr>"
    yield "</table>"


def _render_time_histogram(found: SearchCurve) -> str:
    times = [log10(c.seconds * found.scale) for c in found.candidates if c.seconds is not None]
    if not times:
        return "<p>No candidate was timed.</p>"
    low, high = min(times), max(times)
    width = (high - low) / BARS or 1.0
    counts = Counter(min(BARS - 1, int((t - low) / width)) for t in times)
    most, step = max(counts.values()), (WIDTH - 2 * MARGIN) / BARS
    bars = ""
    for k, count in sorted(counts.items()):
        tall = (HEIGHT - 2 * MARGIN) * count / most
        bars += (
            f'<rect x="{MARGIN + k * step:.1f}" y="{HEIGHT - MARGIN - tall:.1f}" width="{step - 2:.1f}" '
            f'height="{tall:.1f}" fill="#48c"/>'
        )
    labels = _render_svg_text(MARGIN, HEIGHT - 20, format_seconds(10**low)) + _render_svg_text(
        WIDTH - 2 * MARGIN, HEIGHT - 20, format_seconds(10**high)
    )
    return _wrap_in_svg(bars + labels + _render_svg_text(4, MARGIN, str(most)))


def _wrap_in_svg(content: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="11">{content}</svg>'
    )


def _render_svg_text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def format_seconds(seconds: float) -> str:
    """A time with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
