"""The input of the sparse lowering: a def with formats, the types of coordinates, and the few sizes that are fixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..core.dtypes import DType
from ..options import SparseOptions
from ..tc_lang.binding.ranges import Ranges, symbolic_ranges
from ..tc_lang.formats import LevelKind
from ..tc_lang.ir import Access, Expr, Function, Role, Statement, map_operands
from ..tc_lang.size_polynomial import Value
from ..thresholds import MAX_ARRAY_ROW, MAX_FIXED_EXTENT


@dataclass(frozen=True)
class SparseProblem:
    """A def to lower.

    Attributes:
        function: the def, with a format for every tensor that is not dense.
        index_types: the type of the coordinates of each sparse tensor, by name.
        fixed: the sizes that the kernel is specialized for, by name.
        shared: pairs of a temporary or result and the operand whose sparsity pattern it has.
        threads: the threads among which the rows of sums with sparse results are divided.
        aliases: pairs of an operand that the caller makes and the tensor that it is made from and has the extents of.
        options: how to lower the def.
        refills: whether the patterns of results are known, so that only values are computed, if that is faster.
        lanes: on a GPU, adjacent threads that share the stored positions of a row; 0 for a CPU.
        wide: the sparse results whose rows are too wide for an array with an element for each coordinate.
    """

    function: Function
    index_types: tuple[tuple[str, DType], ...]
    fixed: tuple[tuple[str, int], ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    threads: int = 1
    refills: bool = False
    options: SparseOptions = field(default_factory=SparseOptions)
    aliases: tuple[tuple[str, str], ...] = ()
    lanes: int = 0
    wide: tuple[str, ...] = ()

    @property
    def for_gpu(self) -> bool:
        return self.lanes > 0

    @cached_property
    def ranges(self) -> Ranges:
        names = dict(self.aliases)
        if not names:
            return symbolic_ranges(self.function)
        kept = tuple(t for t in self.function.tensors if t.name not in names)
        statements = tuple(rename_reads(s, names) for s in self.function.statements)
        found = symbolic_ranges(replace(self.function, tensors=kept, statements=statements))
        return replace(found, tensors={**found.tensors, **{n: found.tensors[t] for n, t in names.items()}})

    @cached_property
    def sizes(self) -> tuple[str, ...]:
        """The names in the argument `sizes`: the sizes of the def that are not fixed, then its integer scalars."""
        fixed = dict(self.fixed)
        return tuple(n for n in (*self.function.sizes, *self.function.scalars) if n not in fixed)

    def index_type(self, tensor: str) -> DType:
        return dict(self.index_types)[tensor]


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """The facts about a call that determine its kernel; `shared_sparsity.make_cpu_problem` turns them into a problem.

    Attributes:
        function: the def, with the formats of the operands of the call.
    The other attributes are those of `SparseProblem`.
    """

    function: Function
    index_types: tuple[tuple[str, DType], ...]
    fixed: tuple[tuple[str, int], ...]
    threads: int
    refills: bool
    options: SparseOptions
    wide: tuple[str, ...] = ()


def row_extents(function: Function) -> tuple[tuple[str, Value], ...]:
    """The number of coordinates of the innermost level, if that is compressed, of each sparse result, by name."""
    shape = symbolic_ranges(function).shape
    results = ((t.name, t.format) for t in function.tensors if t.role is Role.OUTPUT and t.format is not None)
    return tuple((name, shape(name)[f.order[-1]]) for name, f in results if f.levels[-1].kind is LevelKind.COMPRESSED)


def wide_results(
    extents: tuple[tuple[str, Value], ...], sizes: Mapping[str, int], options: SparseOptions
) -> tuple[str, ...]:
    """The results whose rows are combined in hash tables. extents: see `row_extents`."""
    if options.hash_rows == "never":
        return ()
    most = 0 if options.hash_rows == "always" else MAX_ARRAY_ROW
    found = ((name, x if isinstance(x, int) else x.evaluate(sizes)) for name, x in extents)
    return tuple(name for name, extent in found if extent > most)


def rename_reads(s: Statement, names: Mapping[str, str]) -> Statement:
    """The statement with reads of the tensors in `names` renamed."""

    def visit(e: Expr) -> Expr:
        new = map_operands(e, visit)
        return replace(new, tensor=names[new.tensor]) if isinstance(new, Access) and new.tensor in names else new

    exists = tuple(replace(a, tensor=names.get(a.tensor, a.tensor)) for a in s.exists)
    return replace(s, value=visit(s.value), exists=exists)


def fixed_sizes(function: Function, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The sizes to specialize for, as they decide register tiles: small ones that are no extent of a sparse tensor."""
    sparse = {str(e) for t in function.tensors if t.is_sparse for e in _collect_size_names(t.extents)}
    blocked = {n for t in function.tensors if t.is_sparse for n in _collect_size_names(t.extents)}
    return tuple((n, v) for n, v in sizes.items() if n not in sparse | blocked and v <= MAX_FIXED_EXTENT)


def _collect_size_names(extents: object) -> Iterator[str]:
    for e in extents or ():  # type: ignore[attr-defined]
        if name := getattr(e, "name", None):
            yield name
