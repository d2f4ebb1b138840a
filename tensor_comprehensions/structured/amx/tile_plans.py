"""Register tiles of matrix tiles: one AMX instruction multiplies two of them and adds to a third.

The rows of a register tile run along one iterator of the broadcast operand, its columns along the lanes' iterator, and
the sum along the matrix tiles' third dimension. Panels are padded with zeros to whole matrix tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ...core.dtypes import FLOAT32, UINT32, DType
from ...core.errors import CannotLower
from ...loop_ir.intrinsics import FRAGMENT_DOT_BFLOAT16
from ...loop_ir.nodes import Call, Expr, Load
from ...machine import AMX_CONFIGURE_CYCLES, AMX_ROW_CYCLES, AMX_STORE_CYCLES, AMX_TILE_CYCLES
from ...target import CpuTarget
from ...thresholds import AMX_PACKED_ROWS, AMX_THREAD_PAIRS, BALANCED_CHUNKS, FEW_CHUNKS
from ..analysis.access_strides import access_strides, iterator_coefficients
from ..analysis.contraction_info import ContractionInfo
from ..lower.tile import num_tiles
from ..op import Iterator, StructuredOp, variable_names
from ..plan import PackStep, Plan, Side, TileLoop


@dataclass(frozen=True, slots=True)
class TileInstruction:
    """An instruction that multiplies matrix tiles.

    Attributes:
        name: the intrinsic.
        rows, columns: of a matrix tile of sums.
        steps: steps of the reduction in a matrix tile of a factor.
        factor, total: the types of the factors' elements and of the sums.
        cycles: between the starts of two independent instructions.
        registers: tile registers of the processor.
    """

    name: str
    rows: int
    columns: int
    steps: int
    factor: DType
    total: DType
    cycles: int
    registers: int


INSTRUCTIONS = {i.name: i for i in (TileInstruction(FRAGMENT_DOT_BFLOAT16, 16, 16, 16, UINT32, FLOAT32, 16, 8),)}


def tile_instructions(op: StructuredOp, target: CpuTarget) -> tuple[TileInstruction, ...]:
    """The matrix instructions of `target` for the factors of `op`."""
    return (INSTRUCTIONS[FRAGMENT_DOT_BFLOAT16],) if op.pairs and target.has_amx_bf16 else ()


@dataclass(frozen=True, slots=True)
class TileLayout:
    """How a register tile is divided into matrix tiles.

    Attributes:
        rows, columns, along: the iterators of rows, columns and the sum.
        broadcast_operand: the factor that has the rows.
        sizes: rows and columns of the register tile.
    """

    instruction: TileInstruction
    rows: str
    columns: str
    along: str
    broadcast_operand: Side
    sizes: tuple[int, int]

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns of the matrix tiles of sums in a register tile."""
        return num_tiles(self.sizes[0], self.instruction.rows), num_tiles(self.sizes[1], self.instruction.columns)

    @property
    def unit(self) -> Mapping[str, int]:
        """Points of a matrix tile along each of the three iterators."""
        i = self.instruction
        return {self.rows: i.rows, self.columns: i.columns, self.along: i.steps}

    def padded_size(self, name: str, size: int) -> int:
        """`size` points of an iterator, rounded up to whole matrix tiles."""
        unit = self.unit.get(name, 1)
        return num_tiles(size, unit) * unit


def tile_layout(op: StructuredOp, plan: Plan) -> TileLayout:
    """How `plan.instruction` computes the register tiles of a normalized op.

    Raises CannotLower if it cannot.
    """
    instruction = INSTRUCTIONS[plan.instruction]
    rows = [i.name for i in op.parallel if plan.tile(i.name) > 1 and i.name != plan.vector]
    still = [side for side in Side if plan.vector not in variable_names(op.factors[side.value])]
    if len(still) != 1 or len(rows) != 1 or rows[0] not in variable_names(op.factors[still[0].value]):
        raise CannotLower(
            "matrix_instruction: a register tile needs rows along one iterator of the factor without the lanes"
        )
    if rows[0] in variable_names(op.factors[1 - still[0].value]):
        raise CannotLower("matrix_instruction: both factors depend on the iterator of the rows")
    if not op.pairs or op.pairs not in plan.reductions:
        raise CannotLower("matrix_instruction: there is no sum over pairs")
    if any(level.iterator in plan.reductions for level in plan.levels):
        raise CannotLower("matrix_instruction: a register tile computes whole sums; leave reductions untiled")
    if (access_strides(op.output, [plan.vector]) or {}).get(plan.vector) != 1 or plan.lanes != instruction.columns:
        raise CannotLower(
            f"matrix_instruction: the output is stored in vectors of {instruction.columns} along its rows"
        )
    found = TileLayout(
        instruction, rows[0], plan.vector, op.pairs, still[0], (plan.tile(rows[0]), plan.tile(plan.vector))
    )
    down, beside = found.counts
    if down * beside + down + beside > instruction.registers:
        raise CannotLower(
            f"matrix_instruction: {down} x {beside} sums and their factors exceed {instruction.registers} registers"
        )
    packed = {step.side for step in plan.packs}
    moving = Side(1 - found.broadcast_operand.value)
    if moving not in packed:
        raise CannotLower(f"matrix_instruction: the {moving.name.lower()} factor is not packed")
    if found.broadcast_operand not in packed and find_in_place_broadcast(op, found) is None:
        raise CannotLower(
            f"matrix_instruction: the {found.broadcast_operand.name.lower()} factor is not packed, nor stored in tiles"
        )
    return found


def find_in_place_broadcast(op: StructuredOp, found: TileLayout) -> tuple[Load, int] | None:
    """The load of the broadcast operand's first element of a pair, and the dimension along which its rows continue.

    None unless the operand's memory consists of whole matrix tiles with contiguous rows.
    """
    if any(op.extent(name) % found.unit[name] for name in (found.rows, found.along)):
        return None
    access = _find_pair_head(op.factors[found.broadcast_operand.value])
    if access is None or access.buffer.strides[-1] != 1:
        return None
    moved = [iterator_coefficients(index, (found.rows, found.along)) for index in access.indices]
    rows = [d for d, m in enumerate(moved) if m is not None and m.get(found.rows) == 1]
    others = [m for d, m in enumerate(moved) if d not in rows]
    if moved[-1] != {found.along: 2} or len(rows) != 1 or any(m is None or found.rows in m for m in others):
        return None
    return (access, rows[0]) if all(m == {} for m in others[:-1]) and moved[rows[0]] == {found.rows: 1} else None


def _find_pair_head(factor: Expr) -> Load | None:
    """The first of the two elements of a pair that always has both."""
    match factor:
        case Call(_, (Load(mask=None) as low, Load(mask=None))):
            return low
    return None


# --- plans -------------------------------------------------------------------------------------------------------


def matrix_tile_plans(known: ContractionInfo, target: CpuTarget, *, parallel: bool) -> tuple[Plan, ...]:
    """The plans with matrix tiles worth comparing with others; empty if no instruction applies."""
    found = []
    for instruction in tile_instructions(known.op, target):
        rows = [i for i in known.exclusive_iterators(known.broadcast_operand) if i.name != known.vector]
        if rows and known.vector not in known.broadcast_operand.iterators:
            maker = _MatrixTilePlanner(known, target, instruction, max(rows, key=lambda i: i.extent), parallel)
            found += maker.plans()
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _MatrixTilePlanner:
    """Plans that pack blocks of columns, which stay in L2 while all rows pass; each thread packs the blocks it uses."""

    facts: ContractionInfo
    target: CpuTarget
    instruction: TileInstruction
    rows: Iterator
    parallel: bool

    def plans(self) -> list[Plan]:
        for packed in (False, True):
            plan = self._plan(packed)
            try:
                tile_layout(self.facts.op, plan)
            except CannotLower:
                continue
            return [plan]
        return []

    def _plan(self, packed: bool) -> Plan:
        """A plan; packed: whether the broadcast operand is packed, too."""
        known, op = self.facts, self.facts.op
        height, width = self._tile()
        single = [TileLoop(i.name) for i in op.parallel if i.name not in (self.rows.name, known.vector)]
        shared = [level for level in single if level.iterator in {i.name for i in known.batch}]
        inner = [level for level in single if level not in shared]
        count = prod(op.extent(level.iterator) for level in shared)
        columns = self._columns(count, width)
        outer = [*shared, TileLoop(known.vector, columns)] if columns < op.extent(known.vector) else shared
        count *= num_tiles(op.extent(known.vector), columns)
        extent = self.rows.extent
        parts = min(extent // AMX_PACKED_ROWS, FEW_CHUNKS // count) if self.parallel else 1
        if parts > 1:
            outer = [*outer, TileLoop(self.rows.name, num_tiles(num_tiles(extent, parts), height) * height)]
        depth = len(outer)
        packs = [PackStep(Side(1 - known.broadcast_operand.side.value), depth)]
        if packed:
            packs.insert(0, PackStep(known.broadcast_operand.side, 0 if parts < 2 else depth))
        levels = (*outer, *inner, TileLoop(self.rows.name, height), TileLoop(known.vector, width))
        collapsed, grain = self._share_outer_loops(outer)
        return Plan(
            known.vector,
            self.instruction.columns,
            levels,
            self._reductions(),
            packs=tuple(packs),
            parallel_depth=collapsed,
            grain=grain,
            instruction=self.instruction.name,
        )

    def _share_outer_loops(self, outer: list[TileLoop]) -> tuple[int, int]:
        """How many of the outermost levels the threads share, and the grain."""
        op = self.facts.op
        count = prod(num_tiles(op.extent(level.iterator), level.size) for level in outer)
        if not self.parallel or count < 2 or op.multiplications < 2 * AMX_THREAD_PAIRS:
            return 0, 1
        return len(outer), max(1, AMX_THREAD_PAIRS * count // op.multiplications)

    def _tile(self) -> tuple[int, int]:
        """Rows and columns of a register tile: two by two matrix tiles, or up to three in a row or column."""
        i, extent = self.instruction, self.facts.extent(self.facts.vector)
        if self.rows.extent <= i.rows:
            return i.rows, i.columns * min(3, num_tiles(extent, i.columns))
        if extent <= i.columns:
            return i.rows * min(3, num_tiles(self.rows.extent, i.rows)), i.columns
        return 2 * i.rows, 2 * i.columns

    def _reductions(self) -> tuple[str, ...]:
        along = self.facts.op.pairs
        return (*(name for name in self.facts.reductions if name != along), along)

    def _columns(self, count: int, width: int) -> int:
        """Columns whose panel fits into L2 besides the streaming operand, with enough iterations for the threads."""
        known, room = self.facts, self.target.cache[1]
        extent, point = known.extent(known.vector), 4 * known.k_size
        most = room * 3 // 8 // point
        if self.parallel:
            rows = prod(i.extent for i in known.exclusive_iterators(known.broadcast_operand)) * point
            chunks = BALANCED_CHUNKS if rows <= room // 2 else FEW_CHUNKS
            chunks = max(1, min(chunks, known.op.multiplications // AMX_THREAD_PAIRS))
            most = min(most, num_tiles(extent * count, chunks))
        return min(extent, max(1, num_tiles(most, width)) * width)


def matrix_tile_cycles(known: ContractionInfo, plan: Plan) -> float:
    """Cycles of all register tiles, without waiting for memory."""
    found = tile_layout(known.op, plan)
    sides = [
        _count_tiles_by_size(known.extent(name), size) for name, size in zip(found.unit, found.sizes, strict=False)
    ]
    one = sum(below * beside * _tile_cycles(known, found, m, n) for m, below in sides[0] for n, beside in sides[1])
    return AMX_CONFIGURE_CYCLES + one * prod(i.extent for i in known.parallel if i.name not in found.unit)


def _count_tiles_by_size(extent: int, size: int) -> list[tuple[int, int]]:
    """(size, count) of the full tiles and of the remainder tile."""
    return [(n, count) for n, count in ((size, extent // size), (extent % size, 1)) if n and count]


def _tile_cycles(known: ContractionInfo, found: TileLayout, height: int, width: int) -> float:
    i, op = found.instruction, known.op
    below, beside = num_tiles(height, i.rows), num_tiles(width, i.columns)
    step = max(below * beside * i.cycles, AMX_ROW_CYCLES * (below * i.rows + beside * i.steps))
    taps = prod(r.extent for r in op.reductions if r.name != found.along)
    return (
        step * num_tiles(op.extent(found.along), i.steps) * taps + AMX_TILE_CYCLES + AMX_STORE_CYCLES * height * beside
    )
