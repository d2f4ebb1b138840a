"""The steps of a call: normalize the arguments, allocate the outputs, run, convert the outputs.

Invariant: a caller's tensor is written only when everything that can fail has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..core.checked_fields import suggest_word
from ..core.dtypes import BFLOAT16, DType
from ..core.errors import ArgumentError, InternalError, RangeError
from ..core.lazy_import import lazy_module
from ..core.memory_layout import contiguous_strides
from ..options import CpuOptions
from ..runtime.cpu.huge_pages import advise_huge_pages
from ..target import CpuTarget
from ..tc_lang.binding.bind import bind
from ..tc_lang.binding.match_arguments import Binding, TensorType, match_arguments
from ..tc_lang.ir import BoundFunction, Function, Role
from .arguments import (
    TORCH_TYPES,
    Convert,
    ParameterSpec,
    check_destination,
    check_no_alias,
    output_converter,
    to_numpy,
    to_tensor,
    with_article,
)
from .signatures import declared_dims, format_signature, return_sizes

if TYPE_CHECKING:
    from ..loop_ir.nodes import CheckSite
    from ..tc_lang.reference import evaluator as reference
else:
    reference = lazy_module("tc_lang.reference.evaluator")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arguments:
    """The tensors of one call.

    Attributes:
        inputs: the values of the parameters, in order.
        initial: the initial values of the in/out outputs, in order.
        convert: converts outputs to arrays of the caller's library; None if the caller passed tensors.
    """

    inputs: tuple[Tensor, ...]
    initial: tuple[Tensor, ...]
    convert: Convert | None


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The signature of a def for calls: its parameters and its in/out outputs, in order."""

    function: Function
    parameters: tuple[ParameterSpec, ...]
    initial: tuple[ParameterSpec, ...]

    @classmethod
    def of(cls, function: Function) -> CallSignature:
        sizes = return_sizes(function)
        return cls(
            function,
            tuple(ParameterSpec(function.name, p.name, p.dtype, declared_dims(p)) for p in function.parameters),
            tuple(ParameterSpec(function.name, p.name, p.dtype, sizes[p.name]) for p in function.inouts),
        )


def normalize_arguments(
    call_signature: CallSignature, values: Sequence[object], initial: Mapping[str, object]
) -> Arguments:
    """The arguments of a call as plain tensors. Raises ArgumentError that names the first invalid one."""
    function = call_signature.function
    check_names(call_signature, values, initial)
    convert = output_converter((*values, *initial.values()))
    if convert is to_numpy and (narrow := [r for r in function.returns if function.tensor(r).dtype == BFLOAT16]):
        raise ArgumentError(f"NumPy has no type for '{narrow[0]}' of {function.name}", suggestion="pass torch tensors")
    return Arguments(
        tuple([to_tensor(p, v) for p, v in zip(call_signature.parameters, values, strict=True)]),
        tuple([to_tensor(p, initial[p.name]) for p in call_signature.initial]),
        convert,
    )


def normalize_detached(
    call_signature: CallSignature, values: Sequence[object], initial: Mapping[str, object]
) -> Arguments:
    """As `normalize_arguments`, but detach tensors that require gradients, for callers that do not record a graph."""
    named = {name: _detach(x) for name, x in initial.items()}
    return normalize_arguments(call_signature, [_detach(x) for x in values], named)


def _detach(x: object) -> object:
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


def check_names(call_signature: CallSignature, values: Sequence[object], initial: Mapping[str, object]) -> None:
    """Check the number of arguments, and that the keywords are exactly the in/out outputs. Raises ArgumentError."""
    function, parameters = call_signature.function, call_signature.parameters
    inout = {p.name: p for p in call_signature.initial}
    for name in initial:
        if name not in inout:
            raise _unknown_keyword(function, name, (*inout, "out"))
    if len(values) != len(parameters):
        missing = ", ".join(p.name for p in parameters[len(values) :])
        raise ArgumentError(
            f"{function.name} takes {len(parameters)} argument{'s' * (len(parameters) != 1)}, not {len(values)}",
            expected=format_signature(function),
            suggestion=f"pass {missing}" if missing else "",
        )
    for name, p in inout.items():
        if name not in initial:
            raise ArgumentError(
                f"{function.name} reads '{name}' before it writes it, and the call gives no initial value",
                expected=f"{p} {name}",
                suggestion=f"pass {name}=..., or start '{name}' in the def with '=' or an operator with '!'",
            )


def check_keywords(call_signature: CallSignature, initial: Mapping[str, object], method: Callable[..., object]) -> None:
    """Check that keywords beside those of `method` are in/out outputs. Raises ArgumentError."""
    inout = [p.name for p in call_signature.initial]
    for name in initial:
        if name not in inout:
            own = [p.name for p in signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY]
            raise _unknown_keyword(call_signature.function, name, (*inout, *own))


def _unknown_keyword(function: Function, name: str, known: Iterable[str]) -> ArgumentError:
    if any(p.name == name for p in function.parameters):
        return ArgumentError(f"'{name}' of {function.name} is passed by position", expected=format_signature(function))
    if name in function.returns:
        return ArgumentError(
            f"{function.name} starts '{name}' itself and takes no initial value",
            suggestion="out=... says where the outputs are written",
        )
    return ArgumentError(f"{function.name} takes no argument '{name}'", suggestion=suggest_word(name, known))


# --- sizes and strides ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArgumentShapes:
    """The shapes of the parameters and of the in/out outputs, in order, and the values of specialized scalars."""

    inputs: tuple[Shape, ...]
    initial: tuple[Shape, ...]
    scalars: tuple[tuple[str, int], ...]


def shapes_of(function: Function, arguments: Arguments) -> ArgumentShapes:
    return ArgumentShapes(
        tuple(tuple(x.shape) for x in arguments.inputs),
        tuple(tuple(x.shape) for x in arguments.initial),
        tuple(
            (p.name, int(x.item()))
            for p, x in zip(function.parameters, arguments.inputs, strict=True)
            if p.is_compile_time
        ),
    )


def shapes_from_values(
    call_signature: CallSignature, values: Sequence[object], initial: Mapping[str, object]
) -> ArgumentShapes:
    """As `shapes_of`, from shapes, tensors, or the values of numbers. Raises ArgumentError."""
    check_names(call_signature, values, initial)
    given = list(zip(call_signature.function.parameters, call_signature.parameters, values, strict=True))
    return ArgumentShapes(
        tuple(_extract_shape(p, value) for _, p, value in given),
        tuple(_extract_shape(p, initial[p.name]) for p in call_signature.initial),
        tuple((p.name, int(to_tensor(p, value).item())) for symbol, p, value in given if symbol.is_compile_time),
    )


def _extract_shape(expected: ParameterSpec, value: object) -> Shape:
    if isinstance(value, Tensor | np.ndarray):
        shape: Sequence[object] = tuple(value.shape)
    elif not expected.dims and isinstance(value, bool | int | float | np.generic):
        shape = ()
    elif isinstance(value, tuple | list):
        shape = value
    else:
        raise expected.error("has no shape", suggestion="pass a tuple of sizes, or a tensor")
    if len(shape) != len(expected.dims):
        raise expected.error(f"has {len(shape)} dimensions instead of {len(expected.dims)}", found=str(tuple(shape)))
    for size in shape:
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 0:
            raise expected.error("has a size that is not a number of elements", found=str(tuple(shape)))
    return tuple(int(size) for size in shape if isinstance(size, int | np.integer))


def canonical_strides(x: Tensor) -> Shape:
    """The strides of `x` with unused ones replaced, so that tensors with the same accesses compare equal."""
    contiguous = contiguous_strides(tuple(x.shape))
    if not x.numel():
        return contiguous
    return tuple(s if n > 1 else c for n, s, c in zip(x.shape, x.stride(), contiguous, strict=True))


def bind_sizes(call_signature: CallSignature, sizes: ArgumentShapes) -> BoundFunction:
    """The def bound to the sizes of its arguments.

    Raises:
        ArgumentError: two dimensions that are declared with the same size differ.
        RangeError: no range of an index fits all subscripts.
    """
    binding = _match_argument_shapes(call_signature, sizes)
    return bind(call_signature.function, binding.sizes, binding.scalars)


def sizes_of(call_signature: CallSignature, sizes: ArgumentShapes) -> dict[str, int]:
    """The values of the def's sizes, and of specialized scalars, by name. Raises ArgumentError as `bind_sizes`."""
    binding = _match_argument_shapes(call_signature, sizes)
    return {**binding.sizes, **binding.scalars}


def _match_argument_shapes(call_signature: CallSignature, sizes: ArgumentShapes) -> Binding:
    types = [_make_tensor_type(p, shape) for p, shape in zip(call_signature.parameters, sizes.inputs, strict=True)]
    initial = {
        p.name: _make_tensor_type(p, shape) for p, shape in zip(call_signature.initial, sizes.initial, strict=True)
    }
    return match_arguments(call_signature.function, types, initial, dict(sizes.scalars))


def _make_tensor_type(expected: ParameterSpec, shape: Shape) -> TensorType:
    return TensorType(expected.dtype, shape, contiguous_strides(shape))


def with_strides(bound: BoundFunction, strides: Sequence[Shape]) -> BoundFunction:
    """`bound` with `strides` for its first tensors; parameters come before outputs."""
    given = [replace(t, strides=s) for t, s in zip(bound.tensors, strides, strict=False)]
    return replace(bound, tensors=(*given, *bound.tensors[len(given) :]))


# --- outputs ----------------------------------------------------------------------------------------------------


def allocate_output(bound: BoundFunction, name: str) -> Tensor:
    """A fresh tensor for an output. Raises ArgumentError if memory runs out."""
    tensor = bound.tensor(name)
    try:
        x = torch.empty(tensor.shape, dtype=TORCH_TYPES[tensor.dtype], device="cpu")
    except RuntimeError as error:
        raise ArgumentError(
            f"there is no memory for '{name}' of {bound.name}: {tensor.size * tensor.dtype.size} bytes",
            found=f"a shape of {tensor.shape}",
        ) from error
    if type(x) is not Tensor or x.device.type != "cpu":
        raise ArgumentError(
            f"a mode of torch makes {with_article(type(x).__name__)} of '{name}' of {bound.name}",
            suggestion="call outside of FakeTensorMode and tracing",
        )
    advise_huge_pages(x.data_ptr(), x.nbytes)
    return x


def check_out(bound: BoundFunction, arguments: Arguments, out: object) -> tuple[Tensor, ...]:
    """Check `out`, and return one tensor for each output. Raises ArgumentError."""
    given = out if isinstance(out, tuple | list) else (out,)
    if len(given) != len(bound.returns):
        raise ArgumentError(
            f"'out' of {bound.name} has {len(given)} tensors",
            expected=f"{len(bound.returns)}: {', '.join(bound.returns)}",
        )
    tensors = []
    for name, x in zip(bound.returns, given, strict=True):
        t = bound.tensor(name)
        tensors.append(check_destination(bound.name, name, x, t.dtype, t.shape))
    parameters = [t.name for t in bound.tensors if t.role is Role.INPUT]
    others = [(f"'{name}'", x) for name, x in zip(parameters, arguments.inputs, strict=True)]
    targets = dict(zip(bound.returns, tensors, strict=True))
    for name, x in zip(_list_inout_tensors(bound), arguments.initial, strict=True):
        if not is_same_storage(x, targets[name]):
            others.append((f"the initial value of '{name}'", x))
    check_no_alias(bound.name, targets.items(), others)
    return tuple(tensors)


def is_same_storage(x: Tensor, y: Tensor) -> bool:
    """Whether `x` and `y` have the same shape, and the same address for every element."""
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and canonical_strides(x) == canonical_strides(y)


def _list_inout_tensors(bound: BoundFunction) -> list[str]:
    return [t.name for t in bound.tensors if t.role is Role.INOUT]


def copy_initial_values(bound: BoundFunction, arguments: Arguments, outputs: Sequence[Tensor]) -> None:
    """Copy the initial values of in/out outputs to where they will be updated."""
    targets = dict(zip(bound.returns, outputs, strict=True))
    for name, x in zip(_list_inout_tensors(bound), arguments.initial, strict=True):
        if not is_same_storage(x, targets[name]):
            copy_tensor(x, targets[name])


def copy_tensor(source: Tensor, destination: Tensor) -> None:
    """Copy a tensor; also to an inference tensor, which torch does not allow outside of inference mode."""
    if destination.is_inference():
        with torch.inference_mode():
            destination.copy_(source)
    else:
        destination.copy_(source)


def convert_outputs(outputs: Sequence[Tensor], convert: Convert | None) -> Any:
    """The outputs for the caller: one directly, several as a tuple, converted by `convert` unless it is None.

    Raises ArgumentError if the caller's library cannot read the outputs.
    """
    try:
        values = tuple(outputs) if convert is None else tuple(convert(x) for x in outputs)
    except Exception as error:
        raise ArgumentError(
            f"the library of the arguments cannot read the outputs: {error}", suggestion="pass torch tensors"
        ) from error
    return values[0] if len(values) == 1 else values


def copy_to_out(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Copy the outputs to the caller's tensors, and bump their version counters for autograd."""
    for source, destination in zip(outputs, wanted, strict=True):
        if source is destination:
            torch.autograd.graph.increment_version(destination)
        else:
            copy_tensor(source, destination)


# --- machines ---------------------------------------------------------------------------------------------------


def check_machine(options: object, target: object) -> None:
    """Check that the compiler takes these options and this target. Raises ArgumentError."""
    if not isinstance(options, CpuOptions):
        raise ArgumentError(
            f"options is {with_article(type(options).__name__)}",
            expected="CpuOptions(...)",
            found=repr(options) if isinstance(options, str) else "",
            suggestion='define the operator with it: tc.define(text, options="tuned")' if options == "tuned" else "",
        )
    if not isinstance(target, CpuTarget):
        raise ArgumentError(f"target is {with_article(type(target).__name__)}", expected="a Target")
    if len(target.cache) < 2 or min(target.cache) < 1:
        raise ArgumentError(
            f"the target {target.name} has caches of {target.cache} bytes",
            expected="two levels at least, smallest first",
        )


def check_runs_here(op: str, target: CpuTarget) -> None:
    """Check that this processor can run code for `target`. Raises ArgumentError."""
    if missing := target.missing_features():
        raise ArgumentError(
            f"this kernel of {op} is for {target.name}",
            found=f"a processor without {', '.join(missing)}",
            suggestion="compile without `target` for the processor of this process",
        )


# --- running ----------------------------------------------------------------------------------------------------


def evaluate_reference(bound: BoundFunction, arguments: Arguments) -> tuple[Tensor, ...]:
    """The outputs by the reference evaluator, as fresh tensors."""
    names = [t.name for t in bound.tensors if t.role is Role.INPUT] + _list_inout_tensors(bound)
    arrays = {name: _to_array(x) for name, x in zip(names, (*arguments.inputs, *arguments.initial), strict=True)}
    values = reference.evaluate_def(bound, arrays)
    return tuple(_to_torch(values[name], bound.tensor(name).dtype) for name in bound.returns)


def _to_array(x: Tensor) -> np.ndarray:
    x = x.detach()
    return (x.float() if x.dtype is torch.bfloat16 else x).numpy()


def _to_torch(value: object, dtype: DType) -> Tensor:
    return torch.from_numpy(np.array(value, order="C")).to(TORCH_TYPES[dtype])


def launch_error(op: str, sites: Sequence[CheckSite], failed: int, value: int) -> Exception:
    """The error for a launch that failed: a RangeError for check number `failed` (from 1) with the subscript `value`.

    Other numbers give an InternalError. `value` counts from the start of the dimension.
    """
    if not 0 < failed <= len(sites):
        return InternalError(f"{op}: a launch failed with code {failed}")
    site = sites[failed - 1]
    last = site.origin + site.extent - 1
    return RangeError(
        f"a subscript of '{site.tensor}' is out of bounds in dimension {site.dimension}",
        expected=f"{site.origin} to {last}" if site.extent else "nothing: the dimension is empty",
        found=str(value + site.origin),
    )
