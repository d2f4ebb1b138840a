"""A module of the loop program as text for a GPU: one function per kernel, and how to launch each.

Kernels without a launch run in a single thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ...core.errors import CannotLower
from ...loop_ir import nodes as ir
from ...loop_ir.intervals import Interval
from ...loop_ir.intrinsics import INTRINSICS, REGISTER_MOVES, is_asynchronous, is_collective
from ...loop_ir.passes.lower_warp_ops import scalarize_async_copies
from ...loop_ir.rewrite import allocated_buffers, stride_variables, used_values, walk_stmts
from ...loop_ir.show import LineNumbers
from ..c.c_printer import collect_words, needed_includes, used_helpers
from ..c.dialect import CDialect
from ..c.expressions import PrintScope, array_shape
from ..c.statements import print_statement
from ..c.text_lines import indent_lines, mark_lines

SINGLE = ir.Launch((1, 1, 1), (1, 1, 1))
_SHARED_ALIGNMENT = 16
_BOX_ALIGNMENT = 1024
"""Alignment in bytes of buffers that TMA copies or `wgmma` descriptors reach: every swizzle pattern starts there."""


@dataclass(frozen=True, slots=True)
class GpuKernelSource:
    """One launch.

    Attributes:
        name: the name of the function in the text.
        launch: the grid and the block.
        buffers: its parameters, as positions in the module's arguments followed by its temporaries.
        status: whether the module's status, two int64 that are initially 0, is the next parameter. A failed check
            stores its site + 1 and the value that it found.
        parameters: the parameters of the module that it takes next, as int64. values: their values, in a call's code.
        shared: bytes of shared memory that its text declares. dynamic: bytes that the launch must provide.
        arrays, sizes, identifiers: the shared buffers in order, their bytes, and their names in the text.
        local: bytes of the private buffers of each thread.
        maps: the tensor maps that are its last parameters, 128 bytes each.
        mapped: the position of the buffer of each map, counted as in `buffers`.
    """

    name: str
    launch: ir.Launch
    buffers: tuple[int, ...]
    status: bool
    shared: int
    dynamic: int
    arrays: tuple[ir.Buffer, ...]
    sizes: tuple[int, ...]
    identifiers: tuple[str, ...]
    local: int
    maps: tuple[ir.TensorMap, ...] = ()
    mapped: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    values: tuple[int, ...] = ()

    def bind_parameters(self, values: Mapping[str, int]) -> GpuKernelSource:
        """The launch of a call, with these values of the module's parameters."""
        return replace(
            self, launch=self.launch.bind_parameters(values), values=tuple(values[p] for p in self.parameters)
        )


@dataclass(frozen=True, slots=True)
class GpuCode:
    """The text of a module and its launches in order. aligned: whether it relies on 16-byte aligned arguments."""

    source: str
    kernels: tuple[GpuKernelSource, ...]
    aligned: bool

    def bind_parameters(self, values: Mapping[str, int]) -> GpuCode:
        """The code of a call: its grids, and the values of its parameters, follow from those of the module."""
        return replace(self, kernels=tuple(k.bind_parameters(values) for k in self.kernels))


@dataclass(frozen=True, slots=True)
class GpuDialect:
    """The spellings of a kernel language beyond those of C.

    Attributes:
        c: the spellings that it shares with C.
        kernel: the format of the line before the parameters, from `name`, `cluster` and `bounds`: the threads of a
            block, followed by the minimum of resident blocks if that is more than one.
        single: the same for a kernel of one thread.
        pointer: the address space of arguments, followed by a blank.
        variables: the names and values of the variables of a launch, in the order of `ir.BLOCK` and `ir.THREAD`.
        provided: the declaration of dynamic shared memory, formatted with its alignment; empty: unsupported.
        static: bytes of shared memory that the text itself may declare.
        map: the type of parameters that are tensor maps; empty: unsupported.
        cluster: the attribute of a kernel with clusters, formatted with their size in blocks; empty: unsupported.
    """

    c: CDialect
    kernel: str
    single: str
    pointer: str
    variables: tuple[tuple[str, str], ...]
    provided: str
    static: int
    map: str = ""
    cluster: str = ""


def emit_gpu_source(
    module: ir.Module,
    dialect: GpuDialect,
    *,
    header: str = "",
    aligned: bool = True,
    marks: LineNumbers | None = None,
) -> GpuCode:
    """The text of `module` and its launches.

    Args:
        module: a verified module. Vectors may only copy memory: others would print as loops.
        header: the content of the opening comment: the def, its sizes, the options.
        aligned: whether every argument starts at a multiple of 16 bytes, so that vectors may be loaded from it.
        marks: if given, mark each line with its line in the loop text (`split_marks`); the result does not compile.

    Raises:
        CannotLower: the language cannot spell a statement or an expression.
    """
    relying: set[str] = set()
    kernels = module.kernels if aligned else map(scalarize_async_copies, module.kernels)
    printed = [_Printer(module, dialect, k, position, aligned, relying, marks) for position, k in enumerate(kernels)]
    names: list[str] = []
    for p in printed:
        names.append(p.name(names))
    bodies = ["\n".join(p.lines(name)) for p, name in zip(printed, names, strict=True)]
    words = collect_words(bodies)
    helpers = used_helpers(words, dialect.c)
    heads = needed_includes(words | collect_words(helpers), dialect.c)
    parts = [
        "\n".join(_print_header_comment(module, header)),
        *(["\n".join(heads)] if heads else []),
        *helpers,
        *bodies,
    ]
    launches = tuple(p.kernel(name) for p, name in zip(printed, names, strict=True))
    return GpuCode("\n\n".join(parts) + "\n", launches, bool(relying))


def _print_header_comment(module: ir.Module, header: str) -> Iterator[str]:
    yield f"/* {module.name}"
    for line in header.strip("\n").splitlines():
        yield f" * {line}".rstrip().replace("*/", "* /").replace("/*", "/ *")
    for number, site in enumerate(module.sites, 1):
        extent = f"{site.extent} elements from {site.origin} on"
        yield f" * check {number}: dimension {site.dimension} of {site.tensor}, {extent}"
    yield " */"


def shared_buffers(body: ir.Stmt) -> list[ir.Buffer]:
    """The buffers in shared memory that are allocated in `body`, in order, barriers last."""
    allocated = allocated_buffers(body)
    return [b for space in (ir.Space.SHARED, ir.Space.BARRIER) for b in allocated if b.space is space]


def shared_alignment(body: ir.Stmt) -> int:
    """The alignment in bytes of the shared buffers of `body`."""
    asynchronous = any(isinstance(s, ir.Invoke) and is_asynchronous(s) for s in walk_stmts(body))
    return _BOX_ALIGNMENT if asynchronous else _SHARED_ALIGNMENT


def shared_bytes(body: ir.Stmt) -> dict[str, int]:
    """The bytes of each shared buffer that is allocated in `body`, in order, padded to the alignment."""
    alignment = shared_alignment(body)
    units = {ir.Space.SHARED: alignment, ir.Space.BARRIER: _SHARED_ALIGNMENT}
    return {b.name: -(-b.bytes // units[b.space]) * units[b.space] for b in shared_buffers(body)}


@dataclass(frozen=True)
class _Printer:
    """Prints one kernel. Names of buffers whose alignment the text relies on are added to `relying`."""

    module: ir.Module
    dialect: GpuDialect
    source: ir.Kernel
    position: int
    aligned: bool
    relying: set[str]
    marks: LineNumbers | None = None

    @property
    def launch(self) -> ir.Launch:
        return self.source.launch or SINGLE

    @property
    def status(self) -> bool:
        """Whether the kernel takes the status: it contains checks, or must not run after a failed one."""
        return bool(self.module.sites) and (self.position > 0 or self.checks)

    @cached_property
    def checks(self) -> bool:
        return any(isinstance(s, ir.Check) for s in walk_stmts(self.source.body))

    def name(self, taken: list[str]) -> str:
        names = {n: n for n in (*self.dialect.c.library, *taken)}
        return PrintScope(self.dialect.c, names).fresh(self.source.name)

    @cached_property
    def values(self) -> list[ir.Var | ir.Load]:
        """The variables and the loads in the kernel."""
        return list(used_values(self.source.body))

    @cached_property
    def buffers(self) -> list[int]:
        """The positions of the buffers that the kernel uses; not of those it reaches by tensor maps alone."""
        used = {e.buffer.name for e in self.values if isinstance(e, ir.Load)}
        for s in walk_stmts(self.source.body):
            match s:
                case ir.Store(buffer):
                    used.add(buffer.name)
                case ir.Invoke(_, operands):
                    known = INTRINSICS.get(s.name)
                    mapped = None if known is None else known.mapped
                    used.update(b.name for n, (b, _) in enumerate(operands) if n != mapped)
        everything = (*self.module.arguments, *self.module.temporaries)
        return [n for n, b in enumerate(everything) if b.name in used]

    @cached_property
    def parameters(self) -> list[ir.Parameter]:
        """The parameters of the module that the kernel uses."""
        used = {e.name for e in self.values if isinstance(e, ir.Var)} | stride_variables(self.source.body, self.values)
        return [p for p in self.module.parameters if p.name in used]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The padded bytes of each shared buffer."""
        return shared_bytes(self.source.body)

    @cached_property
    def dynamic_offsets(self) -> dict[str, int]:
        """The offsets of the shared buffers in dynamic shared memory; empty if the text may declare them."""
        sizes = self.sizes
        if sum(sizes.values()) <= self.dialect.static and shared_alignment(self.source.body) == _SHARED_ALIGNMENT:
            return {}
        if not self.dialect.provided:
            raise CannotLower(f"{self.source.name} needs {sum(sizes.values())} bytes of shared memory")
        offsets, total = {}, 0
        for name, size in sizes.items():
            offsets[name], total = total, total + size
        return offsets

    def kernel(self, name: str) -> GpuKernelSource:
        total = sum(self.sizes.values())
        dynamic = total if self.dynamic_offsets else 0
        arrays = tuple(shared_buffers(self.source.body))
        scope, _ = self._parameters(name)
        everything = (*self.module.arguments, *self.module.temporaries)
        return GpuKernelSource(
            name,
            self.launch,
            tuple(self.buffers),
            self.status,
            total - dynamic,
            dynamic,
            arrays,
            tuple(self.sizes.values()),
            tuple(scope.fresh(b.name) for b in arrays),
            sum(b.bytes for b in allocated_buffers(self.source.body) if b not in arrays),
            self.source.maps,
            tuple(everything.index(m.buffer) for m in self.source.maps),
            tuple(p.name for p in self.parameters),
        )

    def lines(self, name: str) -> Iterator[str]:
        """The lines of the function, marked if marks were asked for."""
        lines = self._lines(name)
        return lines if self.marks is None else mark_lines(lines, self.marks.kernels[self.position])

    def _lines(self, name: str) -> Iterator[str]:
        if self.checks and any(isinstance(s, ir.Invoke) and is_collective(s) for s in walk_stmts(self.source.body)):
            raise CannotLower(f"{self.source.name} checks and meets at barriers")
        scope, parameters = self._parameters(name)
        threads = self.launch.block[0] * self.launch.block[1] * self.launch.block[2]
        yield self._print_header(threads, name)
        yield from indent_lines(f"{p}," for p in parameters[:-1])
        yield from indent_lines(parameters[-1:])
        yield ") {"
        if self.status and self.position > 0:
            yield f"    if ({scope.names['%status']}[0] != 0) return;"
        for p in (p for p in self.parameters if p.most is not None):
            given = scope.names[f"%{p.name}"]
            identifier, scope = scope.bind_integer(p.name, Interval(0, p.most), f"n_{given}")
            yield f"    const {self.dialect.c.small} {identifier} = {given};"
        used = {e.name for e in self.values if isinstance(e, ir.Var)}
        for (variable, extent), (wanted, value) in zip(self.launch.ranges(), self.dialect.variables, strict=True):
            if variable in used:
                identifier, scope = scope.bind_integer(variable, Interval(0, extent - 1), wanted)
                yield f"    const {self.dialect.c.small} {identifier} = {value};"
        if dynamic := self.dynamic_offsets:
            yield f"    {self.dialect.provided.format(shared_alignment(self.source.body))}"
            scope = scope.with_values(dynamic=dynamic)
        scope = scope.with_values(cached=frozenset(self.source.readonly))
        yield from indent_lines(print_statement(self.source.body, scope))
        yield "}"

    def _print_header(self, threads: int, name: str) -> str:
        moves = any(isinstance(s, ir.Invoke) and s.name in REGISTER_MOVES for s in walk_stmts(self.source.body))
        blocks = self.source.min_blocks_per_sm
        bounds = f"{threads}, {blocks}" if blocks > 1 or moves else str(threads)
        cluster = self.launch.cluster
        if cluster > 1 and not self.dialect.cluster:
            raise CannotLower(f"{self.source.name} has clusters, and {self.dialect.c.name} has none")
        word = self.dialect.cluster.format(cluster) if cluster > 1 else ""
        header = self.dialect.kernel if threads > 1 else self.dialect.single
        return header.format(bounds=bounds, name=name, cluster=word)

    def _parameters(self, name: str) -> tuple[PrintScope, list[str]]:
        everything = (*self.module.arguments, *self.module.temporaries)
        known = {f"%{name}": name}
        scope = PrintScope(self.dialect.c, known, aligned=self.aligned, relying=self.relying, marks=self.marks)
        written = {s.buffer.name for s in walk_stmts(self.source.body) if isinstance(s, ir.Store)}
        parameters = []
        for position in self.buffers:
            buffer = everything[position]
            identifier, scope = scope.bind(f"@{buffer.name}")
            parameters.append(self._parameter(buffer, identifier, constant=buffer.name not in written))
        if self.status:
            identifier, scope = scope.bind("%status")
            wide = self.dialect.c.types["int64"]
            parameters.append(f"{self.dialect.pointer}{wide} *{self.dialect.c.restrict} {identifier}")
        for p in self.parameters:
            identifier, scope = scope.bind(p.name if p.most is None else f"%{p.name}", p.name)
            parameters.append(f"const {self.dialect.c.types['int64']} {identifier}")
        if self.source.maps and not self.dialect.map:
            raise CannotLower(f"{self.source.name} copies boxes, for which {self.dialect.c.name} has no tensor maps")
        for number in range(len(self.source.maps)):
            identifier, scope = scope.bind(f"%map {number}")
            parameters.append(f"{self.dialect.map} {identifier}")
        return scope, parameters

    def _parameter(self, buffer: ir.Buffer, identifier: str, *, constant: bool) -> str:
        spelling = f"{self.dialect.pointer}{'const ' if constant else ''}{self.dialect.c.type(buffer.type.dtype)}"
        pointer = f"*{self.dialect.c.restrict} {identifier}"
        shape = array_shape(buffer) or ()
        inner = "".join(f"[{n}]" for n in shape[1:])
        return f"{spelling} ({pointer}){inner}" if inner else f"{spelling} {pointer}"
