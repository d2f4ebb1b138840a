"""From an equation and operands to the operator of the def."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from ..api import Op, define
from ..core.dtypes import DTYPES
from ..core.error_boundary import only_tc_errors
from ..core.errors import ArgumentError
from ..core.single_flight import SingleFlightCache
from ..dispatch.arguments import with_article
from ..dispatch.kernel_table import may_be_sparse
from .equation import parse_equation
from .to_def import NAME, RESULT, equation_to_def

LIMIT = 1024
UNKNOWN = 64
"""The assumed value of a size that depends on data, to find an order of contractions."""
_by_text: SingleFlightCache[tuple[str, str | None], Op] = SingleFlightCache(LIMIT)


@only_tc_errors
def operator_for(equation: str, *operands: Any, format: str | None = None) -> Op:
    """The operator for an equation and operands like these, whose result has the format `format`."""
    check_kinds(type(equation).__name__, kinds_of(operands))
    sparse = [may_be_sparse(x) for x in operands]
    densities = (
        [density_power_of_two(x) if s else 1.0 for x, s in zip(operands, sparse, strict=True)] if any(sparse) else []
    )
    shapes = [tuple(map(_size_hint, x.shape)) for x in operands]
    return operator_of_types(equation, [x.dtype for x in operands], shapes, densities, format)


def operator_of_types(
    equation: str,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, ...]],
    densities: Sequence[float],
    format: str | None = None,
) -> Op:
    """The operator for operands of these types and shapes, of which these parts are stored; none: all are dense.

    Raises ArgumentError.
    """
    types = [str(x).removeprefix("torch.") for x in dtypes]
    if odd := [(n, name) for n, name in enumerate(types) if name not in DTYPES]:
        n, name = odd[0]
        raise ArgumentError(f"einsum: operand {n} has elements of type {name}", expected=", ".join(DTYPES))
    equated = parse_equation(equation, shapes)
    if set(types) == {"bool"} and len(types) > 1:
        raise ArgumentError("einsum: the operands are bool, which have no products", suggestion="pass x.int()")
    text = equation_to_def(equated, types, densities)
    formats = None if format is None else {RESULT: format}
    return _by_text.get((text, format), lambda: define(text, formats=formats)[NAME])


def density_power_of_two(x: Any) -> float:
    """The part of the elements of a sparse tensor of any kind that it stores, as a power of 2."""
    nnz = x._nnz() if isinstance(x, torch.Tensor) else x.nnz
    blocks = x.values().shape[1:].numel() if isinstance(x, torch.Tensor) and x.layout in _BLOCKED else 1
    return float(2.0 ** (int(nnz * blocks).bit_length() - prod(x.shape).bit_length())) if nnz else 0.0


_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)


def _size_hint(size: Any) -> int:
    """A size; for a symbol its value in the example: the def is the same for all numbers but 1."""
    if isinstance(size, torch.SymInt):
        from torch.fx.experimental import symbolic_shapes

        hint = getattr(symbolic_shapes, "optimization_hint", None)
        if hint is not None:
            return int(hint(size, fallback=UNKNOWN))
        found = getattr(symbolic_shapes, "size_hint")(size, allow_none=True)  # noqa: B009 (torch 2.10 has this one)
        return UNKNOWN if found is None else int(found)
    return int(size)


def kinds_of(operands: Sequence[Any]) -> list[str]:
    """The kind of each operand, in one or two words."""
    return [_describe_operand_kind(x) for x in operands]


def _describe_operand_kind(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return "nested tensor" if x.is_nested else "tensor"
    return "tensor" if isinstance(x, (np.ndarray, np.generic)) or may_be_sparse(x) else type(x).__name__


def check_sparse_kinds(format: str, out: str) -> None:
    """Check, by kinds, that a format is given and `out` is not. Raises ArgumentError."""
    if format not in ("str", "NoneType"):
        raise ArgumentError(f"einsum: the format is {with_article(format)}", expected='such as "csr"')
    if out != "NoneType":
        raise ArgumentError("einsum: 'out' is for dense operands and results", suggestion="leave it out")


def check_kinds(equation: str, operands: Sequence[str]) -> None:
    """Check, by the names of their kinds, that these are an equation and tensors. Raises ArgumentError."""
    if equation != "str":
        raise ArgumentError(f"einsum: the equation is {with_article(equation)}", expected='such as "ij,jk->ik"')
    for n, kind in enumerate(operands):
        if kind != "tensor":
            raise ArgumentError(
                f"einsum: operand {n} is {with_article(kind)}, not a tensor",
                expected="a dense or sparse tensor, or an array",
            )
