"""The short way of a call: the kernels of earlier calls, found by looking at nothing but the call.

Always holds: a lane only takes what the long way (`api.Op._call`) would take with the same result; whatever is unusual
it leaves to the long way, which explains what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_mode

from .. import knobs
from ..compiler import Compiled
from ..dtypes import DType
from ..runtime.dispatch import Launcher, Operand
from ..tc_lang.function import Role
from ..tc_lang.function import Tensor as BoundTensor
from .arguments import TORCH_TYPES, to_tensor
from .calls import Arguments, Interface, copy, failure

LIMIT = 256
"""How many lanes, and how many numbers, an operator remembers before it forgets them all."""

MISS: Any = object()
"""What a call gives that has no lane."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """A kernel for calls of one kind.

    launcher: accepts the inputs, the initial values and the destinations of a call, in this order; runs on the inputs
        and the outputs.
    spans: the bytes that each of these reaches over.
    fresh: what makes each output; None for an in/out output, which starts as a copy of its initial value.
    """

    launcher: Launcher
    spans: tuple[int, ...]
    fresh: tuple[Callable[[], Tensor] | None, ...]


def plain_call(tensors: Sequence[Any]) -> bool:
    """Does torch expect nothing special of a call on `tensors` now: no gradient, no tangent, no mode?"""
    return not (
        (_records_gradients() and _any_requires_gradient(*tensors))
        or _dispatch_modes()
        or _function_modes()
        or _forward_mode._current_level >= 0
        or _knobs().interpret
    )


_records_gradients, _any_requires_gradient = torch.is_grad_enabled, torch._C._any_requires_grad
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_knobs, _count_change = knobs.current, torch._C._increment_version


class Lanes:
    """The lanes of one operator.

    A call has the lane of its layouts, of the values of its specialised numbers, and of whether it says where to write.
    """

    def __init__(self, interface: Interface) -> None:
        function, parameters = interface.function, interface.function.parameters
        self._count = len(parameters)
        self._numbers = [
            (n, p, _python_types(p.dtype), cast("dict[Any, Tensor]", {}))
            for n, p in enumerate(interface.parameters)
            if not p.dims
        ]
        self._special = tuple(n for n, p in enumerate(parameters) if p.specialised)
        self._initial = tuple(p.name for p in function.initial)
        self._sources = tuple(self._initial.index(r) if r in self._initial else None for r in function.returns)
        self.only_tensors = not self._numbers and not self._initial
        """Whether a call is nothing but tensors and, unless it says where to write, its result fresh outputs."""
        self._last: dict[Hashable, Lane] = {}
        self._known: dict[Hashable, Lane] = {}
        self._apart_before: tuple[Lane, list[int]] | None = None

    def direct(self) -> Launcher | None:
        """The launcher of the last call, for a def of which `only_tensors` holds."""
        lane = self._last.get(((), False))
        return None if lane is None else lane.launcher

    def call(self, tensors: Sequence[Any], out: Any, initial: Mapping[str, Any]) -> Any:
        """The result of a call, or MISS."""
        if len(tensors) != self._count or len(initial) != len(self._initial):
            return MISS
        special: tuple[Any, ...] = ()
        if self._numbers:
            if self._special:
                special = tuple([tensors[n] for n in self._special])
                for value in special:
                    if type(value) is not int:  # a tensor's value may change
                        return MISS
            tensors = self._with_numbers(tensors)
        values: list[Any] = [initial.get(name) for name in self._initial] if initial else []
        if out is None:
            lane = self._last.get((special, False))
            if not values and lane is not None and plain_call(tensors):
                result = lane.launcher.call(*tensors)
                if result is not NotImplemented:
                    return result
            everything = (*tensors, *values)
            lane = self._find((special, False), everything)
            if lane is None or not plain_call(everything):
                return MISS
            if not values:
                return lane.launcher(*tensors)
            outputs = self._fresh(lane, values)
            lane.launcher.run(*tensors, *outputs)
            return outputs[0] if len(outputs) == 1 else outputs
        wanted = out if type(out) is tuple else (out,)
        everything = (*tensors, *values, *wanted)
        lane = self._last.get((special, True))
        if lane is None or not lane.launcher.accepts(*everything):
            lane = self._find((special, True), everything)
        if lane is None or not plain_call(everything) or not self._apart(lane, everything):
            return MISS
        if values:
            self._start(wanted, values)
        lane.launcher.run(*tensors, *wanted)
        _count_change(wanted)
        return out

    def remember(self, compiled: Compiled, arguments: Arguments, special: Sequence[int], out: Sequence[Tensor]) -> None:
        """Make a lane for calls like one that has succeeded, which wrote to `out` if there is any."""
        if out and compiled.sites:
            return
        tensors = (*arguments.inputs, *arguments.initial, *out)
        kind = (tuple(special), bool(out))
        if (kind, _layout(tensors)) in self._known:
            return
        bound = compiled.bound
        names = [t.name for t in bound.tensors if t.role is Role.INPUT]
        names += [*self._initial, *(bound.returns if out else ())]
        accepted = [
            Operand(bound.tensor(name).dtype, tuple(x.shape), tuple(x.stride()))
            for name, x in zip(names, tensors, strict=True)
        ]
        made = [_operand(bound.tensor(name)) for name in bound.returns]
        fresh = tuple(_maker(o) if s is None else None for o, s in zip(made, self._sources, strict=True))
        lane = Lane(launcher(compiled, accepted, made), tuple(map(_span, accepted)), fresh)
        if len(self._known) >= LIMIT:
            self._known.clear()
        self._last[kind] = self._known[kind, _layout(tensors)] = lane

    def _find(self, kind: Hashable, everything: Sequence[Any]) -> Lane | None:
        lane = self._last.get(kind)
        if lane is not None and lane.launcher.accepts(*everything):
            return lane
        try:
            lane = self._known.get((kind, _layout(everything)))
        except (AttributeError, RuntimeError, TypeError):  # not all of these are dense tensors
            return None
        if lane is not None and lane.launcher.accepts(*everything):
            self._last[kind] = lane
            return lane
        return None

    def _with_numbers(self, values: Sequence[Any]) -> Sequence[Any]:
        """`values` with tensors for Python's numbers, the same tensor for the same number."""
        tensors = list(values)
        for n, wanted, types, known in self._numbers:
            value = values[n]
            if type(value) in types:
                key = value or str(value)  # 0.0 and -0.0 are equal
                tensors[n] = known.get(key)
                if tensors[n] is None:
                    if len(known) >= LIMIT:
                        known.clear()
                    tensors[n] = known[key] = to_tensor(wanted, value)
        return tensors

    def _fresh(self, lane: Lane, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs before the kernel runs: those that are in/out as copies of their initial values."""
        return tuple(
            [
                make() if make is not None else values[source or 0].clone(memory_format=torch.contiguous_format)
                for make, source in zip(lane.fresh, self._sources, strict=True)
            ]
        )

    def _start(self, wanted: tuple[Tensor, ...], values: Sequence[Tensor]) -> None:
        """Give the destinations of in/out outputs their initial values."""
        for x, source in zip(wanted, self._sources, strict=True):
            if source is not None and values[source] is not x:
                copy(values[source], x)

    def _apart(self, lane: Lane, everything: Sequence[Tensor]) -> bool:
        """Does no destination come near the memory of another argument, but for its own initial value?"""
        places = [x.data_ptr() for x in everything]
        if self._apart_before == (lane, places):
            return True
        spans, first = lane.spans, len(places) - len(self._sources)
        for n in range(first, len(places)):
            start, stop = places[n], places[n] + spans[n]
            for other, (place, span) in enumerate(zip(places[:n], spans, strict=False)):
                if place < stop and start < place + span:
                    source = self._sources[n - first]
                    if source is None or other != self._count + source or everything[other] is not everything[n]:
                        return False
        if not self._initial:
            self._apart_before = (lane, places)
        return True


def _python_types(dtype: DType) -> tuple[type, ...]:
    return (bool,) if dtype.is_bool else (int,) if dtype.is_integer else (float, int)


def _layout(tensors: Sequence[Any]) -> Hashable:
    return tuple([(x.shape, x.stride()) for x in tensors])


def _span(o: Operand) -> int:
    if 0 in o.sizes:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(o.sizes, o.strides, strict=True))) * o.dtype.size


def _operand(t: BoundTensor) -> Operand:
    return Operand(t.dtype, t.shape, t.strides)


def _maker(o: Operand) -> Callable[[], Tensor]:
    return partial(torch.empty_strided, o.sizes, o.strides, dtype=TORCH_TYPES[o.dtype], device=torch.device("cpu"))


def launcher(compiled: Compiled, accepted: Sequence[Operand], made: Sequence[Operand]) -> Launcher:
    """What runs a kernel on the inputs followed by the outputs."""

    def fail(failed: int, value: int) -> BaseException:
        return failure(compiled.bound.name, compiled.sites, failed, value)

    count = sum(t.role is not Role.TEMPORARY for t in compiled.bound.tensors)
    return Launcher(compiled.executable, accepted, made, range(count), compiled.temporaries, fail)


def plain_launcher(compiled: Compiled) -> Launcher:
    """A launcher for tensors that are known to fit."""
    return launcher(compiled, (), ())
