"""The short form of a report: one screen of text, most important decisions first."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.decisions import Decision
from .advice import advise
from .format_numbers import format_bytes, format_count, format_number
from .kernel_report import CallFacts, Report
from .search_report import describe_search

SUBJECT_WIDTH, MAX_LOOPS = 10, 4
"""Width of the column of subjects in characters; most loops whose footprints are printed."""
SUBJECT_ORDER = (
    "fusion", "lowering", "split", "order", "tiles", "temporary", "plan", "pack", "vector", "mapping", "promotion",
    "padding", "function", "memory", "graph", "tuning",
)  # fmt: skip
MAX_RIVALS = 2
"""Most rivals of a decision in the short form."""


def format_report(report: Report) -> str:
    """The verdict in one line, then the decisions by subject, each with its reason and its numbers."""
    return "\n".join(_format_report_lines(report))


def verdict(report: Report) -> str:
    """Def, sizes, kernels and temporaries in one line."""
    sizes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in report.sizes if shape)
    kernels = report.resources.get("kernels", 0)
    parts = [f"{kernels} kernel{'' if kernels == 1 else 's'}"] if kernels else []
    if "temporary_bytes" in report.resources:
        parts.append(f"{format_bytes(report.resources['temporary_bytes'])} of temporaries in memory")
    return f"{report.name} ({sizes}) for {report.target}: {', '.join(parts)}"


def _format_report_lines(report: Report) -> Iterator[str]:
    yield verdict(report)
    for d in filter(_belongs_in_short_form, decisions_in_order(report)):
        yield from _format_decision(report, d)
    far = [f for f in report.footprints if f.cache != "L1"]
    for f in far[:MAX_LOOPS]:
        trips = "" if f.trips < 0 else f" x {f.trips}"
        about = "" if f.is_exact else "at most "
        size = f"{about}{format_bytes(f.total)}, fits {f.cache}"
        yield f"  {'touches':<{SUBJECT_WIDTH}} {f.name}{trips} (line {f.loop}): {size}"
    if report.roofline is not None:
        yield from _format_roofline(report)
    if report.search is not None:
        yield f"  {'search':<{SUBJECT_WIDTH}} {describe_search(report.search)}"
    if report.calls is not None and report.calls.varying:
        yield f"  {'calls':<{SUBJECT_WIDTH}} {describe_kernels(report.calls)}"
    for section in report.sections:
        yield f"  {section.title}"
        yield from (f"  {'':<{SUBJECT_WIDTH}} {line}" for line in section.text)


def describe_kernels(calls: CallFacts) -> str:
    """The number of kernels of an operator, and the sizes in which they differ, in words."""
    made = f"kernels of this operator so far: {calls.compiled} compiled, {calls.loaded} loaded"
    return f"{made}; they differ in {'; in '.join(calls.varying)}" if calls.varying else made


def _belongs_in_short_form(d: Decision) -> bool:
    """Whether the short form shows a decision, because it is not the usual one."""
    if d.subject == "tuning":
        return "no tuned record" not in d.chosen or "the cache has" in d.why
    if d.subject == "memory":
        return "heap" in d.chosen or "past" in d.chosen
    if d.subject == "pack":
        return "packed" in d.chosen
    return d.subject != "lowering" or "not a contraction" not in d.why


def decisions_in_order(report: Report) -> list[Decision]:
    """The decisions in `SUBJECT_ORDER`; of the same subject, those that move most bytes through memory first."""

    def rank(d: Decision) -> tuple[int, float]:
        moved = dict(d.numbers).get("bytes through memory", 0.0)
        return SUBJECT_ORDER.index(d.subject) if d.subject in SUBJECT_ORDER else len(SUBJECT_ORDER), -moved

    return sorted(report.decisions, key=rank)


def label_statements(report: Report, d: Decision) -> str:
    """The labels of the statements of a decision, separated by commas."""
    return ", ".join(report.labels(d.statements))


def _format_decision(report: Report, d: Decision) -> Iterator[str]:
    about = label_statements(report, d)
    numbers = ", ".join(format_number(name, n) for name, n in shown_numbers(d))
    yield f"  {d.subject:<{SUBJECT_WIDTH}} {f'{about}: ' if about else ''}{d.chosen}"
    if d.why or numbers:
        yield f"  {'':<{SUBJECT_WIDTH}}   because {d.why}" + (f" ({numbers})" if numbers else "")
    if text := advise(d, report):
        yield f"  {'':<{SUBJECT_WIDTH}}   try: {text}"
    total = dict(d.numbers).get("total")
    for o in d.others[:MAX_RIVALS]:
        ratio = f" {o.number / total:.2f} x" if total and o.number is not None else ""
        value = format_count(o.number) if o.number is not None and not ratio else ""
        if d.subject == "fusion" and o.number is not None:
            value = format_bytes(o.number)
        label = "next" if ratio or d.subject != "fusion" else "through memory"
        yield (
            f"  {'':<{SUBJECT_WIDTH}}   {label}:{ratio} {o.text}"
            + (f" [{'; '.join(filter(None, (value, o.why_not)))}]" if value or o.why_not else "")
        )


def shown_numbers(d: Decision) -> list[tuple[str, float]]:
    """The (name, number) pairs of a decision to print, with names for users and without zero costs."""
    if d.subject == "plan":
        return [(f"cycles of {name}" if name != "total" else "cycles", n) for name, n in d.numbers if n]
    if d.subject == "pack":
        return [("cycles to copy" if name == "packing" else "cycles", n) for name, n in d.numbers if name == "packing"]
    if d.subject == "tuning":
        return [("us with the fastest options", n) for _, n in d.numbers]
    return list(d.numbers)


def _format_roofline(report: Report) -> Iterator[str]:
    r = report.roofline
    assert r is not None
    yield (
        f"  limits     {format_count(r.flops)} operations, {format_bytes(r.bytes)}: {r.intensity:.1f} operations per "
        f"byte; the machine does {format_count(r.peak)} operations/s and moves {format_bytes(r.rates[-1][1])}/s"
    )
    if r.seconds is not None and r.share is not None:
        yield f"  time       {r.seconds * 1e6:.1f} us, {100 * r.share:.0f} % of what these limits allow"
