"""The fast path of a call: the kernels of earlier calls, found by the arguments alone.

Invariant: a cached call serves only calls for which the slow path (`api.Op._call`) would give the same result.
Everything unusual goes to the slow path, which explains mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_mode

from ..compiler.compiled_kernel import CompiledCpuKernel, CompiledRangeKernel
from ..compiler.row_strides import GIVEN, PACKED
from ..core import knobs
from ..core.dtypes import FLOAT32, FLOAT64, DType
from ..core.memory_layout import contiguous_strides
from ..runtime.cpu import host_symbols
from ..runtime.cpu.python_launch import CpuLauncher, OperandSpec, arena_offsets, is_plain_cpu_tensor
from ..runtime.fastpath import availability, call_cache, launch_ir
from ..runtime.fastpath.call_cache import RECORDED, CachedCall, CallCache, MutatedArg, NewOutput, TensorGuard
from ..tc_lang.ir import BoundFunction, Role
from ..tc_lang.ir import Tensor as BoundTensor
from .arguments import PLAIN, TYPES, to_tensor
from .call_steps import Arguments, CallSignature, launch_error

LIMIT = 256
"""Maximum number of cached calls, and of cached numbers, of an operator; at the limit, all are dropped."""

MISS: Any = object()
"""The result of a call that no cached call serves."""


def is_plain_call(tensors: Sequence[Any]) -> bool:
    """Whether torch needs nothing special for a call on `tensors`: no gradient, tangent, mode or trace."""
    return not (
        (_records_gradients() and _any_requires_gradient(*tensors))
        or _dispatch_modes()
        or _function_modes()
        or _jit_trace() is not None
        or _forward_mode._current_level >= 0
        or _knobs().interpret
    )


_records_gradients, _any_requires_gradient = torch.is_grad_enabled, torch._C._any_requires_grad
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_jit_trace = torch._C._get_tracing_state
_knobs, _count_change = knobs.current_knobs, torch._C._increment_version


class InlineCache:
    """The cached calls of one operator.

    They are found by the layouts of a call, by the values of its specialized numbers, and by whether it passes `out`.
    On systems that support it, machine code searches one of two call caches: for calls with and without `out`.

    Args:
        call_cache: a shared call cache for calls without `out`; None creates one.
    """

    def __init__(self, call_signature: CallSignature, call_cache: CallCache | None = None) -> None:
        function, parameters = call_signature.function, call_signature.function.parameters
        self._interface, self._count = call_signature, len(parameters)
        self._numbers = [
            (n, p, _python_types(p.dtype), cast("dict[Any, Tensor]", {}))
            for n, p in enumerate(call_signature.parameters)
            if not p.dims and not parameters[n].is_compile_time
        ]
        self._special = tuple(n for n, p in enumerate(parameters) if p.is_compile_time)
        self._initial = tuple(p.name for p in function.inouts)
        self._sources = tuple(self._initial.index(r) if r in self._initial else None for r in function.returns)
        self._machine = availability.is_fast_path_available()
        self._call_caches: dict[bool, CallCache] = {} if call_cache is None else {False: call_cache}
        self._functions: dict[bool, Callable[..., Any]] = {}
        self._plain: dict[Hashable, CpuLauncher] = {}

    def direct_function(self) -> Callable[..., Any] | None:
        """A function for calls without `out` and initial values; None if there is none yet.

        It returns the result, or NotImplemented or RECORDED for calls that it does not serve.
        """
        return None if self._initial else self._functions.get(False)

    def count(self) -> int:
        """How many cached calls there are."""
        return sum(map(len, self._call_caches.values())) + len(self._plain)

    def call(self, tensors: Sequence[Any], out: Any, initial: Mapping[str, Any]) -> Any:
        """The result of a call, or MISS."""
        if len(tensors) != self._count or len(initial) != len(self._initial):
            return MISS
        if self._numbers:
            tensors = self._with_numbers(tensors)
        values: list[Any] = [initial.get(name) for name in self._initial] if initial else []
        wanted = () if out is None else out if type(out) is tuple else (out,)
        if out is not None and len(wanted) != len(self._sources):
            return MISS
        serve = self._functions.get(out is not None)
        if serve is None:
            return MISS
        result = serve(*tensors, *values, *wanted)
        if result is NotImplemented and values and out is None:  # perhaps only because they are not contiguous
            result = serve(*tensors, *[v.contiguous() if type(v) in PLAIN else v for v in values])
        if result is NotImplemented or result is RECORDED:
            return MISS
        if out is None:
            return result
        _count_change(wanted)
        return out

    def add(
        self, compiled: CompiledCpuKernel, arguments: Arguments, special: Sequence[int], out: Sequence[Tensor]
    ) -> None:
        """Cache the call for others like one that has succeeded, which wrote to `out` if there is any."""
        if out and compiled.sites:
            return
        if isinstance(compiled, CompiledRangeKernel):
            if self._machine and not out and _count_parameters(compiled) <= launch_ir.MAX_PARAMETERS:
                self._add_cached_call(self._make_range_call(compiled, special), False)
            return
        if not self._machine:
            if not (self._initial or self._special):
                self._add_python_call(compiled, (*arguments.inputs, *out), bool(out))
            return
        call = self._make_cached_call(compiled, arguments, special, out)
        if call is not None:
            self._add_cached_call(call, bool(out))

    def _add_cached_call(self, call: CachedCall, out: bool) -> None:
        self._call_cache(out).add(call)
        if out not in self._functions:
            self._functions[out] = self._call_cache(out).function()

    def _make_range_call(self, compiled: CompiledRangeKernel, special: Sequence[int]) -> CachedCall:
        """The cached call for calls with any number of rows."""
        bound, values, parameters = compiled.bound, iter(special), _stride_parameters(compiled)
        inputs = [t for t in bound.tensors if t.role is Role.INPUT]
        guards = [
            next(values) if n in self._special else _row_guard(compiled, t, parameters) for n, t in enumerate(inputs)
        ]
        first = [_row_guard(compiled, _with_contiguous_strides(bound.tensor(n))) for n in self._initial]
        made = [_with_contiguous_strides(bound.tensor(r)) for r in bound.returns]
        count = len(inputs)
        return CachedCall(
            compiled.executable.address,
            compiled.executable,
            (*guards, *first),
            (0,) * (count + len(first)),  # no argument is written
            tuple(range(count)),
            tuple(
                NewOutput(_row_guard(compiled, t), math.prod(t.shape) * t.dtype.size, -1 if s is None else count + s)
                for t, s in zip(made, self._sources, strict=True)
            ),
            (),
            ((), 0),
            _count_parameters(compiled),
        )

    def _call_cache(self, out: bool) -> CallCache:
        if out not in self._call_caches:
            taken = self._interface.function.parameters
            kinds = [_get_parameter_kind(p.dtype, p.is_compile_time, bool(p.rank)) for p in taken]
            kinds += [call_cache.TENSOR] * (len(self._initial) + out * len(self._sources))
            self._call_caches[out] = CallCache(kinds, 0 if out else len(self._sources))
        return self._call_caches[out]

    def _make_cached_call(
        self, compiled: CompiledCpuKernel, arguments: Arguments, special: Sequence[int], out: Sequence[Tensor]
    ) -> CachedCall | None:
        """The cached call for calls like this one; None if an initial value and its output have different layouts."""
        bound, values = compiled.bound, iter(special)
        inputs = [t for t in bound.tensors if t.role is Role.INPUT]
        given = [_make_operand_spec(t, x) for t, x in zip(inputs, arguments.inputs, strict=True)]
        first = [
            _make_operand_spec(bound.tensor(n), x) if out else _output_spec(bound, n)
            for n, x in zip(self._initial, arguments.initial, strict=True)
        ]
        to = [_make_operand_spec(bound.tensor(n), x) for n, x in zip(bound.returns, out, strict=False)]
        guards: list[TensorGuard | int] = [
            next(values) if n in self._special else _guard_of_operand(o) for n, o in enumerate(given)
        ]
        made = [_output_spec(bound, r) for r in bound.returns]
        count = len(given)
        sources = [-1 if s is None else count + s for s in self._sources]
        for s, result in zip(self._sources, to or made, strict=True):
            if s is not None and _guard_of_operand(first[s]) != _guard_of_operand(result):
                return None
        return CachedCall(
            compiled.executable.address,
            compiled.executable,
            (*guards, *map(_guard_of_operand, first), *map(_guard_of_operand, to)),
            tuple(o.span for o in (*given, *first, *to)),
            (*range(count), *(count + len(first) + n for n in range(len(to)))),
            ()
            if out
            else tuple(
                NewOutput(_guard_of_operand(o, exact=True), o.span, s) for o, s in zip(made, sources, strict=True)
            ),
            tuple(
                MutatedArg(count + len(first) + n, s, o.span if _is_dense(o) else -1)
                for n, (o, s) in enumerate(zip(to, sources, strict=False))
            ),
            arena_offsets(compiled.temporaries),
        )

    def _add_python_call(self, compiled: CompiledCpuKernel, tensors: Sequence[Tensor], out: bool) -> None:
        """Cache a call in Python, for systems without machine code for calls."""
        bound = compiled.bound
        taken = [t for t in bound.tensors if t.role is Role.INPUT] + [bound.tensor(r) for r in bound.returns if out]
        accepted = [_make_operand_spec(t, x) for t, x in zip(taken, tensors, strict=True)]
        if len(self._plain) >= LIMIT:
            self._plain.clear()
        made = [] if out else [_output_spec(bound, r) for r in bound.returns]
        self._plain[out, _make_layout_key(tensors)] = launcher_for(compiled, accepted, made)
        self._functions[out] = partial(self._call_in_python, out)

    def _call_in_python(self, out: bool, *tensors: Any) -> Any:
        """Serve a call like the function of a `CallCache`: NotImplemented if no cached call accepts it."""
        try:
            found = self._plain.get((out, _make_layout_key(tensors)))
        except (AttributeError, RuntimeError, TypeError):  # some arguments are not dense tensors
            return NotImplemented
        if found is None or not is_plain_call(tensors) or not all(map(is_plain_cpu_tensor, tensors)):
            return NotImplemented
        if not out:
            return found(*tensors)
        if not found.are_disjoint(tensors, len(self._sources)):
            return NotImplemented
        found.run(*tensors)
        return None

    def _with_numbers(self, values: Sequence[Any]) -> Sequence[Any]:
        """`values` with Python numbers replaced by tensors, the same tensor for the same number."""
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


def _python_types(dtype: DType) -> tuple[type, ...]:
    return (bool,) if dtype.is_bool else (int,) if dtype.is_integer else (float, int)


def _make_layout_key(tensors: Sequence[Any]) -> Hashable:
    return tuple([(x.dtype, x.shape, x.stride()) for x in tensors])


def _make_operand_spec(t: BoundTensor, x: Tensor) -> OperandSpec:
    return OperandSpec(t.dtype, tuple(x.shape), tuple(x.stride()))


def _output_spec(bound: BoundFunction, name: str) -> OperandSpec:
    t = bound.tensor(name)
    return OperandSpec(t.dtype, t.shape, t.strides)


def _is_dense(o: OperandSpec) -> bool:
    """Whether the elements of an operand fill the memory that it spans."""
    return o.span == math.prod(o.sizes) * o.dtype.size


def _guard_of_operand(o: OperandSpec, *, exact: bool = False) -> TensorGuard:
    """The guard of an operand, which ignores unused strides. exact: include all strides, to describe an output."""
    free = () if exact else range(len(o.sizes)) if 0 in o.sizes else [d for d, n in enumerate(o.sizes) if n == 1]
    return TensorGuard(
        _get_dtype_number(o.dtype), o.sizes, tuple(launch_ir.ANY if d in free else s for d, s in enumerate(o.strides))
    )


def _with_contiguous_strides(t: BoundTensor) -> BoundTensor:
    return replace(t, strides=contiguous_strides(t.shape))


def _stride_parameters(compiled: CompiledRangeKernel) -> dict[tuple[str, int], int]:
    """The parameter indices of strides read at the call, by tensor and dimension; sizes come first."""
    given = [(name, d) for name, s in compiled.strides.items() for d, stride in enumerate(s) if stride == GIVEN]
    return {place: len(compiled.dynamic_sizes) + n for n, place in enumerate(given)}


def _count_parameters(compiled: CompiledRangeKernel) -> int:
    return len(compiled.dynamic_sizes) + len(_stride_parameters(compiled))


def _row_guard(
    compiled: CompiledRangeKernel, t: BoundTensor, parameters: Mapping[tuple[str, int], int] | None = None
) -> TensorGuard:
    """The guard of a tensor `t` of a range kernel, with markers for dynamic sizes and strides.

    parameters: the parameter indices of strides that are read at the call; None if the tensor is contiguous.
    """
    sizes, strides = list(t.shape), list(t.strides)
    dynamic = compiled.dynamic_dimensions(t.name)
    classes = compiled.strides.get(t.name, ())
    for d in range(len(sizes)):
        if d in dynamic:
            sizes[d] = launch_ir.open_extent(dynamic[d], *compiled.window_of(t.name, dynamic[d]))
        if parameters is not None and classes:
            if classes[d] == GIVEN:
                strides[d] = launch_ir.FIRST_PARAMETER + parameters[t.name, d]
            elif classes[d] == PACKED:
                strides[d] = launch_ir.PACKED
        elif any(e > d for e in dynamic):
            strides[d] = launch_ir.PACKED
    return TensorGuard(_get_dtype_number(t.dtype), tuple(sizes), tuple(strides))


def _get_parameter_kind(dtype: DType, specialized: bool, has_dimensions: bool) -> int:
    """The kind of a parameter as a number of `call_cache`."""
    if specialized:
        return call_cache.CONSTANT
    return (
        call_cache.TENSOR
        if has_dimensions or dtype not in (FLOAT32, FLOAT64)
        else call_cache.number_kind(_get_dtype_number(dtype))
    )


def dtype_number(dtype: torch.dtype) -> int:
    """The number of a dtype in torch's C ABI."""
    return _get_dtype_number(TYPES[dtype])


@cache
def _get_dtype_number(dtype: DType) -> int:
    ask: Callable[[], int] = getattr(host_symbols.torch_library(), f"aoti_torch_dtype_{dtype.name}")
    return ask()


def launcher_for(
    compiled: CompiledCpuKernel, accepted: Sequence[OperandSpec], made: Sequence[OperandSpec]
) -> CpuLauncher:
    """A launcher that runs a kernel on the inputs followed by the outputs."""

    def fail(failed: int, value: int) -> BaseException:
        return launch_error(compiled.bound.name, compiled.sites, failed, value)

    count = sum(t.role is not Role.TEMPORARY for t in compiled.bound.tensors)
    return CpuLauncher(compiled.executable, accepted, made, range(count), compiled.temporaries, fail)


def plain_launcher(compiled: CompiledCpuKernel) -> CpuLauncher:
    """A launcher for tensors that are known to fit; it accepts all and allocates none."""
    return launcher_for(compiled, (), ())
