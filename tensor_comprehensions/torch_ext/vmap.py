"""`torch.vmap` of an operator: the def with one more index, so that one kernel computes the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import ArgumentError
from ..tc_lang.ir import Function, Symbol
from ..tc_lang.transforms.add_batch_dim import add_batch_dim as with_batch

if TYPE_CHECKING:
    from .registration import DispatcherOp

Dimensions = tuple[Any, ...]
Batched = tuple[Callable[..., Any], Function, frozenset[str]]
"""The batched def as an operator and as a function, and its outputs that have the batch."""


def vmap_kernel(op: DispatcherOp, *values: Any) -> Any:
    """The result of a call under a vmap that batches some of `values`."""
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    def rule(info: Any, dimensions: Dimensions, *values: Any) -> tuple[Any, Any]:
        return _apply_vmap_rule(op, info.batch_size, dimensions, values)

    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, op.overload, *values)


def refuse_out_under_vmap(op: DispatcherOp, *_: Any, **__: Any) -> None:
    """Raise ArgumentError for a call with `out` under vmap, because `out` may lack the batch dimension."""
    raise ArgumentError(
        f"a call of {op.function.name} with 'out' cannot be batched by vmap", suggestion="leave 'out' away"
    )


def _apply_vmap_rule(op: DispatcherOp, size: int, dimensions: Dimensions, values: Sequence[Any]) -> tuple[Any, Any]:
    """The results and their batch dimensions. dimensions: the batch dimensions of the arguments; None: not batched."""
    values = [x if d is None else x.movedim(d, 0) for x, d in zip(values, dimensions, strict=True)]
    if op.gradients.given is not None:  # a user's gradient cannot be batched
        return _one_by_one(op, size, dimensions, values)
    over = {name for (_, name), d in zip(op.gradients.keys, dimensions, strict=True) if d is not None}
    taken = [op.function.tensor(name) for _, name in op.gradients.keys]
    if not any(t.name in over for t in taken if _has_sizes(t)):  # no argument has a size that gives the batch size
        place = next((n for n, t in enumerate(taken) if _has_sizes(t)), None)
        if place is None:
            return _one_by_one(op, size, dimensions, values)
        values[place] = values[place].expand(size, *values[place].shape)
        over.add(taken[place].name)
    names = tuple(name for _, name in op.gradients.keys if name in over)
    made, function, outputs = op.batched.get(names, lambda: _make_batched(op, names))
    initial = {
        name: x.expand(size, *x.shape) if name in outputs and name not in over else x
        for name, x in zip(op.names, values[op.count :], strict=True)
    }
    results = made(*values[: op.count], **initial)
    places = tuple(0 if r in outputs else None for r in function.returns)
    return results, places if len(places) != 1 else places[0]


def _has_sizes(t: Symbol) -> bool:
    """Whether a batched form of `t` names the batch size. An in/out output with inferred sizes does not."""
    return not t.is_compile_time and (t.extents is not None or not t.rank)


def _make_batched(op: DispatcherOp, names: tuple[str, ...]) -> Batched:
    function, over = with_batch(op.function, names)
    return op.gradients.make(function), function, over


def _one_by_one(op: DispatcherOp, size: int, dimensions: Dimensions, values: Sequence[Any]) -> tuple[Any, Any]:
    if not size:
        one = [x if d is None else x.new_zeros(x.shape[1:]) for x, d in zip(values, dimensions, strict=True)]
        outputs = op.fake_kernel(*one)
        empty = tuple(y.new_empty((0, *y.shape)) for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
        return (empty[0], 0) if len(empty) == 1 else (empty, (0,) * len(empty))
    slices = [
        op.overload(*[x if d is None else x[n] for x, d in zip(values, dimensions, strict=True)]) for n in range(size)
    ]
    if isinstance(slices[0], Tensor):
        return torch.stack(slices), 0
    return tuple(torch.stack(parts) for parts in zip(*slices, strict=True)), (0,) * len(slices[0])
