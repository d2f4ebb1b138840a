"""Operators in torch's autograd: a call that is recorded, and the gradients that its backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
        self._known: OncePerKey[tuple[Key, ...], tuple[Gradient, Run]] = OncePerKey(LIMIT)

    def source(self) -> str:
        """The text of the gradient by all inputs. Raises CheckError where there is none."""
        if isinstance(self.given, str):
            return self.given
        if self.given is not None:
            raise ArgumentError(f"the gradient of '{self.function.name}' is a Python function, which has no TC text")
        return differentiate(self.function).source

    def by(self, wanted: tuple[Key, ...]) -> tuple[Gradient, Run]:
        """The gradient by some inputs and initial values, and its operator. Raises CheckError where there is none."""
        return self._known.get(wanted if self.written is None else (), lambda: self._new(wanted))

    def _new(self, wanted: tuple[Key, ...]) -> tuple[Gradient, Run]:
        gradient = differentiate(self.function, wanted) if self.written is None else self.written
        return gradient, self._make(gradient.function)

    def keys(self) -> list[Key]:
        """What a call passes: the inputs, then the initial values."""
        f = self.function
        return [*(("input", p.name) for p in f.parameters), *(("initial", p.name) for p in f.initial)]


def is_recorded(function: Function, values: Sequence[object]) -> bool:
    """Does torch record a call on `values` for autograd, in the plain way that is offered here?"""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    tensors = [x for x in values if isinstance(x, Tensor)]
    if not any(x.requires_grad for x in tensors) or any(type(x) not in PLAIN for x in tensors):
        return False
    return any(function.tensor(r).dtype.is_float for r in function.returns)


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
        keys = gradients.keys()
        possible = set(differentiable(gradients.function))
        wanted = tuple(k for k, needed in zip(keys, ctx.needs_input_grad[4:], strict=True) if needed and k in possible)
        if not callable(gradients.given):
            _check_gives(gradients.by(wanted)[0], wanted)
        result = run(*values[:count], **dict(zip(names, values[count:], strict=True)))
        outputs = result if isinstance(result, tuple) else (result,)
        ctx.gradients, ctx.wanted, ctx.keys = gradients, wanted, keys
        _save(ctx, values, outputs)
        function = gradients.function
        ctx.mark_non_differentiable(
            *(x for r, x in zip(function.returns, outputs, strict=True) if not function.tensor(r).dtype.is_float)
        )
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        gradients: Gradients = ctx.gradients
        known = {**ctx.others, **dict(zip(ctx.saved_keys, ctx.saved_tensors, strict=True))}
        for r, x in zip(gradients.function.returns, upstream, strict=True):
            known["gradient", r] = x.contiguous()
        if callable(gradients.given):
            results = _python(gradients, ctx.keys, known)
        else:
            gradient, op = gradients.by(ctx.wanted)
            found = op(*(known[key] for key in gradient.takes))
            results = dict(zip(gradient.gives, found if isinstance(found, tuple) else (found,), strict=True))
        return (None, None, None, None, *(results.get(k) if k in ctx.wanted else None for k in ctx.keys))


def _save(ctx: Any, values: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    """Keep what the backward takes; of tensors whose sizes alone it needs, it does not matter whether they change."""
    gradients: Gradients = ctx.gradients
    parts: dict[Key, Any] = dict(zip(ctx.keys, values, strict=True))
    parts |= {("output", r): x for r, x in zip(gradients.function.returns, outputs, strict=True)}
    read = frozenset(parts)
    if not callable(gradients.given):
        gradient = gradients.by(ctx.wanted)[0]
        read, takes = gradient.reads, set(gradient.takes)
        parts = {key: x for key, x in parts.items() if key in takes}
    saved = {key: x for key, x in parts.items() if isinstance(x, Tensor) and key in read}
    ctx.saved_keys = tuple(saved)
    ctx.save_for_backward(*saved.values())
    ctx.others = {k: x.detach() if isinstance(x, Tensor) else x for k, x in parts.items() if k not in saved}


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
