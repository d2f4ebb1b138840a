"""Atoms: the instructions with which a group of threads moves or multiplies tiles, with the layout of each operand.

An operand is a matrix. Its (thread, value) layout gives the element that a thread holds, or points at, as its v-th
value, as the offset `row + column * rows`. B of a product is N x K. Wider atoms are listed before narrower ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

from ..core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, INT8, INT32, UINT8, UINT16, UINT32, DType, Kind
from ..layouts import Layout
from ..layouts.layout import flatten_tuple
from .lazy_table import LazyTable
from .nodes import Space

TFLOAT32 = DType("tfloat32", Kind.FLOAT, 32)
FLOAT8_E4M3 = DType("float8_e4m3", Kind.FLOAT, 8)
FLOAT8_E5M2 = DType("float8_e5m2", Kind.FLOAT, 8)
"""Operand types that the language lacks. A tfloat32 is a float32 whose last 13 bits are ignored."""

MOVE, MATMUL = "move", "matmul"
FLOAT8 = (FLOAT8_E4M3, FLOAT8_E5M2)

SINCE_80 = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SINCE_75 = ("sm_75", *SINCE_80)
SINCE_90 = ("sm_90", "sm_100", "sm_120")
HOPPER = ("sm_90a",)
"""Architectures for which atoms are chosen: those that have them as a single instruction."""

ROW_BYTES = 16
"""Bytes of a row of the 8 x 8 matrices that `ldmatrix` and `stmatrix` move."""


@dataclass(frozen=True, slots=True)
class AtomOperand:
    """One operand of an atom.

    Attributes:
        space: its memory space: REGISTER, SHARED or GLOBAL.
        dtype: the type of its elements. Moves work on any type; theirs is the unsigned integer of that width.
        rows, columns: the extents of the matrix.
        layout: (thread, value) -> row + column * rows; None for a matrix in shared memory that a descriptor addresses.
    """

    space: Space
    dtype: DType
    rows: int
    columns: int
    layout: Layout | None

    @property
    def values(self) -> int:
        """The number of elements that each thread holds, or points at."""
        if self.layout is None or isinstance(self.layout.shape, int):
            return 0
        return prod(flatten_tuple(self.layout.shape[1]))

    @property
    def registers(self) -> int:
        """The number of registers per thread, of 32 bits (64 for float64); 0 outside of registers."""
        return self.values * min(self.dtype.bits, 32) // 32 if self.space is Space.REGISTER else 0

    @property
    def register(self) -> DType:
        """The type of the operand's registers: its own for accumulators, else uint32, which packs several elements."""
        return self.dtype if self.dtype in (FLOAT32, INT32, FLOAT64) else UINT32

    def place(self, thread: int, value: int) -> tuple[int, int]:
        """The row and column of the element that `thread` holds as its `value`-th."""
        assert self.layout is not None
        column, row = divmod(self.layout(thread, value), self.rows)
        return row, column


@dataclass(frozen=True, slots=True)
class Atom:
    """One instruction, or one statement of a few instructions.

    Attributes:
        name: its name in the CUDA text and in `Invoke`.
        kind: MOVE, with the operands (destination, source), or MATMUL, with (sum, A, B): `sum += A * B.T`.
        threads: the lanes of the warp, or of the warpgroup, that execute it.
        operands: its operands, the written one first.
        architectures: the architectures for which to choose it.
        alignment: the alignment in bytes of the addresses that it takes.
        opcode: the PTX opcode with its modifiers.
    """

    name: str
    kind: str
    threads: Layout
    operands: tuple[AtomOperand, ...]
    architectures: tuple[str, ...]
    alignment: int
    opcode: str

    @property
    def group(self) -> int:
        """The number of threads that execute it together."""
        return {1: 1, 128: 128}.get(self.threads.size, WARP)


WARP, WARPGROUP = 32, 128
_ONE, _WARP, _QUAD_PAIR, _WARPGROUP = Layout(1, 1), Layout(32, 1), Layout((4, 2), (1, 16)), Layout(128, 1)


def _make_thread_value_layout(threads: list[tuple[int, int]], values: list[tuple[int, int]]) -> Layout:
    """The (thread, value) layout with these (size, stride) modes; value modes of size 1 are dropped."""
    parts = [threads, [v for v in values if v[0] > 1] or [(1, 0)]]
    shape, stride = (tuple(p[0][k] if len(p) == 1 else tuple(m[k] for m in p) for p in parts) for k in (0, 1))
    return Layout(shape, stride)


@cache
def _make_fragment_operand(rows: int, columns: int, dtype: DType, *, pair: int = 0, warps: int = 1) -> AtomOperand:
    """The fragment layout of `mma`: 4 lanes share a row; each holds `pair` neighbors, or as many as 32 bits hold."""
    together = pair or max(1, 32 // dtype.bits)
    threads = [(4, together * rows), (8, 1), *([(warps, 16)] if warps > 1 else [])]
    steps = columns // (4 * together)
    values = [(together, rows), (rows // warps // 8, 8), (steps, 4 * together * rows)]
    return AtomOperand(Space.REGISTER, dtype, rows, columns, _make_thread_value_layout(threads, values))


# --- products ----------------------------------------------------------------------------------------------------

_SHORT = {
    FLOAT16: "f16", BFLOAT16: "bf16", TFLOAT32: "tf32", FLOAT8_E4M3: "e4m3", FLOAT8_E5M2: "e5m2", INT8: "s8",
    UINT8: "u8", FLOAT32: "f32", INT32: "s32", FLOAT64: "f64",
}  # fmt: skip


def _mma(m: int, k: int, a: DType, b: DType, total: DType, architectures: tuple[str, ...]) -> Atom:
    """The warp-level `mma` of shape m x 8 x k."""
    operands = (
        _make_fragment_operand(m, 8, total, pair=2),
        _make_fragment_operand(m, k, a),
        _make_fragment_operand(8, k, b),
    )
    types = ".".join(_SHORT[t] for t in (total, a, b, total))
    opcode = f"mma.sync.aligned.m{m}n8k{k}.row.col.{types}"
    return Atom(
        f"mma_m{m}n8k{k}_{_format_product_types(total, a, b)}", MATMUL, _WARP, operands, architectures, 0, opcode
    )


def _format_product_types(total: DType, a: DType, b: DType) -> str:
    """The types in the name of an atom; both factor types only where the hardware allows them to differ."""
    mixed = (b,) if a.bits == 8 else ()
    return "_".join(dict.fromkeys((_SHORT[total], _SHORT[a]))) + "".join(f"_{_SHORT[t]}" for t in mixed)


def _quad_pairs(major_a: str, major_b: str) -> Atom:
    """Four 8 x 8 x 4 products of 8 lanes each; factors are K-major ("row" for A, "col" for B) or not."""
    along = _make_thread_value_layout([(8, 1)], [(4, 8)])
    across = Layout(((4, 2), 4), ((8, 4), 1))
    a = AtomOperand(Space.REGISTER, FLOAT16, 8, 4, along if major_a == "row" else across)
    b = AtomOperand(Space.REGISTER, FLOAT16, 8, 4, along if major_b == "col" else across)
    total = AtomOperand(Space.REGISTER, FLOAT32, 8, 8, Layout(((2, 2, 2), (2, 2, 2)), ((1, 16, 4), (8, 2, 32))))
    opcode = f"mma.sync.aligned.m8n8k4.{major_a}.{major_b}.f32.f16.f16.f32"
    # Later architectures accept it, but emulate it by shuffles and multiply-adds.
    return Atom(f"mma_m8n8k4_{major_a}_{major_b}_f32_f16", MATMUL, _QUAD_PAIR, (total, a, b), ("sm_75",), 0, opcode)


def _wgmma(n: int, a: DType, b: DType, total: DType) -> Atom:
    """The `wgmma` of shape 64 x n x (32 bytes), with B in shared memory and A there or in registers."""
    k = 256 // a.bits
    sums = _make_fragment_operand(64, n, total, pair=2, warps=4)
    operands = (sums, _make_fragment_operand(64, k, a, warps=4), AtomOperand(Space.SHARED, b, n, k, None))
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{_SHORT[total]}.{_SHORT[a]}.{_SHORT[b]}"
    name = "_".join(dict.fromkeys((f"wgmma_m64n{n}k{k}", _SHORT[total], _SHORT[a], _SHORT[b])))
    return Atom(name, MATMUL, _WARPGROUP, operands, HOPPER, ROW_BYTES, opcode)


def _list_mma_atoms() -> Iterator[Atom]:
    for n in range(256, 0, -8):
        for a in (FLOAT16, BFLOAT16, TFLOAT32):
            yield _wgmma(n, a, a, FLOAT32)
        for a, b in product(FLOAT8, repeat=2):
            yield _wgmma(n, a, b, FLOAT32)
        if n in (8, 24) or n % 16 == 0:  # the sizes of integer products
            for a, b in product((INT8, UINT8), repeat=2):
                yield _wgmma(n, a, b, INT32)
    for a, b in product(FLOAT8, repeat=2):  # sm_90 unpacks both to float16; `wgmma` is better there
        yield _mma(16, 32, a, b, FLOAT32, ("sm_89", "sm_120"))
    for k in (32, 16):
        for a, b in product((INT8, UINT8), repeat=2):
            yield _mma(16, k, a, b, INT32, SINCE_80)
    for dtype in (FLOAT16, BFLOAT16):
        yield _mma(16, 16, dtype, dtype, FLOAT32, SINCE_80)
        yield _mma(16, 8, dtype, dtype, FLOAT32, SINCE_75 if dtype == FLOAT16 else SINCE_80)
    for k in (16, 8):
        yield _mma(16, k, FLOAT16, FLOAT16, FLOAT16, SINCE_80 if k == 16 else SINCE_75)
    for k in (8, 4):
        yield _mma(16, k, TFLOAT32, TFLOAT32, FLOAT32, SINCE_80)
    yield _mma(8, 4, FLOAT64, FLOAT64, FLOAT64, ("sm_80", "sm_90"))
    for major_a, major_b in product(("row", "col"), repeat=2):
        yield _quad_pairs(major_a, major_b)


# --- moves -------------------------------------------------------------------------------------------------------


def _make_matrices_operand(count: int, *, transposed: bool) -> AtomOperand:
    """`count` stacked 8 x 8 matrices in registers, in the layout of A fragments; transposed: of B fragments."""
    rows = 8 * count
    threads = [(4, 2), (8, rows)] if transposed else [(4, 2 * rows), (8, 1)]
    return AtomOperand(
        Space.REGISTER,
        UINT16,
        rows,
        8,
        _make_thread_value_layout(threads, [(2, 1 if transposed else rows), (count, 8)]),
    )


def _matrix_moves(count: int) -> Iterator[Atom]:
    """`ldmatrix` and `stmatrix` of `count` 8 x 8 matrices; lane l gives the address of row l of the stack."""
    rows = 8 * count
    threads = [(rows, 1), *([(WARP // rows, 0)] if rows < WARP else [])]
    memory = AtomOperand(Space.SHARED, UINT16, rows, 8, _make_thread_value_layout(threads, [(8, rows)]))
    for transposed in (False, True):
        registers = _make_matrices_operand(count, transposed=transposed)
        name, suffix = (
            f"x{count}{'_trans' if transposed else ''}",
            f"x{count}{'.trans' if transposed else ''}.shared.b16",
        )
        for stem, operands, since in (
            ("ldmatrix", (registers, memory), SINCE_75),
            ("stmatrix", (memory, registers), SINCE_90),
        ):
            opcode = f"{stem}.sync.aligned.m8n8.{suffix}"
            yield Atom(f"{stem}_{name}", MOVE, _WARP, operands, since, ROW_BYTES, opcode)


def _make_transpose_atom() -> Atom:
    """`movmatrix`: transpose an 8 x 8 matrix in the registers of a warp."""
    operands = (_make_matrices_operand(1, transposed=True), _make_matrices_operand(1, transposed=False))
    return Atom("movmatrix_trans", MOVE, _WARP, operands, SINCE_75, 0, "movmatrix.sync.aligned.m8n8.trans.b16")


def _make_bytes_operand(space: Space, count: int) -> AtomOperand:
    """`count` contiguous bytes that one thread moves."""
    return AtomOperand(space, UINT8, 1, count, _make_thread_value_layout([(1, 0)], [(count, 1)]))


def _thread_moves() -> Iterator[Atom]:
    """Asynchronous copies, loads and stores by single threads."""
    for count in (16, 8, 4):
        shared, memory = _make_bytes_operand(Space.SHARED, count), _make_bytes_operand(Space.GLOBAL, count)
        opcode = f"cp.async.{'cg' if count == 16 else 'ca'}.shared.global"
        for name in ("copy_async", "copy_async_zero"):
            yield Atom(f"{name}_{count}", MOVE, _ONE, (shared, memory), SINCE_80, count, opcode)
    for count in (16, 8, 4, 2):
        bits = {16: "v4.u32", 8: "v2.u32", 4: "u32", 2: "u16"}[count]
        for space in (Space.GLOBAL, Space.SHARED):
            memory, registers = _make_bytes_operand(space, count), _make_bytes_operand(Space.REGISTER, count)
            where = f"{space.value}_{count}"
            yield Atom(f"load_{where}", MOVE, _ONE, (registers, memory), SINCE_75, count, f"ld.{space.value}.{bits}")
            yield Atom(f"store_{where}", MOVE, _ONE, (memory, registers), SINCE_75, count, f"st.{space.value}.{bits}")


def _list_move_atoms() -> Iterator[Atom]:
    for count in (4, 2, 1):
        yield from _matrix_moves(count)
    yield _make_transpose_atom()
    yield from _thread_moves()


ATOMS: Mapping[str, Atom] = LazyTable({}, lambda: {a.name: a for a in (*_list_mma_atoms(), *_list_move_atoms())})
"""All atoms by name, wider ones first."""


def is_covering(operand: AtomOperand) -> bool:
    """Whether (thread, value) pairs cover each element exactly once, except for threads that share addresses."""
    if operand.layout is None:
        return True
    shared = prod(size for size, stride in operand.layout[0].flat if stride == 0)
    return sorted(operand.layout.offsets()) == sorted([*range(operand.rows * operand.columns)] * shared)


def group_lanes(atom: Atom) -> Iterator[tuple[int, ...]]:
    """The lanes of each group that executes a warp-level atom: all lanes, or each of four quad pairs."""
    for first in range(0, 16, 4) if atom.threads == _QUAD_PAIR else (0,):
        yield tuple(first + lane for lane in atom.threads.offsets())
