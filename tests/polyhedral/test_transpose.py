"""Statements whose lanes cross a read: values against torch, and what they lower to."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.polyhedral.cpu.transpose_staging import transposable_reads, transpose_block_side
from tensor_comprehensions.schedules import parse_schedule, schedule_transposition
from tensor_comprehensions.target import AVX2, AVX512, CpuTarget

from ..helpers.anywhere import SSE2, TARGETS, interpret_compiled, run

TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
    "bool": torch.bool,
}
MESHED = replace(AVX512, name="sapphirerapids", cache=(49152, 2097152, 110100480))
FLIP = "def flip({0}(M,N) I) -> (O) {{ O(j,i) = I(i,j) }}"


def flip(dtype: str = "float") -> tc.Op:
    return tc.define(FLIP.format(dtype)).flip


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randint(0, 2 if dtype == torch.bool else 100, (rows, columns))
    return x.to(dtype)


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (2, 3), (16, 16), (17, 33), (64, 64), (70, 129)])
def test_sizes(shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    torch.testing.assert_close(flip()(x), x.t().contiguous(), rtol=0, atol=0)


@pytest.mark.parametrize("target", [MESHED, *TARGETS], ids=lambda t: t.name)
@pytest.mark.parametrize("name", TYPES)
def test_types(name: str, target: CpuTarget) -> None:
    x = matrix(37, 83, TYPES[name])
    kernel = flip(name).compile(x, target=target)
    torch.testing.assert_close(run(kernel, x), x.t().contiguous(), rtol=0, atol=0)
    assert "shuffle(" in kernel.source("loops")


@pytest.mark.parametrize("shape", [(10, 128), (12, 50), (20, 33), (110, 16), (31, 5), (9, 4), (33, 65), (8, 96)])
@pytest.mark.parametrize("name", ["float", "double"])
def test_planes_in_the_first_cache(name: str, shape: tuple[int, int]) -> None:
    x = matrix(*shape, TYPES[name])
    kernel = flip(name).compile(x, target=MESHED)
    torch.testing.assert_close(run(kernel, x), x.t().contiguous(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "target", "pieces"),
    [
        ((10, 128), MESHED, True),
        ((8, 96), MESHED, False),  # half a line of the output
        ((128, 3), MESHED, False),  # less than a piece
        ((200, 160), MESHED, False),  # not in the first cache
        ((10, 128), AVX512, False),  # wide operations are cut in two
    ],
)
def test_which_blocks_load_rows_in_pieces(shape: tuple[int, int], target: CpuTarget, pieces: bool) -> None:
    kernel = flip().compile(matrix(*shape), target=target)
    assert ("float32x4 = I[0, ramp(" in kernel.source("loops")) == pieces


def test_floats_keep_their_bits() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).reshape(256, 256)
    for name, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16)):
        result = flip(name)(bits.view(dtype))
        assert torch.equal(result.view(torch.int16), bits.t())


@pytest.mark.parametrize("order", [p for p in permutations(range(4)) if p[-1] != 3], ids=str)
def test_permutations(order: tuple[int, ...]) -> None:
    x = torch.randn(3, 18, 5, 21)
    op = tc.define(f"def p(float(A,B,C,D) I) -> (O) {{ O({','.join('abcd'[k] for k in order)}) = I(a,b,c,d) }}").p
    torch.testing.assert_close(op(x), x.permute(order).contiguous(), rtol=0, atol=0)


def test_strided_views() -> None:
    """A slice, a transposed view of a transposition (a copy), and a broadcast row."""
    x = matrix(80, 90)
    for view in (x[3:40:2, 5:77], x.t(), x[:1].expand(50, 90), x[:, :1].expand(80, 33), x[:, ::3]):
        torch.testing.assert_close(flip()(view), view.t().contiguous(), rtol=0, atol=0)


def test_pointwise_chains() -> None:
    """Several transposed operands of other types beside plain ones, and a fused chain through a temporary."""
    op = tc.define(
        "def f(float(M,N) A, half(M,N) B, float(N,M) C, float(N) d) -> (O, P) {"
        " T(j,i) = A(i,j) * B(i,j) + d(j)"
        " O(j,i) = T(j,i) + C(j,i)"
        " P(j,i) = T(j,i) * 2 + A(i,j) }"
    ).f
    a, b, c, d = torch.randn(45, 70), torch.randn(45, 70).half(), torch.randn(70, 45), torch.randn(70)
    o, p = op(a, b, c, d)
    t = a.t() * b.t().float() + d[:, None]
    torch.testing.assert_close(o, t + c, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(p, t * 2 + a.t(), rtol=1e-5, atol=1e-5)


def test_all_operands_transposed_still_store_whole_vectors() -> None:
    op = tc.define("def f(float(M,N) A, float(M,N) B) -> (O) { O(j,i) = A(i,j) + B(i,j) }").f
    a, b = torch.randn(100, 50), torch.randn(100, 50)
    torch.testing.assert_close(op(a, b), (a + b).t().contiguous())
    loops = op.compile(a, b).source("loops")
    assert "shuffle(" in loops
    assert "O[j, ramp(" in loops


def test_shifted_and_guarded_reads() -> None:
    """Offsets stay; what a condition guards is not read ahead of it."""
    op = tc.define(
        "def f(float(M,N) A) -> (O, P) {"
        " O(j,i) = A(i + 1,j + 2) where i in 0:M-1, j in 0:N-2"
        " P(j,i) = i < M - 1 ? A(i + 1,j) : 0 where i in 0:M, j in 0:N }"
    ).f
    a = torch.randn(41, 37)
    o, p = op(a)
    torch.testing.assert_close(o, a[1:, 2:].t().contiguous(), rtol=0, atol=0)
    torch.testing.assert_close(p, torch.cat((a[1:], torch.zeros(1, 37))).t().contiguous(), rtol=0, atol=0)


def test_what_is_written_is_not_read_ahead() -> None:
    """A symmetric update reads what the same kernel writes."""
    source = "def f(float(N,N) I) -> (O) { O(i,j) = I(i,j) O(i,j) += O(j,i) * 2 }"
    op = tc.define(source).f
    x = torch.randn(33, 33)
    torch.testing.assert_close(op(x), op.reference(x))


def test_accumulation_into_an_output() -> None:
    op = tc.define("def f(float(M,N) A) -> (O) { O(j,i) = A(i,j) O(j,i) += A(i,j) }").f
    a = torch.randn(30, 50)
    torch.testing.assert_close(op(a), 2 * a.t())


@pytest.mark.parametrize("target", [AVX512, AVX2, SSE2], ids=lambda t: t.name)
def test_side_of_blocks(target: CpuTarget) -> None:
    i, j = build.var("i"), build.var("j")
    x, out = build.buffer("x", FLOAT32, (90, 80)), build.buffer("out", FLOAT32, (80, 90))
    read = build.load(x, j, i)
    stores = [build.store(out, (i, j), read)]
    assert transposable_reads(stores, "i", "j") == (read,)
    assert transposable_reads(stores, "j", "i") == ()
    assert transpose_block_side(stores, [read], (64, 64), target) == min(8, target.lanes(32))
    past = [replace(s, nontemporal=True) for s in stores]
    assert transpose_block_side(past, [read], (64, 64), target) == target.lanes(32)
    assert transpose_block_side(stores, [read], (64, 3), target) == 4


def test_wide_blocks_fill_whole_lines() -> None:
    """Where wide operations are whole, and rows begin lines or the first cache holds all for what is no sum."""
    i, j = build.var("i"), build.var("j")
    whole = replace(AVX512, name="skylake-avx512")

    def chosen(rows: int, columns: int, target: CpuTarget, *, pointwise: bool = True) -> int:
        x, out = build.buffer("x", FLOAT32, (columns, rows)), build.buffer("out", FLOAT32, (rows, columns))
        read = build.load(x, j, i)
        return transpose_block_side([build.store(out, (i, j), read)], [read], (64, 64), target, pointwise=pointwise)

    assert chosen(160, 240, whole) == 16
    assert chosen(160, 240, AVX512) == 8  # wide operations are cut in two
    assert chosen(160, 236, whole) == 8  # rows begin anywhere
    assert chosen(32, 60, whole) == 16  # all in the first cache
    assert chosen(32, 60, whole, pointwise=False) == chosen(32, 60, AVX512) == 8


def test_what_promotion_refuses() -> None:
    i, j = build.var("i"), build.var("j")
    x, index = build.buffer("x", FLOAT32, (90, 90)), build.buffer("out", FLOAT32, (90, 90))
    near = build.buffer("near", FLOAT32, (90, 3))
    refused = [
        build.load(index, j, i),  # written
        build.load(x, j, i, mask=build.lt(i, 4)),  # guarded
        build.load(x, j, build.mod(i, 7)),  # no constant step
        build.load(x, j, build.mul(i, 2)),  # not contiguous
        build.load(near, j, build.sub(i, i)),  # the same for all rows
    ]
    for read in refused:
        assert transposable_reads([build.store(index, (i, j), read)], "i", "j") == ()


def test_large_outputs_stream() -> None:
    """What the caches cannot hold is written past them; results are the same."""
    x, small = torch.randn(272, 320), replace(AVX512, cache=(32768, 1 << 16, 1 << 18))
    kernel = flip().compile(x, target=small)
    assert "nontemporal" in kernel.source("llvm")
    torch.testing.assert_close(run(kernel, x), x.t().contiguous(), rtol=0, atol=0)
    assert "nontemporal" not in flip().compile(x[:128, :128].contiguous(), target=small).source("llvm")


@pytest.mark.parametrize("shape", [(1, 7), (30, 20), (129, 33), (300, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_reductions_over_crossing_reads(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """One operand lies along the reduction and the other across it: that one goes through a buffer."""
    name = {torch.float32: "float", torch.float64: "double"}[dtype]
    op = tc.define(f"def f({name}(M,N) X, {name}(N,M) Y) -> (O, P) {{ O(i) +=! X(i,j) * Y(j,i) P(i) max=! X(i,j) }}").f
    x, y = torch.randn(shape, dtype=dtype), torch.randn(shape[::-1], dtype=dtype)
    o, p = op(x, y)
    torch.testing.assert_close(o, (x * y.t()).sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(p, x.amax(1), rtol=0, atol=0)
    if min(shape) > 16:
        assert "shuffle(" in op.compile(x, y).source("loops")


def test_reduction_beside_a_transposed_output() -> None:
    op = tc.define(
        "def f(float(M,N) X) -> (O) {"
        " m(j) max=! X(i,j)"
        " e(j,i) = exp(X(i,j) - m(j))"
        " s(j) +=! e(j,i)"
        " O(j,i) = e(j,i) / s(j) }"
    ).f
    x = torch.randn(150, 70)
    torch.testing.assert_close(op(x), torch.softmax(x, 0).t().contiguous())
    assert "shuffle(" in op.compile(x).source("loops")


def test_column_sums_keep_their_lanes() -> None:
    """Reads along the rows need nothing turned."""
    op = tc.define("def f(float(M,N) X) -> (O) { O(j) +=! X(i,j) }").f
    x = torch.randn(100, 90)
    torch.testing.assert_close(op(x), x.sum(0), rtol=1e-4, atol=1e-4)
    assert "shuffle(" not in op.compile(x).source("loops")


def test_tiles_of_permutations_cover_runs_of_both_sides() -> None:
    """Memory goes on along one row for the reads and along another for the writes; elsewhere rows stay apart."""
    x, bias = torch.randn(8, 70, 12, 64), torch.randn(64)
    heads = tc.define("def f(float(A,B,C,D) I) -> (O) { O(a,c,b,d) = I(a,b,c,d) }").f
    torch.testing.assert_close(heads(x), x.transpose(1, 2).contiguous(), rtol=0, atol=0)
    schedule = heads.compile(x).source("schedule")
    assert "S0.c] in 0:12 whole" in schedule
    assert "S0.b] in 0:70 tile 16" in schedule
    biased = tc.define("def f(float(A,B) I, float(B) b) -> (O) { O(i,j) = I(i,j) + b(j) }").f
    assert "S0.i] in 0:6720 tile 1," in biased.compile(x.reshape(-1, 64), bias).source("schedule")


FAR = replace(AVX512, name="skylake-avx512", cache=(2048, 4096, 1 << 30))
"""A machine whose last cache is far, and whose others are small."""


@pytest.mark.sampled  # shapes and types
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((256, 384), "float"), ((33, 65), "float"), ((1021, 39), "float"), ((17, 1100), "float"),
        ((1025, 530), "double"), ((250, 700), "half"), ((131, 290), "uint8"), ((131, 290), "bool"),
    ],
)  # fmt: skip
def test_whole_lines_leave_a_buffer(shape: tuple[int, int], dtype: str) -> None:
    """Rows of the output begin anywhere in a line; each line is stored by the tile in which it begins."""
    x = matrix(*shape, TYPES[dtype])
    kernel = flip(dtype).compile(x, target=FAR)
    assert torch.equal(run(kernel, x), x.t())
    assert "scratch" in kernel.source("loops")
    if shape[0] > 64:
        assert "nontemporal" in kernel.source("llvm")


def test_whole_lines_of_chains_and_permutations() -> None:
    """Other operands, several outputs, outputs that begin anywhere, orders of four axes."""
    op = tc.define(
        "def f(float(M,N) A, float(N,M) B, float(M) c) -> (O, P) {"
        " O(j,i) = A(i,j) * B(j,i) + c(i)"
        " P(j,i) = O(j,i) - 2 * A(i,j) }"
    ).f
    a, b, c = matrix(150, 203).float(), matrix(203, 150).float(), matrix(1, 150).float()[0]
    o, p = run(op.compile(a, b, c, target=FAR), a, b, c)
    assert torch.equal(o, a.t() * b + c)
    assert torch.equal(p, o - 2 * a.t())
    x = matrix(101, 203)
    kernel = flip().compile(x.float(), target=FAR)
    out = torch.empty(203 * 101 + 3)[3:].view(203, 101)
    assert torch.equal(run(kernel, x.float(), out=out), x.t().float())
    y = torch.arange(7 * 38 * 5 * 41).float().reshape(7, 38, 5, 41)
    for order in ((0, 3, 1, 2), (3, 2, 1, 0), (2, 3, 0, 1), (0, 2, 3, 1)):
        text = f"def p(float(A,B,C,D) I) -> (O) {{ O({','.join('abcd'[k] for k in order)}) = I(a,b,c,d) }}"
        assert torch.equal(run(tc.define(text).p.compile(y, target=FAR), y), y.permute(order))


@pytest.mark.sampled  # shapes
@pytest.mark.parametrize("shape", [(1030, 520), (1030, 70), (70, 1030), (50, 90)])
def test_experts_let_whole_lines_leave(shape: tuple[int, int]) -> None:
    """The expert's pipeline and the default one end in an innermost loop that stores whole lines."""
    x = matrix(*shape).float()
    kernel = flip().compile(x, target=FAR, schedule=schedule_transposition)
    assert torch.equal(run(kernel, x), x.t())
    assert "scratch" in kernel.source("loops")
    default = flip().compile(x, target=FAR)
    line = next(line for line in default.source("schedule").splitlines() if "vectorize(" in line)
    scheduled = flip().compile(x, target=FAR, schedule=parse_schedule(line.split(": ", 1)[1]))
    assert scheduled.source("llvm") == default.source("llvm")


@pytest.mark.sampled  # the two orders
@pytest.mark.parametrize(("tile", "inside"), [("n=32, m=1030", "m1"), ("m=32, n=1050", "n1")])
def test_tiles_longer_than_a_buffer(tile: str, inside: str) -> None:
    """The rest of a long tile has a smaller buffer."""
    x = matrix(1030, 1050).float()
    text = f"tile({tile}) >> pack(x='{inside}') >> vectorize('m', lanes=16) >> nontemporal_stores()"
    op = tc.define("def flip(float(M,N) x) -> (y) { y(n,m) = x(m,n) }").flip
    assert torch.equal(run(op.compile(x, target=FAR, schedule=parse_schedule(text)), x), x.t())


def test_tiles_of_short_rows_are_whole() -> None:
    """A line that two tiles share goes to memory twice; long runs to read are worth that where rows are long."""
    far = replace(AVX512, name="skylake-avx512")

    def schedule(rows: int, columns: int) -> str:
        return str(flip().compile(torch.empty(rows, columns), target=far).source("schedule"))

    assert "tile(j=64, i=250) >> pack(I='i1')" in schedule(250, 3840)
    assert "tile(i=128, j=256) >> pack(I='j1')" in schedule(1000, 1280)


def test_which_transpositions_leave_in_lines() -> None:
    """Where the last cache is near, it takes what it has room for."""
    x = torch.empty(700, 700)
    far, near = (replace(AVX512, name=name) for name in ("skylake-avx512", "znver4"))
    assert "streaming" in flip().compile(x, target=far).source("loops")
    assert "streaming" not in flip().compile(x, target=near).source("loops")
    assert "streaming" not in flip().compile(x[:300, :300].contiguous(), target=far).source("loops")


@pytest.mark.sampled  # types for each shape
@pytest.mark.parametrize("shape", [(129, 64), (257, 40), (131, 290), (1030, 90)])
@pytest.mark.parametrize("name", ["float", "double", "uint8"])
def test_no_two_tiles_store_one_element(name: str, shape: tuple[int, int]) -> None:
    """A last tile of less than a line leaves to the one before it what that stores of its last line."""
    x = matrix(*shape, TYPES[name])
    (found,) = interpret_compiled(flip(name).compile(x, target=FAR).compiled, {"I": x})
    assert torch.equal(found, x.t())
