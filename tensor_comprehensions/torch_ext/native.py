"""Kernels for the dispatcher that need no Python: a cell of `runtime.boxed` for each operator, filled by its calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..runtime import cells
from ..runtime.boxed import BoxedCell
from . import recording

if TYPE_CHECKING:
    from .operators import Operator


def native_cell(op: Operator) -> BoxedCell | None:
    """A cell with kernels of `op` for the CPU; None where this torch or this system has no such thing."""
    if not cells.available():
        return None
    kinds = [cells.CONSTANT if special else cells.TENSOR for _, special, _ in op.kinds]
    return BoxedCell(kinds, len(op.function.returns), op.run, partial(recording.recorded, op))
