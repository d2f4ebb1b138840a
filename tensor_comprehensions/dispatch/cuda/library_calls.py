"""Library calls: split a def at statements that are matrix products, which torch computes (TC paper).

A statement that is exactly a matrix product, or a batch of them, may run in torch. The statements before and after it
become kernels of their own. All run in program order, so no dependence has to be analyzed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ...core.diagnostics import get_logger
from ...tc_lang import ir as f
from ...tc_lang.ir import BoundFunction, BoundStatement
from ...tc_lang.transforms.extract_statements import TouchedTensors, extract_statements_as_def, tensors_of_statements


@dataclass(frozen=True, slots=True)
class LibraryMatmul:
    """`target = left @ right`, or a batch of such products.

    target, left, right: (name of the tensor, the order that permutes its dimensions to [batch,] rows, columns).
    """

    target: tuple[str, tuple[int, ...]]
    left: tuple[str, tuple[int, ...]]
    right: tuple[str, tuple[int, ...]]

    @property
    def function(self) -> str:
        """The name of the torch function."""
        return "bmm" if len(self.target[1]) == 3 else "mm"

    def __str__(self) -> str:
        target, left, right = (f"{name}.permute{order}" for name, order in (self.target, self.left, self.right))
        return f"torch.{self.function}({left}, {right}, out={target})"

    @property
    def tensors(self) -> tuple[str, str, str]:
        """The tensors of a call: the inputs, then the output."""
        return (self.left[0], self.right[0], self.target[0])

    def __call__(self, left: Tensor, right: Tensor, target: Tensor) -> None:
        """Compute the product on the current stream of the tensors' device."""
        factors = left.permute(self.left[1]), right.permute(self.right[1])
        getattr(torch, self.function)(*factors, out=target.permute(self.target[1]))


DefPart = BoundFunction | LibraryMatmul
Part = LibraryMatmul | tuple[BoundStatement, ...]


def split_at_library_calls(bound: BoundFunction) -> tuple[DefPart, ...]:
    """The def as parts that run in order; a single part if no statement is a library call.

    Tensors that one part passes to another are outputs of the first and inputs of the second, even if they are
    temporaries of the whole.
    """
    parts: list[Part] = []
    for product, group in groupby(
        ((match_library_matmul(s, bound), s) for s in bound.statements), lambda pair: pair[0]
    ):
        statements = tuple(s for _, s in group)
        parts += [product] * len(statements) if product is not None else [statements]
    if not any(isinstance(part, LibraryMatmul) for part in parts):
        return (bound,)
    get_logger("schedule").debug("%s: %s", bound.name, "; ".join(str(p) for p in parts if isinstance(p, LibraryMatmul)))
    touched = [tensors_of_call(p) if isinstance(p, LibraryMatmul) else tensors_of_statements(p) for p in parts]
    return tuple(
        p
        if isinstance(p, LibraryMatmul)
        else extract_statements_as_def(bound, f"{bound.name}_{n}", p, touched[:n], touched[n + 1 :])
        for n, p in enumerate(parts)
    )


def tensors_of_call(call: LibraryMatmul) -> TouchedTensors:
    """The tensors that a call reads and writes."""
    return TouchedTensors(frozenset((call.left[0], call.right[0])), frozenset((call.target[0],)))


def find_library_matmuls(bound: BoundFunction) -> tuple[LibraryMatmul, ...]:
    """The products among the statements of a def, in order."""
    return tuple(p for s in bound.statements if (p := match_library_matmul(s, bound)) is not None)


def match_library_matmul(s: BoundStatement, bound: BoundFunction) -> LibraryMatmul | None:
    """The matrix product that a statement computes; None if it is none or covers only part of a tensor."""
    e = s.value
    if s.reduction != "+" or not s.initialize or s.reads_own_target or s.checks or len(s.reduction_indices) != 1:
        return None
    if not (isinstance(e, f.Binary) and e.op == "*"):
        return None
    target, left, right = (s.target, _list_index_names(s.subscripts)), _match_factor(e.left), _match_factor(e.right)
    if left is None or right is None or target[0] in (left[0], right[0]):
        return None
    extents = {i.name: i.extent if i.lower == 0 else -1 for i in s.indices}
    for name, indices in (target, left, right):
        tensor = bound.tensor(name)
        if tensor.shape != tuple(extents.get(i, -1) for i in indices) or len(set(indices)) < len(indices):
            return None
        if tensor.dtype != bound.tensor(s.target).dtype or not tensor.dtype.is_float:
            return None
    (k,) = (i.name for i in s.reduction_indices)
    batch = [i for i in target[1] if i in left[1] and i in right[1]]
    rows = [i for i in target[1] if i in left[1] and i not in right[1]]
    columns = [i for i in target[1] if i in right[1] and i not in left[1]]
    if len(rows) != 1 or len(columns) != 1 or len(batch) > 1:
        return None
    orders = [
        _find_axis_permutation(where, (*batch, *both))
        for where, both in ((target, (*rows, *columns)), (left, (*rows, k)), (right, (k, *columns)))
    ]
    if any(order is None for order in orders):
        return None
    return LibraryMatmul(*((where[0], order or ()) for where, order in zip((target, left, right), orders, strict=True)))


def _match_factor(e: f.Expr) -> tuple[str, tuple[str, ...]] | None:
    """The tensor and the indices of a factor; None if it is no plain access. The library does a cast around it."""
    if isinstance(e, f.Cast) and e.dtype.is_float:
        e = e.operand
    if not isinstance(e, f.Access) or e.guarded or not all(isinstance(i, f.Index) for i in e.subscripts):
        return None
    return e.tensor, _list_index_names(e.subscripts)


def _list_index_names(subscripts: tuple[f.Expr, ...]) -> tuple[str, ...]:
    return tuple(i.name if isinstance(i, f.Index) else "" for i in subscripts)


def _find_axis_permutation(where: tuple[str, tuple[str, ...]], wanted: tuple[str, ...]) -> tuple[int, ...] | None:
    indices = where[1]
    return tuple(indices.index(i) for i in wanted) if sorted(indices) == sorted(wanted) else None
