"""Recorded options of a call: those that it uses, those that a search starts from, and why (`TC_LOGS=tune`).

Invariant: options measured on other machines, threads or sizes are starting points only, never used as if measured
here; but untuned sizes use the options of the nearest sizes.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch

from ..cache import measurement_store
from ..cache.key import Key, make_key, names_digest, toolchain_versions
from ..cache.measurement_store import Measurement
from ..cache.store import Store, current_store
from ..core.decisions import Decision, Rival, open_book, record_decision
from ..core.diagnostics import get_logger
from ..options import CpuOptions
from ..target import CpuTarget
from ..tc_lang.ir import BoundFunction, Function

T = TypeVar("T")
MAX_SEEDS = 3
"""The maximum number of tuned sizes, and of thread counts, whose options a search starts from."""
SHOWN_RIVALS = 8
"""The maximum number of measured options that a report shows."""
MAX_DIGITS = 19
"""The maximum number of digits of an extent: keys may come from other machines."""
MANY_THREADS = 16
"""Up to here, every number of threads is looked up; above, powers of two and the number of this machine."""
FACTS = {
    "def": "the def", "dtypes": "types", "shapes": "sizes", "strides": "strides", "threads": "threads",
    "alignment": "alignment", "bound": "numbers",
}  # fmt: skip
"""The parts of a key as a log names them; all whose name starts with `target.` are the target."""
SHOWN = ("dtypes", "shapes", "threads", "strides")
"""The facts that are logged with both values."""


RECORD_USED, RECORD_UNUSED = "a tuned record is used", "no tuned record is used"


@dataclass(frozen=True, slots=True)
class Found:
    """Measured options, and the key that they were measured for."""

    key: Key
    best: Measurement


def starting_points(store: Store, key: Key, names: str, start: object) -> list[CpuOptions]:
    """Recorded options that are good for these sizes with other numbers of threads, or for similar sizes.

    names: `key.names_digest` of the def. start: the options that a search starts from anyway.
    """
    own = [m.options for m in measurement_store.recall_measurements(store, key) if _is_usable(m, names)][:MAX_SEEDS]
    others = [
        found.best.options
        for found in (*measured_with_other_threads(store, key, names), *nearest_sizes(store, key, names)[:MAX_SEEDS])
    ]
    return [o for o in dict.fromkeys([*own, *others]) if isinstance(o, CpuOptions) and o != start]


def lookup_best(
    function: Function, bound: BoundFunction, target: CpuTarget, store: Store | None = None, *, exact: bool = False
) -> CpuOptions | None:
    """The best options that the cache knows for these sizes, or else for the nearest; None if it knows none.

    exact: only for these sizes.
    """
    store = current_store() if store is None else store
    key, names = make_key(function, bound, target, threads=torch.get_num_threads()), names_digest(bound)
    return lookup_by_key(function, key, names, CpuOptions, store, exact=exact)


def lookup_by_key(
    function: Function, key: Key, names: str, record: type[T], store: Store, *, exact: bool = False
) -> T | None:
    """Like `lookup_best`, for a given key and only for options of class `record`."""
    best = measurement_store.best_measurement(store, key, names)
    if best is not None and isinstance(best.options, record):
        _log(lambda: f"{function.name}: hit: {_format_record(Found(key, best))}")
        record_decision(lambda: Decision("tuning", (), RECORD_USED, _format_record(Found(key, best))))
        return best.options
    found = [] if exact else [n for n in nearest_sizes(store, key, names) if isinstance(n.best.options, record)]
    if found:
        _log(lambda: f"{function.name}: no record of these sizes; the nearest: {_format_record(found[0], key)}")
        nearest = f"there is no record of these sizes; the nearest: {_format_record(found[0], key)}"
        record_decision(lambda: Decision("tuning", (), RECORD_USED, nearest))
        return cast("T", found[0].best.options)
    if others := measured_with_other_threads(store, key, names):
        tuned = ", ".join(other.key["threads"] for other in others)
        get_logger("tune").warning(
            "%s: these sizes were tuned with %s threads, and torch has %s: they run untuned; tune them with as many, "
            "or call torch.set_num_threads", function.name, tuned, key["threads"],
        )  # fmt: skip
    _log(lambda: f"{function.name}: miss: {_explain_record_miss(store, key, names)}")
    record_decision(lambda: Decision("tuning", (), RECORD_UNUSED, _explain_record_miss(store, key, names)))
    return None


def _list_measured(function: Function, bound: BoundFunction, target: CpuTarget) -> dict[str, Any]:
    """The fastest options that were measured for these sizes, as numbers and rivals of a decision."""
    key, names = make_key(function, bound, target, threads=torch.get_num_threads()), names_digest(bound)
    found = [m for m in measurement_store.recall_measurements(current_store(), key) if _is_usable(m, names)]
    if not found:
        return {}
    others = tuple(
        Rival(repr(m.options), m.seconds * 1e6, f"{m.seconds * 1e6:.1f} us, measured {m.samples} times")
        for m in found[1:SHOWN_RIVALS]
    )
    return {"numbers": (("total", found[0].seconds * 1e6),), "others": others}


def explain_record(
    function: Function, bound: BoundFunction, options: object, target: CpuTarget, *, asked: bool
) -> Decision:
    """Whether a tuned record decides on the options of a kernel, and if not, why.

    asked: whether the operator takes its options from records.
    """
    with open_book() as book:
        found = lookup_best(function, bound, target)
    (known,) = (d for d in book.decisions if d.subject == "tuning")
    known = replace(known, **_list_measured(function, bound, target))
    is_used = options == found and (asked or options != CpuOptions())  # a search of this process sets them, too
    if found is None or is_used:
        return known
    why = "other options were given" if asked else "the operator is not defined with options='tuned'"
    return replace(known, chosen=RECORD_UNUSED, why=f"{why}; the cache has {known.why}")


def nearest_sizes(store: Store, key: Key, names: str) -> list[Found]:
    """The best options of other sizes of the same def, nearest first by the ratios of the sizes."""
    found = [
        Found(other, usable[0])
        for other, measurements in measurement_store.family_measurements(store, key).items()
        if (usable := [m for m in measurements if _is_usable(m, names)])
    ]
    return sorted(found, key=lambda f: (_compute_shape_distance(key, f.key), f.key.digest))


def measured_with_other_threads(store: Store, key: Key, names: str) -> list[Found]:
    """The best options of the same call with other numbers of threads, the nearest numbers first."""
    mine = int(key["threads"] or 0)
    found = []
    for count in sorted(_thread_counts() - {mine}, key=lambda n: (abs(math.log2(n / max(mine, 1))), n)):
        other = Key(tuple((name, str(count) if name == "threads" else text) for name, text in key.parts))
        best = next((m for m in measurement_store.recall_measurements(store, other) if _is_usable(m, names)), None)
        if best is not None:
            found.append(Found(other, best))
    return found[:MAX_SEEDS]


def _thread_counts() -> set[int]:
    """The thread counts that a call may have been tuned with on this machine."""
    here = os.cpu_count() or 1
    powers = {1 << n for n in range(here.bit_length())}
    return {*range(1, min(here, MANY_THREADS) + 1), *powers, here, here // 2 or 1, torch.get_num_threads()}


def _is_usable(m: Measurement, names: str) -> bool:
    return m.validated and m.names_digest in ("", names)


def _compute_shape_distance(mine: Key, other: Key) -> float:
    """The distance of the shapes of two keys: the sum of |log ratio| over all extents; infinite if ranks differ."""
    a, b = (re.findall("[0-9]+", k["shapes"]) for k in (mine, other))
    if len(a) != len(b) or max(map(len, [*a, *b]), default=0) > MAX_DIGITS:
        return math.inf
    return sum(abs(math.log((int(x) + 1) / (int(y) + 1))) for x, y in zip(a, b, strict=True))


# --- why ---------------------------------------------------------------------------------------------------------


def _log(text: Callable[[], str]) -> None:
    if get_logger("tune").isEnabledFor(logging.DEBUG):
        get_logger("tune").debug("%s", text())


def _format_record(found: Found, wanted: Key | None = None) -> str:
    """A record in one line, with the facts in which it differs from the wanted key."""
    m = found.best
    facts = [f"record {found.key.digest[:12]}", f"{m.seconds * 1e6:.1f} us in the race", repr(m.options)]
    if wanted is not None:
        facts[1:1] = describe_key_differences(wanted, found.key)
    if not m.is_current:
        facts.append(f"measured by other versions ({_other_versions(m)})")
    return ", ".join(facts)


def _explain_record_miss(store: Store, key: Key, names: str) -> str:
    """The reason for a miss: the nearest record, and how it differs."""
    known = measurement_store.all_measurements(store)
    same = [other for other in known if other["def"] == key["def"]]
    if not same:
        return f"none of {len(known)} records is of this def"
    nearest = min(
        same,
        key=lambda other: (
            len(describe_key_differences(key, other)),
            _compute_shape_distance(key, other),
            other.digest,
        ),
    )
    facts = describe_key_differences(key, nearest)
    if not any(_is_usable(m, names) for m in known[nearest]):
        facts.append("its options were not validated, or name loops and tensors of another spelling")
    return f"the nearest of {len(same)} records of this def is {nearest.digest[:12]}: {'; '.join(facts)}"


def describe_key_differences(wanted: Key, other: Key) -> list[str]:
    """The facts in which the key of a record differs from the wanted key, in words."""
    parts = wanted.difference(other)
    target = [name for name in parts if name.partition(".")[0] == "target"]
    rest = [name for name in parts if name not in target]
    if "bound" in rest and len(rest) > 1:  # a digest of everything but the def, sizes included
        rest.remove("bound")
    said = [_describe_fact_difference(name, wanted, other) for name in rest]
    if target:
        fields = ", ".join(name.partition(".")[2] or name for name in target)
        named = f"{other['target.name']} instead of {wanted['target.name']}" if "target.name" in target else fields
        said.append(f"target {named}")
    return said


def _describe_fact_difference(name: str, wanted: Key, other: Key) -> str:
    said = FACTS.get(name, name)
    return f"{said} {other[name]} instead of {wanted[name]}" if name in SHOWN else f"other {said}"


def _other_versions(m: Measurement) -> str:
    theirs, mine = dict(m.versions), dict(toolchain_versions())
    return ", ".join(
        _describe_change(name, theirs, mine) for name in {**mine, **theirs} if theirs.get(name) != mine.get(name)
    )


def _describe_change(name: str, theirs: dict[str, str], mine: dict[str, str]) -> str:
    return f"{name} {theirs.get(name, 'unknown')} instead of {mine.get(name, 'none')}"
