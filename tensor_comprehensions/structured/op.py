"""Structured ops: a contraction as named iterators and affine operand maps, with its prologue and epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from ..core.dtypes import FLOAT32, DType
from ..core.errors import InternalError
from ..core.internal_names import SEPARATOR, internal_name
from ..loop_ir import build
from ..loop_ir.nodes import Const, Expr, Load, Type, Var
from ..loop_ir.rewrite import walk_expr

ACCUMULATOR = internal_name("acc")


class IteratorKind(Enum):
    """Whether the points along an iterator are independent or are summed."""

    PARALLEL = "parallel"
    REDUCTION = "reduction"


@dataclass(frozen=True, slots=True)
class Iterator:
    """A dimension of the iteration domain; its values run over `0 .. extent - 1`."""

    name: str
    extent: int
    kind: IteratorKind

    @property
    def is_parallel(self) -> bool:
        return self.kind is IteratorKind.PARALLEL


@dataclass(frozen=True, slots=True)
class HalfSpace:
    """Points where `sum of coefficient * iterator + rest >= 0`.

    Attributes:
        terms: (iterator, coefficient) pairs.
        rest: a scalar int64 expression over variables of surrounding loops.
    """

    terms: tuple[tuple[str, int], ...]
    rest: Expr


@dataclass(frozen=True, slots=True)
class StructuredOp:
    """`output = epilogue(initial + sum over the reduction iterators of left * right)`.

    Ops that only reduce, permute or copy have the constant 1 for `right`: see `memory_bound/`.

    Every index expression is int64 arithmetic over `Var(iterator name)` and variables of surrounding loops. `left`,
    `right` and `initial` have the accumulator's type, with explicit casts; factors in pairs have the type of a pair.

    Attributes:
        name: prefix of the names that lowering generates; unique within a kernel.
        iterators: the domain; their names must not be bound around the op.
        output: the element that a point of the parallel iterators defines.
        left, right: the factors: pointwise expressions of (normally) one `Load` each.
        initial: the initial value of an element, over the parallel iterators; a `Load` of the output itself adds to
            it; None is zero.
        epilogue: the value stored, over the parallel iterators and `accumulator_var(dtype)`; None stores the sum.
        reduction: the combining operator; only "+" for products.
        pairs: the reduction along which the factors are pairs of bfloat16 (`bf16_pairs.py`), whose two products one
            instruction adds; "" if the factors are no pairs.
        elements: conditions on parallel iterators. Output elements that violate one are not needed, but may be
            computed.
        terms: conditions on all iterators. Products that violate one are not summed; an element without products
            has the sum 0.
    """

    name: str
    iterators: tuple[Iterator, ...]
    output: Load
    left: Expr
    right: Expr
    initial: Expr | None = None
    epilogue: Expr | None = None
    reduction: str = "+"
    pairs: str = ""
    elements: tuple[HalfSpace, ...] = ()
    terms: tuple[HalfSpace, ...] = ()

    def __post_init__(self) -> None:
        if self.left.type != self.right.type:
            raise InternalError(f"{self.name}: factors of types {self.left.type} and {self.right.type}")
        if self.initial is not None and self.initial.type.dtype != self.dtype:
            raise InternalError(f"{self.name}: initial value of type {self.initial.type}, not {self.dtype}")

    @property
    def dtype(self) -> DType:
        """The type of the accumulator."""
        return FLOAT32 if self.pairs else self.left.type.dtype

    @property
    def parallel(self) -> tuple[Iterator, ...]:
        return tuple(i for i in self.iterators if i.is_parallel)

    @property
    def reductions(self) -> tuple[Iterator, ...]:
        return tuple(i for i in self.iterators if not i.is_parallel)

    @property
    def factors(self) -> tuple[Expr, Expr]:
        return (self.left, self.right)

    @property
    def is_product(self) -> bool:
        """Whether there is a second factor that reads something."""
        return not isinstance(self.right, Const)

    @property
    def start(self) -> Expr:
        """The value of an element before the first term."""
        return build.const(0, self.dtype) if self.initial is None else self.initial

    @property
    def stored_value(self) -> Expr:
        """The value of the output element, of the output's type."""
        value = accumulator_var(self.dtype) if self.epilogue is None else self.epilogue
        return build.cast(value, self.output.buffer.type.dtype)

    @property
    def multiplications(self) -> int:
        """How many products the op sums in all."""
        return prod(i.extent for i in self.iterators)

    def display_name(self, iterator: str) -> str:
        """The name of an iterator for users: the def's index, or fused indices joined by `_`."""
        own = iterator.removeprefix(internal_name(self.name, ""))
        joined = own.replace(SEPARATOR, "_")
        taken = joined != own and any(i.name in (joined, internal_name(self.name, joined)) for i in self.iterators)
        return own if taken else joined

    def iterator(self, name: str) -> Iterator:
        return next(i for i in self.iterators if i.name == name)

    def extent(self, name: str) -> int:
        return self.iterator(name).extent


def accumulator_var(dtype: DType) -> Var:
    """The name by which an epilogue refers to the sum."""
    return Var(ACCUMULATOR, Type(dtype))


def loads_in(e: Expr) -> tuple[Load, ...]:
    """The loads in `e`."""
    return tuple(x for x in walk_expr(e) if isinstance(x, Load))


def factor_tensor(factor: Expr) -> str:
    """The tensor that a factor reads first."""
    return loads_in(factor)[0].buffer.name


def variable_names(e: Expr) -> tuple[str, ...]:
    """The variables in `e`, each once, in order of appearance."""
    return tuple(dict.fromkeys(x.name for x in walk_expr(e) if isinstance(x, Var)))
