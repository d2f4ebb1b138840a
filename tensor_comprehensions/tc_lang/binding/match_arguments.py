"""Match the arguments of a call with a function's parameters: infer sizes from shapes and report mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.dtypes import DType
from ...core.errors import ArgumentError
from ..ir import Const, Function, Size, Symbol
from .ranges import output_shapes


@dataclass(frozen=True, slots=True)
class TensorType:
    """The facts about a tensor argument that the language needs; strides count elements."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """The values of a function's symbols for one call: the input of `bind`."""

    sizes: dict[str, int]
    scalars: dict[str, int]
    strides: dict[str, tuple[int, ...]]


def match_arguments(
    function: Function,
    types: Sequence[TensorType],
    initial: Mapping[str, TensorType] | None = None,
    scalars: Mapping[str, int] | None = None,
) -> Binding:
    """Infer the sizes from the arguments of a call.

    Args:
        types: the types of the arguments for the parameters, in order.
        initial: the types of the initial values of in/out tensors, by name.
        scalars: the values of the specialized scalar parameters.

    Raises ArgumentError, which names the tensor, the dimension and both values, if an argument does not fit; RangeError
    if the output shapes, which are needed to check in/out tensors, cannot be inferred.
    """
    initial, scalars = initial or {}, scalars or {}
    parameters = function.parameters
    if len(types) != len(parameters):
        raise ArgumentError(
            f"'{function.name}' takes {len(parameters)} argument(s)",
            expected=", ".join(p.name for p in parameters) or "none",
            found=f"{len(types)} argument(s)",
        )
    _check_initial(function, initial)
    passed = [*zip(parameters, types, strict=True), *((t, initial[t.name]) for t in function.inouts)]
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for symbol, type_ in passed:
        _check_type(symbol, type_)
        _match_shape(symbol, type_, sizes, origin)
    values = _bind_scalars(function, scalars)
    if function.inouts:
        _check_initial_shapes(function, initial, sizes, values)
    return Binding(sizes, values, {symbol.name: type_.strides for symbol, type_ in passed})


def _check_initial(function: Function, initial: Mapping[str, TensorType]) -> None:
    wanted = {t.name for t in function.inouts}
    for t in function.inouts:
        if t.name not in initial:
            raise ArgumentError(
                f"'{function.name}' reads its output '{t.name}' before it defines it",
                expected=f"an initial value: {t.name}=...",
                found="none",
            )
    for name in initial:
        if name not in wanted:
            raise ArgumentError(
                f"'{function.name}' has no in/out output '{name}'",
                expected=", ".join(sorted(wanted)) or "no initial values",
                found=name,
            )


def _check_type(symbol: Symbol, type_: TensorType) -> None:
    if type_.dtype != symbol.dtype:
        raise ArgumentError(
            f"'{symbol.name}' has another type than declared", expected=str(symbol.dtype), found=str(type_.dtype)
        )
    if len(type_.shape) != symbol.rank:
        raise ArgumentError(
            f"'{symbol.name}' has another number of dimensions than declared",
            expected=str(symbol.rank),
            found=f"{len(type_.shape)}, shape {type_.shape}",
        )


def _match_shape(symbol: Symbol, type_: TensorType, sizes: dict[str, int], origin: dict[str, str]) -> None:
    for d, (extent, found) in enumerate(zip(symbol.extents or (), type_.shape, strict=False)):
        place = f"dimension {d} of '{symbol.name}'"
        match extent:
            case Const(value=expected):
                if found != expected:
                    raise ArgumentError(
                        f"{place} has another size than declared", expected=str(expected), found=str(found)
                    )
            case Size(name=name):
                expected = sizes.setdefault(name, found)
                origin.setdefault(name, place)
                if found != expected:
                    raise ArgumentError(
                        f"{place} has another size than {origin[name]}",
                        expected=f"{name} = {expected}, from {origin[name]}",
                        found=str(found),
                    )


def _bind_scalars(function: Function, scalars: Mapping[str, int]) -> dict[str, int]:
    for name in function.scalars:
        if name not in scalars:
            raise ArgumentError(
                f"'{function.name}' needs the value of '{name}' to compile: it is used in a subscript or a range",
                expected=f"an int for '{name}'",
            )
    return {name: int(scalars[name]) for name in function.scalars}


def _check_initial_shapes(
    function: Function, initial: Mapping[str, TensorType], sizes: Mapping[str, int], scalars: Mapping[str, int]
) -> None:
    shapes = output_shapes(function, sizes, scalars)
    for t in function.inouts:
        for d, (expected, found) in enumerate(zip(shapes[t.name], initial[t.name].shape, strict=True)):
            if expected != found:
                raise ArgumentError(
                    f"dimension {d} of the initial value of '{t.name}' has another size than the output",
                    expected=str(expected),
                    found=str(found),
                )
