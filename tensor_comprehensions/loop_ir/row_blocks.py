"""Compose a module for any number of rows from modules for a few fixed numbers of rows.

This works if every row of the results depends only on the same row of the operands. Then a module for 64 rows and one
for a single row make a module for any number: as many blocks of 64 rows as fit, and the rest one by one. Each block
accesses the operands by a `Window`, so its code is unchanged and its proofs hold. The same works for programs that add
rows to tensors that all rows share, if the blocks run one after another.

Each stage of a program runs over all rows, or once, before the next stage starts. At run time, the number of rows only
decides the number of blocks, and whether threads share them.

Rows may lie along any dimension, and along several axes: the module of a block of rows is then itself one for any
number of columns. Each such axis has a level; the outermost is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.dtypes import INT64
from ..core.errors import CannotLower
from ..core.internal_names import internal_name
from . import build
from .nodes import (
    Allocate,
    Buffer,
    Check,
    CheckSite,
    Expr,
    If,
    Kernel,
    Let,
    Load,
    Loop,
    LoopKind,
    Module,
    Space,
    Stmt,
    Store,
    Type,
    Var,
    Window,
)
from .passes.hoist_packing import hoist_packing
from .redirection import Redirect
from .rewrite import map_stmt, used_values, walk_expr, walk_stmts
from .row_loops import RowLoops, end_row_loops, find_row_loops
from .uses import UseTable, has_body

SIZES = internal_name("sizes")
"""The name of the last argument: an array of int64 with sizes, followed by strides."""


def rows_variable(level: int) -> str:
    """The variable that holds the number of rows along an axis."""
    return internal_name("rows", *[level] * bool(level))


def first_row_variable(level: int) -> str:
    """The variable that holds the index of the first row of a block."""
    return internal_name("first", *[level] * bool(level))


def block_variable(level: int) -> str:
    """The variable of loops over the blocks along an axis."""
    return internal_name("block", *[level] * bool(level))


def again_variable(level: int) -> str:
    """The variable of the loop that may compute a block twice: 0 for the block itself, 1 shifted to the last rows."""
    return internal_name("again", *[level] * bool(level))


@dataclass(frozen=True, slots=True)
class RowBlock:
    """A module for blocks of `rows` rows.

    grain: the least number of blocks in a chunk of the parallel loop; 0: threads share the work inside a block instead.
    overlap_from: if at least this many rows remain, an overlapping block computes them, and some rows twice; 0: never.
    is_serial: whether blocks must run one after another, because they add to the same elements.
    may_be_shorter: whether the last block may have fewer rows, because the module consists of loops over its rows.
    longest: for such a module, the number of rows of the other blocks; 0: `rows`.
    """

    rows: int
    module: Module
    grain: int
    overlap_from: int = 0
    is_serial: bool = False
    may_be_shorter: bool = False
    longest: int = 0

    @property
    def step(self) -> int:
        """The number of rows from block to block."""
        return self.longest or self.rows


Stage = tuple[RowBlock, ...] | Module
"""Blocks with descending numbers of rows, each a multiple of the next; or a module without rows, which runs once."""


@dataclass(frozen=True, slots=True)
class RowProgram:
    """The buffers of a program for any number of rows. Its stages use the same names, perhaps with other shapes.

    arguments: in the order of the calling convention. shared: memory that several stages use.
    levels: for buffers with rows, the level of each dynamic dimension. scalars: for scalar arguments of the modules,
    the variables that replace them. windows: for operands of which a row uses several elements along the axis, (step
    from row to row, number of elements). level: the level of the rows that the stages run over; other dynamic
    dimensions have greater ones. uses: finds what statements use; the programs of all levels share it.
    """

    name: str
    arguments: tuple[Buffer, ...]
    shared: tuple[Buffer, ...]
    levels: Mapping[str, tuple[int, ...]]
    scalars: Mapping[str, str] = field(default_factory=dict)
    windows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    level: int = 0
    uses: UseTable = field(default_factory=UseTable)


def join_row_blocks(program: RowProgram, stages: Sequence[Stage], short: RowBlock | None = None) -> Module:
    """The module for any number of rows. `bind_variables` has to bind the variables of rows and strides.

    Args:
        short: a block that computes all stages, and runs instead of them if it is not shorter than the rows.

    Raises:
        CannotLower: checks cannot run before all computation, or differ between blocks; or only one of `stages` and
            `short` views memory through windows.
    """
    *stages, alone = _use_same_windows([*stages, () if short is None else (short,)], program.uses)
    modules = [m for stage in (*stages, alone) for m in modules_of(stage)]
    arguments = tuple(_common_form(b, modules) for b in program.arguments)
    shared = tuple(replace(_common_form(b, modules), space=Space.SCRATCH) for b in program.shared)
    sources = {b.name: b for b in (*arguments, *shared)}
    views = {b.name for m in modules for b in m.arguments if _is_reshaped(b, sources.get(b.name))}
    joiner = _Joiner(sources, program, frozenset(views))
    numbered, sites = _number_sites(stages)
    if short is not None and sites:
        raise CannotLower("checks run before all stages")
    kernels = []
    for name, parts in _split_into_phases(numbered):
        body = build.block(*map(joiner.run_stage, parts))
        used = program.uses.find(body).buffers
        for b in (b for b in shared if b.name in used):
            body = joiner.allocate(b, body)
        if isinstance(alone, tuple) and alone:
            body = joiner.run_short(alone[0], body)
            found = program.uses.find(body)
            if found.accessed.keys() & found.windows.keys():
                raise CannotLower("the short block reaches memory without the windows of the other blocks")
        kernels.append(Kernel(internal_name(program.name, name), body))
    written = {name for m in modules for name in m.written}
    return Module(
        program.name, arguments, (), tuple(kernels), sites,
        tuple(b.name for b in arguments if b.name in written), frozenset().union(*(m.partial for m in modules)),
    )  # fmt: skip


def has_row_loops(program: RowProgram, block: RowBlock) -> bool:
    """Whether the module of a block consists of loops over its rows, so that the block may be shorter (or longer)."""
    try:
        _Joiner({b.name: b for b in (*program.arguments, *program.shared)}, program, frozenset()).row_loops(block)
    except CannotLower:
        return False
    return True


def bind_variables(module: Module, count: int, values: Sequence[tuple[str, Expr]]) -> Module:
    """`module` with one more argument, `SIZES`, of `count` numbers, and with the variables in `values` bound.

    Each value may read `SIZES` and use the variables before it.
    """
    return replace(
        module,
        arguments=(*module.arguments, sizes_buffer(count)),
        kernels=tuple(replace(k, body=_bind_used(k.body, values, UseTable())) for k in module.kernels),
    )


def sizes_buffer(count: int) -> Buffer:
    """The argument `SIZES`."""
    return Buffer(SIZES, Type(INT64), (count,), (1,))


def _bind_used(body: Stmt, values: Sequence[tuple[str, Expr]], uses: UseTable) -> Stmt:
    used = set(uses.find(body).variables)
    for name, value in reversed(values):
        if name in used:
            body = Let(name, value, body)
            used |= {e.name for e in walk_expr(value) if isinstance(e, Var)}
    return body


def modules_of(stage: Stage) -> tuple[Module, ...]:
    """The modules that a stage is made of."""
    return (stage,) if isinstance(stage, Module) else tuple(b.module for b in stage)


def _use_same_windows(stages: Sequence[Stage], uses: UseTable) -> list[Stage]:
    """`stages` with windows on a buffer in all modules if in any: inner axes may have added them in some only."""
    names: dict[str, str] = {}
    for k in (k for stage in stages for m in modules_of(stage) for k in m.kernels):
        names |= uses.find(k.body).windows

    def add_windows(m: Module) -> Module:
        if not any(uses.find(k.body).accessed.keys() & names.keys() for k in m.kernels):
            return m
        bodies = [_view_used(_add_windows(k.body, names, uses), m.arguments, names, uses) for k in m.kernels]
        return replace(m, kernels=tuple(replace(k, body=body) for k, body in zip(m.kernels, bodies, strict=True)))

    def change(stage: Stage) -> Stage:
        if isinstance(stage, Module):
            return add_windows(stage)
        return tuple(replace(b, module=add_windows(b.module)) for b in stage)

    return [change(stage) for stage in stages] if names else list(stages)


def _add_windows(s: Stmt, names: Mapping[str, str], uses: UseTable) -> Stmt:
    """`s` with windows of these `names` added inside of its windows, where they are missing."""
    new = map_stmt(s, lambda e: e, lambda inner: _add_windows(inner, names, uses))
    if not isinstance(new, Window):
        return new
    return replace(new, body=_view_used(new.body, (new.buffer,), names, uses))


def _view_used(s: Stmt, buffers: Sequence[Buffer], names: Mapping[str, str], uses: UseTable) -> Stmt:
    """`s` with windows of the whole added for those of `buffers` that are in `names` but have no windows in `s`."""
    found = uses.find(s)
    used = found.buffers - found.windows.keys()
    for b in buffers:
        if b.name in names and b.name in used:
            s = _view_whole(b, names, s)
    return s


def _view_whole(b: Buffer, names: Mapping[str, str], body: Stmt) -> Stmt:
    """`body` with accesses to `b` through a window of the whole (nested if `names` has further windows of it)."""
    seen = replace(b, name=names[b.name])
    body = Redirect({b.name: seen}, {}).stmt(body)
    if seen.name in names:
        body = _view_whole(seen, names, body)
    return Window(seen, b, build.const(0), b.shape[0], build.const(b.shape[0]), body)


def _common_form(b: Buffer, modules: Sequence[Module]) -> Buffer:
    """`b` in the form that it has in all modules; unchanged if it has rows, or if forms differ and need windows."""
    forms = {(x.shape, x.strides): x for m in modules for x in m.arguments if x.name == b.name}
    return b if b.dynamic or len(forms) != 1 else next(iter(forms.values()))


def _is_reshaped(b: Buffer, source: Buffer | None) -> bool:
    """Whether `b`, as a module has it, differs in shape or strides from a `source` that is not dynamic."""
    return source is not None and not source.dynamic and (b.shape, b.strides) != (source.shape, source.strides)


def _number_sites(stages: Sequence[Stage]) -> tuple[list[Stage], tuple[CheckSite, ...]]:
    """The stages with check sites numbered consecutively over all stages, and these sites."""
    sites: list[CheckSite] = []
    new: list[Stage] = []
    for stage in stages:
        first, own = len(sites), modules_of(stage)[0].sites
        if any(m.sites != own for m in modules_of(stage)):
            raise CannotLower("blocks of different numbers of rows make different checks")
        sites += own
        if isinstance(stage, Module):
            new.append(_shift_sites(stage, first))
        else:
            new.append(tuple(replace(b, module=_shift_sites(b.module, first)) for b in stage))
    return new, tuple(sites)


def _shift_sites(m: Module, first: int) -> Module:
    def shift(s: Stmt) -> Stmt:
        new = map_stmt(s, lambda e: e, shift)
        return replace(new, site=new.site + first) if isinstance(new, Check) else new

    return replace(m, kernels=tuple(replace(k, body=shift(k.body)) for k in m.kernels)) if first and m.sites else m


Part = tuple[RowBlock, RowBlock | None, tuple[Kernel, ...]]
"""A block, the next larger one, and the kernels of the block that run in this phase."""
StagePart = Sequence[Part] | tuple[Module, tuple[Kernel, ...]]
"""The blocks of a stage over rows, or a module without rows and its kernels that run in this phase."""


def _split_into_phases(stages: Sequence[Stage]) -> list[tuple[str, list[StagePart]]]:
    """The phases, as (name, parts): first each check, over all rows, and then the rest, stage by stage."""
    split = [[_split_checks(m) for m in modules_of(stage)] for stage in stages]
    checked = any(m.sites for stage in stages for m in modules_of(stage))
    kernels = [k for parts in split for _, rest in parts for k in rest] if checked else []
    made = {s.buffer.name for k in kernels for s in walk_stmts(k.body) if isinstance(s, Store)}
    phases: list[tuple[str, list[StagePart]]] = []
    for stage, parts in zip(stages, split, strict=True):
        if len({len(checks) for checks, _ in parts}) > 1:
            raise CannotLower("blocks of different numbers of rows make different checks")
        for n in range(len(parts[0][0])):
            now = [(checks[n],) for checks, _ in parts]
            if any(_read_buffers(k) & made for kernels in now for k in kernels):
                raise CannotLower("a subscript that is checked is computed from rows")
            phases.append((f"check{len(phases)}", [_stage_part(stage, now)]))
    rest = [_stage_part(stage, [rest for _, rest in parts]) for stage, parts in zip(stages, split, strict=True)]
    return [*phases, ("rows", rest)]


def _stage_part(stage: Stage, kernels: Sequence[tuple[Kernel, ...]]) -> StagePart:
    """The part of `stage` with these `kernels` of each of its modules."""
    if isinstance(stage, Module):
        return stage, kernels[0]
    return list(zip(stage, (None, *stage[:-1]), kernels, strict=True))


def _split_checks(module: Module) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """The kernels with checks, and the other kernels."""
    if not module.sites:
        return (), module.kernels
    checks = tuple(k for k in module.kernels if any(isinstance(s, Check) for s in walk_stmts(k.body)))
    return checks, tuple(k for k in module.kernels if k not in checks)


def _read_buffers(k: Kernel) -> set[str]:
    return {e.buffer.name for e in used_values(k.body) if isinstance(e, Load)}


@dataclass(frozen=True, slots=True)
class _Joiner:
    """Composes loops over blocks.

    sources: the arguments and memory that stages share, by name. views: names of sources without rows whose shapes
    differ in some modules; all modules access them through windows of the same name.
    """

    sources: Mapping[str, Buffer]
    program: RowProgram
    views: frozenset[str]

    @property
    def rows(self) -> Var:
        """The number of rows."""
        return build.var(rows_variable(self.program.level))

    @property
    def block(self) -> str:
        """The variable of loops over blocks."""
        return block_variable(self.program.level)

    def allocate(self, b: Buffer, body: Stmt) -> Stmt:
        """`body` inside an allocation of `b`, memory that stages share, with strides computed from its extents."""
        lengths = tuple(build.var(rows_variable(level)) for level in self.program.levels.get(b.name, ()))
        extents = dict(zip(b.dynamic, lengths, strict=True))
        body = Allocate((b,), body, lengths)
        stride: Expr = build.const(1)
        steps: list[tuple[str, Expr]] = []
        for d in reversed(range(len(b.shape))):
            held = b.stride_variable(d)
            if held is not None:
                steps.append((held, stride))
                stride = build.var(held)
            stride = build.mul(stride, extents.get(d, b.shape[d]))
        for name, value in reversed(steps):
            body = Let(name, value, body)
        return body

    def run_stage(self, part: StagePart) -> Stmt:
        """The loops over the rows of a stage, or its body if it runs once."""
        if isinstance(part, tuple):
            module, kernels = part
            return self.body(RowBlock(0, module, 0), kernels, build.const(0))
        return self.loops_over_blocks(part)

    def run_short(self, block: RowBlock, otherwise: Stmt) -> Stmt:
        """The body of a block that may be shorter if there are no more rows, else `otherwise`."""
        body = self.body(block, block.module.kernels, build.const(0))
        return If(build.le(self.rows, block.rows), body, otherwise)

    def loops_over_blocks(self, parts: Sequence[Part]) -> Stmt:
        """The loop over blocks of the first size in `parts`, followed by loops over the remaining rows."""
        (block, above, kernels), *smaller = parts
        if block.may_be_shorter:
            body = self.body(block, kernels, build.mul(build.var(self.block), block.step))
            blocks = build.div(build.add(self.rows, block.step - 1), block.step)
            return self.parallelize(block, above, build.const(0), body, blocks)
        rest = self.loops_over_blocks(smaller) if smaller else build.NOTHING
        if not block.overlap_from:
            return build.block(self.whole_blocks(block, above, kernels), rest)
        left = build.mod(self.rows, block.rows)
        again = build.logical_and(build.ge(self.rows, block.rows), build.ge(left, block.overlap_from))
        return build.block(self.overlapping_blocks(block, above, kernels, again), If(build.logical_not(again), rest))

    def whole_blocks(self, block: RowBlock, above: RowBlock | None, kernels: Sequence[Kernel]) -> Loop:
        """The loop over whole blocks."""
        body = self.body(block, kernels, build.mul(build.var(self.block), block.rows))
        return self.parallelize(block, above, self.count_done(block, above), body)

    def overlapping_blocks(
        self, block: RowBlock, above: RowBlock | None, kernels: Sequence[Kernel], again: Expr
    ) -> Loop:
        """The loop over whole blocks. If `again`, the last is computed twice, the second time shifted to the last rows.

        If larger blocks have computed that block already, its first computation is left out.
        """
        done, time = self.count_done(block, above), again_variable(self.program.level)
        number, count = build.var(self.block), build.div(self.rows, block.rows)
        is_last = build.logical_and(again, build.eq(number, build.sub(count, 1)))
        shift = build.minimum(build.mul(build.var(time), block.rows), build.mod(self.rows, block.rows))
        body = self.body(block, kernels, build.add(build.mul(number, block.rows), shift))
        first = build.select(build.lt(number, done), build.const(1), build.const(0))
        last = build.select(is_last, build.const(2), build.const(1))
        twice = Loop(time, build.maximum(first, 0), last, body)
        begin = build.minimum(done, build.select(again, build.sub(count, 1), count))
        return self.parallelize(block, above, build.maximum(begin, 0), twice)

    def count_done(self, block: RowBlock, above: RowBlock | None) -> Expr:
        """The number of blocks of this size whose rows larger blocks have computed."""
        if above is None:
            return build.const(0)
        return build.mul(build.div(self.rows, above.rows), above.rows // block.rows)

    def parallelize(
        self, block: RowBlock, above: RowBlock | None, begin: Expr, body: Stmt, end: Expr | None = None
    ) -> Loop:
        """The loop over blocks from `begin` on; parallel unless the blocks are serial or make a single chunk."""
        is_one_chunk = above is not None and above.rows // block.rows - 1 <= block.grain
        is_serial = block.is_serial or not block.grain or is_one_chunk
        kind, grain = (LoopKind.SERIAL, 1) if is_serial else (LoopKind.PARALLEL, block.grain)
        end = build.div(self.rows, block.rows) if end is None else end
        return Loop(self.block, begin, end, body, kind, grain=grain)

    def body(self, block: RowBlock, kernels: Sequence[Kernel], start: Expr) -> Stmt:
        """The body of the block from row `start` on: `kernels` with windows on the operands."""
        memory = {b.name: replace(b, space=Space.SCRATCH) for b in block.module.temporaries}
        scalars = {name: build.var(variable) for name, variable in self.program.scalars.items()}
        reached = {b.name: self.reach(b) for b in block.module.arguments if b.name not in scalars}
        bodies = [k.body for k in kernels]
        if block.may_be_shorter:
            loops = self.row_loops(block)
            end = build.minimum(build.sub(self.rows, start), block.step)
            bodies = [end_row_loops(s, loops, self.sources, start, self.rows, end, reached) for s in bodies]
            reached |= {name: self.sources[name] for name in loops.arguments}
        redirect = Redirect({**memory, **reached}, scalars, self.program.uses)
        body = build.block(*map(redirect.stmt, bodies))
        if block.grain:
            body = _run_in_one_thread(body, self.program.uses)
        used = self.program.uses.find(body).buffers
        body = build.allocate([b for b in memory.values() if b.name in used], body)
        for name, buffer in reached.items():
            source = self.sources[name]
            if buffer.name in used and buffer is not source:
                d = self.dimension(source)
                if d is None:
                    whole = source.shape[0]
                    body = Window(buffer, source, build.const(0), whole, build.const(whole), body)
                else:
                    body = self.window(buffer, source, start, block.rows, body, d)
        return _bind_used(body, [(first_row_variable(self.program.level), start)], self.program.uses)

    def window(self, buffer: Buffer, source: Buffer, start: Expr, rows: int, body: Stmt, dimension: int) -> Window:
        """The window of `source` with the elements that `rows` rows from `start` on use."""
        step, reach = self.program.windows.get(source.name, (1, 1))
        first, length = build.mul(start, step), build.add(build.mul(build.sub(self.rows, 1), step), reach)
        return Window(buffer, source, first, step * (rows - 1) + reach, length, body, dimension, step - 1)

    def row_loops(self, block: RowBlock) -> RowLoops:
        """The loops over the rows of a block. Raises CannotLower if its code is not such loops."""
        places = {name: self.dimension(source) for name, source in self.sources.items()}
        found = find_row_loops(
            block.module, self.sources, {n: d for n, d in places.items() if d is not None}, block.rows
        )
        if block.step > block.rows and found.dimensions.keys() > found.arguments:
            raise CannotLower("memory for rows has no room for more of them")
        if block.step > block.rows and self.chooses_by_first_row(block.module):
            raise CannotLower("the code is for as many rows behind the first one as the block has")
        return found

    def chooses_by_first_row(self, module: Module) -> bool:
        """Whether a condition depends on the first row of the block, as those of masks on whole blocks do."""
        first = {name for name, held in self.program.scalars.items() if held == first_row_variable(self.program.level)}
        conditions = (s.condition for k in module.kernels for s in walk_stmts(k.body) if isinstance(s, If))
        return any(isinstance(e, Load) and e.buffer.name in first for c in conditions for e in walk_expr(c))

    def dimension(self, source: Buffer) -> int | None:
        """The dimension of a buffer along which the rows of this level lie, or None."""
        levels = self.program.levels.get(source.name, ())
        return next((d for d, level in zip(source.dynamic, levels, strict=True) if level == self.program.level), None)

    def reach(self, b: Buffer) -> Buffer:
        """The buffer through which a block accesses an argument of its module: the source itself, or a window of it."""
        source = self.sources[b.name]
        if b.name not in self.views and self.dimension(source) is None:
            return source
        name = internal_name(b.name, "rows", *[self.program.level] * bool(self.program.level))
        return replace(b, name=name, space=source.space)


def _run_in_one_thread(s: Stmt, uses: UseTable) -> Stmt:
    """`s` with parallel loops made serial. Packing that each thread would do once is done once before the loop."""
    if has_body(s) and not uses.find(s).has_parallel_loops:
        return s
    if not isinstance(s, Loop) or s.kind is not LoopKind.PARALLEL:
        return map_stmt(s, lambda e: e, lambda inner: _run_in_one_thread(inner, uses))
    filled, rest = hoist_packing(s)
    body: Stmt = replace(rest, kind=LoopKind.SERIAL, grain=1)
    for buffer, fill in reversed(filled):
        body = Allocate((buffer,), build.block(fill, body))
    return body
