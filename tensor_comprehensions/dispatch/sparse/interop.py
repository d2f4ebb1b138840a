"""Convert sparse tensors from and to torch's five sparse layouts and SciPy's arrays, sharing memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from ...core.diagnostics import get_logger
from ...core.error_boundary import only_tc_errors
from ...core.errors import ArgumentError
from ...tc_lang.formats import Format, coo_format, parse_format
from ..arguments import PLAIN
from .array_input import to_plain_tensor
from .sparse_tensor import FormatLike, SparseTensor, to_format
from .structure import cache_for_arrays, structure_of

if TYPE_CHECKING:
    import scipy.sparse

_COMPRESSED: dict[torch.layout, tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    torch.sparse_csr: ("csr", Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: ("csc", Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsr: ("bsr", Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsc: ("bsc", Tensor.ccol_indices, Tensor.row_indices),
}
_LAYOUTS = {name: layout for layout, (name, _, _) in _COMPRESSED.items()}
TORCH_FORMATS, SCIPY_FORMATS = "coo, csr, csc, bsr or bsc", "coo, csr, csc or bsr"


@only_tc_errors
def as_sparse(x: Any, format: FormatLike | None = None) -> SparseTensor:
    """Make a `SparseTensor` from a sparse or dense tensor of torch, SciPy or NumPy. Copies only to convert.

    Args:
        x: a torch tensor of any layout, a SciPy sparse array, a NumPy array, or a `SparseTensor`.
        format: the format of the result; by default that of `x`. Required for a dense tensor, whose zeros are not
            stored.

    Raises:
        ArgumentError: `x` has another type, cannot have this format, or has malformed arrays.
    """
    tensor = _from_any(x, format)
    return tensor if format is None else tensor.to(format)


def _from_any(x: Any, format: FormatLike | None) -> SparseTensor:
    if isinstance(x, SparseTensor):
        return x
    if is_scipy(x):
        return from_scipy(x).check()
    if isinstance(x, np.ndarray):
        x = to_plain_tensor(x, "the array")
    if not isinstance(x, Tensor):
        raise ArgumentError(
            f"a {type(x).__name__} is not a tensor", expected="a torch tensor, a SciPy sparse array or a NumPy array"
        )
    if x.is_nested or x.is_quantized or x.is_meta:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else "meta"
        raise ArgumentError(f"a {kind} tensor has no sparse form", suggestion="pass a dense tensor with values")
    if x.layout is torch.strided:
        return _from_dense(x, format)
    made = from_torch(x)
    structure_of(made)
    return made.with_values(_without_base(made.values))


class _Alias(torch.autograd.Function):
    """An alias of a tensor in the same memory that autograd does not treat as a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _without_base(values: Tensor) -> Tensor:
    """The values of a torch sparse tensor, but not as a view, since Dynamo accepts no views of sparse tensors."""
    if values.requires_grad and torch.is_grad_enabled():
        return cast("Tensor", _Alias.apply(values))  # type: ignore[no-untyped-call]
    return values.detach()


def _from_dense(x: Tensor, format: FormatLike | None) -> SparseTensor:
    if format is None:
        raise ArgumentError("a dense tensor needs a format", suggestion='as_sparse(x, "csr")')
    known = to_format(format, x.ndim)
    places = torch.ones_like(x, dtype=torch.bool) if known.is_dense else x.detach() != 0
    where = places.nonzero().T if x.ndim else torch.zeros((0, 1), dtype=torch.int64)
    return SparseTensor.from_coordinates(where, x[places], x.shape, known)


# --- torch -------------------------------------------------------------------------------------------------------


def from_torch(x: Tensor) -> SparseTensor:
    """A torch sparse tensor in its own format, sharing its arrays. Uncoalesced tensors are coalesced.

    The arrays are not checked. Raises ArgumentError for batched tensors, and for layouts without gradients in torch.
    """
    if x.layout is torch.sparse_coo:
        return _from_coo(x)
    if x.layout not in _COMPRESSED:
        raise ArgumentError(f"a tensor of the layout {x.layout} has no format here", suggestion="pass x.to_dense()")
    name, pos, crd = _COMPRESSED[x.layout]
    if name != "csr" and x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"torch cannot add up gradients by {name} tensors",
            expected="csr or coo, or a SparseTensor",
            suggestion="a = tc.as_sparse(x.detach()), then a.values.requires_grad_()",
        )
    if x.ndim != 2 or x.dense_dim():
        raise ArgumentError(f"a batched or hybrid {name} tensor has no format here", suggestion="pass x.to_sparse()")
    values = x.values()
    format = parse_format(name, tuple(values.shape[1:]), 2)
    levels = (None, (pos(x).detach(), crd(x).detach()), *(None for _ in format.blocks))
    return SparseTensor(format, x.shape, levels, values)


def _from_coo(x: Tensor) -> SparseTensor:
    if type(x) not in PLAIN:  # torch traces COO tensors as if they stored no elements
        raise ArgumentError("torch does not trace COO tensors", suggestion="pass tc.as_sparse(x) instead of x")
    if not x.is_coalesced():
        get_logger("sparse").debug("an uncoalesced tensor of the shape %s is coalesced", tuple(x.shape))
        _check_coordinates(x)
        x = x.coalesce()
    rows, sparse = x.indices().detach(), x.sparse_dim()
    format = coo_format(sparse, x.dense_dim())
    if not sparse:
        return SparseTensor(format, x.shape, (None,) * x.ndim, x.to_dense())
    levels: list[Any] = [(None, row.contiguous()) for row in rows] + [None] * x.dense_dim()
    levels[0] = (
        cache_for_arrays("coo", [rows], lambda: torch.tensor([0, rows.shape[1]], device=rows.device)),
        levels[0][1],
    )
    return SparseTensor(format, x.shape, levels, x.values())


def _check_coordinates(x: Tensor) -> None:
    """Check that the coordinates of an uncoalesced tensor are in range, or torch crashes. Raises ArgumentError."""
    for d, (row, extent) in enumerate(zip(x._indices(), x.shape, strict=False)):
        outside = (row < 0) | (row >= extent)
        if bool(outside.any()):
            n = int(outside.to(torch.uint8).argmax())
            raise ArgumentError(
                f"level {d} of the sparse tensor has the coordinate crd[{n}] = {int(row[n])}",
                expected=f"0 to {extent - 1}", found=str(int(row[n])),
            )  # fmt: skip


def has_torch_layout(format: Format) -> bool:
    """Whether torch has a layout for a format."""
    is_plain = format.is_dense or str(format).partition("(")[0] in _LAYOUTS
    return is_plain or any(format == _coo(format, unique) for unique in (True, False))


def _coo(format: Format, unique: bool) -> Format:
    """The format of torch's COO tensors with as many sparse and dense dimensions as a format."""
    return coo_format(format.depth, format.rank - format.depth, unique=unique)


def to_torch(t: SparseTensor) -> Tensor:
    """See `SparseTensor.torch`."""
    format = t.format
    if format.is_dense:
        return t.to_dense()
    name = str(format).partition("(")[0]
    if name in _LAYOUTS:
        arrays = t.levels[1]
        assert arrays is not None
        pos, crd = arrays
        assert pos is not None
        return torch.sparse_compressed_tensor(
            pos, crd, t.values, t.shape, layout=_LAYOUTS[name], check_invariants=False
        )
    depth = format.depth
    for unique in (True, False):
        if format == _coo(format, unique):
            rows = torch.stack([level[1].long() for level in t.levels[:depth] if level is not None])
            return torch.sparse_coo_tensor(rows, t.values, t.shape, is_coalesced=unique, check_invariants=False)
    raise ArgumentError(
        f"torch has no layout for the format '{format}'",
        expected=TORCH_FORMATS,
        suggestion='convert it first: x.to("csr")' if format.rank == 2 else 'convert it first: x.to("coo")',
    )


# --- SciPy -------------------------------------------------------------------------------------------------------


def is_scipy(x: object) -> bool:
    """Whether `x` is a sparse array or matrix of SciPy. Does not import SciPy."""
    module = sys.modules.get("scipy.sparse")
    return module is not None and bool(module.issparse(x))


def from_scipy(x: Any) -> SparseTensor:
    """A SciPy array in its own format, sharing its arrays; DIA, LIL and DOK become CSR.

    Unsorted indices are sorted and repeated ones summed, in a copy. Memory after the elements is left out. Otherwise
    the arrays are not checked.
    """
    if x.format not in ("csr", "csc", "bsr", "coo"):
        get_logger("sparse").debug("a SciPy array of the format %s becomes csr", x.format)
        x = x.tocsr()
    values = to_plain_tensor(x.data, "the values of a SciPy array")
    if values.ndim != (3 if x.format == "bsr" else 1):
        raise ArgumentError(
            f"a SciPy array of the format {x.format} has values of {values.ndim} dimensions",
            expected="a dimension, or three in blocks", found=f"a shape of {tuple(values.shape)}",
        )  # fmt: skip
    if x.format == "coo":
        rows = np.stack(x.coords) if x.ndim else np.zeros((0, x.nnz))
        return SparseTensor.from_coordinates(rows, values, x.shape, coo_format(x.ndim), _index_type(rows))
    if _can_be_walked(x) and not x.has_canonical_format:
        get_logger("sparse").debug("a SciPy array of the shape %s has unsorted or repeated indices: copied", x.shape)
        x = x.copy()
        x.sum_duplicates()
        values = torch.from_numpy(x.data)
    format = parse_format(x.format, tuple(values.shape[1:]), 2)
    pos, crd = to_plain_tensor(x.indptr, "indptr"), to_plain_tensor(x.indices, "indices")
    if _can_be_walked(x):
        count = int(pos[-1])
        crd, values = crd[:count], values[:count]
    return SparseTensor(format, x.shape, (None, (pos, crd), *(None for _ in format.blocks)), values)


def _can_be_walked(x: Any) -> bool:
    """Whether the positions (`indptr`) of a SciPy array are valid for its indices, which SciPy does not check."""
    pos = x.indptr
    parents = x.shape[x.format == "csc"] // (x.blocksize[0] if x.format == "bsr" else 1)
    return bool(len(pos) == parents + 1 and pos[0] == 0 and pos[-1] <= len(x.indices) and (pos[1:] >= pos[:-1]).all())


def _index_type(rows: Any) -> torch.dtype | None:
    return torch.int64 if rows.dtype == np.int64 else None


def has_scipy_format(format: Format) -> bool:
    """Whether SciPy has an array of a format."""
    is_compressed = str(format).partition("(")[0] in ("csr", "csc", "bsr")
    return is_compressed or any(format == coo_format(format.rank, unique=unique) for unique in (True, False))


def to_scipy(t: SparseTensor) -> scipy.sparse.sparray:
    """See `SparseTensor.scipy`."""
    try:
        import scipy.sparse as sp
    except ImportError:
        raise ArgumentError("SciPy is not installed", suggestion="pip install scipy") from None
    name = str(t.format).partition("(")[0]
    if t.dtype in (torch.float16, torch.bfloat16):
        raise ArgumentError(
            f"SciPy holds no elements of {str(t.dtype).removeprefix('torch.')}",
            suggestion="x.with_values(x.values.float()).scipy()",
        )
    if name in ("csr", "csc", "bsr"):
        arrays = t.levels[1]
        assert arrays is not None
        assert arrays[0] is not None
        parts = (t.values.detach().numpy(), arrays[1].numpy(), arrays[0].numpy())
        made: scipy.sparse.sparray = getattr(sp, f"{name}_array")(parts, shape=t.shape)
        return made
    if t.format in (coo_format(t.ndim), coo_format(t.ndim, unique=False)):
        rows = tuple(level[1].numpy() for level in t.levels if level is not None)
        found: scipy.sparse.sparray = sp.coo_array((t.values.detach().numpy(), rows), shape=t.shape)
        return found
    raise ArgumentError(
        f"SciPy has no array of the format '{t.format}'",
        expected=SCIPY_FORMATS, suggestion='convert it first: x.to("csr")',
    )  # fmt: skip
