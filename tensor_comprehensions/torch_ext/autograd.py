"""Operators in torch's autograd: record calls, and run their gradients in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ..core.error_boundary import only_tc_errors, shorten_traceback
from ..core.errors import ArgumentError, CheckError, TCError
from ..core.lazy_import import lazy_module
from ..core.single_flight import SingleFlightCache
from ..dispatch.arguments import PLAIN, with_article
from ..dispatch.call_steps import CallSignature, check_names
from ..tc_lang.ir import Function

if TYPE_CHECKING:
    from ..tc_lang import gradients as calculus
    from ..tc_lang.gradients import Gradient, Key
else:
    calculus = lazy_module("tc_lang.gradients")

Run = Callable[..., Any]
PythonGradient = Callable[[tuple[Any, ...], tuple[Tensor, ...], tuple[Tensor, ...]], Sequence[Tensor | None]]
"""Takes (inputs and initial values, outputs, gradients of outputs); returns the gradients of the first, in order."""

LIMIT = 64
"""Maximum number of gradients in memory per def, one for each set of inputs that require gradients."""


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """How to record calls in which given arguments require gradients.

    A call takes values (inputs, then initial values), returns outputs and may save temporaries. A position is an index
    into the concatenation of all these.

    Attributes:
        gradient, op: the gradient as a def and as an operator; None for a Python function.
        saved: positions whose values the gradient reads.
        held: positions of which the gradient uses only the sizes.
        inputs: for each argument of the gradient its position; -1 - n stands for the gradient of output n.
        outputs: for each value, the index of its gradient among the results of `op`; None if it gets no gradient.
        forward: the operator that also returns the saved temporaries; None if no temporaries are saved.
        double_backward: the plan without temporaries, for gradients that are differentiated themselves. Its values are
            saved, too.
    """

    gradient: Gradient | None
    op: Run | None
    saved: tuple[int, ...]
    held: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    forward: Run | None = None
    double_backward: BackwardPlan | None = None


class Gradients:
    """The gradients of a def: derived from it, or given as the text of a def or as a Python function.

    Args:
        make: makes an operator of a def.
        keep: whether calls may save temporaries for the gradient.
    """

    def __init__(
        self,
        function: Function,
        given: str | PythonGradient | None,
        make: Callable[[Function], Run],
        *,
        keep: bool = True,
    ) -> None:
        if not (given is None or isinstance(given, str) or callable(given)):
            raise ArgumentError(
                f"the gradient of '{function.name}' is {with_article(type(given).__name__)}",
                expected="the text of a def, or a Python function",
            )
        self.function, self.given = function, given
        self.written = calculus.parse_given_gradient(function, given) if isinstance(given, str) else None
        self.make, self.keep = make, keep and given is None
        self.keys: tuple[Key, ...] = (
            *(("input", p.name) for p in function.parameters),
            *(("initial", p.name) for p in function.inouts),
        )
        self.integers = tuple(n for n, r in enumerate(function.returns) if not function.tensor(r).dtype.is_float)
        """Outputs without a gradient."""
        self.possible = len(self.integers) < len(function.returns)
        """Whether the def has an output that can have a gradient."""
        self._plans: dict[tuple[bool, ...], BackwardPlan] = {}
        self._fast_plans: dict[tuple[bool, ...], BackwardPlan] = {}
        self._known: SingleFlightCache[tuple[Key, ...], tuple[Gradient, Run]] = SingleFlightCache(LIMIT)
        self._keeping: SingleFlightCache[tuple[Key, ...], tuple[Gradient, Run, Run] | None] = SingleFlightCache(LIMIT)
        self._forwards: SingleFlightCache[tuple[str, ...], Run] = SingleFlightCache(LIMIT)
        self._tangents: SingleFlightCache[tuple[bool, ...], tuple[Gradient, Run]] = SingleFlightCache(LIMIT)

    def source(self) -> str:
        """The text of the gradient of all inputs. Raises CheckError if it does not exist."""
        if isinstance(self.given, str):
            return self.given
        if self.given is not None:
            raise ArgumentError(f"the gradient of '{self.function.name}' is a Python function, which has no TC text")
        return calculus.differentiate(self.function, keep=self.keep).source

    @property
    def without_saved(self) -> Gradients:
        """The same gradients without saved temporaries, for calls that must run exactly the given operator."""
        return Gradients(self.function, self.given, self.make, keep=False)

    def fast_plan(self, required: tuple[bool, ...]) -> BackwardPlan:
        """The plan that saves temporaries if that is faster, for a call that only autograd observes."""
        found = self._fast_plans.get(required)
        if found is None:
            found = self._fast_plans[required] = self._make_fast_plan(self.plan(required), required)
        return found

    @only_tc_errors
    def _make_fast_plan(self, plan: BackwardPlan, required: tuple[bool, ...]) -> BackwardPlan:
        if not self.keep:
            return plan
        wanted = self._wanted_gradients(required)
        made = self._keeping.get(wanted, lambda: self._make_saving_gradient(wanted))
        if made is None:
            return plan
        gradient, op, forward = made
        fast = self._make_plan(gradient, op, wanted)
        saved = tuple(sorted({*fast.saved, *plan.saved}))
        held = tuple(n for n in sorted({*fast.held, *plan.held}) if n not in saved)
        return replace(fast, saved=saved, held=held, forward=forward, double_backward=plan)

    def _make_saving_gradient(self, wanted: tuple[Key, ...]) -> tuple[Gradient, Run, Run] | None:
        gradient = calculus.differentiate(self.function, wanted, keep=True)
        kept = gradient.saved_names
        if not kept:
            return None
        forward = self._forwards.get(kept, lambda: self.make(calculus.with_saved_outputs(self.function, kept)))
        return gradient, self.make(gradient.function), forward

    def plan(self, required: tuple[bool, ...]) -> BackwardPlan:
        """How to record a call. required: for each value, whether it requires a gradient.

        Raises CheckError if such a value has no gradient.
        """
        return self._plans.get(required) or self._make_plain_plan(required)

    @only_tc_errors
    def _make_plain_plan(self, required: tuple[bool, ...]) -> BackwardPlan:
        wanted = self._wanted_gradients(required)
        if callable(self.given):
            gives = tuple(n if k in wanted else None for n, k in enumerate(self.keys))
            everything = tuple(range(len(self._positions())))
            takes = (*everything, *(-1 - n for n in range(len(self.function.returns))))
            plan = BackwardPlan(None, None, everything, (), takes, gives)
        else:
            gradient, op = self._known.get(() if self.written else wanted, lambda: self._make_gradient(wanted))
            _check_gives(gradient, wanted)
            plan = self._make_plan(gradient, op, wanted)
        self._plans[required] = plan
        return plan

    def _wanted_gradients(self, required: tuple[bool, ...]) -> tuple[Key, ...]:
        possible = calculus.differentiable_inputs(self.function)
        return tuple(k for k, needed in zip(self.keys, required, strict=True) if needed and k in possible)

    def _make_plan(self, gradient: Gradient, op: Run, wanted: Sequence[Key]) -> BackwardPlan:
        positions = self._positions(gradient.saved_names)
        places = {key: n for n, key in enumerate(gradient.outputs)}
        taken = [key for key in gradient.inputs if key[0] != "gradient"]
        return BackwardPlan(
            gradient,
            op,
            tuple(positions[k] for k in taken if k in gradient.reads),
            tuple(positions[k] for k in taken if k not in gradient.reads),
            tuple(self._place(k, positions) for k in gradient.inputs),
            tuple(places[k] if k in wanted else None for k in self.keys),
        )

    def _positions(self, kept: Sequence[str] = ()) -> dict[Key, int]:
        results: list[Key] = [("output", r) for r in self.function.returns]
        results += [("temporary", name) for name in kept]
        return {key: n for n, key in enumerate((*self.keys, *results))}

    def _place(self, key: Key, positions: Mapping[Key, int]) -> int:
        return -1 - self.function.returns.index(key[1]) if key[0] == "gradient" else positions[key]

    def _make_gradient(self, wanted: tuple[Key, ...]) -> tuple[Gradient, Run]:
        gradient = self.written or calculus.differentiate(self.function, wanted)
        return gradient, self.make(gradient.function)

    def call_gradient(self, op: Run, values: Sequence[Any]) -> tuple[Any, ...]:
        """The results of `op`, which takes the arguments of the def. values: the inputs, then the initial values."""
        names, count = [p.name for p in self.function.inouts], len(self.function.parameters)
        result = op(*values[:count], **dict(zip(names, values[count:], strict=True)))
        return result if isinstance(result, tuple) else (result,)

    # --- forward mode ------------------------------------------------------------------------------------------------

    def jvp(self, values: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Tensor | None]) -> list[Any]:
        """The derivative of each output in the direction of the tangents; None for an output without one.

        The gradient is linear in the gradients of the outputs. Its own gradient with respect to these is its transpose,
        which maps tangents of the inputs to tangents of the outputs.
        """
        moved = tuple(t is not None for t in tangents)
        plan = self.plan(moved)
        if plan.gradient is None:
            raise ArgumentError(
                f"the gradient of '{self.function.name}' is a Python function, which has no forward mode",
                suggestion="give the gradient as the text of a def, or leave it to be derived",
            )
        gradient = plan.gradient
        transposed, op = self._tangents.get(moved, lambda: self._make_transposed(gradient))
        mine = {p.name: place for p, place in zip(gradient.function.parameters, plan.inputs, strict=True)}
        positions = self._positions()
        along = {}
        for r, key in zip(gradient.function.returns, gradient.outputs, strict=True):
            tangent = tangents[positions[key]]
            along[r] = torch.zeros_like(values[positions[key]]) if tangent is None else tangent.contiguous()
        everything = (*values, *outputs)
        arguments = []
        for kind, name in transposed.inputs:
            if kind == "input":  # of the gradient of an output only the sizes matter, which are those of the output
                place = mine[name]
                arguments.append(everything[place] if place >= 0 else outputs[-1 - place])
            else:
                arguments.append(along[name])
        found = op(*arguments)
        results: list[Any] = [None] * len(outputs)
        for (_, name), x in zip(transposed.outputs, found if isinstance(found, tuple) else (found,), strict=True):
            results[-1 - mine[name]] = x
        return results

    def _make_transposed(self, gradient: Gradient) -> tuple[Gradient, Run]:
        passed = zip(gradient.function.parameters, gradient.inputs, strict=True)
        wanted = [("input", p.name) for p, key in passed if key[0] == "gradient"]
        transposed = calculus.differentiate(gradient.function, wanted)
        return transposed, self.make(transposed.function)


def is_recorded(values: Sequence[object]) -> bool:
    """Whether autograd records a call on `values`, outside of torch.func transforms and on plain tensors."""
    if torch._C._are_functorch_transforms_active():
        return False
    tensors = [x for x in values if isinstance(x, Tensor)]
    wanted = (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)) or has_tangent(tensors)
    return wanted and all(type(x) in PLAIN for x in tensors)


def has_tangent(values: Iterable[object]) -> bool:
    """Whether forward-mode AD is on and one of `values` has a tangent."""
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return False
    return any(isinstance(x, Tensor) and _unpack_tangent(x) is not None for x in values)


_transforms = torch._C._are_functorch_transforms_active


def _unpack_tangent(x: Tensor) -> Tensor | None:
    unpack: Callable[[Tensor], Any] = forward_ad.unpack_dual
    tangent: Tensor | None = unpack(x).tangent
    return tangent


def call_with_autograd(
    run: Run,
    call_signature: CallSignature,
    gradients: Gradients,
    tensors: Sequence[object],
    out: object,
    initial: Mapping[str, object],
) -> Any:
    """The result of `run(*tensors, **initial)`, recorded in autograd's graph.

    Raises:
        CheckError: the def has no gradient.
        ArgumentError: an argument is invalid, or `out` is given.
    """
    function = call_signature.function
    check_names(call_signature, tensors, initial)
    if not gradients.possible:
        forward = torch._C._is_fwd_grad_enabled()
        try:
            torch._C._set_fwd_grad_enabled(False)
            return run_without_gradients(run, *tensors, out=out, **initial)
        finally:
            torch._C._set_fwd_grad_enabled(forward)
    if out is not None:
        raise out_not_differentiable_error(function)
    if not initial:
        return record_call(run, gradients, tensors)
    names, count = [p.name for p in function.inouts], len(tensors)

    def by_position(*values: object) -> Any:
        return run(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return record_call(by_position, gradients, (*tensors, *(initial[name] for name in names)))


def run_without_gradients(run: Run, /, *arguments: Any, **named: Any) -> Any:
    """Run without recording gradients, and restore the mode even after an interrupt, unlike `torch.no_grad()`."""
    recording = torch.is_grad_enabled()
    try:
        _set_recording(False)
        return run(*arguments, **named)
    finally:
        _set_recording(recording)


_set_recording = torch._C._set_grad_enabled


def out_not_differentiable_error(function: Function) -> ArgumentError:
    """The error for a recorded call with `out`."""
    return ArgumentError(
        f"an argument of {function.name} requires a gradient or has a tangent, and a call with 'out' records neither",
        suggestion="leave 'out' away, or call under torch.no_grad()",
    )


def record_call(run: Run, gradients: Gradients, values: Sequence[object]) -> Any:
    """The result of `run(*values)`, recorded in autograd's graph. values: the inputs, then the initial values."""
    return _apply(run, gradients, *values)


class _Recorded(_SingleLevelFunction):
    """One recorded call, at one level of torch.func's transforms; an operator is dispatched once for each level.

    In the old style, with `ctx` in `forward`, because `setup_context` costs three times as much per call.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, gradients: Gradients, *values: Any) -> Any:
        required = ctx.needs_input_grad[2:]
        plan = _choose_backward_plan(gradients, required) if True in required else None
        if plan is None or plan.forward is None:
            result = run(*values)
            outputs = results = result if type(result) is tuple else (result,)
        else:
            results = gradients.call_gradient(plan.forward, values)
            outputs = results[: len(gradients.function.returns)]
            result = outputs if len(outputs) > 1 else outputs[0]
        if plan is not None:
            everything = (*values, *results)
            saved, places, kept = [everything[n] for n in plan.saved], plan.saved, _NOTHING
            if plan.held or not _PLAIN.issuperset(map(type, saved)):
                saved, places, kept = _divide_arguments(plan, everything)
            ctx.call = gradients, plan, places, kept
            ctx.save_for_backward(*saved)
        if gradients.integers:
            ctx.mark_non_differentiable(*[outputs[n] for n in gradients.integers])
        if forward_ad._current_level >= 0:
            ctx.gradients = gradients
            ctx.others = [None if isinstance(x, Tensor) else x for x in values]
            ctx.save_for_forward(*[x for x in values if isinstance(x, Tensor)], *outputs)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        try:
            return _run_backward(ctx, upstream)
        except TCError as error:
            shorten_traceback(error)
            raise

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        gradients = cast("Gradients", ctx.gradients)
        tensors = iter(ctx.saved_tensors)
        values = [next(tensors) if x is None else x for x in ctx.others]
        results = gradients.jvp(values, list(tensors), tangents[2:])
        return results[0] if len(results) == 1 else tuple(results)


def _run_backward(ctx: Any, upstream: Sequence[Tensor]) -> Any:
    gradients, plan, places, kept = cast("tuple[Gradients, BackwardPlan, Sequence[int], dict[int, Any]]", ctx.call)
    known = {**kept, **dict(zip(places, map(_outlived, ctx.saved_tensors), strict=True))}
    if plan.double_backward is not None and torch.is_grad_enabled():
        plan = plan.double_backward
    if plan.op is None:
        results = _call_python_gradient(gradients, known, upstream)
    else:
        found = plan.op(*[known[n] if n >= 0 else upstream[-1 - n].contiguous() for n in plan.inputs])
        results = found if isinstance(found, tuple) else (found,)
    return (None, None, *[None if n is None else results[n] for n in plan.outputs])


def _divide_arguments(
    plan: BackwardPlan, everything: Sequence[Any]
) -> tuple[list[Any], tuple[int, ...], dict[int, Any]]:
    """The tensors that autograd saves, their positions, and the other values that the gradient needs, by position."""
    places = tuple(n for n in plan.saved if isinstance(everything[n], Tensor))
    kept = {n: everything[n] for n in plan.saved if n not in places}
    for n in plan.held:  # their values may change, since only the sizes matter
        kept[n] = everything[n].detach() if isinstance(everything[n], Tensor) else everything[n]
    return [everything[n] for n in places], places, kept


_PLAIN, _NOTHING = frozenset(PLAIN), cast("dict[int, Any]", {})


def _choose_backward_plan(gradients: Gradients, required: tuple[bool, ...]) -> BackwardPlan:
    """The plan for a call inside `forward`. Forward mode and transforms need the plan without temporaries."""
    if forward_ad._current_level >= 0 or _transforms():
        return gradients.plan(required)
    return gradients.fast_plan(required)


_outlived = torch._C._functorch.unwrap_if_dead
"""The tensor inside a wrapper of a torch.func transform that has ended; other tensors are returned unchanged."""
_apply: Run = _Recorded.apply  # type: ignore[attr-defined]


def _check_gives(gradient: Gradient, wanted: Sequence[Key]) -> None:
    for key in wanted:
        if key not in gradient.outputs:
            name = f"d_{key[1]}" + ("_0" if key[0] == "initial" else "")
            raise CheckError(f"'{gradient.function.name}' does not return '{name}', and '{key[1]}' requires a gradient")


def _call_python_gradient(
    gradients: Gradients, known: Mapping[int, Any], upstream: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The gradients that a user's Python function returns, checked. Raises ArgumentError."""
    assert callable(gradients.given)
    keys, everything = gradients.keys, [known[n] for n in range(len(known))]
    found = gradients.given(
        tuple(everything[: len(keys)]), tuple(everything[len(keys) :]), tuple(x.contiguous() for x in upstream)
    )
    found = found if isinstance(found, tuple | list) else (found,)
    if len(found) != len(keys):
        raise ArgumentError(
            f"the gradient of '{gradients.function.name}' gives {len(found)} values",
            expected=f"{len(keys)}, a tensor or None for each of {', '.join(name for _, name in keys)}",
        )
    for (_, name), x, value in zip(keys, found, everything, strict=False):
        asked = isinstance(value, Tensor) and value.is_floating_point()
        if asked and x is not None and not _is_gradient(x, value):
            kind = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else with_article(type(x).__name__)
            raise ArgumentError(
                f"the gradient of '{gradients.function.name}' by '{name}' is {kind}",
                expected=f"a tensor of shape {tuple(value.shape)}, or None",
            )
    return found


def _is_gradient(x: object, value: Tensor) -> bool:
    """Whether `x` can be a gradient with respect to `value`. torch sums over dimensions along which that broadcasts."""
    if not isinstance(x, Tensor) or value.ndim > x.ndim:
        return False
    return all(n in (1, m) for n, m in zip(reversed(value.shape), reversed(x.shape), strict=False))
