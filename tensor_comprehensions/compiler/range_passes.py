"""The compiler of range kernels, which serve any number of rows.

If possible, a range kernel consists of loops over all rows. Otherwise it consists of blocks with a few fixed numbers of
rows, which `PASSES` lower and `join_row_blocks` joins. A block is a def with all sizes known, so it is optimized and
verified as a kernel for fixed sizes is. Strides that depend on dynamic sizes are variables in it; `open_strides`
chooses numbers to stand for them during the passes that no pass can exploit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from time import perf_counter
from typing import Any

from ..codegen.c import c_printer
from ..core import knobs
from ..core.diagnostics import get_logger
from ..core.errors import CannotLower, InternalError
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.binding_checks import check_bindings
from ..loop_ir.masked_blocks import ScalarBound, choose_module, compare_scalars
from ..loop_ir.nodes import Buffer, Expr, Load, Module, Type
from ..loop_ir.open_rows import OpenBuffer, OpenProgram, open_same_rows
from ..loop_ir.passes.split_masks import split_masked_loops
from ..loop_ir.row_blocks import (
    RowBlock,
    RowProgram,
    Stage,
    bind_variables,
    first_row_variable,
    has_row_loops,
    join_row_blocks,
    rows_variable,
    sizes_buffer,
)
from ..loop_ir.show import format_program
from ..loop_ir.uses import UseTable
from ..loop_ir.verify import verify
from ..options import CpuOptions
from ..runtime.cpu import object_code
from ..target import CpuTarget
from ..tc_lang.dynamic_sizes.block_masks import (
    RowScalars,
    at_equal_terms,
    find_block_mask,
    find_masked_temporaries,
    masked_out,
    without_mask,
)
from ..tc_lang.dynamic_sizes.row_stages import RowStage, base_tensor, shared_tensors, split_row_stages
from ..tc_lang.dynamic_sizes.rows import CannotGeneralize, Rows, list_dynamic_sizes, list_row_operands
from ..tc_lang.ir import Access, BoundFunction, BoundStatement, Index, Role, Tensor, walk_expr
from ..tc_lang.syntax.printer import format_ranges
from . import cpu_passes
from .compiled_kernel import BlockSize, CompiledRangeKernel, PassContext, keep_results
from .row_block_sizes import (
    choose_block_sizes,
    collect_subscript_indices,
    list_open_counts,
    list_variants,
    shares_matrices,
)
from .row_strides import GIVEN, PACKED, StrideClasses, open_strides

BlockMaker = Callable[[tuple[int, ...]], BoundFunction]
"""Returns the def for a number of rows along each axis."""


@dataclass(frozen=True, slots=True)
class RangeProblem:
    """A def to compile for any number of rows.

    Attributes:
        axes: the axes, outermost first.
        row: the def for a single row along each axis.
        make: returns the def for a number of rows along each axis; strides that are not dynamic are those of the call.
        strides: the strides of each tensor with rows, by name: numbers, `PACKED` or `GIVEN`.
        typical: most rows of a block; 0 chooses.
    """

    axes: tuple[Rows, ...]
    row: BoundFunction
    make: BlockMaker
    strides: StrideClasses
    typical: int = 0


def compile_range(problem: RangeProblem, text: str, options: CpuOptions, target: CpuTarget) -> CompiledRangeKernel:
    """Compile the kernel for any number of rows.

    Raises:
        CannotGeneralize: the def cannot be computed block by block.
    """
    start = perf_counter()
    context = PassContext(options, target, problem.row.name)
    sizes, joined = _make_range_module(problem, text, context)
    block = problem.make(tuple(axis[0].rows for axis in sizes))
    lowered = perf_counter()
    results, seconds, _ = cpu_passes.run_passes(cpu_passes.PASSES[-3:], block, text, context, {"join": joined})
    compiled = CompiledRangeKernel(
        problem.row, text, options, target, (("blocks", lowered - start), *seconds), results["assemble"],
        results["load"], (), cpu_passes.check_sites_of(joined, block), len(joined.kernels),
        problem.axes, sizes, problem.make, problem.strides,
    )  # fmt: skip
    keep_results(compiled, {"join": joined, "emit": results["emit"]})
    cpu_passes.log_compilation(compiled, None)
    return compiled


def _make_range_module(
    problem: RangeProblem, text: str, context: PassContext
) -> tuple[tuple[tuple[BlockSize, ...], ...], Module]:
    """The block sizes along each axis, and the module for any number of rows.

    If the module has loops over all rows, the sizes are the numbers of rows that these were lowered for.
    """
    opened = _open_range_module(problem, text, context)
    if opened is not None:
        return tuple((BlockSize(n, 1, 0, is_open=True),) for n in list_open_counts(problem.axes, 0)), opened
    sizes = choose_block_sizes(problem.make, problem.axes, context.options, problem.typical)
    return sizes, _build_range_module(problem, sizes, text, context)


def _build_range_module(
    problem: RangeProblem, sizes: tuple[tuple[BlockSize, ...], ...], text: str, context: PassContext
) -> Module:
    """The module that joins the blocks of all stages."""
    blocks = {v: problem.make(v) for v in list_variants(problem.axes, sizes)}
    legal = {v: cpu_passes.run_passes(cpu_passes.PASSES[:2], b, text, context)[0] for v, b in blocks.items()}

    def lower(variant: tuple[int, ...], bound: BoundFunction) -> Module:
        made = {**legal[variant], "legalize": bound}
        lowered: Module = cpu_passes.run_passes(cpu_passes.PASSES[2:-3], blocks[variant], text, context, made)[0][
            "simplify_again"
        ]
        return lowered

    first = next(iter(blocks))
    composer = _make_composer(problem, sizes, blocks[first], legal, lower)
    module = composer.compose(0, {v: results["legalize"] for v, results in legal.items()}, ())
    return _bind_sizes(module, composer, legal[first]["canonicalize"], context)


def _open_range_module(problem: RangeProblem, text: str, context: PassContext) -> Module | None:
    """The module with loops over all rows; None if the lowered code has no such loops, or blocks are faster."""
    counts = [list_open_counts(problem.axes, number) for number in range(2)]
    blocks = {v: problem.make(v) for v in counts}
    legal: dict[tuple[int, ...], dict[str, Any]] = {
        v: cpu_passes.run_passes(cpu_passes.PASSES[:2], b, text, context)[0] for v, b in blocks.items()
    }

    def lower(variant: tuple[int, ...]) -> Module:
        lowered = cpu_passes.run_passes(cpu_passes.PASSES[2:4], blocks[variant], text, context, legal[variant])[0]
        module: Module = lowered["simplify"]
        shapes = {t.name: t.shape for t in legal[variant]["legalize"].tensors}
        if any(b.shape != shapes[b.name] for b in module.arguments):
            raise CannotLower("neighboring dimensions are one loop")
        return module

    try:
        _check_register_tiles(problem, legal[counts[0]]["legalize"], context)
        composer = _make_composer(problem, (), blocks[counts[0]], legal, lambda v, bound: lower(v))
        program = composer.open_program(legal[counts[0]]["legalize"])
        opened = open_same_rows(program, map(lower, counts), counts)
        kernels = tuple(replace(k, body=split_masked_loops(k.body)) for k in opened.kernels)
        opened = replace(opened, kernels=kernels)
        made = {"simplify": _bind_sizes(opened, composer, legal[counts[0]]["canonicalize"], context)}
        passed = cpu_passes.run_passes(cpu_passes.PASSES[4:-3], blocks[counts[0]], text, context, made)[0]
    except (CannotLower, CannotGeneralize) as reason:
        get_logger("passes").debug("%s: made of blocks of rows: %s", context.name, reason)
        return None
    module: Module = passed["simplify_again"]
    return module


def _check_register_tiles(problem: RangeProblem, legal: BoundFunction, context: PassContext) -> None:
    """Refuse rows that make register tiles together, before a def of many rows is lowered in vain."""
    if shares_matrices(problem.make, problem.axes) and cpu_passes.has_register_tiles(
        legal, context.options, context.target
    ):
        raise CannotLower("register tiles have several rows")


def _bind_sizes(module: Module, composer: _Composer, plain: BoundFunction, context: PassContext) -> Module:
    """`module` with a last argument for sizes, from which the row counts and strides are computed."""
    joined = bind_variables(module, *composer.list_variables(plain))
    check_bindings(joined)
    if knobs.current_knobs().verify:
        try:
            verify(joined)
        except InternalError as error:
            raise InternalError(f"{context.name}: for any number of rows: {error}") from error
    return joined


def _make_composer(
    problem: RangeProblem,
    sizes: tuple[tuple[BlockSize, ...], ...],
    block: BoundFunction,
    legal: Mapping[tuple[int, ...], Mapping[str, Any]],
    lower: Callable[[tuple[int, ...], BoundFunction], Module],
) -> _Composer:
    """A `_Composer` for blocks. legal: results of "canonicalize" and "legalize" by variant; the first is of `block`."""
    first = next(iter(legal.values()))
    plain: BoundFunction = first["canonicalize"]
    own = {t.name: mine.name for t, mine in zip(block.tensors, plain.tensors, strict=True)}
    places = _find_places(problem.axes, own, first["legalize"], plain)
    scalars = {
        own[name]: first_row_variable(n) if is_first else rows_variable(n)
        for name, (n, is_first) in list_row_operands(problem.axes).items()
        if name in own
    }
    strides = {own[name]: found for name, found in problem.strides.items()}
    windowed = {
        own[t.name]: [n for n, x in enumerate(problem.axes) if t.name in x.windowed] for t in problem.row.tensors
    }
    firsts = frozenset(
        name for name, held in scalars.items() if held in map(first_row_variable, range(len(problem.axes)))
    )
    row_scalars = RowScalars(firsts, frozenset(scalars) - firsts)
    unread = {v: find_masked_temporaries(results["legalize"], row_scalars) for v, results in legal.items()}
    return _Composer(problem.axes, sizes, places, scalars, windowed, row_scalars, unread, strides, lower)


def _find_places(
    axes: Sequence[Rows], own: Mapping[str, str], bound: BoundFunction, plain: BoundFunction
) -> dict[str, dict[int, int]]:
    """For each tensor of a legalized def, the axes of its dimensions that count rows, by dimension."""
    names = {mine: name for name, mine in own.items()}
    found: dict[str, dict[int, int]] = {}
    for t in bound.tensors:
        base = base_tensor(t.name, plain)
        for n, rows in enumerate(axes):
            place = rows.place(names.get(base, base))
            if place is not None:
                if len(t.shape) != len(plain.tensor(base).shape):
                    raise CannotGeneralize(rows.sizes[0], f"'{names.get(base, base)}' is computed in another shape")
                found.setdefault(t.name, {}).update(dict.fromkeys(range(place, place + rows.depth), n))
    return found


@dataclass(frozen=True, slots=True)
class _Composer:
    """Composes the modules of blocks, axis by axis, from the innermost one on. A variant is a tuple of rows per axis.

    Attributes:
        axes, strides: as in `RangeProblem`.
        sizes: the block sizes along each axis; () for loops over all rows.
        places: the axis of each dimension that counts rows, by tensor.
        scalars: the variables that hold the scalar operands of blocks.
        windowed: the axes along which a row is computed from several elements, by operand.
        row_scalars: the operands in `scalars` by kind.
        unread: for each variant, the temporaries that are read only where a mask holds.
        lower: returns the module for a variant and its def.
        uses: finds what statements use.
    """

    axes: tuple[Rows, ...]
    sizes: tuple[tuple[BlockSize, ...], ...]
    places: Mapping[str, Mapping[int, int]]
    scalars: Mapping[str, str]
    windowed: Mapping[str, Sequence[int]]
    row_scalars: RowScalars
    unread: Mapping[tuple[int, ...], frozenset[str]]
    strides: StrideClasses
    lower: Callable[[tuple[int, ...], BoundFunction], Module]
    uses: UseTable = field(default_factory=UseTable)

    def compose(self, level: int, bounds: Mapping[tuple[int, ...], BoundFunction], outer: tuple[int, ...]) -> Module:
        """The module for any numbers of rows along the axes from `level` on.

        bounds: the def for each combination of block sizes along these axes. outer: the block sizes along the others.
        """
        if level == len(self.axes):
            return self._lower_leaf(outer, bounds[()])
        with_rows = [name for name, found in self.places.items() if level in found.values()]
        split = {v: split_row_stages(bound, with_rows) for v, bound in bounds.items()}
        first = next(iter(split.values()))
        if len({tuple((s.has_rows, s.updates) for s in stages) for stages in split.values()}) > 1:
            raise CannotGeneralize(self.axes[level].sizes[0], "other numbers of rows are computed in other steps")
        before = next(iter(bounds.values()))
        program = self._program(level, before, first)
        parts = (program, split, before, outer)
        stages = [self._stage(*parts, k, with_shorter=True) for k in range(len(first))]
        if (short := self._short_block(program, bounds, first)) is not None:
            with suppress(CannotLower):
                return join_row_blocks(program, stages, short)
        if any(isinstance(stage, tuple) and stage[0].may_be_shorter for stage in stages):
            try:
                return join_row_blocks(program, stages)
            except CannotLower:  # another stage reads the same rows through other windows
                stages = [self._stage(*parts, k, with_shorter=False) for k in range(len(first))]
        try:
            return join_row_blocks(program, stages)
        except CannotLower as refusal:
            raise CannotGeneralize(self.axes[level].sizes[0], str(refusal)) from refusal

    def _stage(
        self,
        program: RowProgram,
        split: Mapping[tuple[int, ...], Sequence[RowStage]],
        before: BoundFunction,
        outer: tuple[int, ...],
        k: int,
        *,
        with_shorter: bool,
    ) -> Stage:
        """The blocks of one stage, or its module if it runs once.

        with_shorter: whether one block that may have fewer rows may replace the blocks of all sizes.
        """
        level, stage = program.level, next(iter(split.values()))[k]

        def compose_block(rows: int) -> Module:
            inner = {v[1:]: self._open_shared(level, s[k].bound, before) for v, s in split.items() if v[0] == rows}
            return self.compose(level + 1, inner, (*outer, rows))

        sizes = [size for size in self.sizes[level] if any(v[0] == size.rows for v in split)]
        if not stage.has_rows:
            return compose_block(sizes[0].rows)
        needed = [size for size in sizes if not size.is_optional]
        largest: RowBlock | None = None
        if with_shorter and self.sizes[level][0].rows > 1 and self._names_rows(level, k, split):
            tried = [sizes[0], needed[0]] if sizes[0].is_optional and self._sums_all_terms(level, stage) else needed[:1]
            for size in tried:
                largest = _make_row_block(size, compose_block(size.rows), stage)
                if has_row_loops(program, largest):
                    longer = replace(largest, longest=self.sizes[level][0].rows)
                    largest = longer if has_row_loops(program, longer) else largest
                    return (replace(largest, may_be_shorter=True, overlap_from=0),)
        largest = largest or _make_row_block(needed[0], compose_block(needed[0].rows), stage)
        return (largest, *(_make_row_block(size, compose_block(size.rows), stage) for size in needed[1:]))

    def _short_block(
        self, program: RowProgram, bounds: Mapping[tuple[int, ...], BoundFunction], stages: Sequence[RowStage]
    ) -> RowBlock | None:
        """A block of all stages that may be shorter, for calls with few terms of a sum; None if there is none.

        For such calls, a separate loop that initializes the sums would take as long as the sums.
        """
        longest = next(iter(bounds))
        if len(self.axes) > 1 or len(stages) < 2 or not any(map(self._adds_terms, stages)):
            return None
        block = RowBlock(longest[0], self._lower_leaf(longest, bounds[longest]), 0, may_be_shorter=True)
        return block if has_row_loops(program, block) else None

    def _adds_terms(self, stage: RowStage) -> bool:
        """Whether a stage adds products."""
        return stage.sums and any(map(_sums_products, stage.bound.statements))

    def _sums_all_terms(self, level: int, stage: RowStage) -> bool:
        """Whether the statements of a stage only add rows to tensors without rows, and no mask leaves out blocks."""
        adds = not any(level in self.places.get(s.target, {}).values() for s in stage.bound.statements)
        return adds and find_block_mask(stage.bound, self.row_scalars) is None

    def _names_rows(self, level: int, k: int, split: Mapping[tuple[int, ...], Sequence[RowStage]]) -> bool:
        """Whether each statement of a stage has exactly one index over rows, which is a subscript of some tensor."""
        large = next(iter(split))
        small = next((v for v in reversed(list(split)) if v[0] != large[0] and v[1:] == large[1:]), None)
        if small is None:
            return False
        pairs = zip(split[large][k].bound.statements, split[small][k].bound.statements, strict=True)
        return all(
            self._indices_of_rows(level, a) == [i.name for i, j in zip(a.indices, b.indices, strict=True) if i != j]
            for a, b in pairs
        )

    def _indices_of_rows(self, level: int, s: BoundStatement) -> list[str]:
        """The indices that are subscripts of row dimensions in a statement; "" stands for other subscripts."""
        accesses = [(a.tensor, a.subscripts) for a in walk_expr(s.value) if isinstance(a, Access)]
        used = [
            x[d]
            for tensor, x in ((s.target, s.subscripts), *accesses)
            for d, n in self.places.get(tensor, {}).items()
            if n == level
        ]
        return list(dict.fromkeys(e.name if isinstance(e, Index) else "" for e in used))

    def _lower_leaf(self, variant: tuple[int, ...], bound: BoundFunction) -> Module:
        """The module of a block, with variables for dynamic strides."""
        module = self._lower_masked(variant, bound)
        forms = {t.name: self._open_variables(t) for t in bound.tensors if t.role is not Role.TEMPORARY}
        arguments = tuple(
            replace(b, stride_variables=tuple(map(forms[b.name].get, b.strides)) if forms[b.name] else ())
            for b in module.arguments
        )
        return replace(module, arguments=arguments)

    def _lower_masked(self, variant: tuple[int, ...], bound: BoundFunction) -> Module:
        """The module of a block, with cheaper code for blocks that a mask on row indices keeps or drops as a whole."""
        general, mask = self.lower(variant, bound), find_block_mask(bound, self.row_scalars)
        if mask is None or not general.kernels:
            return general
        empty = masked_out(bound, self.row_scalars, self.unread.get(variant, frozenset()))
        if empty is None:
            return general
        whole = without_mask(bound, self.row_scalars)
        parts = sorted(mask, key=repr)
        holding = [ScalarBound(c.terms, -c.high, c.limit) for c in parts]
        failing = [ScalarBound(_negate(c.terms), c.low - 1, c.limit) for c in parts]
        holds = reduce(build.logical_and, (compare_scalars(general, b) for b in holding))
        fails = reduce(build.logical_or, (compare_scalars(general, b) for b in failing))
        choices = [(fails, self.lower(variant, empty) if empty.statements else None)]
        if self._are_most_columns(variant):
            choices.insert(0, (holds, self.lower(variant, whole)))
            if all(c.is_square for c in parts):
                both = [ScalarBound(terms, 0, c.limit) for c in parts for terms in (c.terms, _negate(c.terms))]
                equal = reduce(build.logical_and, (compare_scalars(general, b) for b in both))
                choices.append((equal, self.lower(variant, at_equal_terms(bound, self.row_scalars))))
        return choose_module(general, choices)

    def _are_most_columns(self, variant: tuple[int, ...]) -> bool:
        """Whether blocks of this variant are the largest along the innermost axis, and so compute most rows."""
        return variant[-1] == next(size.rows for size in self.sizes[-1] if not size.is_optional)

    def _open_variables(self, t: Tensor) -> dict[int, str]:
        """The variables for the dynamic strides of a tensor, by the numbers that stand for the strides."""
        return {t.strides[d]: internal_name(t.name, "stride", d) for d in self._open_dimensions(t)}

    def _kept_dimensions(self, t: Tensor) -> list[int]:
        """The dimensions of a tensor, but only the last one of several along the same axis."""
        places = self.places.get(t.name, {})
        return [d for d in range(len(t.shape)) if d not in places or places.get(d + 1) != places[d]]

    def _open_dimensions(self, t: Tensor) -> list[int]:
        """The dimensions whose strides depend on dynamic sizes."""
        known, kept = self.strides.get(t.name), self._kept_dimensions(t)
        if known is not None:
            return [d for d in kept if known[d] in (PACKED, GIVEN)]
        return [d for d in kept if any(e > d for e in self.places.get(t.name, ()))]

    def _open_shared(self, level: int, bound: BoundFunction, before: BoundFunction) -> BoundFunction:
        """The def of a stage, with variable strides for temporaries that other stages share, too."""
        temporaries = {t.name for t in before.tensors if t.role is Role.TEMPORARY}
        shared = {t.name for t in bound.tensors if t.role is not Role.TEMPORARY and t.name in temporaries}
        return replace(bound, tensors=tuple(self._open(t) if t.name in shared else t for t in bound.tensors))

    def _open(self, t: Tensor) -> Tensor:
        return replace(
            t, strides=open_strides(t.shape, t.strides, self._open_dimensions(t), self.places.get(t.name, ()))
        )

    def _program(self, level: int, bound: BoundFunction, stages: Sequence[RowStage]) -> RowProgram:
        """The buffers of all stages, in which each axis is one dynamic dimension."""
        taken = [t for t in bound.tensors if t.role is not Role.TEMPORARY and t.name not in self.scalars]
        shared = [self._open(t) for t in shared_tensors(stages, bound)]
        forms = {t.name: self._row_form(t, level) for t in (*taken, *shared)}
        arguments, local = ([forms[t.name][0] for t in ts] for ts in (taken, shared))
        levels = {name: found for name, (_, found) in forms.items() if found}
        rows = self.axes[level]
        windows = {name: (rows.step, rows.reach) for name, axes in self.windowed.items() if level in axes}
        return RowProgram(bound.name, tuple(arguments), tuple(local), levels, self.scalars, windows, level, self.uses)

    def open_program(self, bound: BoundFunction) -> OpenProgram:
        """The arguments of the module with loops over all rows. Raises CannotLower if blocks of rows are faster."""
        if find_block_mask(bound, self.row_scalars) is not None and any(map(_sums_products, bound.statements)):
            raise CannotLower("a mask on numbers of rows leaves out blocks of products")
        if any(self._sums_outermost_dimension(t) for t in bound.tensors):
            raise CannotLower("a sum over the outermost dimension reads memory in order, block by block")
        buffers = {}
        for t in bound.tensors:
            places, kept = self.places.get(t.name, {}), self._kept_dimensions(t)
            if t.role is not Role.TEMPORARY and t.name not in self.scalars:
                axes = {d: places[d] for d in kept if d in places}
                windowed = self.windowed.get(t.name, ())
                steps = {d: self.axes[axis].step for d, axis in axes.items() if axis in windowed}
                buffers[t.name] = OpenBuffer(self._row_form(t, 0)[0], tuple(kept), axes, steps)
        variables = {first_row_variable(n): build.const(0) for n in range(len(self.axes))}
        scalars = {name: variables.get(held, build.var(held)) for name, held in self.scalars.items()}
        return OpenProgram(buffers, scalars)

    def _sums_outermost_dimension(self, t: Tensor) -> bool:
        """Whether a sum over rows adds whole slices `t[n]`: rows are the outermost of several dimensions."""
        axis = self.places.get(t.name, {}).get(0)
        return axis is not None and self.axes[axis].sums and len(t.shape) > self.axes[axis].depth

    def _row_form(self, t: Tensor, level: int) -> tuple[Buffer, tuple[int, ...]]:
        """The buffer of a tensor, with one dimension per axis, and the levels of its dynamic dimensions."""
        places, variables = self.places.get(t.name, {}), self._open_variables(t)
        kept = self._kept_dimensions(t)
        dynamic = {n: places[d] for n, d in enumerate(kept) if places.get(d, -1) >= level}
        shape = tuple(0 if n in dynamic else t.shape[d] for n, d in enumerate(kept))
        strides = tuple(t.strides[d] for d in kept)
        held = tuple(map(variables.get, strides)) if variables else ()
        return Buffer(t.name, Type(t.dtype), shape, strides, dynamic=tuple(dynamic), stride_variables=held), tuple(
            dynamic.values()
        )

    def list_variables(self, plain: BoundFunction) -> tuple[int, list[tuple[str, Expr]]]:
        """How many sizes and strides a call passes, and (variable, value) for row counts and strides."""
        names = list_dynamic_sizes(self.axes)
        total = len(names) + sum(s.count(GIVEN) for s in self.strides.values())
        values: list[Expr] = [Load(sizes_buffer(total), (build.const(n),)) for n in range(total)]
        read = iter(values[len(names) :])
        found: list[tuple[str, Expr]] = []
        for n, rows in enumerate(self.axes):
            count: Expr = build.const(1)
            for name in rows.original_sizes:
                count = build.mul(count, values[names.index(name)])
            known = build.maximum(build.sub(count, rows.reach - rows.step), 0)  # so that blocks start in their operands
            found.append((rows_variable(n), build.div(known, rows.step)))
        for t in (t for t in plain.tensors if t.name in self.strides):
            found += self._list_strides(t, read, dict(zip(names, values, strict=False)))
        return total, found

    def _list_strides(self, t: Tensor, read: Iterator[Expr], sizes: Mapping[str, Expr]) -> list[tuple[str, Expr]]:
        """(variable, value) for the dynamic strides of an argument, innermost first. sizes: the call's, by name."""
        places, classes, variables = self.places.get(t.name, {}), self.strides.get(t.name, ()), self._open_variables(t)
        given = {d: next(read) for d, stride in enumerate(classes) if stride == GIVEN}
        found: list[tuple[str, Expr]] = []
        stride: Expr = build.const(1)
        for d in reversed(self._kept_dimensions(t)):
            held = variables.get(t.strides[d])
            if held is not None:
                found.append((held, given.get(d, stride)))
            step = build.var(held) if held is not None else t.strides[d]
            extent: Expr = build.var(rows_variable(places[d])) if d in places else build.const(t.shape[d])
            if places.get(d) in self.windowed.get(t.name, ()):
                extent = sizes[self.axes[places[d]].original_sizes[-1]]
            stride = build.mul(extent, step)
        return found


def _negate(terms: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, -factor) for name, factor in terms)


def _sums_products(s: BoundStatement) -> bool:
    """Whether a statement sums over elements of two tensors, so that a mask can leave out most of the work."""
    reduced = {i.name for i in s.reduction_indices if i.extent > 1}
    accesses = [e for e in walk_expr(s.value) if isinstance(e, Access)]
    return len({a.tensor for a in accesses if collect_subscript_indices(a) & reduced}) > 1


def _make_row_block(size: BlockSize, module: Module, stage: RowStage) -> RowBlock:
    return RowBlock(size.rows, module, size.grain, 0 if stage.updates else size.overlap_from, stage.sums)


def rebuild_module(kernel: CompiledRangeKernel) -> Module:
    """The module of a kernel, lowered again."""
    problem = RangeProblem(kernel.axes, kernel.bound, kernel.make, kernel.strides)
    return _make_range_module(problem, kernel.text, kernel.context)[1]


def _with_original_names(kernel: CompiledRangeKernel) -> Module:
    return cpu_passes.with_original_names(kernel.rerun_until("join"), kernel.make((1,) * len(kernel.axes)))


def _format_schedules(kernel: CompiledRangeKernel) -> str:
    parts = []
    for variant in list_variants(kernel.axes, kernel.sizes):
        exact = replace(kernel, bound=kernel.make(variant))
        rows = " x ".join(map(str, variant))
        what = "loops over any number of rows, chosen for" if kernel.has_open_loops else "blocks of"
        parts.append(f"{what} {rows} row{'s' * (rows != '1')}:\n{cpu_passes.KINDS['schedule'](exact)}")
    return "\n".join(parts)


KINDS: dict[str, Callable[[CompiledRangeKernel], str]] = {
    "tc": lambda k: k.text,
    "ranges": lambda k: f"for one row:\n{format_ranges(k.bound)}",
    "schedule": _format_schedules,
    "loops": lambda k: format_program(_with_original_names(k)),
    "c": lambda k: c_printer.emit_c(_with_original_names(k), header=k.text),
    "llvm": lambda k: k.rerun_until("emit"),
    "asm": lambda k: object_code.host_assembly(k.rerun_until("emit"), k.target),
}
"""The printers of `source` for a kernel for any number of rows."""
