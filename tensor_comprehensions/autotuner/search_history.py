"""The candidates of past searches for reports: searches of this process, or of a journal."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from ..cache.key import Key
from ..cache.options_proto import from_message
from ..explain.kernel_report import SearchCurve, TriedOptions
from . import tuner_pb2 as pb
from .journal import read_records
from .outcomes import Outcome, outcome_from_message
from .search_loop import TuningResult, find_significant_winner

MAX_SEARCHES = 32
"""The number of latest searches that a process remembers."""

_remembered: OrderedDict[str, SearchCurve] = OrderedDict()
_lock = Lock()


def remember_search(key: Key, found: TuningResult[Any]) -> None:
    """Remember the candidates of a search whose result is cached under `key`."""
    with _lock:
        _remembered[key.digest] = trace_search(found)
        _remembered.move_to_end(key.digest)
        while len(_remembered) > MAX_SEARCHES:
            _remembered.popitem(last=False)


def find_search(key: Key, journal: Path | None = None) -> SearchCurve | None:
    """The last search for `key` in this process, or in a journal; None if there is none.

    Raises ArgumentError if there is no such journal.
    """
    if journal is not None:
        return _read_search(journal, key)
    with _lock:
        return _remembered.get(key.digest)


def trace_search(found: TuningResult[Any]) -> SearchCurve:
    """The candidates of a search that has ended."""
    return SearchCurve(
        _list_candidates(found.outcomes),
        repr(found.options),
        found.seconds,
        found.default_seconds,
        _scale(found.outcomes, found.default, found.default_seconds),
        found.elapsed,
    )


def _read_search(path: Path, key: Key) -> SearchCurve | None:
    """The search for `key` in a journal; None if it has none."""
    records = list(read_records(path))
    own = {problem for problem, record in records if isinstance(record, pb.Start) and record.key == key.digest}
    found = [record for problem, record in records if problem in own]
    outcomes = [outcome_from_message(r, from_message(r.options)) for r in found if isinstance(r, pb.Outcome)]
    ends = [r for r in found if isinstance(r, pb.Decision)]
    if not outcomes:
        return None
    last = max(o.elapsed for o in outcomes)
    winner = find_significant_winner(ends[-1].timings) if ends else None
    if winner is None:
        return SearchCurve(_list_candidates(outcomes), "", None, None, 1.0, last)
    finalists, timings = [from_message(m) for m in ends[-1].finalists], ends[-1].timings
    default = timings[0] if timings[0].runs else timings[winner]
    return SearchCurve(
        _list_candidates(outcomes),
        repr(finalists[winner]),
        timings[winner].low,
        default.low,
        _scale(outcomes, finalists[0], default.low),
        ends[-1].elapsed,
    )


def _list_candidates(outcomes: Sequence[Outcome]) -> tuple[TriedOptions, ...]:
    return tuple(TriedOptions(repr(o.options), o.kind, o.seconds, o.elapsed) for o in outcomes)


def _scale(outcomes: Sequence[Outcome], default: Any, raced: float) -> float:
    """The time of the default in the race, as a multiple of its time in the search."""
    return next((raced / o.seconds for o in outcomes if o.options == default and o.seconds), 1.0)
