"""Pictures of tile programs: which thread holds each element of an instruction, and the stages of pipelines over time.

The grids of elements and threads follow figures 3 to 6 of "Graphene: An IR for Optimized Tensor Computations on GPUs"
(ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..loop_ir import nodes as ir
from ..loop_ir.atoms import ATOMS, Atom, AtomOperand
from ..tiles import specs
from ..tiles.builder.tile_views import MemoryView
from ..tiles.check.shared_accesses import evaluate_index
from ..tiles.tensors import ThreadTensor
from .kernel_report import Grid, Section

MAX_ROWS, MAX_COLUMNS = 16, 36
"""Most rows and columns of a picture; larger matrices are cut off."""
MAX_STEPS = 12
"""Most steps of a loop that a picture shows."""


# --- instructions ------------------------------------------------------------------------------------------------


def draw_atoms(names: Iterable[str]) -> Iterator[Section]:
    """A section for each instruction of several threads: the thread that holds, or addresses, each element."""
    for name in dict.fromkeys(names):
        atom = ATOMS.get(name)
        if atom is not None and atom.group > 1:
            operands = zip(_operand_names(atom), atom.operands, strict=True)
            lines = [_describe_operand(role, o) for role, o in operands]
            grids = [
                _operand_grid(role, o, atom)
                for role, o in zip(_operand_names(atom), atom.operands, strict=True)
                if o.layout
            ]
            yield Section(f"threads of {name}", tuple(lines), tuple(grids))


def _operand_names(atom: Atom) -> tuple[str, ...]:
    return ("sums", "left factor", "right factor") if len(atom.operands) == 3 else ("destination", "source")


def _describe_operand(role: str, o: AtomOperand) -> str:
    held = f"{o.values} elements of each thread" if o.layout is not None else "found by a descriptor"
    return f"{role}: {o.rows} x {o.columns} {o.dtype} in {o.space.value} memory, {held}"


def _operand_grid(role: str, o: AtomOperand, atom: Atom) -> Grid:
    rows, columns = min(o.rows, MAX_ROWS), min(o.columns, MAX_COLUMNS)
    cells = [[-1] * columns for _ in range(rows)]
    for thread in range(atom.group):
        for value in range(o.values):
            row, column = o.place(thread, value)
            if row < rows and column < columns and cells[row][column] < 0:
                cells[row][column] = thread
    verb = "holds" if o.space is ir.Space.REGISTER else "points at"
    cut = f", the first {rows} x {columns}" if (rows, columns) != (o.rows, o.columns) else ""
    return Grid(f"{role}: the thread that {verb} each element{cut}", tuple(map(tuple, cells)), atom.group)


# --- groups of threads -------------------------------------------------------------------------------------------


def draw_thread_groups(program: specs.Program) -> Iterator[Section]:
    """The section on how the program divides the threads of a block: the first thread of each group."""
    found = {str(s.threads): s.threads for s in _list_nodes(program.body) if isinstance(s, specs.Spec)}
    grids = tuple(
        Grid(f"#{name}: the first thread of each group", _group_cells(threads), program.threads)
        for name, threads in found.items()
        if len(threads.parts) > 1 and 1 < threads.count <= MAX_ROWS * MAX_COLUMNS
    )
    if grids:
        yield Section("groups of threads", (), grids)


def _group_cells(threads: ThreadTensor) -> tuple[tuple[int, ...], ...]:
    """The first thread of each tile of the outermost level, in rows if the level has several dimensions."""
    layout = threads.levels[0]
    first = evaluate_index(threads.offset, {})
    offsets = [first + offset for offset in layout.offsets()]
    rows = layout.modes[0].size if len(layout.modes) > 1 else 1
    return tuple(tuple(offsets[row::rows]) for row in range(rows))


def _list_nodes(body: Sequence[specs.Node]) -> Iterator[specs.Node]:
    """The nodes of a program, outer ones first."""
    for node in body:
        yield node
        if isinstance(node, (specs.Spec, *specs.BODIES)):
            yield from _list_nodes(node.body)


# --- pipelines ---------------------------------------------------------------------------------------------------


Order = tuple[int, int, int]
"""The order of a step: 0 before the first wait for copies, else 1; its number; its part, if it fills repeatedly."""


@dataclass(frozen=True, slots=True)
class _Event:
    """An access ("fill" or "use") of some threads to a stage of a shared buffer in a step."""

    threads: str
    verb: str
    buffer: str
    stage: int
    order: Order


@dataclass
class _Walk:
    """Traverses the steps of a block as its first thread executes them.

    A step begins at each wait for copies; in a role, with each iteration of its innermost loop.

    Attributes:
        staged: the buffers with stages, and the number of stages.
        events: the accesses so far.
        threads: the threads of the current role; "" outside of roles.
        order: the order of the current step.
        steps: the number of waits so far.
    """

    staged: dict[str, int]
    events: list[_Event] = field(default_factory=list)
    threads: str = ""
    order: Order = (0, 0, 0)
    steps: int = 0

    def run(self, body: Sequence[specs.Node], values: dict[str, Any]) -> None:
        """Traverse nodes. values: the values of variables; missing ones are 0."""
        for node in body:
            match node:
                case specs.Loop(var, stop, inner):
                    last = int(evaluate_index(stop, values)) if isinstance(stop, ir.Expr) else stop
                    self._run_loop(var, last, inner, values)
                case specs.When(condition, inner):
                    if evaluate_index(condition, values):
                        self.run(inner, values)
                case specs.Let(names, inner):
                    known = dict(values)
                    for name, value in names:
                        known[name] = evaluate_index(value, known)
                    self.run(inner, known)
                case specs.Role(threads, _, inner):
                    self.threads, self.order = f"#{threads}", (0, 0, 0)
                    self.run(inner, values)
                    self.threads = ""
                case specs.One(_, inner) | specs.Named(body=inner):
                    self.run(inner, values)
                case specs.Commit() if self.order[0] == 0:
                    self.order = (0, self.order[1] + 1, 0)
                case specs.WaitCopies():
                    self.order = (1, self.steps, 0)
                    self.steps += 1
                case specs.Spec():
                    self._note(node, values)

    def _run_loop(self, var: str, stop: int, inner: Sequence[specs.Node], values: dict[str, Any]) -> None:
        """The first steps of a loop. In a role, a loop around others, such as one over tiles, has one iteration."""
        is_outer = self.threads and any(isinstance(n, specs.Loop) for n in _list_nodes(inner))
        for i in range(min(stop, 1 if is_outer else MAX_STEPS)):
            if self.steps > MAX_STEPS:
                return
            if self.threads and not is_outer:
                self.order = (1, i, 0)
            self.run(inner, {**values, var: i})

    def _note(self, s: specs.Spec, values: dict[str, Any]) -> None:
        for verb, operands in (("fill", s.outputs), ("use", s.inputs)):
            for o in operands:
                if isinstance(o, MemoryView) and o.buffer.name in self.staged:
                    stage = int(evaluate_index(o.tensor.coordinates[0], values))
                    self._add(verb, o.buffer.name, stage)

    def _add(self, verb: str, buffer: str, stage: int) -> None:
        """Record an access, in a new part of the step if an earlier access went to another stage."""
        own = {e.order: e.stage for e in self.events if (e.threads, e.verb, e.buffer) == (self.threads, verb, buffer)}
        while own.get(self.order, stage) != stage:
            phase, number, part = self.order
            self.order = phase, number, part + 1
        self.events.append(_Event(self.threads, verb, buffer, stage, self.order))


def draw_pipeline(program: specs.Program) -> Iterator[Section]:
    """The section on the stages of shared memory that each step fills and uses; none if no buffer has stages."""
    walk = _Walk(_find_staged(program.body))
    walk.run(program.body, {})
    if not walk.events:
        return
    steps = sorted({e.order for e in walk.events})
    rows: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for threads, verb, buffer in dict.fromkeys((e.threads, e.verb, e.buffer) for e in walk.events):
        own = {e.order: e.stage for e in walk.events if (e.threads, e.verb, e.buffer) == (threads, verb, buffer)}
        key = f"{f'{threads} ' if threads else ''}{verb}", tuple(own.get(step, -1) for step in steps)
        rows.setdefault(key, []).append(buffer)
    grid = Grid(
        "the stage that each step fills or uses",
        tuple(cells for _, cells in rows),
        max(walk.staged.values()),
        tuple(f"{label} {', '.join(buffers)}" for (label, _), buffers in rows.items()),
        tuple("before" if phase == 0 else "" if part else str(n) for phase, n, part in steps),
    )
    stages = ", ".join(f"{name}: {depth}" for name, depth in walk.staged.items())
    more = f"; the first {MAX_STEPS} steps of each loop" if any(n >= MAX_STEPS - 1 for _, n, _ in steps) else ""
    yield Section("pipeline", (f"stages of shared memory: {stages}{more}",), (grid,))


def _find_staged(body: Sequence[specs.Node]) -> dict[str, int]:
    """The number of stages of each shared buffer that has several."""
    tiles = (n.tile for n in _list_nodes(body) if isinstance(n, specs.Allocate))
    buffers = (tile.buffer for tile in tiles if isinstance(tile, MemoryView) and tile.buffer.space is ir.Space.SHARED)
    return {b.name: b.shape[0] for b in buffers if len(b.shape) > 2 and b.shape[0] > 1}
