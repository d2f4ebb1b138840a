"""Reuse of scalars that neighboring taps of a window share: scalars in registers are loaded once for all taps."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from ...target import CpuTarget
from .contraction_info import ContractionInfo, Numbers


def distinct_taps(facts: ContractionInfo, window: str, points: Mapping[str, Numbers]) -> tuple[Numbers, Numbers]:
    """How many distinct scalars register tiles read over the reduction `window`, and how many of them for several taps.

    points: as for `scalars_in_registers`.
    """
    still, count = facts.broadcast_operand, np.full_like(points[facts.vector], facts.extent(window))
    read, part, apart = count, np.zeros_like(count), abs(still.step(window) or 0)
    for name, size in points.items():
        if name == facts.vector or name not in still.iterators:
            continue
        step = abs(still.step(name) or 0)
        if not step or not apart or (step % apart and apart % step):
            read = read * size
            continue
        runs = (count, size, step // apart) if step >= apart else (size, count, apart // step)
        different, several = _count_overlaps(*runs)
        read, part = read * different / count, np.maximum(part, several / different)
    return read, read * part


def _count_overlaps(length: Numbers, runs: Numbers, apart: int) -> tuple[Numbers, Numbers]:
    """The distinct numbers in `runs` ranges of `length` numbers at distance `apart`, and those in several ranges."""
    overlap = (apart < length) & (runs > 1)
    different = length + (runs - 1) * np.minimum(apart, length)
    once = 2 * apart + (runs - 2) * np.maximum(0, 2 * apart - length)
    return different, np.where(overlap, different - once, 0.0)


def scalars_in_registers(
    facts: ContractionInfo, target: CpuTarget, window: str, width: int, points: Mapping[str, Numbers]
) -> Numbers:
    """How many scalars that taps of `window` share stay in registers of `width` numbers; 0 unless all of them fit.

    points: sizes of the register tiles along parallel iterators, including the lanes'; others have size 1.
    """
    _, kept = distinct_taps(facts, window, points)
    moving = [
        n
        for name, n in points.items()
        if name in facts.vector_operand.iterators and name not in facts.broadcast_operand.iterators
    ]
    cells, vectors = (np.ceil(prod(sizes) / width) for sizes in (points.values(), moving))
    return np.where(cells + vectors + kept < target.vector_registers, kept, 0.0)
