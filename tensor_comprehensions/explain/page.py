"""The page of a report: one HTML file that loads no other files, and can be read without JavaScript.

Colored edges show which statement a line belongs to. With JavaScript, pointing at a line marks all lines of its
statements; a click keeps the marks and scrolls the other listings there, until Escape. A content security policy
allows only this style sheet and this script, by their hashes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from hashlib import sha256
from html import escape
from typing import Any
from zlib import compress

from ..core.decisions import SUBJECTS, Decision
from ..core.gc_pause import pause_gc
from .advice import advise, summarize
from .charts import draw_bars, draw_dependences, draw_grid, draw_roofline
from .format_numbers import format_bytes, format_count, format_number
from .kernel_report import Listing, ListingLine, Report
from .page_assets import SCRIPT, STYLE
from .search_report import describe_search, draw_search
from .text import decisions_in_order, describe_kernels, label_statements, shown_numbers, verdict

COLORS = 8
"""Number of colors of statements; further statements reuse them in order."""
FOLDED, MOST_LINES = ("c", "llvm"), 2000
"""Listings that are folded at first; most lines of a listing that can be read without JavaScript."""
HINT = (
    "Colors show statements. Point at a line to see the same statement in all listings; click to keep it, press Escape "
    "to let go."
)
PACKED = "The script of this page unpacks these lines."
SIGNS = {"+": "new", "-": "old", " ": "", "~": "gap"}
"""The style class of a diff line by its sign."""


@pause_gc()
def format_page(report: Report) -> str:
    """The HTML of the page."""
    return "\n".join(_format_page(report)) + "\n"


def format_frame(page: str) -> str:
    """An iframe with the page, for notebooks; it is sandboxed, so it can run only its own script."""
    return (
        '<iframe sandbox="allow-scripts" width="100%" height="720" style="border:1px solid #888" '
        f'srcdoc="{escape(page, quote=True)}"></iframe>'
    )


def _compute_csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode()


def _format_page(report: Report) -> Iterator[str]:
    policy = f"default-src 'none'; style-src '{_compute_csp_hash(STYLE)}'; script-src '{_compute_csp_hash(SCRIPT)}'"
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=True)}">'
    yield '<meta name="viewport" content="width=device-width">'
    yield f"<title>{escape(report.name)}</title>"
    yield f"<style>{STYLE}</style>\n</head>\n<body>"
    yield f"<header><h1>{escape(report.name)}</h1>"
    yield f"<p>{escape(verdict(report))}</p></header>"
    yield "<main>"
    yield f'<ul id="summary">{"".join(f"<li>{escape(x)}" for x in summarize(report))}</ul>'
    yield f'<p class="hint">{HINT}</p>'
    yield from _format_panes(report)
    yield from _format_dependences(report)
    yield from _format_decisions(report)
    yield from _format_footprints(report)
    yield from _format_roofline(report)
    yield from _search(report)
    yield from _calls(report)
    for section in report.sections:
        yield f"<section><h2>{escape(section.title)}</h2>"
        yield from (f"<p>{escape(p)}</p>" for p in section.text)
        yield from map(draw_grid, section.grids)
        yield "</section>"
    yield from _format_facts(report)
    yield f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>"


# --- listings ----------------------------------------------------------------------------------------------------


def _format_panes(report: Report) -> Iterator[str]:
    order = {s.name: n for n, s in enumerate(report.statements)}
    shown = [x for x in report.listings if x.kind not in FOLDED]
    yield '<div class="panes">'
    for listing in shown:
        yield from _format_listing(report, listing, order)
    yield "</div>"
    for listing in report.listings:
        if listing not in shown:
            title = f"{listing.title}, {len(listing.lines)} lines{_format_linked_share(listing)}"
            yield _folded_pane(listing.kind, title, _make_listing_rows(listing, order))
    yield from _format_pass_changes(report)


def _format_pass_changes(report: Report) -> Iterator[str]:
    """The lines that each pass removed and added, folded."""
    seconds = dict(report.seconds)
    for number, p in enumerate(report.passes):
        time = f", {seconds[p.name] * 1e3:.1f} ms" if p.name in seconds else ""
        title = f"changes by the pass {p.name.replace('_', ' ')}: {p.before} lines before, {p.after} after{time}"
        if p.lines:
            yield _folded_pane(
                f"pass{number}", title, [[f"{sign} {text}", "", "", SIGNS[sign]] for sign, text in p.lines]
            )


_Rows = list[list[Any]]
"""Packed lines: [text, statements, line of loops, style class if it is not that of the statements]."""


def _make_listing_rows(listing: Listing, order: dict[str, int]) -> _Rows:
    owners = {names: _format_owner_numbers(names, order) for names in {line.statements for line in listing.lines}}
    return [[line.text, owners[line.statements], line.loop or ""] for line in listing.lines]


def _folded_pane(name: str, title: str, rows: _Rows) -> str:
    """A pane that is folded at first; the script unpacks its lines when the user opens it."""
    opening = f'<details class="fold" id="{escape(name, quote=True)}" {_compress_rows(rows)}>'
    return f"{opening}<summary>{escape(title)}</summary><pre>{PACKED}</pre></details>"


def _compress_rows(rows: _Rows) -> str:
    packed = compress(json.dumps(rows, separators=(",", ":")).encode())
    return f'data-z="{base64.b64encode(packed).decode()}"'


def _format_listing(report: Report, listing: Listing, order: dict[str, int]) -> Iterator[str]:
    is_long = len(listing.lines) > MOST_LINES
    data = f" {_compress_rows(_make_listing_rows(listing, order))}" if is_long else ""
    yield f'<section class="pane" id="{escape(listing.kind, quote=True)}" tabindex="0"{data}>'
    yield f"<h2>{escape(listing.title)} <small>{escape(_format_linked_share(listing).removeprefix(': '))}</small></h2>"
    lines = PACKED if is_long else "".join(_format_listing_line(line, order) for line in listing.lines)
    yield f"<pre>{lines}</pre></section>"


def _format_linked_share(listing: Listing) -> str:
    """How many instructions have a line of the loops, in words; "" for other listings."""
    if listing.kind not in ("asm", "llvm", "ptx") or not any(line.loop for line in listing.lines):
        return ""
    return f": {100 * listing.linked_share():.0f} % of the instructions have a line of loops"


def _format_owner_numbers(names: tuple[str, ...], order: dict[str, int]) -> str:
    return " ".join(str(order[name]) for name in names if name in order)


def _format_listing_line(line: ListingLine, order: dict[str, int]) -> str:
    owners = _format_owner_numbers(line.statements, order)
    color = "" if not owners else " cm" if " " in owners else f" c{int(owners) % COLORS}"
    data = f' data-s="{owners}"' if owners else ""
    loop = f' data-l="{line.loop}"' if line.loop else ""
    about = f' title="{escape(line.role, quote=True)}"' if line.role else ""
    return f'<span class="l{color}"{data}{loop}{about}>{escape(line.text)}\n</span>'


# --- dependences -------------------------------------------------------------------------------------------------


def _format_dependences(report: Report) -> Iterator[str]:
    if not report.edges:
        return
    order = {s.name: n for n, s in enumerate(report.statements)}
    yield f'<section id="dependences"><h2>dependences</h2>{draw_dependences(report)}<table><thead><tr><th>from<th>to'
    yield "<th>tensor<th>kind<th>distances<th>kernels</tr></thead><tbody>"
    for e in report.edges:
        kernels = "one" if e.is_fused else f"two: {e.why}" if e.why else "two"
        cells = (*report.labels((e.source, e.sink)), e.tensor, ", ".join(e.kinds), ", ".join(e.distances), kernels)
        owners = " ".join(str(order[name]) for name in dict.fromkeys((e.source, e.sink)))
        yield f'<tr class="l" data-s="{owners}">' + "".join(f"<td>{escape(cell)}" for cell in cells) + "</tr>"
    yield "</tbody></table></section>"


# --- why ---------------------------------------------------------------------------------------------------------


def _format_decisions(report: Report) -> Iterator[str]:
    found = decisions_in_order(report)
    if not found:
        return
    order = {s.name: n for n, s in enumerate(report.statements)}
    yield '<section id="why"><h2>decisions</h2><table><thead><tr><th>about<th>statements<th>chosen<th>because'
    yield "<th>numbers<th>others</tr></thead><tbody>"
    for d in found:
        owners = " ".join(str(order[name]) for name in d.statements if name in order)
        meaning = escape(SUBJECTS.get(d.subject, ""), quote=True)
        advice = f"<br><b>Try:</b> {escape(text)}" if (text := advise(d, report)) else ""
        yield f'<tr class="l" data-s="{owners}"><td title="{meaning}">{escape(d.subject)}'
        yield f"<td>{escape(label_statements(report, d))}<td>{escape(d.chosen)}<td>{escape(d.why)}{advice}"
        yield f"<td>{_format_decision_numbers(d)}<td>{_format_rivals(d)}</tr>"
    yield "</tbody></table></section>"


def _format_decision_numbers(d: Decision) -> str:
    return "<br>".join(escape(format_number(name, n)) for name, n in shown_numbers(d))


def _format_rivals(d: Decision) -> str:
    total = dict(d.numbers).get("total")
    if total and all(o.number is not None for o in d.others) and d.others:
        return draw_bars([(o.text, (o.number or 0.0) / total, o.why_not) for o in d.others])
    texts = (
        f"{o.text}{f' ({_format_rival_number(d, o.number)})' if o.number is not None else ''}"
        f"{f': {o.why_not}' if o.why_not else ''}"
        for o in d.others
    )
    return "<br>".join(map(escape, texts))


def _format_rival_number(d: Decision, number: float) -> str:
    return format_bytes(number) if d.subject == "fusion" else format_count(number)


# --- memory and limits -------------------------------------------------------------------------------------------


def _format_footprints(report: Report) -> Iterator[str]:
    if not report.footprints:
        return
    yield '<section id="footprints"><h2>what one iteration touches</h2><table><thead><tr><th>line<th>loop<th>trips'
    yield "<th>bytes<th>smallest cache<th>of which</tr></thead><tbody>"
    for f in report.footprints:
        parts = "; ".join(f"{name} {format_bytes(size)}" for name, size in f.bytes)
        size = f"{'' if f.is_exact else 'at most '}{format_bytes(f.total)}"
        trips = "?" if f.trips < 0 else str(f.trips)
        cells = (str(f.loop), f.name, trips, size, f.cache, parts)
        yield f'<tr class="l" data-l="{f.loop}">' + "".join(f"<td>{escape(cell)}" for cell in cells) + "</tr>"
    yield "</tbody></table></section>"


def _format_roofline(report: Report) -> Iterator[str]:
    if report.roofline is not None:
        yield f'<section id="limits"><h2>limits of the machine</h2>{draw_roofline(report.roofline)}</section>'


def _search(report: Report) -> Iterator[str]:
    if report.search is None:
        return
    yield f'<section id="search"><h2>search for options</h2><p>{escape(describe_search(report.search))}</p>'
    yield f"<p>{escape(report.search.chosen)}</p>" if report.search.chosen else ""
    yield f"{draw_search(report.search)}</section>"


def _calls(report: Report) -> Iterator[str]:
    c = report.calls
    if c is None:
        return
    path = c.hindrance or "calls like this one take the fast path, after the first"
    rows = [
        ("path", path),
        ("kernels", f"{describe_kernels(c)}; making them took {c.seconds * 1e3:.0f} ms"),
        ("fast path", f"{c.lanes} kinds of calls so far"),
    ]
    rows += [("needs", guard) for guard in c.guards]
    yield '<section id="calls"><h2>calls</h2><table><tbody>'
    yield from (f"<tr><th>{escape(name)}<td>{escape(text)}</tr>" for name, text in rows)
    yield "</tbody></table></section>"


def _format_facts(report: Report) -> Iterator[str]:
    yield '<section id="facts"><h2>facts</h2><table><tbody>'
    rows = [("machine code", report.matches)] if report.matches else []
    rows += [(name, value) for name, value in report.facts]
    rows += [(name.replace("_", " "), format_count(value)) for name, value in report.resources.items()]
    rows += [(f"pass {name}", f"{seconds * 1e3:.1f} ms") for name, seconds in report.seconds]
    for name, value in rows:
        yield f"<tr><th>{escape(name)}<td>{escape(value)}</tr>"
    yield "</tbody></table></section>"
