"""Kernels for the dispatcher that need no Python: a cell of `runtime.boxed` for each operator, filled by its calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import knobs
from ..calling.calls import Arguments, Interface
from ..calling.lanes import Lanes
from ..compiler import Compiled
from ..dtypes import DType
from ..runtime import boxed, process
from ..runtime.dispatch import places
from ..tc_lang.function import Role, contiguous_strides
from . import recording

if TYPE_CHECKING:
    from .operators import Operator


def native_kernels(op: Operator, namespace: str) -> boxed.Cell | None:
    """Kernels of `op` that are registered for the CPU; None where this torch or this system has no such thing."""
    if not boxed.available():
        return None
    _follow_the_knobs()
    cell = boxed.Cell([special for _, special, _ in op.kinds], op.run, partial(recording.recorded, op))
    cell.register(namespace, op.schema.name)
    return cell


@cache
def _follow_the_knobs() -> None:
    knobs.observe(lambda now: boxed.pause(now.interpret))


class NativeLanes(Lanes):
    """The lanes of an operator, which its cell gets too.

    They are given up together with those of the op: `remember` is called by every call that comes through Python.
    """

    def __init__(self, interface: Interface, cell: boxed.Cell) -> None:
        super().__init__(interface)
        self._interface, self._cell = interface, cell

    def remember(self, compiled: Compiled, arguments: Arguments, special: Sequence[int], out: Sequence[Tensor]) -> None:
        super().remember(compiled, arguments, special, out)
        if not out:
            _add(self._cell, self._interface, compiled, arguments, iter(special))


def _add(cell: boxed.Cell, interface: Interface, compiled: Compiled, arguments: Arguments, special: Any) -> None:
    function, bound = interface.function, compiled.bound
    inputs = zip(function.parameters, [t for t in bound.tensors if t.role is Role.INPUT], arguments.inputs, strict=True)
    guards: list[boxed.Facts | int] = [
        next(special) if p.specialised else _facts(t.dtype, tuple(x.shape), tuple(x.stride())) for p, t, x in inputs
    ]
    count, initial = len(guards), [p.name for p in function.initial]
    for name, x in zip(initial, arguments.initial, strict=True):
        if not x.is_contiguous():  # the copy would be more than one of bytes
            return
        guards.append(_facts(bound.tensor(name).dtype, tuple(x.shape), contiguous_strides(tuple(x.shape))))
    outputs = [
        boxed.Fresh(
            boxed.Facts(_number(t.dtype), t.shape, t.strides),
            math.prod(t.shape) * t.dtype.size,
            count + initial.index(t.name) if t.name in initial else -1,
        )
        for t in map(bound.tensor, bound.returns)
    ]
    cell.add(compiled.executable.address, guards, outputs, count, places(compiled.temporaries), compiled.executable)


def _facts(dtype: DType, sizes: tuple[int, ...], strides: tuple[int, ...]) -> boxed.Facts:
    empty = 0 in sizes
    free = tuple(boxed.ANY if empty or n == 1 else s for n, s in zip(sizes, strides, strict=True))
    return boxed.Facts(_number(dtype), sizes, free)


@cache
def _number(dtype: DType) -> int:
    """torch's number of a type, in its C interface."""
    ask: Callable[[], int] = getattr(process.torch_library(), f"aoti_torch_dtype_{dtype.name}")
    return ask()
