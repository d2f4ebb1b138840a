"""Programs with one atom of sm_75 or sm_80 on random bits, and what they give by the instruction set's formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tensor_comprehensions.core.dtypes import FLOAT32, INT32, UINT16, UINT32
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.atoms import ATOMS, MATMUL, WARP, Atom
from tensor_comprehensions.loop_ir.intrinsics import INTRINSICS

Array = np.ndarray[Any, Any]
TX = b.var(ir.THREAD[0])
SEED = 20
PRODUCTS = [a for a in ATOMS.values() if a.name in INTRINSICS and a.kind == MATMUL and a.group == WARP]
MATRICES = [a for a in ATOMS.values() if a.name in INTRINSICS and a.name.startswith("ldmatrix")]
STORED = [a for a in ATOMS.values() if a.name.startswith("stmatrix")]


@dataclass(frozen=True)
class Case:
    """A module, its arrays, and what must be in `out` at the end.

    scale: the sum of the magnitudes of the terms of each element, by which a device may round differently; None: never.
    """

    module: ir.Module
    arrays: dict[str, Array]
    expected: Array
    scale: Array | None = None


def build_module(
    name: str, body: ir.Stmt, arguments: tuple[ir.Buffer, ...], threads: int = 32, maps: tuple[ir.TensorMap, ...] = ()
) -> ir.Module:
    """One kernel of one block, which writes `out`."""
    kernel = ir.Kernel(name, body, ir.Launch((1, 1, 1), (threads, 1, 1)), maps=maps)
    return ir.Module(name, arguments, (), (kernel,), (), ("out",))


def copy_registers(to: ir.Buffer, source: ir.Buffer, count: int, *, out: bool = False) -> ir.Stmt:
    """Registers from the row of a thread, or back."""
    places = [((n,), (TX, n)) for n in range(count)]
    return b.block(*(b.store(to, w, b.load(source, *r)) for r, w in ((x[::-1] if not out else x) for x in places)))


# --- products ----------------------------------------------------------------------------------------------------


def product_case(atom: Atom, rng: np.random.Generator) -> Case:
    registers = [
        ir.Buffer(f"r{n}", ir.Type(o.register), (o.registers,), (1,), ir.Space.REGISTER)
        for n, o in enumerate(atom.operands)
    ]
    memory = [b.buffer(f"m{n}", r.type.dtype, (32, r.shape[0])) for n, r in enumerate(registers)]
    out = b.buffer("out", registers[0].type.dtype, memory[0].shape)
    zero = b.const(0)
    body = b.block(
        *(copy_registers(r, m, r.shape[0]) for r, m in zip(registers, memory, strict=True)),
        ir.Invoke(atom.name, tuple((r, (zero,)) for r in registers)),
        copy_registers(out, registers[0], registers[0].shape[0], out=True),
    )
    module = build_module(atom.name, b.allocate(registers, body), (*memory, out))
    arrays = {m.name: random_bits(rng, m) for m in memory}
    for operand, m in zip(atom.operands, memory, strict=True):
        rare_specials(arrays[m.name], operand.dtype.name)
    held = [arrays[m.name] for m in memory]
    return Case(module, arrays, multiply_registers(atom, held), multiply_registers(atom, held, magnitude=True))


def random_bits(rng: np.random.Generator, m: ir.Buffer) -> Array:
    kind = np.dtype(m.type.dtype.name)
    return np.frombuffer(rng.bytes(kind.itemsize * int(np.prod(m.shape))), kind).reshape(m.shape).copy()


def rare_specials(registers: Array, dtype: str) -> None:
    """Leave infinities and NaN in two lanes only, else they would be in all sums: clear an exponent's highest bit."""
    kind, exponent = {
        "float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80), "tfloat32": (np.uint32, 0x7F800000),
        "float32": (np.uint32, 0x7F800000), "float64": (np.uint64, 0x7FF0000000000000),
    }.get(dtype, (np.uint32, 0))  # fmt: skip
    bits = registers[2:].view(kind)
    bits[(bits & kind(exponent)) == kind(exponent)] ^= kind(0x4000) << kind(bits.itemsize * 8 - 16)


@np.errstate(all="ignore")
def numbers(registers: Array, dtype: str) -> Array:
    match dtype:
        case "bfloat16":
            return (registers.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        case "tfloat32":
            return (registers.view(np.uint32) >> 13 << 13).view(np.float32).astype(np.float64)
    found = registers.view(np.dtype(dtype))
    return found.astype(np.float64 if found.dtype.kind == "f" else np.int64)


def places(atom: Atom, role: str, bits: int) -> Callable[[int, int], tuple[int, int, int]]:
    """(group, row, column) of the i-th element of a lane, as the instruction set says it."""
    if atom.name.startswith("mma_m8n8k4_row") or atom.name.startswith("mma_m8n8k4_col"):
        along = (role == "A") == (atom.name.split("_")[2 if role == "A" else 3] == "row")

        def quad_pair(lane: int, i: int) -> tuple[int, int, int]:
            upper = 4 * (lane >= 16)
            if role == "C":
                return lane % 16 // 4, (lane & 1) + (i & 2) + upper, (i & 4) + (lane & 2) + (i & 1)
            return lane % 16 // 4, (lane % 4 if along else i % 4) + upper, i if along else lane % 4

        return quad_pair
    per = max(1, 32 // bits) if role != "C" else 2
    halves = 2 if atom.operands[0].rows == 16 and role != "B" else 1

    def lanes(lane: int, i: int) -> tuple[int, int, int]:
        word, part = divmod(i, per)
        return 0, lane // 4 + 8 * (word % halves), lane % 4 * per + part + 4 * per * (word // halves)

    return lanes


def multiply_registers(atom: Atom, registers: list[Array], *, magnitude: bool = False) -> Array:
    """The sums of each lane, or those of the magnitudes of their terms."""
    matrices: list[dict[tuple[int, int, int], Any]] = []
    for role, operand, held in zip("CAB", atom.operands, registers, strict=True):
        place, values = places(atom, role, operand.dtype.bits), numbers(held, operand.dtype.name)
        values = np.abs(values) if magnitude else values
        matrices.append({place(lane, i): values[lane, i] for lane in range(32) for i in range(values.shape[1])})
    total, left, right = matrices
    depth = atom.operands[1].columns
    kind = np.dtype(atom.operands[0].dtype.name)
    with np.errstate(all="ignore"):
        for g, i, j in total:
            for k in range(depth):
                total[g, i, j] = total[g, i, j] + left[g, i, k] * right[g, j, k]
        place = places(atom, "C", atom.operands[0].dtype.bits)
        count = numbers(registers[0], kind.name).shape[1]
        return np.array([[total[place(lane, i)] for i in range(count)] for lane in range(32)]).astype(kind)


# --- matrices ----------------------------------------------------------------------------------------------------


def matrix_case(atom: Atom, rng: np.random.Generator) -> Case:
    """Lanes give the rows in an order of their own."""
    registers, rows = atom.operands[0].registers, atom.operands[0].rows
    shared = ir.Buffer("s", ir.Type(UINT16), (32, 8), (8, 1), ir.Space.SHARED)
    held = ir.Buffer("r", ir.Type(UINT32), (registers,), (1,), ir.Space.REGISTER)
    source, out = b.buffer("m", UINT16, (32, 8)), b.buffer("out", UINT32, (32, registers))
    row = b.mod(b.add(b.mul(TX, 5), 3), 32)
    body = b.block(
        *(b.store(shared, (TX, n), b.load(source, TX, n)) for n in range(8)),
        ir.Invoke("barrier", ()),
        ir.Invoke(atom.name, ((held, (b.const(0),)), (shared, (row, b.const(0))))),
        copy_registers(out, held, registers, out=True),
    )
    arrays = {"m": random_bits(rng, source)}
    matrix = arrays["m"][[(lane * 5 + 3) % 32 for lane in range(rows)]].reshape(-1, 8, 8)
    if atom.name.endswith("trans"):
        matrix = matrix.transpose(0, 2, 1)
    pairs = np.ascontiguousarray(matrix).view(np.uint32)  # [matrix, row, word]
    expected = pairs.reshape(registers, 32).T
    return Case(build_module(atom.name, b.allocate([shared, held], body), (source, out)), arrays, expected)


def stored_matrix_case(atom: Atom, rng: np.random.Generator) -> Case:
    """Lanes give the rows in an order of their own; rows that no lane gives stay as they were."""
    registers, rows = atom.operands[1].registers, atom.operands[0].rows
    shared = ir.Buffer("s", ir.Type(UINT16), (32, 8), (8, 1), ir.Space.SHARED)
    held = ir.Buffer("r", ir.Type(UINT32), (registers,), (1,), ir.Space.REGISTER)
    source, out = b.buffer("m", UINT32, (32, registers)), b.buffer("out", UINT16, (32, 8))
    row = b.mod(b.add(b.mul(TX, 5), 3), 32)
    body = b.block(
        copy_registers(held, source, registers),
        *(b.store(shared, (TX, n), b.const(7, UINT16)) for n in range(8)),
        ir.Invoke("barrier", ()),
        ir.Invoke(atom.name, ((shared, (row, b.const(0))), (held, (b.const(0),)))),
        ir.Invoke("barrier", ()),
        *(b.store(out, (TX, n), b.load(shared, TX, n)) for n in range(8)),
    )
    arrays = {"m": random_bits(rng, source)}
    pairs = np.ascontiguousarray(arrays["m"].T).reshape(registers, 8, 4).view(np.uint16)  # [matrix, row, column]
    if atom.name.endswith("trans"):
        pairs = pairs.transpose(0, 2, 1)
    expected = np.full((32, 8), 7, np.uint16)
    expected[[(lane * 5 + 3) % 32 for lane in range(rows)]] = pairs.reshape(-1, 8)
    return Case(build_module(atom.name, b.allocate([shared, held], body), (source, out)), arrays, expected)


def transposition_case(rng: np.random.Generator) -> Case:
    source, out = (b.buffer(n, UINT32, (32, 1)) for n in ("m", "out"))
    r, t = (ir.Buffer(n, ir.Type(UINT32), (1,), (1,), ir.Space.REGISTER) for n in "rt")
    views = ((t, (b.const(0),)), (r, (b.const(0),)))
    body = b.block(
        copy_registers(r, source, 1), ir.Invoke("movmatrix_trans", views), copy_registers(out, t, 1, out=True)
    )
    arrays = {"m": random_bits(rng, source)}
    matrix = arrays["m"].view(np.uint16).reshape(8, 8).T
    expected = np.ascontiguousarray(matrix).view(np.uint32).reshape(32, 1)
    return Case(build_module("movmatrix_trans", b.allocate([r, t], body), (source, out)), arrays, expected)


# --- the rest ----------------------------------------------------------------------------------------------------


def shuffle_case(rng: np.random.Generator) -> Case:
    """Each lane takes the value of the lane that it names."""
    source, wanted, out = (b.buffer(n, t, (64,)) for n, t in (("m", FLOAT32), ("w", INT32), ("out", FLOAT32)))
    r, t = (b.register(n, FLOAT32) for n in "rt")
    lane = b.cast(b.load(wanted, TX), b.const(0).type.dtype)
    body = b.block(
        b.store(r, (), b.load(source, TX)),
        ir.Invoke("shuffle_index", ((t, ()), (r, ())), (8,), (lane,)),
        b.store(out, (TX,), b.load(t)),
    )
    arrays = {"m": rng.random(64, np.float32), "w": rng.integers(0, 16, 64).astype(np.int32)}
    expected = arrays["m"][np.arange(64) // 8 * 8 + arrays["w"] % 8]
    return Case(build_module("shuffle_index", b.allocate([r, t], body), (source, wanted, out), 64), arrays, expected)


def zero_copy_case(rng: np.random.Generator, size: int) -> Case:
    """Where the source ends, zeros are copied."""
    count = size // 4
    source, out = b.buffer("m", INT32, (20, count)), b.buffer("out", INT32, (32, count))
    shared = ir.Buffer("s", ir.Type(INT32), (32, count), (count, 1), ir.Space.SHARED)
    views = ((shared, (TX, b.const(0))), (source, (TX, b.const(0))))
    body = b.block(
        ir.Invoke("copy_async_zero", views, (size,), (b.lt(TX, 20),)),
        ir.Invoke("commit_async", ()),
        ir.Invoke("wait_async", (), (0,)),
        *(b.store(out, (TX, n), b.load(shared, TX, n)) for n in range(count)),
    )
    arrays = {"m": rng.integers(1, 99, (20, count)).astype(np.int32)}
    expected = np.concatenate([arrays["m"], np.zeros((12, count), np.int32)])
    return Case(build_module(f"copy_{size}", b.allocate([shared], body), (source, out)), arrays, expected)


def part_case(rng: np.random.Generator, threads: int = 64) -> Case:
    shared = ir.Buffer("s", ir.Type(INT32), (128,), (1,), ir.Space.SHARED)
    source, out = (b.buffer(n, INT32, (128,)) for n in ("m", "out"))
    parts = [ir.Invoke("barrier_part", (), (n, threads)) for n in (1, 2)]
    fill = b.store(shared, (TX,), b.load(source, TX))
    body = ir.If(
        b.lt(TX, 64),
        b.block(fill, parts[0], b.store(out, (TX,), b.load(shared, b.sub(63, TX)))),
        b.block(fill, parts[1], b.store(out, (TX,), b.load(shared, b.sub(191, TX)))),
    )
    arrays = {"m": rng.integers(0, 99, 128).astype(np.int32)}
    expected = np.concatenate([arrays["m"][63::-1], arrays["m"][:63:-1]])
    return Case(build_module("barrier_part", b.allocate([shared], body), (source, out), 128), arrays, expected)


def reuse_case(rng: np.random.Generator, *, first: bool = True, last: bool = True, threads: int = 64) -> Case:
    """Two pairs of warps, each in a loop, fill memory, read what both of a pair wrote, and fill it again."""
    shared = ir.Buffer("s", ir.Type(INT32), (128,), (1,), ir.Space.SHARED)
    source, out = b.buffer("m", INT32, (5, 128)), b.buffer("out", INT32, (128,))
    total, r = b.register("total", INT32), b.var("r")

    def role(number: int, rounds: int) -> ir.Stmt:
        base = 64 * (number - 1)
        meet = ir.Invoke("barrier_part", (), (number, threads))
        read = b.add(b.load(shared, b.sub(2 * base + 63, TX)), b.load(shared, base))
        steps = [b.store(shared, (TX,), b.load(source, r, TX)), meet, b.store(total, (), read, op="+"), meet]
        kept = [s for n, s in enumerate(steps) if s is not meet or (first if n == 1 else last)]
        return ir.Loop("r", b.const(0), b.const(rounds), b.block(*kept))

    body = b.block(
        b.store(total, (), b.const(0, INT32)),
        ir.If(b.lt(TX, 64), role(1, 5), role(2, 3)),
        b.store(out, (TX,), b.load(total)),
    )
    arrays = {"m": rng.integers(0, 99, (5, 128)).astype(np.int32)}
    parts = [arrays["m"][:rounds, k : k + 64] for k, rounds in ((0, 5), (64, 3))]
    expected = np.concatenate([(x[:, ::-1] + x[:, :1]).sum(0) for x in parts]).astype(np.int32)
    return Case(build_module("reuse", b.allocate([shared, total], body), (source, out), 128), arrays, expected)


def lanes_case(rng: np.random.Generator, *, meet: bool = True) -> Case:
    """All lanes read an element; then one of them may write it, for they have met."""
    shared, own = ir.Buffer("s", ir.Type(INT32), (2,), (1,), ir.Space.SHARED), b.register("own", INT32)
    source, out = b.buffer("m", INT32, (32,)), b.buffer("out", INT32, (32,))
    body = b.block(
        ir.If(b.lt(TX, 2), b.store(shared, (TX,), b.load(source, TX))),
        ir.Invoke("warp_barrier", ()),
        b.store(own, (), b.load(shared, b.const(0))),
        ir.Invoke("warp_barrier", ()) if meet else b.block(),
        ir.If(b.eq(TX, 5), b.store(shared, (b.const(0),), b.load(shared, b.const(1)))),
        ir.Invoke("warp_barrier", ()),
        b.store(out, (TX,), b.add(b.load(own), b.load(shared, b.const(0)))),
    )
    arrays = {"m": rng.integers(0, 99, 32).astype(np.int32)}
    expected = np.full(32, arrays["m"][:2].sum(), np.int32)
    return Case(build_module("lanes", b.allocate([shared, own], body), (source, out)), arrays, expected)


@cache
def cases() -> dict[str, Case]:
    rng = np.random.default_rng(SEED)
    found = {a.name: product_case(a, rng) for a in PRODUCTS}
    found |= {a.name: matrix_case(a, rng) for a in MATRICES}
    found |= {a.name: stored_matrix_case(a, rng) for a in STORED}
    found |= {f"copy_{size}": zero_copy_case(rng, size) for size in (4, 8, 16)}
    return found | {
        "movmatrix_trans": transposition_case(rng),
        "shuffle_index": shuffle_case(rng),
        "barrier_part": part_case(rng),
        "reuse": reuse_case(rng),
        "lanes": lanes_case(rng),
    }


def arrays_of(c: Case) -> dict[str, Array]:
    out = next(a for a in c.module.arguments if a.name == "out")
    return {**{n: a.copy() for n, a in c.arrays.items()}, "out": np.zeros(out.shape, out.type.dtype.name)}


def assert_right(c: Case, found: Array) -> None:
    wanted = c.expected.view(np.float16) if c.expected.dtype == np.float16 else c.expected
    np.testing.assert_array_equal(found.view(wanted.dtype), wanted, err_msg=f"{c.module.name}, seed {SEED}")
