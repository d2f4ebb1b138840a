"""The buffers of a sparse kernel: of operands, of results that the caller allocates, and of sizes and counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..core.dtypes import INT64, DType
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.nodes import Buffer, Expr, Type
from ..tc_lang.formats import Format, LevelKind
from ..tc_lang.ir import Role, Symbol
from ..tc_lang.size_polynomial import SizeName, SizeOperation, SizePolynomial, Value
from .sparse_problem import SparseProblem


@dataclass(frozen=True, slots=True)
class SparseOperand:
    """The arrays of one tensor: its values, and the pos and crd of its levels that are not dense."""

    name: str
    format: Format | None
    role: Role
    values: Buffer
    pos: tuple[Buffer | None, ...] = ()
    crd: tuple[Buffer | None, ...] = ()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers, in the order of the arguments of the kernel."""
        levels = (b for pair in zip(self.pos, self.crd, strict=True) for b in pair if b is not None)
        return (*levels, self.values)


def operand_of(name: str, dtype: DType, role: Role, format: Format | None, index: DType | None) -> SparseOperand:
    """The buffers of a tensor, each one-dimensional with a length known only at run time."""
    values = build.dynamic_buffer(name, dtype)
    if format is None or format.is_dense or index is None:
        return SparseOperand(name, format, role, values)
    pos, crd = [], []
    for n, level in enumerate(format.levels):
        pos.append(build.dynamic_buffer(f"{name}.pos{n}", index) if level.kind is LevelKind.COMPRESSED else None)
        crd.append(None if level.is_dense else build.dynamic_buffer(f"{name}.crd{n}", index))
    return SparseOperand(name, format, role, values, tuple(pos), tuple(crd))


@dataclass(frozen=True, slots=True)
class Collected:
    """The elements that a statement contributes to a sparse result: their coordinates by dimension, and their values.

    starts: on a GPU, the start of each thread's elements, and the end of the last ones. is_sorted: whether the list has
    each element once, in the order of the format.
    """

    statement: int
    tensor: str
    coordinates: tuple[Buffer, ...]
    values: Buffer
    starts: Buffer | None = None
    is_sorted: bool = False

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers, in the order of the arguments of the kernel."""
        return (*self.coordinates, self.values, *(() if self.starts is None else (self.starts,)))

    @property
    def written_buffers(self) -> tuple[Buffer, ...]:
        """The arrays that kernels write."""
        return self.buffers


@dataclass(frozen=True, slots=True)
class Assembled:
    """The arrays of a sparse result that a statement writes level by level.

    bound: operands that together store at least as many elements; empty if the elements are counted first.
    counts_rows: whether the entries of each row are counted first, into `pos`, which the caller allocates before that.
    stages_rows: whether threads share the rows, which are written to a staging buffer first.
    is_known: whether the caller has the levels from an earlier run, so that only the values are written.
    """

    statement: int
    tensor: str
    format: Format
    index: DType
    pos: tuple[Buffer | None, ...]
    crd: tuple[Buffer | None, ...]
    values: Buffer
    bound: tuple[str, ...] = ()
    counts_rows: bool = False
    stages_rows: bool = False
    is_known: bool = False

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """In the order of the arguments of the kernel."""
        levels = (b for pair in zip(self.pos, self.crd, strict=True) for b in pair if b is not None)
        return (*levels, self.values)

    @property
    def written_buffers(self) -> tuple[Buffer, ...]:
        """The arrays that kernels write."""
        return (self.values,) if self.is_known else self.buffers


def assembled_of(statement: int, target: Symbol, index: DType, bound: tuple[str, ...], counts_rows: bool) -> Assembled:
    """The arrays of a statement that defines the sparse `target`."""
    assert target.format is not None
    own = operand_of(f"{target.name}.{statement}", target.dtype, target.role, target.format, index)
    return Assembled(statement, target.name, target.format, index, own.pos, own.crd, own.values, bound, counts_rows)


def declare_collected_list(statement: int, target: Symbol, *, by_threads: bool = False) -> Collected:
    """The list for the elements that a statement contributes to the sparse `target`.

    by_threads: whether the threads of a GPU write it, so that it has `starts`.
    """
    stem = f"{target.name}.{statement}"
    coordinates = tuple(build.dynamic_buffer(f"{stem}.coordinate{d}", INT64) for d in range(target.rank))
    values = build.dynamic_buffer(f"{stem}.values", target.dtype)
    starts = build.dynamic_buffer(f"{stem}.starts", INT64) if by_threads else None
    return Collected(statement, target.name, coordinates, values, starts)


def totals_buffer(count: int) -> Buffer:
    """The buffer of element counts, at least one long."""
    return Buffer(internal_name("totals"), Type(INT64), (max(1, count),), (1,))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a problem as expressions: constants if they are fixed, else variables bound around a kernel."""

    buffer: Buffer
    names: tuple[str, ...]
    fixed: Mapping[str, int]
    derived: Mapping[str, Value]

    @staticmethod
    def of(problem: SparseProblem) -> Sizes:
        buffer = Buffer(internal_name("sizes"), Type(INT64), (max(1, len(problem.sizes)),), (1,))
        return Sizes(buffer, problem.sizes, dict(problem.fixed), problem.ranges.sizes)

    def value(self, x: Value) -> Expr:
        """An integer or a polynomial of sizes as an int64 expression."""
        if isinstance(x, int):
            return build.const(x)
        total: Expr = build.const(0)
        for monomial, coefficient in x.terms:
            product: Expr = build.const(coefficient)
            for atom in monomial:
                product = build.mul(product, self._atom(atom))
            total = build.add(total, product)
        return total

    def name(self, name: str) -> Expr:
        """The expression of a size, of an integer scalar, or of the extent `t.d` of a tensor."""
        if name in self.fixed:
            return build.const(self.fixed[name])
        return build.var(_make_size_variable(name)) if name in self.names else self.value(self.derived[name])

    def list_variables(self) -> Iterator[tuple[str, Expr]]:
        """The variables of sizes, each with the load that initializes it."""
        for n, name in enumerate(self.names):
            yield _make_size_variable(name), build.load(self.buffer, n)

    def _atom(self, atom: SizeName | SizeOperation) -> Expr:
        match atom:
            case SizeName(name=name):
                return self.name(name)
            case SizeOperation(op=op, left=left, right=right):
                names = {"/": "div", "%": "mod"}
                return build.binary(names.get(op, op), self.value(left), self.value(right))


def _make_size_variable(name: str) -> str:
    return f"size.{name}"


def is_whole(bounds: tuple[Value, Value], extent: Value) -> bool:
    """Whether `bounds` cover a whole dimension."""
    lower, upper = bounds
    difference = SizePolynomial(()) + upper - extent
    return lower == 0 and difference.value == 0
