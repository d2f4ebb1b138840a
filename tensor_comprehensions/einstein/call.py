"""The call: from an equation and operands to the operator that is called with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..api import Op, define
from ..calling.arguments import article
from ..dtypes import DTYPES
from ..errors import ArgumentError
from ..guard import guarded
from ..once import OncePerKey
from .definition import NAME, definition
from .equation import parse

LIMIT = 1024
_by_shapes: OncePerKey[tuple[Any, ...], Op] = OncePerKey(LIMIT)
_by_text: OncePerKey[str, Op] = OncePerKey(LIMIT)


def einsum(equation: str, *operands: Any, out: Any = None) -> Any:
    """The sum of products that `equation` describes, as `torch.einsum` has it: `einsum("bij,bjk->bik", a, b)`.

    Every subscript is a letter and names a dimension; those missing from the output are summed over. Without `->`, the
    output has the subscripts that occur once, in alphabetical order. A subscript that is repeated in one operand takes
    the diagonal. `...` stands for dimensions that are matched from the right; dimensions of size 1 are repeated as
    needed. Several operands are contracted in pairs, in the order with the fewest multiplications.

    Args:
        equation: `"ij,jk->ik"`; spaces mean nothing.
        operands: torch tensors, or NumPy arrays, as many as the equation has subscripts for.
        out: a tensor to write to instead of fresh memory.

    Raises:
        ArgumentError: the equation is malformed or does not fit the operands.
    """
    if not isinstance(equation, str):
        raise ArgumentError(
            f"einsum: the equation is {article(type(equation).__name__)}", expected='such as "ij,jk->ik"'
        )
    try:
        key = (equation, *[(x.shape, x.dtype) for x in operands])
    except AttributeError:
        raise _unfit(operands) from None
    operator = _by_shapes.get(key, lambda: operator_for(equation, *operands))
    return operator(*operands) if out is None else operator(*operands, out=out)


@guarded
def operator_for(equation: str, *operands: Any) -> Op:
    """The operator for an equation and operands like these."""
    if any(not isinstance(x, (torch.Tensor, np.ndarray, np.generic)) for x in operands):
        raise _unfit(operands)
    types = [str(x.dtype).removeprefix("torch.") for x in operands]
    if odd := [(n, name) for n, name in enumerate(types) if name not in DTYPES]:
        n, name = odd[0]
        raise ArgumentError(f"einsum: operand {n} has elements of type {name}", expected=", ".join(DTYPES))
    text = definition(parse(equation, [tuple(x.shape) for x in operands]), types)
    return _by_text.get(text, lambda: define(text)[NAME])


def _unfit(operands: tuple[Any, ...]) -> ArgumentError:
    n, wrong = next((n, x) for n, x in enumerate(operands) if not isinstance(x, (torch.Tensor, np.ndarray)))
    return ArgumentError(f"einsum: operand {n} is {article(type(wrong).__name__)}, not a tensor")
