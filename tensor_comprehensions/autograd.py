"""Operators in torch's autograd: a call that is recorded, and the gradients that its backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .arguments import PLAIN
from .calls import Interface, check_names
from .errors import ArgumentError, CheckError
from .once import OncePerKey
from .tc_lang.differentiate import differentiable, differentiate
from .tc_lang.function import Function
from .tc_lang.gradient import Gradient, Key, given_gradient

Run = Callable[..., Any]
PythonGradient = Callable[[tuple[Any, ...], tuple[Tensor, ...], tuple[Tensor, ...]], Sequence[Tensor | None]]
"""Takes the inputs and initial values, the outputs, and their gradients; gives the gradients of the first, in order."""

LIMIT = 64
"""How many gradients, each by other inputs, are kept for one def."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How calls are recorded of which the same arguments require gradients.

    keys: all that a call passes, in order. wanted: those of them that get a gradient. takes, reads: what the gradient
    takes, and what of that it reads. gradient, op: as a def and as an operator; None for a Python function.
    """

    keys: tuple[Key, ...]
    wanted: frozenset[Key]
    takes: frozenset[Key]
    reads: frozenset[Key]
    gradient: Gradient | None
    op: Run | None


class Gradients:
    """The gradients of a def: derived from it, or given as the text of a def or as a Python function.

    Args:
        make: makes an operator of a def.
    """

    def __init__(self, function: Function, given: str | PythonGradient | None, make: Callable[[Function], Run]) -> None:
        if not (given is None or isinstance(given, str) or callable(given)):
            raise ArgumentError(
                f"the gradient of '{function.name}' is a {type(given).__name__}",
                expected="the text of a def, or a Python function",
            )
        self.function, self.given = function, given
        self.written = given_gradient(function, given) if isinstance(given, str) else None
        self._make = make
        self._plans: dict[tuple[bool, ...], Plan] = {}
        self._known: OncePerKey[tuple[Key, ...], tuple[Gradient, Run]] = OncePerKey(LIMIT)

    def source(self) -> str:
        """The text of the gradient by all inputs. Raises CheckError where there is none."""
        if isinstance(self.given, str):
            return self.given
        if self.given is not None:
            raise ArgumentError(f"the gradient of '{self.function.name}' is a Python function, which has no TC text")
        return differentiate(self.function).source

    def plan(self, required: tuple[bool, ...]) -> Plan:
        """How to record a call; `required` tells of each argument whether it requires a gradient.

        Raises CheckError where there is no gradient by one of them.
        """
        return self._plans.get(required) or self._new(required)

    def _new(self, required: tuple[bool, ...]) -> Plan:
        f = self.function
        keys = (*(("input", p.name) for p in f.parameters), *(("initial", p.name) for p in f.initial))
        possible = differentiable(f)
        wanted = tuple(k for k, needed in zip(keys, required, strict=True) if needed and k in possible)
        if callable(self.given):
            everything = frozenset((*keys, *(("output", r) for r in f.returns)))
            plan = Plan(keys, frozenset(wanted), everything, everything, None, None)
        else:
            gradient, op = self._known.get(() if self.written else wanted, lambda: self._made(wanted))
            _check_gives(gradient, wanted)
            plan = Plan(keys, frozenset(wanted), frozenset(gradient.takes), gradient.reads, gradient, op)
        self._plans[required] = plan
        return plan

    def _made(self, wanted: tuple[Key, ...]) -> tuple[Gradient, Run]:
        gradient = self.written or differentiate(self.function, wanted)
        return gradient, self._make(gradient.function)


def is_recorded(values: Sequence[object]) -> bool:
    """Does torch record a call on `values` for autograd, in the plain way that is offered here?"""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    tensors = [x for x in values if isinstance(x, Tensor)]
    return any(x.requires_grad for x in tensors) and all(type(x) in PLAIN for x in tensors)


def recorded(
    run: Run,
    interface: Interface,
    gradients: Gradients,
    tensors: Sequence[object],
    out: object,
    initial: Mapping[str, object],
) -> Any:
    """The result of `run(*tensors, **initial)`, which autograd can differentiate.

    Raises CheckError where the def has no gradient, ArgumentError as a call does.
    """
    function = interface.function
    check_names(interface, tensors, initial)
    if not any(function.tensor(r).dtype.is_float for r in function.returns):
        with torch.no_grad():
            return run(*tensors, out=out, **initial)
    if out is not None:
        raise ArgumentError(
            f"an argument of {function.name} requires a gradient, and a call with 'out' does not record one",
            suggestion="leave 'out' away, or call under torch.no_grad()",
        )
    names = [p.name for p in function.initial]
    apply: Run = _Recorded.apply
    return apply(run, gradients, len(tensors), names, *tensors, *(initial[name] for name in names))


class _Recorded(torch.autograd.Function):
    """One call. Old style, with the context in `forward`: the new one costs three times as much per call."""

    @staticmethod
    def forward(ctx: Any, run: Run, gradients: Gradients, count: int, names: Sequence[str], *values: Any) -> Any:
        plan = gradients.plan(ctx.needs_input_grad[4:])
        result = run(*values[:count], **dict(zip(names, values[count:], strict=True)))
        outputs = result if isinstance(result, tuple) else (result,)
        ctx.gradients, ctx.plan = gradients, plan
        _save(ctx, values, outputs)
        integers = [x for x in outputs if not x.is_floating_point()]
        if integers:
            ctx.mark_non_differentiable(*integers)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        gradients, plan = cast("Gradients", ctx.gradients), cast("Plan", ctx.plan)
        known = {**ctx.others, **dict(zip(ctx.saved_keys, ctx.saved_tensors, strict=True))}
        for r, x in zip(gradients.function.returns, upstream, strict=True):
            known["gradient", r] = x.contiguous()
        if plan.gradient is None or plan.op is None:
            results = _python(gradients, plan.keys, known)
        else:
            found = plan.op(*[known[key] for key in plan.gradient.takes])
            results = dict(zip(plan.gradient.gives, found if isinstance(found, tuple) else (found,), strict=True))
        return (None, None, None, None, *[results.get(k) if k in plan.wanted else None for k in plan.keys])


def _save(ctx: Any, values: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    """Keep what the backward takes; of tensors whose sizes alone it needs, it does not matter whether they change."""
    plan = cast("Plan", ctx.plan)
    saved, others = {}, {}
    outputs_of = [("output", r) for r in ctx.gradients.function.returns]
    for key, x in (*zip(plan.keys, values, strict=True), *zip(outputs_of, outputs, strict=True)):
        if key in plan.reads and isinstance(x, Tensor):
            saved[key] = x
        elif key in plan.takes:
            others[key] = x.detach() if isinstance(x, Tensor) else x
    ctx.saved_keys, ctx.others = tuple(saved), others
    ctx.save_for_backward(*saved.values())


def _check_gives(gradient: Gradient, wanted: Sequence[Key]) -> None:
    for key in wanted:
        if key not in gradient.gives:
            name = f"d_{key[1]}" + ("_0" if key[0] == "initial" else "")
            raise CheckError(f"'{gradient.function.name}' does not return '{name}', and '{key[1]}' requires a gradient")


def _python(gradients: Gradients, keys: Sequence[Key], known: Mapping[Key, Any]) -> dict[Key, Tensor | None]:
    """The gradients that a Python function gives."""
    assert callable(gradients.given)
    returns = gradients.function.returns
    found = gradients.given(
        tuple(known[k] for k in keys),
        tuple(known["output", r] for r in returns),
        tuple(known["gradient", r] for r in returns),
    )
    found = found if isinstance(found, tuple | list) else (found,)
    if len(found) != len(keys):
        raise ArgumentError(
            f"the gradient of '{gradients.function.name}' gives {len(found)} values",
            expected=f"{len(keys)}, a tensor or None for each of {', '.join(name for _, name in keys)}",
        )
    return dict(zip(keys, found, strict=True))
