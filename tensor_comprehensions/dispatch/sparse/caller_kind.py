"""The kind of sparse tensor that a call returns: torch's, SciPy's or `SparseTensor`, as its operands are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import ArgumentError
from ...tc_lang.ir import Function
from ..arguments import TORCH_TYPES
from .interop import SCIPY_FORMATS, TORCH_FORMATS, has_scipy_format, has_torch_layout, is_scipy
from .sparse_tensor import SparseTensor
from .structure import copy_levels, list_index_arrays


def is_sparse(value: object) -> bool:
    """Whether an argument is a sparse tensor of any kind."""
    if isinstance(value, Tensor):
        return value.layout is not torch.strided
    return isinstance(value, SparseTensor) or is_scipy(value)


def check_results_exist(function: Function, values: Sequence[object]) -> None:
    """Check that the library of the sparse operands has the formats of the results. Raises ArgumentError.

    function: the def, with the declared formats.
    """
    kind = _caller_kind(values)
    if kind is None:
        return
    has_format, names = (has_torch_layout, TORCH_FORMATS) if kind == "torch" else (has_scipy_format, SCIPY_FORMATS)
    operand = next(p.name for p, v in zip(function.parameters, values, strict=False) if is_sparse(v))
    way = f"pass tc.as_sparse({operand}) to get a SparseTensor"
    for symbol in map(function.tensor, function.returns):
        if symbol.format is None or symbol.format.is_dense:
            continue
        label = f"the result '{symbol.name}' of {function.name}"
        if not has_format(symbol.format):
            other = f", or declare {symbol.name}: {'csr' if symbol.format.rank == 2 else 'coo'}"
            raise ArgumentError(
                f"{label} has a format that {kind} lacks, and the sparse operands are {kind}'s",
                expected=names, found=str(symbol.format), suggestion=way + other,
            )  # fmt: skip
        if kind == "SciPy" and TORCH_TYPES[symbol.dtype] in (torch.float16, torch.bfloat16):
            raise ArgumentError(
                f"{label} has elements of a type that SciPy lacks, and the sparse operands are SciPy's",
                found=str(symbol.dtype), suggestion=way,
            )  # fmt: skip


def _caller_kind(values: Sequence[object]) -> str | None:
    """The library of the sparse results of a call: "torch", "SciPy", or None for `SparseTensor`."""
    kinds = [v for v in values if is_sparse(v)]
    if kinds and all(isinstance(v, Tensor) for v in kinds):
        return "torch"
    if kinds and all(map(is_scipy, kinds)) and not any(isinstance(v, Tensor) for v in values):
        return "SciPy"
    return None


def results_in_caller_kind(results: Mapping[str, Tensor | SparseTensor], values: Sequence[object]) -> Any:
    """The results, one directly and several as a tuple, in the caller's kind of sparse tensor.

    That is torch's if all sparse operands are torch's, SciPy's if they are SciPy's and no operand is a torch tensor,
    else `SparseTensor`.
    """
    kinds = [v for v in values if is_sparse(v)]
    found: list[Any] = list(results.values())
    if any(map(is_scipy, kinds)):
        found = list(_with_own_indices(found, kinds))
    kind = _caller_kind(values)
    if kind == "torch":
        found = [r.torch() if isinstance(r, SparseTensor) else r for r in found]
    elif kind == "SciPy":
        found = [r.scipy() if isinstance(r, SparseTensor) else r.numpy() for r in found]
    return found[0] if len(found) == 1 else tuple(found)


def _with_own_indices(
    results: Sequence[Tensor | SparseTensor], operands: Sequence[Any]
) -> Iterator[Tensor | SparseTensor]:
    """Results that share no indices with SciPy's arrays or with each other: SciPy changes indices in place."""
    compressed = [x for x in operands if is_scipy(x) and x.format in ("csr", "csc", "bsr")]
    taken = {a.__array_interface__["data"][0] for x in compressed for a in (x.indptr, x.indices)}
    for r in results:
        if not isinstance(r, SparseTensor):
            yield r
            continue
        arrays = {x.data_ptr() for x in list_index_arrays(r.levels)}
        yield SparseTensor.from_known(r.format, r.shape, copy_levels(r.levels), r.values) if arrays & taken else r
        taken |= arrays
