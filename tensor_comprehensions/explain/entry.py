"""The report on a call: its kernel is compiled as for the call, and explained by what it is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .cpu import explain_cpu_kernel
from .report import Report

if TYPE_CHECKING:
    from ..api import Op


def explain_call(
    op: Op,
    tensors: Sequence[Any],
    initial: Mapping[str, Any],
    options: Any,
    target: Any,
    schedule: object,
    *,
    measure: bool = False,
) -> Report:
    """The report on a call of `op`; arguments as for `Op.compile`."""
    kernel = op.compile(*tensors, options=options, target=target, schedule=schedule, **initial)
    return explain_cpu_kernel(kernel.compiled)
