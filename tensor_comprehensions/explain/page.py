"""The page of a report: one HTML file that loads nothing, can be read without script, and links its listings by lines.

Colored edges say which statement a line belongs to. With script, pointing at a line marks all lines of its statements,
and a click keeps the marks and scrolls the other listings there; Escape lets go. A content security policy allows this
style sheet and this script, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from hashlib import sha256
from html import escape

from ..core.decisions import Decision
from .charts import draw_bank_grid, draw_bars, draw_roofline
from .kernel_report import Listing, ListingLine, Report
from .numbers import format_bytes, format_count, format_number
from .page_assets import SCRIPT, STYLE
from .text import decisions_in_order, label_statements, shown_numbers, verdict

COLORS = 8
"""Statements that have a color of their own; more begin again."""


def format_page(report: Report) -> str:
    """The whole page."""
    return "\n".join(_page(report)) + "\n"


def format_frame(page: str) -> str:
    """A page inside another, such as a notebook: it may run its own script and reach nothing."""
    return (
        '<iframe sandbox="allow-scripts" width="100%" height="720" style="border:1px solid #888" '
        f'srcdoc="{escape(page, quote=True)}"></iframe>'
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode()


def _page(report: Report) -> Iterator[str]:
    policy = f"default-src 'none'; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'"
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=True)}">'
    yield '<meta name="viewport" content="width=device-width">'
    yield f"<title>{escape(report.name)}</title>"
    yield f"<style>{STYLE}</style>\n</head>\n<body>"
    yield f"<header><h1>{escape(report.name)}</h1>"
    yield f"<p>{escape(verdict(report))}</p></header>"
    yield "<main>"
    yield from _panes(report)
    yield from _decisions(report)
    yield from _footprints(report)
    yield from _limits(report)
    for section in report.sections:
        yield f"<section><h2>{escape(section.title)}</h2>"
        yield from (f"<p>{escape(p)}</p>" for p in section.text)
        yield f"<p>the bank of each element:</p>{draw_bank_grid(section)}" if section.grid else ""
        yield "</section>"
    yield from _facts(report)
    yield f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>"


# --- listings ----------------------------------------------------------------------------------------------------


def _panes(report: Report) -> Iterator[str]:
    order = {s.name: n for n, s in enumerate(report.statements)}
    yield '<div class="panes">'
    for listing in report.listings:
        yield from _format_listing(report, listing, order)
    yield "</div>"


def _format_listing(report: Report, listing: Listing, order: dict[str, int]) -> Iterator[str]:
    share = ""
    if any(line.loop for line in listing.lines):
        share = f" <small>{100 * listing.linked_share():.0f} % of the instructions have a line of loops</small>"
    yield f'<section class="pane" id="{escape(listing.kind, quote=True)}" tabindex="0">'
    yield f"<h2>{escape(listing.title)}{share}</h2>"
    lines = (_line(line, number, order, report) for number, line in enumerate(listing.lines, 1))
    yield f"<pre>{''.join(lines)}</pre></section>"


def _line(line: ListingLine, number: int, order: dict[str, int], report: Report) -> str:
    owners = [order[name] for name in line.statements if name in order]
    color = "" if not owners else f" c{owners[0] % COLORS}" if len(owners) == 1 else " cm"
    data = f' data-s="{" ".join(map(str, owners))}"' if owners else ""
    loop = f' data-l="{line.loop}"' if line.loop else ""
    about = f' title="{escape(line.role, quote=True)}"' if line.role else ""
    return f'<span class="l{color}"{data}{loop}{about}>{escape(line.text)}\n</span>'


# --- why ---------------------------------------------------------------------------------------------------------


def _decisions(report: Report) -> Iterator[str]:
    found = decisions_in_order(report)
    if not found:
        return
    order = {s.name: n for n, s in enumerate(report.statements)}
    yield '<section id="why"><h2>decisions</h2><table><thead><tr><th>about<th>statements<th>chosen<th>because'
    yield "<th>numbers<th>others</tr></thead><tbody>"
    for d in found:
        owners = " ".join(str(order[name]) for name in d.statements if name in order)
        yield f'<tr class="l" data-s="{owners}"><td>{escape(d.subject)}<td>{escape(label_statements(report, d))}'
        yield f"<td>{escape(d.chosen)}<td>{escape(d.why)}<td>{_numbers(d)}<td>{_format_rivals(d)}</tr>"
    yield "</tbody></table></section>"


def _numbers(d: Decision) -> str:
    return "<br>".join(escape(format_number(name, n)) for name, n in shown_numbers(d))


def _format_rivals(d: Decision) -> str:
    total = dict(d.numbers).get("total")
    if total and all(o.number is not None for o in d.others) and d.others:
        return draw_bars([(o.text, (o.number or 0.0) / total, o.why_not) for o in d.others])
    texts = (
        f"{o.text}{f' ({_value(d, o.number)})' if o.number is not None else ''}{f': {o.why_not}' if o.why_not else ''}"
        for o in d.others
    )
    return "<br>".join(map(escape, texts))


def _value(d: Decision, number: float) -> str:
    return format_bytes(number) if d.subject == "fusion" else format_count(number)


# --- memory and limits -------------------------------------------------------------------------------------------


def _footprints(report: Report) -> Iterator[str]:
    if not report.footprints:
        return
    yield '<section id="footprints"><h2>what one iteration touches</h2><table><thead><tr><th>line<th>loop<th>trips'
    yield "<th>bytes<th>smallest cache<th>of which</tr></thead><tbody>"
    for f in report.footprints:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in f.bytes)
        size = f"{'' if f.is_exact else 'at most '}{format_bytes(f.total)}"
        trips = "?" if f.trips < 0 else str(f.trips)
        cells = (str(f.loop), f.name, trips, size, f.cache, parts)
        yield f'<tr class="l" data-l="{f.loop}">' + "".join(f"<td>{escape(cell)}" for cell in cells) + "</tr>"
    yield "</tbody></table></section>"


def _limits(report: Report) -> Iterator[str]:
    if report.roofline is not None:
        yield f'<section id="limits"><h2>limits of the machine</h2>{draw_roofline(report.roofline)}</section>'


def _facts(report: Report) -> Iterator[str]:
    yield '<section id="facts"><h2>facts</h2><table><tbody>'
    rows = [("machine code", report.matches)] if report.matches else []
    rows += [(name, value) for name, value in report.facts]
    rows += [(name.replace("_", " "), format_count(value)) for name, value in report.resources.items()]
    rows += [(f"pass {name}", f"{seconds * 1e3:.1f} ms") for name, seconds in report.seconds]
    for name, value in rows:
        yield f"<tr><th>{escape(name)}<td>{escape(value)}</tr>"
    yield "</tbody></table></section>"
