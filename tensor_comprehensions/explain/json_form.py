"""A report as JSON values; the schema number changes when keys change."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..core.decisions import Decision
from .kernel_report import Listing, Report

SCHEMA = 3


def report_to_json(report: Report) -> dict[str, Any]:
    """The whole report as JSON values."""
    return {
        "schema": SCHEMA,
        "name": report.name,
        "target": report.target,
        "sizes": {name: list(shape) for name, shape in report.sizes},
        "resources": dict(report.resources),
        "seconds": dict(report.seconds),
        "facts": dict(report.facts),
        "matches": report.matches,
        "statements": [asdict(s) for s in report.statements],
        "decisions": [_encode_decision(d) for d in report.decisions],
        "listings": [_listing_to_json(x) for x in report.listings],
        "footprints": [
            {
                "loop": f.loop, "name": f.name, "trips": f.trips, "bytes": dict(f.bytes), "exact": f.is_exact,
                "cache": f.cache,
            }
            for f in report.footprints
        ],
        "roofline": None if report.roofline is None else asdict(report.roofline),
        "dependences": [asdict(e) for e in report.edges],
        "passes": [asdict(p) for p in report.passes],
        "sections": [asdict(s) for s in report.sections],
        "search": None if report.search is None else asdict(report.search),
        "calls": None if report.calls is None else asdict(report.calls),
    }  # fmt: skip


def _encode_decision(d: Decision) -> dict[str, Any]:
    return {
        "subject": d.subject,
        "statements": list(d.statements),
        "chosen": d.chosen,
        "why": d.why,
        "numbers": dict(d.numbers),
        "others": [{"text": o.text, "number": o.number, "why_not": o.why_not} for o in d.others],
    }


def _listing_to_json(x: Listing) -> dict[str, Any]:
    lines = [{"text": n.text, "statements": list(n.statements), "role": n.role, "loop": n.loop} for n in x.lines]
    return {"kind": x.kind, "title": x.title, "lines": lines}
