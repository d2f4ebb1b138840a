"""Fake outputs: the shapes of a def's outputs, for sizes that may be SymInts.

Under `torch.compile`, the call itself reports invalid sizes when it runs; elsewhere they raise here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.errors import RangeError, TCError
from ..dispatch.arguments import TORCH_TYPES, check_elements
from ..dispatch.call_steps import ArgumentShapes, CallSignature, bind_sizes
from ..tc_lang.binding.ranges import output_shapes, symbolic_ranges
from ..tc_lang.ir import Const, Function, Size
from ..tc_lang.size_polynomial import SizeName, SizeOperation, Value

Shapes = list[tuple[Any, ...]]


def fake_outputs(call_signature: CallSignature, values: Sequence[Any]) -> tuple[Tensor, ...]:
    """Uninitialized outputs of the right shapes on the inputs' device. Raises ArgumentError or RangeError."""
    function = call_signature.function
    tensors = [x for x in values if isinstance(x, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    shapes = output_sizes(call_signature, values)
    return tuple(
        torch.empty(shape, dtype=TORCH_TYPES[function.tensor(r).dtype], device=device)
        for r, shape in zip(function.returns, shapes, strict=True)
    )


def output_sizes(call_signature: CallSignature, values: Sequence[Any]) -> Shapes:
    """The shape of each output. values: the inputs of a call, then the initial values."""
    compiling = torch._guards.TracingContext.try_get() is not None
    symbolic = any(isinstance(n, torch.SymInt) for n in _collect_size_numbers(values))
    if compiling:
        try:
            return _shapes_without_checks(call_signature.function, values, symbolic)
        except TCError:
            return [(1,) * call_signature.function.tensor(r).rank for r in call_signature.function.returns]
    for expected, x in zip((*call_signature.parameters, *call_signature.initial), values, strict=True):
        if isinstance(x, Tensor):
            check_elements(expected, x)
    return _infer_symbolic_shapes(call_signature, values) if symbolic else _check_shapes(call_signature, values)


def _collect_size_numbers(values: Sequence[Any]) -> list[Any]:
    return [n for x in values for n in (x.shape if isinstance(x, Tensor) else (x,))]


def _check_shapes(call_signature: CallSignature, values: Sequence[Any]) -> Shapes:
    """Compute the shapes of integer sizes, with the checks of a real call."""
    function, count = call_signature.function, len(call_signature.parameters)
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in values]
    scalars = tuple((p.name, int(x)) for p, x in zip(function.parameters, values, strict=False) if p.is_compile_time)
    bound = bind_sizes(call_signature, ArgumentShapes(tuple(shapes[:count]), tuple(shapes[count:]), scalars))
    return [bound.tensor(r).shape for r in function.returns]


def _infer_symbolic_shapes(call_signature: CallSignature, values: Sequence[Any]) -> Shapes:
    """Compute the shapes as formulas of symbolic sizes; conditions on sizes become guards or run-time checks."""
    sizes, equal = _match_sizes(call_signature.function, values)
    check: Callable[..., None] = torch._check
    for found, expected in equal:
        check(found == expected, lambda: f"a size of an argument of {call_signature.function.name} differs")
    return _evaluate_shapes(call_signature.function, sizes)


def _shapes_without_checks(function: Function, values: Sequence[Any], symbolic: bool) -> Shapes:
    sizes, _ = _match_sizes(function, values)
    if symbolic:
        return _evaluate_shapes(function, sizes)
    scalars = {name: sizes[name] for name in function.scalars}
    shapes = output_shapes(function, sizes, scalars)
    return [shapes[r] for r in function.returns]


def _match_sizes(function: Function, values: Sequence[Any]) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """The value of each size and specialized scalar, and pairs of (found, expected) extents that must be equal."""
    sizes: dict[str, Any] = {}
    equal: list[tuple[Any, Any]] = []
    for symbol, x in zip((*function.parameters, *function.inouts), values, strict=True):
        if symbol.is_compile_time:
            sizes[symbol.name] = x
        for extent, found in zip(symbol.extents or (), x.shape if isinstance(x, Tensor) else (), strict=False):
            match extent:
                case Const(value=expected):
                    equal.append((found, expected))
                case Size(name=name) if name in sizes:
                    equal.append((found, sizes[name]))
                case Size(name=name):
                    sizes[name] = found
    for name in function.sizes:  # of tensors with too few dimensions
        sizes.setdefault(name, 0)
    return sizes, equal


def _evaluate_shapes(function: Function, sizes: Mapping[str, Any]) -> Shapes:
    formulas = _make_shape_formulas(function)
    if formulas is None:  # depends on the values of numbers
        numbers = {name: int(x) for name, x in sizes.items()}
        shapes = output_shapes(function, numbers, {name: numbers[name] for name in function.scalars})
        return [shapes[r] for r in function.returns]
    return [tuple(_clamp_extent(_evaluate_formula(x, sizes)) for x in shape) for shape in formulas]


def _clamp_extent(n: Any) -> Any:
    """`n`, or 0 if it is negative, which the call itself reports. For a SymInt, this may add a guard to the graph."""
    if isinstance(n, int):
        return max(n, 0)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # already imported if sizes are symbols

    return 0 if guard_or_false(n < 0) else n


@lru_cache(maxsize=1024)
def _make_shape_formulas(function: Function) -> list[tuple[Value, ...]] | None:
    try:
        ranges = symbolic_ranges(function)
    except RangeError:
        return None
    return [ranges.shape(r) for r in function.returns]


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "/": lambda a, b: a // b, "%": lambda a, b: a % b, "min": torch.sym_min, "max": torch.sym_max,
}  # fmt: skip


def _evaluate_formula(x: Value, sizes: Mapping[str, Any]) -> Any:
    if isinstance(x, int):
        return x
    total: Any = 0
    for monomial, coefficient in x.terms:
        product: Any = coefficient
        for atom in monomial:
            match atom:
                case SizeName(name=name):
                    product = product * sizes[name]
                case SizeOperation(op=op, left=left, right=right):
                    product = product * _OPERATIONS[op](_evaluate_formula(left, sizes), _evaluate_formula(right, sizes))
        total = total + product
    return total
