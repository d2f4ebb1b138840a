"""Results as an aligned table and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .runner import OURS, Limit, Result
from .timing import Quartiles

# Of the rounds: those that nothing disturbed, of all.
HEAD = ("kernel", "threads", "ours", "best peer", "peer's time", "ratio", "quartiles", "rounds", "goal")


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def row(result: Result) -> tuple[str, ...]:
    """The cells of one line under `HEAD`."""
    best = result.best
    ours, ratio = result.times.get(OURS), result.ratio
    verdict = "" if result.goal is None else f"{result.goal:.2f}"
    if ratio is not None and result.goal is not None:
        verdict += " met" if ratio.median >= result.goal else " short"
    return (
        result.name,
        str(result.threads),
        duration(ours.median) if ours else result.failures.get(OURS, "-"),
        best or "-",
        duration(result.times[best].median) if best else "-",
        f"{ratio.median:.2f}" if ratio else "-",
        f"{ratio.low:.2f} .. {ratio.high:.2f}" if ratio else "-",
        f"{result.quiet}/{result.rounds}",
        verdict,
    )


WIDTHS = (26, 7, 9, 16, 11, 6, 13, 8, 10)
"""Fixed, so that a line can be printed when its kernel is done."""


def line(cells: Sequence[str]) -> str:
    """The cells in columns: text to the left, numbers to the right."""
    left = (0, 3, 8)
    return "  ".join(
        c.ljust(w) if n in left else c.rjust(w) for n, (c, w) in enumerate(zip(cells, WIDTHS, strict=True))
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    """All results with a head."""
    yield line(HEAD).rstrip()
    for result in results:
        yield line(row(result)).rstrip()


def notes(results: Sequence[Result]) -> Iterator[str]:
    """Notes below the table: contenders that failed, and how a kernel differs from its origin."""
    said: set[str] = set()
    for result in results:
        texts = [f"{who}: {why}" for who, why in result.failures.items()] + ([result.note] if result.note else [])
        for text in texts:
            message = f"{result.name}: {text}"
            if message not in said:
                said.add(message)
                yield message


def machine() -> dict[str, Any]:
    """The facts that the numbers depend on."""
    return {
        "processor": _processor(),
        "cores": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")]
    return names[0] if names else platform.processor()


def read_json(path: Path) -> list[Result]:
    """The results that `write_json` wrote to `path`."""
    return [_result(entry) for entry in json.loads(path.read_text())["results"]]


def _result(entry: dict[str, Any]) -> Result:
    quartiles = {key: {name: Quartiles(**q) for name, q in entry[key].items()} for key in ("times", "ratios")}
    return Result(**{**entry, **quartiles, "limit": _read_limit(entry.get("limit"))})


def _read_limit(entry: dict[str, Any] | None) -> Limit | None:
    if entry is None:
        return None
    return Limit(**{**entry, **{key: Quartiles(**entry[key]) for key in ("seconds", "share")}})


def write_json(path: Path, results: Sequence[Result], settings: dict[str, Any]) -> None:
    """Everything measured, for later comparison. Times in seconds."""
    document = {"machine": machine(), "settings": settings, "results": [asdict(r) for r in results]}
    path.write_text(json.dumps(document, indent=1) + "\n")
