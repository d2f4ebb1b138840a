"""Contractions lowered to loops compute what they say, whatever the sizes, the layouts and the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT16, FLOAT32, FLOAT64, INT32
from tensor_comprehensions.core.errors import CannotLower
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.nodes import Load, Loop, LoopKind, Space, Store, Var
from tensor_comprehensions.loop_ir.passes.hoist_packing import hoist_packing
from tensor_comprehensions.loop_ir.rewrite import walk_stmt_exprs, walk_stmts
from tensor_comprehensions.structured.analysis.contraction_info import analyze_contraction
from tensor_comprehensions.structured.cost.register_tiles import RegisterTileRanking
from tensor_comprehensions.structured.language.apply_primitives import plan_of_schedule
from tensor_comprehensions.structured.language.primitives import nontemporal_stores, pack, tile, vectorize
from tensor_comprehensions.structured.lower.contraction import generate_contraction, lower_contraction
from tensor_comprehensions.structured.op import accumulator_var
from tensor_comprehensions.structured.plan import PackStep, Plan, Side, TileLoop
from tensor_comprehensions.structured.planners.blocking import BlockingHeuristic
from tensor_comprehensions.structured.planners.select import select_plan, why_not_microkernel
from tensor_comprehensions.target import AVX2, AVX512

MATMULS = {
    "C:i,j = A:i,k x B:k,j": "ik,kj->ij",
    "C:i,j = A:k,i x B:k,j": "ki,kj->ij",
    "C:i,j = B:k,j x A:i,k": "kj,ik->ij",
}


@pytest.mark.parametrize("text", MATMULS)
@pytest.mark.parametrize("sizes", [(1, 16, 3), (7, 20, 5), (13, 37, 1), (16, 64, 9), (29, 50, 12)])
@pytest.mark.parametrize("target", [AVX512, AVX2], ids=lambda t: t.name)
def test_matmul(ops: Any, text: str, sizes: tuple[int, int, int], target: Any) -> None:
    op = ops.op(text, dict(zip("ijk", sizes, strict=True)))
    arrays = ops.run(op, lower_contraction(op, target, parallel=False))
    names = [x.buffer.name for x in (op.left, op.right) if isinstance(x, Load)]
    assert np.array_equal(arrays["result"], np.einsum(MATMULS[text], *(arrays[n] for n in names)))


@pytest.mark.parametrize(
    ("text", "sizes", "einsum"),
    [
        ("C:i,j = A:i,k x B:j,k", {"i": 30, "j": 21, "k": 35}, "ik,jk->ij"),
        ("C:i,j = A:k,i x B:j,k", {"i": 25, "j": 32, "k": 16}, "ki,jk->ij"),
        ("C:b,i,j = A:b,i,k x B:b,j,k", {"b": 3, "i": 26, "j": 17, "k": 9}, "bik,bjk->bij"),
        ("C:b,i,j = A:b,i,k x B:b,k,j", {"b": 3, "i": 6, "j": 17, "k": 9}, "bik,bkj->bij"),
        ("C:a,b,c,d = A:d,b,e,a x B:e,c", {"a": 5, "b": 3, "c": 25, "d": 9, "e": 4}, "dbea,ec->abcd"),
        ("C:a,b,c = A:b,d,a x B:d,c", {"a": 5, "b": 6, "c": 9, "d": 12}, "bda,dc->abc"),
        ("C:a,b = A:c,a,d x B:d,c,b", {"a": 15, "b": 16, "c": 5, "d": 3}, "cad,dcb->ab"),
    ],
)
def test_tensor_contractions(ops: Any, text: str, sizes: dict[str, int], einsum: str) -> None:
    op = ops.op(text, sizes)
    arrays = ops.run(op, lower_contraction(op, AVX512, parallel=False))
    assert np.array_equal(arrays["result"], np.einsum(einsum, arrays["A"], arrays["B"]))


@pytest.mark.parametrize("sizes", [(128, 32, 256), (301, 20, 150)])
def test_threads_share_the_rows_that_meet_one_panel(ops: Any, sizes: tuple[int, int, int]) -> None:
    op = ops.op("C:i,j = A:i,k x B:j,k", dict(zip("ijk", sizes, strict=True)))
    loop = lower_contraction(op, AVX512, parallel=True)
    assert isinstance(loop, Loop)
    assert loop.kind is LoopKind.PARALLEL
    (panel, _), *_ = hoist_packing(loop)[0]
    assert panel.shape[-2] == sizes[2]
    assert panel.shape[-1] >= sizes[1]
    arrays = ops.run(op, loop)
    assert np.array_equal(arrays["result"], arrays["A"] @ arrays["B"].T)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("width", [7, 24])
def test_convolution(ops: Any, stride: int, width: int) -> None:
    sizes = {"n": 2, "o": 26, "h": 3, "w": width, "c": 3, "y": 3, "x": 3}
    op = ops.op(f"C:n,o,h,w = A:n,c,{stride}*h+y,{stride}*w+x x B:o,c,y,x", sizes)
    arrays = ops.run(op, lower_contraction(op, AVX512, parallel=False))
    windows = np.lib.stride_tricks.sliding_window_view(arrays["A"], (3, 3), axis=(2, 3))[:, :, ::stride, ::stride]
    assert np.array_equal(arrays["result"], np.einsum("nchwyx,ocyx->nohw", windows, arrays["B"]))


def test_depthwise_convolution(ops: Any) -> None:
    op = ops.op("C:c,h,w = A:c,h+y,w+x x B:c,y,x", {"c": 4, "h": 6, "w": 20, "y": 3, "x": 3})
    arrays = ops.run(op, lower_contraction(op, AVX512, parallel=False))
    windows = np.lib.stride_tricks.sliding_window_view(arrays["A"], (3, 3), axis=(1, 2))
    assert np.array_equal(arrays["result"], np.einsum("chwyx,cyx->chw", windows, arrays["B"]))


@pytest.mark.parametrize("dtype", [FLOAT64, INT32], ids=str)
def test_other_types(ops: Any, dtype: Any) -> None:
    op = ops.op("C:i,j = A:i,k x B:k,j", {"i": 9, "j": 21, "k": 6}, dtype)
    arrays = ops.run(op, lower_contraction(op, AVX512, parallel=False))
    assert np.array_equal(arrays["result"], arrays["A"] @ arrays["B"])


def test_half_precision_storage_accumulates_in_single(ops: Any) -> None:
    op = ops.op("C:i,j = A:i,k x B:j,k", {"i": 32, "j": 40, "k": 12}, FLOAT32, FLOAT16)
    arrays = ops.run(op, lower_contraction(op, AVX512, parallel=False))
    exact = arrays["A"].astype(np.float32) @ arrays["B"].astype(np.float32).T
    assert np.array_equal(arrays["result"], exact.astype(np.float16))


def test_parallel_loops_have_no_races(ops: Any) -> None:
    op = ops.op("C:i,j = A:i,k x B:k,j", {"i": 19, "j": 50, "k": 6})
    plan = Plan("j", 16, (TileLoop("j", 32), TileLoop("i", 8), TileLoop("i", 4)), ("k",), parallel_depth=2)
    arrays = ops.run(op, generate_contraction(op, plan))
    assert np.array_equal(arrays["result"], arrays["A"] @ arrays["B"])


BIAS = build.buffer("bias", FLOAT32, (20,))


@pytest.mark.parametrize("blocked", [False, True])
def test_initial_value_and_epilogue_surround_the_sum_once(ops: Any, blocked: bool) -> None:
    initial = Load(BIAS, (Var("j"),))
    epilogue = build.call("fmax", accumulator_var(FLOAT32), build.mul(initial, 2.0))
    op = ops.op("C:i,j = A:i,k x B:k,j", {"i": 7, "j": 20, "k": 10}, initial=initial, epilogue=epilogue)
    levels = (TileLoop("j", 32), *((TileLoop("k", 4),) if blocked else ()), TileLoop("i", 4))
    arrays = ops.run(op, generate_contraction(op, Plan("j", 16, levels, ("k",))))
    expected = np.maximum(arrays["bias"] + arrays["A"] @ arrays["B"], 2 * arrays["bias"])
    assert np.array_equal(arrays["result"], expected)


@pytest.mark.parametrize("shape", [(5, 20), (1, 32)])
def test_epilogues_with_calls_run_over_spilled_sums(ops: Any, shape: tuple[int, int]) -> None:
    i, j = shape
    epilogue = build.call("exp", accumulator_var(FLOAT32))
    op = ops.op("C:h,i,j = A:i,k x B:h,k,j", {"h": 2, "i": i, "j": j, "k": 3}, epilogue=epilogue)
    levels = (TileLoop("h", 2), TileLoop("j", 32), TileLoop("i", 4))
    arrays = ops.run(op, generate_contraction(op, Plan("j", 16, levels, ("k",))))
    sums = np.einsum("ik,hkj->hij", arrays["A"], arrays["B"])
    np.testing.assert_allclose(arrays["result"], np.exp(sums), rtol=1e-6)


def test_accumulates_into_its_output(ops: Any) -> None:
    op = ops.op("C:i,j = A:i,k x B:k,j", {"i": 7, "j": 20, "k": 10})
    op = ops.op("C:i,j = A:i,k x B:k,j", {"i": 7, "j": 20, "k": 10}, initial=op.output)
    arrays = ops.run(op, lower_contraction(op, AVX512, parallel=False))
    assert np.array_equal(arrays["result"], arrays["C"] + arrays["A"] @ arrays["B"])


PACKED = [
    (1, (("j", 32), ("i", 4))),
    (2, (("j", 32), ("k", 4), ("i", 4))),
    (2, (("i", 8), ("k", 4), ("j", 32), ("i", 4))),
    (2, (("j", 48), ("i", 8), ("j", 16), ("i", 3))),
]


@pytest.mark.sampled  # layouts, depths and sides of one lowering
@pytest.mark.parametrize("text", [*MATMULS, "C:i,j = A:i,k x B:j,k", "C:i,j = B:j,k x A:k,i"])
@pytest.mark.parametrize(("depth", "levels"), PACKED)
@pytest.mark.parametrize("sides", [(Side.LEFT,), (Side.RIGHT,), (Side.LEFT, Side.RIGHT)])
def test_any_factor_may_be_packed_at_any_depth(
    ops: Any, text: str, depth: int, levels: tuple[tuple[str, int], ...], sides: tuple[Side, ...]
) -> None:
    op = ops.op(text, {"i": 21, "j": 50, "k": 18})
    chosen = tuple(TileLoop(*level) for level in levels)
    plan = Plan("j", 16, chosen, ("k",), packs=tuple(PackStep(side, depth) for side in sides))
    arrays = ops.run(op, generate_contraction(op, plan))
    a = arrays["A"].T if "A:k,i" in text else arrays["A"]
    b = arrays["B"].T if "B:j,k" in text else arrays["B"]
    assert np.array_equal(arrays["result"], a @ b)


@pytest.mark.parametrize(
    ("text", "sizes", "why"),
    [
        ("C:j,i = A:i,k x B:k,j", {"i": 3, "j": 30, "k": 200}, "3 contiguous"),
        ("C:i = A:i,k x B:k", {"i": 64, "k": 64}, "one row"),
        ("C:i = A:k,i x B:k", {"i": 64, "k": 64}, "once"),
        ("C:i,j = A:i,k x B:j,k", {"i": 1, "j": 64, "k": 64}, "one row"),
    ],
)
def test_objects_to_what_it_would_do_badly_but_does_it(ops: Any, text: str, sizes: dict[str, int], why: str) -> None:
    op = ops.op(text, sizes)
    assert why in (why_not_microkernel(op, AVX512) or "")
    arrays = ops.run(op, lower_contraction(op, AVX512, parallel=False))
    subscripts = (x.split(":")[1].replace(",", "") for x in text.replace("=", "x").split(" x "))
    out, a, b = (s.strip() for s in subscripts)
    assert np.array_equal(arrays["result"], np.einsum(f"{a},{b}->{out}", arrays["A"], arrays["B"]))


@pytest.mark.parametrize("rows", [2, 5])
def test_a_factor_is_turned_for_a_few_rows(ops: Any, rows: int) -> None:
    """As by a linear layer on a small batch: loops would gather the weights once for each row."""
    op = ops.op("C:i,j = A:i,k x B:j,k", {"i": rows, "j": 64, "k": 64})
    assert why_not_microkernel(op, AVX512) is None
    arrays = ops.run(op, lower_contraction(op, AVX512, parallel=False))
    assert np.array_equal(arrays["result"], arrays["A"] @ arrays["B"].T)


@pytest.mark.parametrize("text", ["C:2*j = A:i,k x B:k,j", "C:i,j = A:i,k x B:k"])
def test_refuses_what_it_cannot_do(ops: Any, text: str) -> None:
    op = ops.op(text, {"i": 8, "j": 30, "k": 9})
    assert why_not_microkernel(op, AVX512) is not None
    with pytest.raises(CannotLower):
        lower_contraction(op, AVX512, parallel=False)


@pytest.mark.parametrize("sizes", [(1, 33, 3, 12, 2), (2, 19, 2, 7, 2)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("target", [AVX512, AVX2], ids=lambda t: t.name)
def test_lanes_across_the_output(ops: Any, sizes: tuple[int, ...], stride: int, target: Any) -> None:
    """Narrow images: the lanes run along the channels, and the sums are turned to be stored."""
    extents = {**dict(zip("nohwc", sizes, strict=True)), "y": 3, "x": 2}
    scale = build.load(build.buffer("S", FLOAT32, (extents["o"],)), Var("o"))
    text = f"C:n,o,h,w = A:n,c,{stride}*h+y,{stride}*w+x x B:o,c,y,x"
    op = ops.op(text, extents, epilogue=build.add(accumulator_var(FLOAT32), scale))
    known = analyze_contraction(op, "o")
    tile = RegisterTileRanking(known, target).best
    for parallel in (False, True):
        arrays = ops.run(op, generate_contraction(op, BlockingHeuristic(known, target, tile, parallel).plan()))
        assert np.array_equal(arrays["result"], _convolve(arrays, stride) + arrays["S"][None, :, None, None])


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("read", ["i", "j", "i,j", "j,i"])
def test_epilogues_before_sums_are_turned(ops: Any, read: str, called: bool) -> None:
    """On vectors of sums as they are, unless what is added to them lies in memory as the output does."""
    sizes = {"i": 41, "j": 22, "k": 9}
    value = build.add(accumulator_var(FLOAT32), ops.access(f"S:{read}", sizes, FLOAT32))
    op = ops.op("C:i,j = A:i,k x B:j,k", sizes, epilogue=build.call("exp", value) if called else value)
    body = generate_contraction(
        op, plan_of_schedule(tile(i=32, j=9) >> pack("A") >> vectorize("i") >> nontemporal_stores(), op, AVX512)
    )
    assert not any(s.nontemporal for s in walk_stmts(body) if isinstance(s, Store) and s.buffer.space is Space.SCRATCH)
    found = {e.type.lanes for e in walk_stmt_exprs(body) if isinstance(e, Load) and e.buffer.name == "S"}
    assert found == {"i": {16}, "j": {1}, "i,j": {8}, "j,i": {16}}[read]
    arrays = ops.run(op, body)
    added = np.einsum(f"{read.replace(',', '')},i,j->ij", arrays["S"], np.ones(41), np.ones(22))
    expected = arrays["A"] @ arrays["B"].T + added
    np.testing.assert_allclose(arrays["result"], np.exp(expected) if called else expected, rtol=1e-6)


def _convolve(arrays: Any, stride: int) -> Any:
    windows = np.lib.stride_tricks.sliding_window_view(arrays["A"], (3, 2), axis=(2, 3))[:, :, ::stride, ::stride]
    return np.einsum("nchwyx,ocyx->nohw", windows, arrays["B"])


def test_narrow_images_have_lanes_along_the_channels(ops: Any) -> None:
    extents = {"n": 4, "o": 128, "h": 12, "w": 12, "c": 128, "y": 3, "x": 3}
    op = ops.op("C:n,o,h,w = A:n,c,h+y,w+x x B:o,c,y,x", extents)
    assert select_plan(op, AVX512, parallel=True).vector == "o"
    assert (
        select_plan(ops.op("C:i,j = A:i,k x B:k,j", {"i": 512, "j": 512, "k": 512}), AVX512, parallel=True).vector
        == "j"
    )


def test_too_little_work_for_threads_packs_once(ops: Any) -> None:
    """Shares of rows that no thread takes would make the same panel again and again."""
    op = ops.op("C:i,j = A:i,k x B:k,j", {"i": 64, "j": 64, "k": 64}, FLOAT32, FLOAT16)
    plan = select_plan(op, AVX512, parallel=True)
    assert not plan.parallel_depth
    (panel,) = plan.packs
    assert all(level.iterator == "j" for level in plan.levels[: panel.depth])
