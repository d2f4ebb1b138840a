"""The first calls of an equation: torch computes them until their work pays for a compilation.

A compilation takes as long as a thousand small products. Work is counted from sizes, never timed, so that the choice
depends on the earlier calls alone. The sizes of these calls count as values that the operator has seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from threading import Lock

import torch
from torch import Tensor

from ..core import knobs
from ..core.errors import ArgumentError
from ..dispatch.dynamic_sizes import DynamicSizes
from .equation import parse_equation

ENOUGH_SECONDS = 0.5
"""A kernel pays after calls of this estimated time in all: twice the time that the slowest kernels take to compile."""
CALL_SECONDS = 1e-5
"""Overhead of a torch call in seconds, without its operations."""
OPERATIONS_PER_SECOND = 5e10
"""Multiply-adds, or elements moved, per second by one thread."""
MOST_VALUES = 3
"""Maximum number of values recorded per size; more would not change the decision of `dispatch.dynamic_sizes`."""
LIMIT = 1024
"""Maximum number of cached equations, and of shapes of each."""
_DTYPES = (torch.float32, torch.float64)


class FirstCalls:
    """The calls of one equation, for operands of one type."""

    def __init__(self, operands: Sequence[str], output: str) -> None:
        self.operands, self._lock = tuple(operands), Lock()
        self._steps = [frozenset(operands[0])]
        for n, labels in enumerate(operands[1:], 2):  # in the order of torch
            kept = self._steps[-1] & frozenset(output).union(*operands[n - 1 :]) if n > 2 else self._steps[-1]
            self._steps.append(kept | frozenset(labels))
        self._seconds: dict[tuple[Sequence[int], ...], float] = {}
        self.seconds = 0.0
        self.values: dict[str, tuple[int, ...]] = {}

    def count(self, operands: Sequence[Tensor]) -> bool:
        """Record a call; whether torch should compute it. False if its shapes do not fit the equation."""
        shapes = tuple([x.shape for x in operands])
        seconds = self._seconds.get(shapes)
        if seconds is None:
            sizes = self._label_sizes(shapes)
            if sizes is None:
                return False
            seconds = self._note(shapes, sizes)
        with self._lock:
            self.seconds += seconds
            return self.seconds < ENOUGH_SECONDS

    def _label_sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int] | None:
        sizes: dict[str, int] = {}
        for labels, shape in zip(self.operands, shapes, strict=True):
            if len(shape) != len(labels):
                return None
            for label, size in zip(labels, shape, strict=True):
                if sizes.setdefault(label, size) != size:  # or one of them is 1
                    return None
        return sizes

    def _note(self, shapes: tuple[Sequence[int], ...], sizes: Mapping[str, int]) -> float:
        """Record `sizes` and return the estimated seconds of a call with them."""
        operations = sum(prod([sizes[label] for label in step]) for step in self._steps)
        seconds = CALL_SECONDS + operations / OPERATIONS_PER_SECOND
        with self._lock:
            if len(self._seconds) < LIMIT:
                self._seconds[shapes] = seconds
            for label, size in sizes.items():
                seen = self.values.get(label, ())
                if len(seen) < MOST_VALUES and size not in seen:
                    self.values[label] = (*seen, size)
        return seconds

    def note_values(self, sizes: DynamicSizes) -> None:
        """Note the values of these calls as those of calls of an operator for the equation."""
        with self._lock:
            values = dict(self.values)
        for n in range(MOST_VALUES):
            sizes.note({f"N_{label}": seen[min(n, len(seen) - 1)] for label, seen in values.items()})


_first_calls: dict[tuple[str, torch.dtype], FirstCalls | None] = {}
"""For each equation its calls, None if torch computes none. Another thread may clear it at any time."""


def are_first(equation: str, operands: Sequence[Tensor]) -> bool:
    """Whether torch computes a call, which is counted then: a product of dense floats on the CPU."""
    key = (equation, operands[0].dtype)
    try:
        calls = _first_calls[key]
    except KeyError:
        if len(_first_calls) >= LIMIT:
            _first_calls.clear()
        calls = _first_calls.setdefault(key, _start(equation, operands))
    if calls is None or calls.seconds >= ENOUGH_SECONDS or len(calls.operands) != len(operands):
        return False
    if any(x.dtype is not key[1] or not x.is_cpu for x in operands) or torch.is_autocast_enabled("cpu"):
        return False
    settings = knobs.current_knobs()
    is_on = settings.einsum == "auto" and settings.dynamic != "always" and not settings.interpret
    return is_on and calls.count(operands)


def note_first_calls(equation: str, operands: Sequence[Tensor], sizes: DynamicSizes) -> None:
    """Note the sizes of the calls that torch has computed."""
    calls = _first_calls.get((equation, operands[0].dtype)) if operands else None
    if calls is not None and calls.values:
        calls.note_values(sizes)


def _start(equation: str, operands: Sequence[Tensor]) -> FirstCalls | None:
    if len(operands) < 2 or operands[0].dtype not in _DTYPES or "." in equation:
        return None
    try:
        parsed = parse_equation(equation, [tuple(x.shape) for x in operands])
    except ArgumentError:
        return None
    left = equation.partition("->")[0].replace(" ", "").split(",")
    return FirstCalls(left, "".join(parsed.output))
