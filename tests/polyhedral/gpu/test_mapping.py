"""What the mapper decides on known programs: kernels, launches, loops, reductions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensor_comprehensions.loop_ir.intrinsics import BARRIER, SHUFFLE_XOR
from tensor_comprehensions.loop_ir.nodes import (
    If,
    Invoke,
    Kernel,
    Launch,
    Loop,
    LoopKind,
    Module,
    Space,
    Stmt,
)
from tensor_comprehensions.loop_ir.rewrite import allocated_buffers, walk_stmts
from tensor_comprehensions.options import MappingOptions, check_mapping
from tensor_comprehensions.polyhedral.gpu.lower_gpu import default_options, explain_gpu, lower_gpu
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang import BoundFunction, bind, compile_source
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

H200 = parse_gpu_target("cuda:sm_90")
MATMUL = "def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
ADD = "def add(float(N,M) A, float(N,M) B) -> (C) { C(n,m) = A(n,m) + B(n,m) }"
ROW_SUM = "def s(float(N,D) X) -> (O) { O(n) +=! X(n,d) }"
COLUMN_SUM = "def s(float(N,D) X) -> (O) { O(d) +=! X(n,d) }"
SUM = "def s(float(N) X) -> (O) { O +=! X(n) }"
TRANSPOSE = "def t(float(N,M) X) -> (O) { O(m,n) = X(n,m) }"
MOMENTS = "def f(float(N,D) X) -> (m, v) { m(n) +=! X(n,d)  v(n) +=! X(n,d) * X(n,d) }"
MLP = """
def mlp(float(B,N) X, float(O,N) W, float(P,O) V) -> (Y) {
    T(b,o) +=! X(b,n) * W(o,n)
    T(b,o) = fmaxf(T(b,o), 0)
    Y(b,p) +=! T(b,o) * V(p,o)
}"""
REVERSED = "def f(float(N) X) -> (O) { T(n) = X(n) * 2.0  O(n) = T(N - 1 - n) }"


def bound(source: str, **sizes: int) -> BoundFunction:
    (function,) = compile_source(source)
    return legalize(bind(function, sizes))


def module(source: str, options: MappingOptions | None, **sizes: int) -> Module:
    return lower_gpu(bound(source, **sizes), options, H200)


def launches(m: Module) -> list[Launch | None]:
    return [k.launch for k in m.kernels]


def loops(k: Kernel) -> list[Loop]:
    return walk_loops(k.body)


def walk_loops(body: Stmt | None) -> list[Loop]:
    return [] if body is None else [s for s in walk_stmts(body) if isinstance(s, Loop)]


def list_invoked(k: Kernel) -> list[str]:
    return [s.name for s in walk_stmts(k.body) if isinstance(s, Invoke)]


def test_tiles_go_round_the_blocks_and_points_round_the_threads() -> None:
    m = module(MATMUL, MappingOptions.naive(), M=100, N=70, K=37)
    assert launches(m) == [Launch((4, 3, 1), (32, 8, 1))]


def test_identifiers_that_are_idle_everywhere_are_taken_back() -> None:
    m = module(ADD, MappingOptions(tile=(1, 64), threads=(64, 4, 4), blocks=(256, 256, 256)), N=5, M=40)
    assert launches(m) == [Launch((5, 1, 1), (40, 1, 1))]


def test_blocks_that_are_too_few_walk_several_tiles() -> None:
    m = module(ADD, MappingOptions(tile=(4, 0), threads=(32,), blocks=(2,)), N=64, M=32)
    assert launches(m) == [Launch((2, 1, 1), (32, 1, 1))]
    assert any(loop.step == 2 or str(loop.stop) for loop in loops(m.kernels[0]))


def test_one_thread_runs_the_simplest_kernel() -> None:
    m = module(MATMUL, MappingOptions.single_thread(), M=5, N=6, K=7)
    assert launches(m) == [Launch((1, 1, 1), (1, 1, 1))]
    assert list_invoked(m.kernels[0]) == []


def test_kernels_follow_one_another_where_blocks_would_conflict() -> None:
    assert len(module(REVERSED, MappingOptions.naive(), N=1000).kernels) == 2
    assert len(module(REVERSED, MappingOptions.naive().fuse("max"), N=1000).kernels) == 2


@pytest.mark.parametrize(("limit", "unrolled"), [(1, 0), (7, 1), (8, 2), (100, 2)])
def test_loops_are_written_out_up_to_a_number_of_instances(limit: int, unrolled: int) -> None:
    options = MappingOptions(tile=(8, 64), threads=(16, 4)).unroll(limit)
    (kernel,) = module(ADD, options, N=64, M=64).kernels
    assert sum(loop.kind is LoopKind.UNROLLED for loop in loops(kernel)) == unrolled


def test_loops_that_stop_early_are_written_out_with_guards() -> None:
    options = MappingOptions(tile=(8, 64), threads=(16, 4)).unroll(8)
    (kernel,) = module(ADD, options, N=61, M=50).kernels
    (apart,) = (s for s in walk_stmts(kernel.body) if isinstance(s, If) and s.otherwise is not None)
    assert [sum(loop.kind is LoopKind.UNROLLED for loop in walk_loops(s)) for s in (apart.then, apart.otherwise)] == [
        2,
        2,
    ]


# --- reductions --------------------------------------------------------------------------------------------------


def cooperative(threads: tuple[int, ...], tile: tuple[int, ...] = (1,)) -> MappingOptions:
    return MappingOptions(tile=tile, threads=threads, cooperative_reductions=True)


def list_shared_shapes(k: Kernel) -> list[tuple[int, ...]]:
    return [b.shape for b in allocated_buffers(k.body) if b.space is Space.SHARED]


def test_a_warp_needs_no_shared_memory() -> None:
    (kernel,) = module(ROW_SUM, cooperative((32, 4), (4,)), N=64, D=500).kernels
    assert list_invoked(kernel) == [SHUFFLE_XOR] * 5
    assert list_shared_shapes(kernel) == []


def test_warps_of_a_block_meet_once() -> None:
    (kernel,) = module(ROW_SUM, cooperative((256,)), N=64, D=5000).kernels
    assert list_invoked(kernel) == [SHUFFLE_XOR] * 5 + [BARRIER] + [SHUFFLE_XOR] * 3
    assert list_shared_shapes(kernel) == [(8,)]


def test_several_reductions_meet_at_one_barrier() -> None:
    (kernel,) = module(MOMENTS, cooperative((256,)), N=64, D=5000).kernels
    assert list_invoked(kernel).count(BARRIER) == 1
    assert list_shared_shapes(kernel) == [(8,), (8,)]


def test_columns_are_read_by_neighbors() -> None:
    (kernel,) = module(COLUMN_SUM, cooperative((32, 8), (32,)), N=500, D=64).kernels
    assert kernel.launch == Launch((2, 1, 1), (32, 8, 1))
    assert list_shared_shapes(kernel) == [(256,)]


def test_long_sums_are_split_across_blocks() -> None:
    options = replace(cooperative((256,)), split_k=64)
    m = module(SUM, options, N=1 << 20)
    assert [t.shape for t in m.temporaries] == [(64,)]
    assert [k.launch.grid[0] for k in m.kernels if k.launch] == [64, 1]


# --- the default -------------------------------------------------------------------------------------------------


def test_large_products_are_tiled_for_shared_memory_and_registers() -> None:
    options = default_options(bound(MATMUL, M=1024, N=1024, K=1024), H200)
    check_mapping(options, H200)
    assert options.shared_memory
    assert options.private_memory


def test_every_processor_has_a_block_of_a_small_product() -> None:
    (launch,) = launches(module(MATMUL, None, M=128, N=256, K=32))
    assert launch is not None
    assert launch.grid[0] * launch.grid[1] >= H200.num_sms // 2


def test_layers_are_one_kernel_while_their_weights_are_small() -> None:
    assert len(module(MLP, None, B=128, N=128, O=64, P=32).kernels) == 1
    assert len(module(MLP, None, B=4096, N=1024, O=1024, P=1024).kernels) == 2


def test_a_long_sum_keeps_all_processors_busy_by_default() -> None:
    first, last = launches(module(SUM, None, N=10_000_000))
    assert first is not None
    assert last is not None
    assert first.grid[0] >= H200.num_sms
    assert last.grid == (1, 1, 1)


def test_a_transposition_goes_through_shared_memory() -> None:
    (kernel,) = module(TRANSPOSE, None, N=4096, M=4096).kernels
    assert list_shared_shapes(kernel) == [(32, 32)]
    assert list_invoked(kernel) == [BARRIER]


def test_the_explanation_shows_the_mapped_tree() -> None:
    text = explain_gpu(bound(MATMUL, M=100, N=70, K=37), MappingOptions.naive(), H200)
    for part in (
        "kernel: 4 x 3 x 1 blocks of 32 x 8 x 1 threads",
        "b0 = ",
        "t1 = ",
        "band: m / 32, n / 32",
        "k / 32 (ordered)",
    ):
        assert part in text


TABLES = """def tables(float(V,D) T, float(W,D) U, int32(B,L) I, int32(B,M) J) -> (O, P) {
    O(b,d) +=! T(I(b,l),d)
    P(b,d) +=! U(J(b,m),d)
}"""
CHAIN = """def chain(float(V) T, int32(W) I, int32(N) J) -> (O) { O(n) = T(I(J(n))) }"""


def test_what_has_nothing_in_common_shares_a_launch_while_it_is_light() -> None:
    """The checks do, too; but one that reads at a place that another checks comes after it."""
    small = module(TABLES, None, V=100, W=90, D=64, B=32, L=5, M=7)
    assert [k.name for k in small.kernels] == ["tables.check0", "tables"]
    assert len(small.sites) == 2
    assert len(module(TABLES, None, V=100, W=90, D=64, B=1 << 14, L=50, M=50).kernels) == 4
    assert len(module(TABLES, MappingOptions.naive(), V=100, W=90, D=64, B=32, L=5, M=7).kernels) == 4
    assert [k.name for k in module(CHAIN, None, V=9, W=8, N=40).kernels] == ["chain.check0", "chain.check1", "chain"]
