"""The autograd kernel of an operator: records a call if needed, and redispatches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .autograd import has_tangent, out_not_differentiable_error, record_call

if TYPE_CHECKING:
    from .registration import DispatcherOp


def autograd_kernel(op: DispatcherOp, *values: Any) -> Any:
    """The result of a call; recorded in autograd's graph if an input requires a gradient or has a tangent."""
    wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*values)
    if not (wanted or forward_ad._current_level >= 0) or not op.gradients.possible:
        return redispatch(op, *values)
    if not torch._C._are_functorch_transforms_active():
        return record_call(partial(redispatch, op), op.gradients, values)
    return _at_this_level(op, values)


def redispatch(op: DispatcherOp, *values: Any) -> Any:
    """Redispatch to the kernel that computes, traces or batches."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.overload(*values)


def _at_this_level(op: DispatcherOp, values: tuple[Any, ...]) -> Any:
    """Record a call at the current level of torch.func's transforms; the calls inside are recorded at other levels."""
    from torch._functorch import autograd_function

    at_one_level: Any = autograd_function.enable_single_level_autograd_function  # type: ignore[attr-defined]

    def run(*values: Any) -> Any:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return redispatch(op, *values)

    with at_one_level():
        return record_call(run, op.gradients, values)


def out_autograd_kernel(op: DispatcherOp, *values: Any, **destinations: Tensor) -> None:
    """Run a call that writes to `destinations`. Raises ArgumentError if autograd would have to record it."""
    everything = (*values, *destinations.values())
    if (torch.is_grad_enabled() and torch._C._any_requires_grad(*everything)) or has_tangent(everything):
        raise out_not_differentiable_error(op.function)
    with torch._C._AutoDispatchBelowAutograd():
        op.out(*values, **destinations)
