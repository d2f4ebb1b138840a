"""Kernels for the dispatcher that need no Python: a cell of `runtime.boxed` for each operator, filled by its calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..runtime import cells
from ..runtime.boxed import BoxedCell
from . import recording

if TYPE_CHECKING:
    from .operators import Operator


def native_kernels(op: Operator, namespace: str) -> BoxedCell | None:
    """Kernels of `op` that are registered for the CPU; None where this torch or this system has no such thing."""
    if not cells.available():
        return None
    kinds = [cells.CONSTANT if special else cells.TENSOR for _, special, _ in op.kinds]
    cell = BoxedCell(kinds, len(op.function.returns), op.run, partial(recording.recorded, op))
    cell.register(namespace, op.schema.name)
    return cell
