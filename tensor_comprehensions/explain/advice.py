"""Advice on decisions, and a summary of a kernel in a few sentences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..core.decisions import Decision
from .format_numbers import format_bytes
from .kernel_report import Report

MAX_RIVAL_COST_RATIO = 0.97
"""A rival plan is worth trying if its cost is below this fraction of the chosen plan's."""
MAX_SUGGESTIONS = 3
"""Most suggestions in a summary."""


def advise(d: Decision, report: Report) -> str:
    """Advice on how to improve on a decision; "" if there is none."""
    if d.subject == "fusion" and d.chosen == "two kernels":
        return _advise_fusion(d, report)
    if d.subject == "plan":
        total = dict(d.numbers).get("total", 0.0)
        best = min((o.number for o in d.others if o.number is not None), default=total)
        if total and best < MAX_RIVAL_COST_RATIO * total:
            share = f"at {best / total:.2f} of its cycles by the model"
            return f"another plan, {share}: time it as a schedule, or tune the operator"
    if d.subject == "tuning" and "no tuned record" in d.chosen:
        return "op.autotune(...) measures options for these sizes"
    return ""


def _advise_fusion(d: Decision, report: Report) -> str:
    if "fusion='min'" in d.why:
        return "" if "without it" in d.why else "leave out fusion='min', and they share a kernel"
    if "share no loop" in d.why:
        return ""
    options = "MappingOptions(outer_fusion='max')" if report.target.startswith("cuda") else "CpuOptions(fusion='max')"
    return f"{options} joins them: time both, or tune the operator"


def summarize(report: Report) -> Iterator[str]:
    """A few sentences about the kernel, for readers who know neither schedules nor machine code."""
    yield from _describe_kernels(report)
    yield from itertools.islice(_suggest_changes(report), MAX_SUGGESTIONS)
    r = report.roofline
    if r is not None and r.seconds is not None and r.share is not None:
        share = f"{100 * r.share:.0f} % of what the limits of this machine allow"
        yield f"A call takes {r.seconds * 1e6:.1f} us on one thread: {share}."
    if any(advise(d, report) for d in report.about("tuning")):
        yield "Its options are not tuned for these sizes. Try: op.autotune(...) measures some and keeps the fastest."


def _suggest_changes(report: Report) -> Iterator[str]:
    """A sentence for each decision with advice, those that move most bytes through memory first."""
    places: dict[tuple[str, str], list[str]] = {}
    for d in sorted(report.decisions, key=lambda d: -dict(d.numbers).get("bytes through memory", 0.0)):
        text = advise(d, report)
        if text and d.subject != "tuning":
            ends = d.statements[:1] + d.statements[-1:] if len(d.statements) > 1 else d.statements
            what = f"{d.chosen}, because {d.why}" if d.subject == "fusion" else d.why
            places.setdefault((what, text), []).append(" and ".join(report.labels(ends)))
    for (what, text), about in places.items():
        yield f"{'; '.join(about)}: {what}. Try: {text}."


def _describe_kernels(report: Report) -> Iterator[str]:
    kernels, count = report.resources.get("kernels", 0), len(report.statements)
    size = report.resources.get("temporary_bytes")
    moved = f"{format_bytes(size)} of intermediate results go through memory" if size else ""
    if kernels == 1:
        what = f"One kernel computes all {count} statements" if count > 1 else "One kernel"
        kept = "no intermediate result goes through memory" if size == 0 else moved
        yield "; ".join(filter(None, (what, kept))) + "."
    elif kernels:
        yield f"{kernels} kernels run one after another{f'; {moved} between them' if moved else ''}."
