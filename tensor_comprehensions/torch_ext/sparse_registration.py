"""Registration of defs with sparse tensors: one operator of torch for each def and combination of operand formats."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from ..core.error_boundary import only_tc_errors
from ..core.errors import ArgumentError
from ..core.single_flight import SingleFlightCache
from ..dispatch.arguments import TORCH_TYPES
from ..dispatch.sparse.sparse_tensor import SparseTensor
from ..tc_lang.ir import Function
from . import sparse_autograd, sparse_vmap
from .autograd import run_without_gradients
from .registration import FOREVER, Overload, Registration, gradient_name
from .schema import NAMESPACE
from .sparse_parts import (
    PartSignature,
    SparseArgument,
    arrays_of,
    fake_parts,
    from_parts,
    index_dtype_of,
    part_signature,
    results_from_parts,
    results_to_parts,
    to_parts,
)

if TYPE_CHECKING:
    from .sparse_fixed import FixedDispatcherOp
    from .sparse_op import SparseOp

MAX_PARTS = 64
"""Most arguments and results of torch's operators together."""
_CASTING = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


class SparseDispatcherOp:
    """A def for operands of given formats as an operator of torch's dispatcher.

    It runs the kernels of the def that was used last with this content, or its own if that no longer exists.

    Attributes:
        function: the def with these formats.
        signature: its signature.
        arguments, returns: the operands and results of the signature.
        names: the names of the initial values.
        count: the number of operands before the initial values.
        overload: `torch.ops.tc.<name>.default`.
        batched: its batched forms, by the names of the batched arguments.
    """

    overload: Overload

    def __init__(self, signature: PartSignature, function: Function, op: SparseOp) -> None:
        self.signature, self.function = signature, function
        self.arguments, self.returns = signature.arguments, signature.returns
        self.names, self.count = tuple(p.name for p in function.inouts), len(function.parameters)
        self._given, self._make_dense = op.given, op.make_dense
        self.rebind(op)

    def rebind(self, op: SparseOp) -> None:
        """Use the kernels of this def from now on, as long as another object references it."""
        self._op: Callable[[], SparseOp | None] = weakref.ref(op)
        self._own: SparseOp | None = None
        self.batched: SingleFlightCache[tuple[str, ...], sparse_vmap.Batched] = SingleFlightCache(FOREVER)

    @property
    def op(self) -> SparseOp:
        """The kernels and the gradients."""
        found = self._own or self._op()
        if found is None:
            from .sparse_op import SparseOp

            found = self._own = SparseOp.of(self.function, self._make_dense, self._given)
        return found

    def call(self, values: Sequence[Any]) -> list[Any]:
        """The results of a call of the operator, for operands by position, initial values last."""
        return self.join(values, self.overload(*to_parts(self.arguments, values)))

    def join(self, values: Sequence[Any], found: Any) -> list[Any]:
        """Build the results from the operands and the outputs of the operator."""
        return results_from_parts(self.returns, values, found)

    def hand_back(self, results: Sequence[Any]) -> Any:
        """Split the results of a call into the outputs of the operator."""
        parts = [x for r, result in zip(self.returns, results, strict=True) for x in self._parts_of(r.source, result)]
        return parts[0] if len(parts) == 1 else tuple(parts)

    @staticmethod
    def _parts_of(source: int, result: Any) -> list[Tensor]:
        if not isinstance(result, SparseTensor):
            return [result]
        return [result.values] if source >= 0 else [*arrays_of(result.levels), result.values]

    def run(self, *parts: Any) -> Any:
        """The kernel for real tensors. Raises ArgumentError or RangeError."""
        found = run_without_gradients(self._compute, parts)
        return found[0] if len(found) == 1 else tuple(found)

    @only_tc_errors
    def _compute(self, parts: Sequence[Any]) -> list[Tensor]:
        values = from_parts(self.arguments, parts)
        kernels = self.op.kernels
        call = kernels.accept(values[: self.count], dict(zip(self.names, values[self.count :], strict=True)))
        results = list(kernels.run(call).values())
        return results_to_parts(self.returns, results, index_dtype_of(values))

    def fake_kernel(self, *parts: Any) -> Any:
        """The kernel for fake and meta tensors."""

        def new_count() -> Any:
            return torch.library.get_ctx().new_dynamic_size()

        found = fake_parts(self.returns, from_parts(self.arguments, parts), new_count, TORCH_TYPES)
        return found[0] if len(found) == 1 else tuple(found)

    def autocast_kernel(self, *parts: Any) -> Any:
        """The result of a call under autocast, which casts arguments to the declared types."""
        return without_autocast(self.arguments, parts, lambda cast: self.overload(*cast))

    def autograd_kernel(self, *parts: Any) -> Any:
        """The result of a call, recorded in autograd's graph if a value requires a gradient."""
        return sparse_autograd.sparse_autograd_kernel(self, *parts)

    def vmap_kernel(self, *parts: Any) -> Any:
        """The result of a call under vmap."""
        return sparse_vmap.sparse_vmap_kernel(self, *parts)


def without_autocast(arguments: Sequence[SparseArgument], parts: Sequence[Any], run: Callable[[list[Any]], Any]) -> Any:
    """The result of `run` on parts cast to the declared types, with autocast off inside."""
    values = from_parts(arguments, parts)
    with torch._C._ExcludeDispatchKeyGuard(_CASTING):
        cast = [_cast(a.dtype, x) for a, x in zip(arguments, values, strict=True)]
        return run(to_parts(arguments, cast))


def _cast(dtype: Any, x: Any) -> Any:
    values = x.values if isinstance(x, SparseTensor) else x
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.dtype is torch.float64:
        return x
    if not dtype.is_float:
        return x
    values = values.to(TORCH_TYPES[dtype])
    return x.with_values(values) if isinstance(x, SparseTensor) else values


_operators: SingleFlightCache[str, SparseDispatcherOp] = SingleFlightCache(FOREVER)
_begun: dict[str, SparseDispatcherOp] = {}
"""Operators whose registration has begun. An interrupted one is resumed, since torch accepts no name twice."""


def sparse_operator(op: SparseOp, function: Function) -> SparseDispatcherOp:
    """The operator of a def with the formats of its operands, the same for every def with the same content.

    Raises:
        ArgumentError: it has more parts than torch's operators may have.
    """
    signature = part_signature(function, gradient_name(op.given))
    parts = signature.parts
    if parts > MAX_PARTS:
        raise ArgumentError(
            f"{function.name} with these formats is too large: operators of torch have at most {MAX_PARTS} parts",
            found=f"{parts} arrays of operands and results",
            suggestion="call it outside of graphs and transforms",
        )
    found = _operators.get(signature.name, lambda: _register_operator(signature, function, op))
    if found.op is not op:
        found.rebind(op)
    return found


def _register_operator(signature: PartSignature, function: Function, op: SparseOp) -> SparseDispatcherOp:
    left = _begun.get(signature.name)
    made = left or _begun.setdefault(signature.name, SparseDispatcherOp(signature, function, op))
    register_parts(made, again=left is not None)
    return made


def register_parts(made: SparseDispatcherOp | FixedDispatcherOp, again: bool) -> None:
    """Register an operator on parts with torch. again: whether an interrupted registration may have left some of it."""
    name = made.signature.name
    registration = Registration(name, again)
    registration.define(made.signature.schema, (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    made.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    registration.implement(made.run, "CPU", "CompositeExplicitAutograd")
    registration.register_fake_kernel(made.fake_kernel)
    registration.implement(made.autograd_kernel, "Autograd")
    registration.implement(made.autocast_kernel, "AutocastCPU", "AutocastCUDA")
    registration.implement(made.vmap_kernel, "FuncTorchBatched")
