"""Programs with one product of a warpgroup, or copies of boxes, on random bits, and what they give by NumPy."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np

from tensor_comprehensions.core.dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    DType,
)
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.atoms import ATOMS
from tensor_comprehensions.loop_ir.intrinsics import INTRINSICS
from tensor_comprehensions.loop_ir.matrix_descriptor import swizzle_of

from .atom_cases import Case, build_module
from .tile_gemm_hopper import TX, call, make_shared_buffer, swizzle_buffer

Array = np.ndarray[Any, Any]
SEED = 91
ZERO = b.const(0)
BAR = b.buffer("bar", UINT64, (1,), ir.Space.BARRIER)


def load_boxes(*copies: ir.Stmt, size: int) -> ir.Stmt:
    """One thread loads boxes; all wait for them."""
    expect = call("barrier_expect", (BAR, (0,)), attributes=(size,))
    return b.block(
        ir.If(b.eq(TX, 0), b.block(call("barrier_init", (BAR, (0,)), attributes=(1,)), call("fence_barrier_init"))),
        call("barrier"),
        ir.If(b.eq(TX, 0), b.block(expect, *copies)),
        call("barrier_wait", (BAR, (0,)), values=(ZERO,)),
    )


# --- boxes -------------------------------------------------------------------------------------------------------


def box_case(
    shape: tuple[int, ...], box: tuple[int, ...], first: tuple[int, ...], rng: np.random.Generator, swizzle: int = 0
) -> Case:
    """A box that leaves the tensor on several sides: zeros come from there, and nothing goes back there."""
    rank, inner = len(box), box[-1]
    rows = prod(box) // inner
    source, out = b.buffer("m", UINT16, shape), b.buffer("out", UINT16, shape)
    plain = b.buffer("plain", UINT16, (rows, inner))
    tile = make_shared_buffer("s", UINT16, *box)
    if swizzle:
        tile = swizzle_buffer(tile, swizzle_of(swizzle, 2))
    maps = tuple(ir.TensorMap(x.name, x, box, swizzle) for x in (source, out))
    at = tuple(map(b.const, first))
    start = (0,) * rank
    load = call(f"tma_load_{rank}", (tile, start), (source, at), (BAR, (0,)), attributes=(0,))
    row = [b.mod(b.div(TX, prod(box[d + 1 : -1])), box[d]) for d in range(rank - 1)]
    kept = [ir.If(b.lt(TX, rows), b.store(plain, (TX, c), b.load(tile, *row, c))) for c in range(inner)]
    again = [
        ir.If(b.lt(TX, rows), b.store(tile, (*row, b.const(c)), b.add(b.load(tile, *row, c), b.const(1, UINT16))))
        for c in range(inner)
    ]
    store = b.block(
        call(f"tma_store_{rank}", (out, at), (tile, start), attributes=(1,)),
        call("bulk_commit"),
        call("bulk_wait", attributes=(0,)),
    )
    body = b.block(
        load_boxes(load, size=2 * prod(box)),
        *kept,
        *again,
        call("fence_async"),
        call("barrier"),
        ir.If(b.eq(TX, 0), store),
    )
    threads = -(-rows // 32) * 32
    arrays = {"m": rng.integers(1, 1 << 16, shape).astype(np.uint16), "plain": np.zeros((rows, inner), np.uint16)}
    expected = np.zeros(shape, np.uint16)
    inside = tuple(slice(max(f, 0), max(min(f + n, e), max(f, 0))) for f, n, e in zip(first, box, shape, strict=True))
    expected[inside] = arrays["m"][inside] + np.uint16(1)
    body = b.allocate([tile, BAR], body)
    m = build_module(f"box_{rank}_{swizzle}", body, (source, out, plain), threads, maps)
    m = ir.Module(m.name, m.arguments, (), m.kernels, (), ("out", "plain"))
    return Case(m, arrays, expected)


# --- products ----------------------------------------------------------------------------------------------------

TYPES = {"f16": FLOAT16, "bf16": BFLOAT16, "tf32": FLOAT32, "s8": INT8, "u8": UINT8}


def product_case(name: str, rng: np.random.Generator) -> Case:
    """`out = out0 + A @ B.T` of one instruction; the left factor may be in registers, those in memory across."""
    known = INTRINSICS[name]
    atom = ATOMS[known.atom]
    total, left, right = atom.operands
    types = [TYPES[x] for x in atom.opcode.split(".")[-2:]]
    dtype = types[0]
    width = 128 // dtype.size
    in_registers, across = 1 in known.registers, [n in known.across for n in (1, 2)]
    sources = [
        b.buffer(name, t, (-(-o.rows // width), 64, width) if lies else (o.rows, width))
        for name, t, o, lies in zip("AB", types, (left, right), across, strict=True)
    ]
    tiles = [
        swizzle_buffer(make_shared_buffer(f"s{x.name}", x.type.dtype, *x.shape), swizzle_of(128, dtype.size))
        for x in sources
    ]
    words = b.buffer("words", UINT32, (128, left.registers))
    start, out = (b.buffer(n, total.register, (128, total.registers)) for n in ("start", "out"))
    acc = b.buffer("acc", total.register, (total.registers,), ir.Space.REGISTER)
    held = b.buffer("held", UINT32, (left.registers,), ir.Space.REGISTER)
    maps = tuple(ir.TensorMap(x.name, x, (*(1,) * (len(x.shape) - 2), *x.shape[-2:]), 128) for x in sources)
    copies = []
    for n, (x, tile) in enumerate(zip(sources, tiles, strict=True)):
        for part in range(x.shape[0] if len(x.shape) == 3 else 1):
            at = (part, 0, 0) if len(x.shape) == 3 else (0, 0)
            copies.append(call(f"tma_load_{len(at)}", (tile, at), (x, at), (BAR, (0,)), attributes=(n,)))
    step = 2 * left.columns * left.dtype.bits // 8 // dtype.size  # the third step along K of a row
    places = [(0, step, 0) if lies else (0, step) for lies in across]
    first = (held, (0,)) if in_registers else (tiles[0], places[0])
    second = (tiles[1], places[1])
    body = b.block(
        load_boxes(*copies, size=sum(x.bytes for x in sources)),
        *(b.store(acc, (n,), b.load(start, TX, n)) for n in range(total.registers)),
        *(b.store(held, (n,), b.load(words, TX, n)) for n in range(left.registers)),
        call("wgmma_fence"),
        call(name, (acc, (0,)), first, second, values=(b.const(True, b.eq(TX, 0).type.dtype),)),
        call("wgmma_commit"),
        call("wgmma_wait", attributes=(0,)),
        *(b.store(out, (TX, n), b.load(acc, n)) for n in range(total.registers)),
    )
    arrays = {x.name: random(rng, x.type.dtype, x.shape) for x in (*sources, start)}
    values = {n: numbers(arrays[n], t, left.dtype.name) for n, t in zip("AB", types, strict=True)}
    a, w = (
        (x.transpose(0, 2, 1).reshape(-1, 64)[: o.rows] if lies else x)[:, step : step + left.columns]
        for x, o, lies in zip(values.values(), (left, right), across, strict=True)
    )
    arrays["words"] = np.zeros((128, left.registers), np.uint32)
    if in_registers:
        held_by = np.array([[left.place(t, v) for v in range(left.values)] for t in range(128)])
        raw = arrays["A"][:, step : step + left.columns][held_by[..., 0], held_by[..., 1]]
        arrays["words"] = np.ascontiguousarray(raw).view(np.uint32).reshape(128, left.registers)
    spots = np.array([[total.place(t, v) for v in range(total.values)] for t in range(128)])
    sums = arrays["start"].astype(a.dtype)
    scale = np.abs(sums)
    for k in range(a.shape[1]):
        term = (a[:, k, None] * w[:, k])[spots[..., 0], spots[..., 1]]
        sums, scale = sums + term, scale + np.abs(term)
    kernel = b.allocate([*tiles, BAR, acc, held], body)
    m = build_module(name, kernel, (*sources, words, start, out), 128, maps)
    return Case(m, arrays, sums.astype(arrays["start"].dtype), scale)


def random(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...]) -> Array:
    if dtype.is_integer:
        return rng.integers(0 if dtype == UINT8 else -100, 100, shape).astype(dtype.name)
    values = rng.normal(size=shape).astype(np.float32)
    if dtype == BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype.name)


def numbers(x: Array, dtype: DType, kind: str) -> Array:
    if dtype == BFLOAT16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind == "tfloat32":
        return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return x.astype(np.int64 if dtype.is_integer else np.float64)


PRODUCTS = [
    "wgmma_m64n8k16_f32_f16",
    "wgmma_m64n24k32_s32_s8",
    "wgmma_m64n16k32_s32_u8",
    "wgmma_m64n32k32_s32_s8_u8",
    "wgmma_m64n40k16_f32_bf16_left_across",
    "wgmma_m64n128k16_f32_f16_both_across",
    "wgmma_m64n32k8_f32_tf32",
    "wgmma_m64n40k8_f32_tf32_registers",
    "wgmma_m64n48k16_f32_bf16_across",
    "wgmma_m64n64k16_f32_f16_registers",
    "wgmma_m64n96k32_s32_s8_registers",
    "wgmma_m64n128k16_f32_bf16_registers_across",
    "wgmma_m64n256k16_f32_bf16",
]


@cache
def cases() -> dict[str, Case]:
    rng = np.random.default_rng(SEED)
    found = {name: product_case(name, rng) for name in PRODUCTS}
    boxes = [
        box_case((20, 64), (16, 64), (9, 0), rng, 128),
        box_case((20, 40), (16, 32), (-3, 16), rng, 64),
        box_case((20, 24), (24, 16), (-2, -8), rng, 32),
        box_case((5, 9, 24), (2, 4, 16), (4, 6, 16), rng),
        box_case((5, 3, 9, 64), (2, 3, 8, 64), (3, -1, 4, 0), rng, 128),
        box_case((2, 3, 3, 6, 16), (1, 2, 2, 4, 8), (1, 2, -1, 4, 8), rng),
    ]
    return found | {c.module.name: c for c in boxes}


def wide(x: Array, buffer: ir.Buffer) -> Array:
    """As the interpreter holds it."""
    return (x.astype(np.uint32) << 16).view(np.float32) if buffer.type.dtype == BFLOAT16 else x.copy()
