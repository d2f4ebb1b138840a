"""Random arguments for a def, for users who give sizes instead of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.error_boundary import only_tc_errors
from ..core.errors import ArgumentError
from ..core.interrupts import deferred_interrupts
from ..tc_lang.binding.ranges import output_shapes
from ..tc_lang.formats import Format
from ..tc_lang.ir import Function, Symbol
from .arguments import TORCH_TYPES
from .signatures import declared_dims

DENSITY = 0.1
"""Fraction of the elements that a random sparse operand stores."""


@only_tc_errors
def sample_arguments(function: Function, values: Mapping[str, float]) -> tuple[list[Any], dict[str, Any]]:
    """Random arguments of these sizes: floats in [-1, 1), integers that are valid subscripts of the smallest size.

    A sparse parameter gets a `SparseTensor` of its format that stores about a tenth of the elements, and at least one.

    values: the values of size names, and of parameters that are numbers (1 if missing).

    Returns the inputs in order, and the initial values of in/out outputs by name. Raises ArgumentError.
    """
    numbers = {p.name: values.get(p.name, 1) for p in function.parameters if not p.rank}
    for name in values:
        if name not in function.sizes and name not in numbers:
            raise ArgumentError(
                f"{function.name} has no size and no number called {name!r}",
                expected=", ".join([*function.sizes, *numbers]),
            )
    for name in function.scalars:
        if not isinstance(numbers[name], int):
            raise ArgumentError(f"{function.name}: {name} is {numbers[name]!r}", expected="a whole number")
    sizes = {name: _find_size_value(function, name, values) for name in function.sizes}
    shapes = output_shapes(function, sizes, {name: int(numbers[name]) for name in function.scalars})
    smallest = min(sizes.values(), default=1)
    generator = torch.Generator().manual_seed(0)

    def make(symbol: Symbol) -> Any:
        if not symbol.rank:
            return numbers.get(symbol.name, 1)
        shape = shapes.get(symbol.name) or [sizes[d] if d in sizes else int(d) for d in declared_dims(symbol)]
        dense = _draw_tensor(symbol, shape, smallest, generator)
        return _make_sparse(dense, symbol.format, generator) if symbol.format and symbol.is_sparse else dense

    return [make(p) for p in function.parameters], {p.name: make(p) for p in function.inouts}


def _find_size_value(function: Function, name: str, values: Mapping[str, float]) -> int:
    size = values.get(name)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ArgumentError(
            f"{function.name} needs a value of its size {name}",
            found="" if size is None else str(size),
            suggestion=f"add {name}=...",
        )
    if size >= 2**63:
        raise ArgumentError(f"the size {name} is too large", expected="less than 2^63", found=str(size))
    return size


def _make_sparse(dense: Tensor, format: Format, generator: torch.Generator) -> Any:
    with deferred_interrupts():
        from .sparse.interop import as_sparse
    kept = torch.rand(dense.shape, generator=generator) < DENSITY
    if kept.numel():
        kept.view(-1)[0] = True
    return as_sparse(torch.where(kept, dense, torch.zeros_like(dense)), format)


def _draw_tensor(symbol: Symbol, shape: Sequence[int], limit: int, generator: torch.Generator) -> Tensor:
    dtype = TORCH_TYPES[symbol.dtype]
    if symbol.dtype.is_float:
        return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1).to(dtype)
    high = 2 if symbol.dtype.is_bool else max(1, min(limit, 100))
    return torch.randint(high, shape, generator=generator).to(dtype)
