"""Each piece of a pipeline keeps what an op computes, or refuses; pipelines, plans and texts turn into one another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from tensor_comprehensions.core.dtypes import FLOAT16, FLOAT32
from tensor_comprehensions.core.errors import ArgumentError, CannotLower
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.nodes import Block, Stmt
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.structured.language import primitives
from tensor_comprehensions.structured.language.apply_primitives import explain_schedule, plan_of_schedule
from tensor_comprehensions.structured.language.plan_to_schedule import plan_to_schedule
from tensor_comprehensions.structured.language.primitives import (
    Pack,
    Schedule,
    interchange,
    nontemporal_stores,
    pack,
    pack_output,
    pad,
    parallel,
    peel,
    prefetch,
    tile,
    unroll,
    vectorize,
)
from tensor_comprehensions.structured.lower import panel_prefetch
from tensor_comprehensions.structured.lower.contraction import generate_contraction
from tensor_comprehensions.structured.lower.tile import IterRange, full_region, local_var
from tensor_comprehensions.structured.match.drop_unit_dims import drop_unit_dims
from tensor_comprehensions.structured.op import accumulator_var
from tensor_comprehensions.structured.plan import Side
from tensor_comprehensions.structured.planners.select import select_plan
from tensor_comprehensions.target import AVX2, AVX512

MATMUL = "C:m,n = A:m,k x B:k,n"
SIZES = {"m": 14, "n": 37, "k": 11}


def computes(ops: Any, p: Schedule, text: str = MATMUL, sizes: dict[str, int] | None = None) -> bool:
    """Whether `p` leaves the result as `numpy.einsum` computes it from the op alone."""
    op = ops.op(text, sizes or SIZES)
    plan = plan_of_schedule(p, op, AVX512)
    arrays = ops.run(op, generate_contraction(drop_unit_dims(op), plan))
    out, a, b = (t.split(":")[1].strip().replace(",", "") for t in text.replace("=", "x").split(" x "))
    return np.array_equal(arrays["result"], np.einsum(f"{a},{b}->{out}", arrays["A"], arrays["B"]))


PIPELINES = {
    "nothing": Schedule(),
    "one level": tile(m=4, n=32),
    "rows": tile(m=3),
    "lanes": tile(n=16),
    "order written": tile(n=16, m=5),
    "blocks": tile(m=6, n=32, k=4) >> tile(m=3, n=16),
    "three levels": tile(m=12, n=32) >> tile(m=6, k=4) >> tile(n=16, m=2),
    "interchange": tile(m=4, n=16, k=5) >> interchange("k1 n1 m1"),
    "iterators by name": tile(m=4, n=16, k=5) >> interchange("n m k"),
    "parallel": tile(m=4, n=16) >> parallel("m1", "n1"),
    "parallel, grain": tile(m=4, n=16) >> parallel("m1", grain_size=3),
    "pack left": tile(m=4, n=16) >> pack(A="m1"),
    "pack right": tile(n=16, m=4) >> pack(B="n1"),
    "pack whole": tile(n=16, m=4) >> pack("A", "B"),
    "pack whole, blocks": tile(k=4, n=16, m=4) >> pack("A", "B"),
    "pack by place": tile(n=16, m=4) >> pack(right="n1"),
    "pack whole, together": tile(n=16, m=4) >> pack("A", "B") >> parallel("n1", "m1"),
    "pack whole, pad, together": tile(n=16, m=4) >> pack("A", "B") >> pad("A") >> parallel("n1") >> peel("n"),
    "pad": tile(n=16, m=4) >> pack("A", "B") >> pad("B"),
    "pad both": tile(n=32, m=4) >> pack("A", "B") >> pad("A", "B"),
    "pad what each loop packs": tile(n=32, m=4) >> pack(A="m1", B="n1") >> pad("A", "B") >> parallel("n1"),
    "pad inside blocks": tile(n=33, m=9, k=4) >> tile(n=32, m=4) >> pack(A="m1", B="n1") >> pad("A", "B"),
    "pad one large tile": tile(n=48, m=16) >> pack("A", "B") >> pad("A", "B") >> vectorize("n", lanes=16),
    "peel": tile(n=16, m=4) >> peel("m", "n"),
    "peel blocks": tile(m=10, n=32) >> tile(m=4, n=16) >> peel("m1", "n2", "m2"),
    "peel what is shared": tile(m=4, n=16) >> parallel("m1", "n1") >> peel("m", "n"),
    "narrow": tile(n=16, m=4) >> vectorize("n", lanes=4),
    "stream": tile(n=16, m=4) >> nontemporal_stores(),
    "prefetch": tile(n=16, m=4) >> prefetch(B="n1"),
    "prefetch, unroll": tile(n=16, m=4) >> unroll(k=4) >> prefetch(B="n1") >> parallel("n1"),
    "prefetch the next block": tile(n=16, k=4, m=4) >> prefetch(B="k1"),
    "prefetch for a panel": tile(n=16, m=4) >> pack(B="n1") >> prefetch(B="n1"),
    "unroll": tile(n=16, m=4) >> unroll(k=4),
    "unroll evenly": tile(n=16, m=4) >> unroll(k=11),
    "unroll a block": tile(n=16, k=6, m=4) >> unroll(k=4),
    "unroll completely": tile(n=16, m=4) >> unroll("k"),
    "issue": tile(m=8, n=32, k=4)
    >> tile(m=4, n=16)
    >> pad("A", "B")
    >> pack(A="m1", B="n1")
    >> vectorize()
    >> unroll(k=4),
}


@pytest.mark.parametrize("p", PIPELINES.values(), ids=PIPELINES)
def test_every_piece_keeps_the_result(ops: Any, p: Schedule) -> None:
    assert computes(ops, p)


@pytest.mark.parametrize("p", PIPELINES.values(), ids=PIPELINES)
def test_round_trips(ops: Any, p: Schedule) -> None:
    assert eval(repr(p), vars(primitives)) == p
    op = drop_unit_dims(ops.op(MATMUL, SIZES))
    plan = plan_of_schedule(p, op, AVX512)
    back = plan_to_schedule(plan, op)
    assert plan_of_schedule(back, op, AVX512) == plan
    assert plan_to_schedule(plan_of_schedule(back, op, AVX512), op) == back
    assert eval(repr(back), vars(primitives)) == back
    assert hash(back) == hash(eval(repr(back), vars(primitives)))


@pytest.mark.parametrize("target", [AVX512, AVX2], ids=lambda t: t.name)
@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (MATMUL, {"m": 512, "n": 512, "k": 512}),
        (MATMUL, {"m": 64, "n": 64, "k": 4096}),
        ("C:m,n = A:m,k x B:n,k", {"m": 700, "n": 300, "k": 900}),
        ("C:b,m,n = A:b,m,k x B:b,k,n", {"b": 30, "m": 26, "n": 72, "k": 26}),
        ("C:a,b,c,d = A:d,b,e,a x B:e,c", {"a": 24, "b": 24, "c": 25, "d": 23, "e": 24}),
        ("C:a,b,c = A:b,d,a x B:d,c", {"a": 168, "b": 24, "c": 162, "d": 168}),
        ("C:a,b = A:c,a,d x B:d,c,b", {"a": 15, "b": 160, "c": 500, "d": 3}),
        ("C:n,o,h,w = A:n,c,h+y,w+x x B:o,c,y,x", {"n": 2, "o": 64, "h": 28, "w": 28, "c": 32, "y": 3, "x": 3}),
    ],
)
def test_the_choice_of_the_cost_model_is_a_pipeline(ops: Any, text: str, sizes: dict[str, int], target: Any) -> None:
    op = drop_unit_dims(ops.op(text, sizes))
    for alone in (True, False):
        plan = select_plan(op, target, parallel=alone)
        assert plan_of_schedule(plan_to_schedule(plan, op), op, target) == plan


def tiles_and_branches(ops: Any, p: Schedule) -> tuple[int, int]:
    """How many micro-kernels `p` makes, and how many branches there are in loops around them."""
    op = drop_unit_dims(ops.op(MATMUL, SIZES))
    text = format_program(generate_contraction(op, plan_of_schedule(p, op, AVX512)))
    return text.count("allocate register"), text.count("else")


def test_threads_share_the_copy_of_a_whole_factor(ops: Any) -> None:
    op = drop_unit_dims(ops.op(MATMUL, {"m": 40, "n": 64, "k": 8}))
    text = format_program(
        generate_contraction(op, plan_of_schedule(tile(n=16, m=4) >> pack("A", "B") >> parallel("n1"), op, AVX512))
    )
    assert text.count("parallel for") == 3


def test_padding_leaves_one_micro_kernel(ops: Any) -> None:
    packed = tile(n=32, m=4) >> pack("A", "B")
    assert tiles_and_branches(ops, packed >> peel("m", "n"))[0] == 4
    assert tiles_and_branches(ops, packed >> pad("A") >> peel("n"))[0] == 2
    assert tiles_and_branches(ops, packed >> pad("A", "B"))[0] == 1


def test_peeling_leaves_no_branch(ops: Any) -> None:
    for shared in (Schedule(), parallel("m1", "n1")):
        loops = tile(m=4, n=16) >> shared
        assert [tiles_and_branches(ops, loops >> p)[1] for p in (Schedule(), peel("m"), peel("m", "n"))] == [3, 2, 0]


def test_the_last_rows_of_a_padded_panel_are_zeros(ops: Any) -> None:
    """Where two iterators of a factor are in the register tile, copies fill up one of them."""
    text, sizes = "C:p,q,n = A:p,q,k x B:k,n", {"p": 7, "q": 5, "k": 3, "n": 20}
    op = ops.op(text, sizes)
    p = tile(p=2, n=16, q=3) >> pack("A", "B") >> pad("A", "B")
    arrays = ops.run(op, generate_contraction(drop_unit_dims(op), plan_of_schedule(p, op, AVX512)))
    assert np.array_equal(arrays["result"], np.einsum("pqk,kn->pqn", arrays["A"], arrays["B"]))


@pytest.mark.parametrize("epilogue", ["relu", "tanh"])
def test_padding_stores_what_there_is(ops: Any, epilogue: str) -> None:
    """An epilogue that reads a row's own value, in registers and by way of a buffer."""
    total = build.add(accumulator_var(FLOAT32), ops.access("D:m", SIZES, FLOAT32))
    total = build.maximum(total, 0.0) if epilogue == "relu" else build.call("tanh", total)
    op = ops.op(MATMUL, SIZES, epilogue=total, initial=ops.access("E:n", SIZES, FLOAT32))
    p = tile(n=32, m=4, k=5) >> tile(n=16, m=3) >> pack(A="m1", B="n1") >> pad("A", "B")
    arrays = ops.run(op, generate_contraction(drop_unit_dims(op), plan_of_schedule(p, op, AVX512)))
    expected = arrays["A"] @ arrays["B"] + arrays["E"] + arrays["D"][:, None]
    expected = np.maximum(expected, 0) if epilogue == "relu" else np.tanh(expected)
    np.testing.assert_allclose(arrays["result"], expected, rtol=1e-5)


@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_random_pipelines_keep_the_result(ops: Any, data: Any) -> None:
    size = st.integers(1, 20)
    sizes = {name: data.draw(size) for name in "bmk"} | {"n": data.draw(st.integers(2, 40))}
    p = Schedule()
    for _ in range(data.draw(st.integers(1, 3))):
        names = data.draw(st.permutations("bmnk"))[: data.draw(st.integers(1, 4))]
        p = p >> tile(**{name: data.draw(st.integers(1, 8 if name != "n" else 32)) for name in names})
    p = p >> tile(m=data.draw(st.integers(1, 4)), n=data.draw(st.integers(2, 32)), b=1)
    for name in data.draw(st.sampled_from(["", "A", "B", "AB"])):
        loop = data.draw(st.sampled_from(["m1", "n1", "m", "n", "b"]))
        p = p >> pack(**{name: loop})
        p = p >> pad(name) if data.draw(st.booleans()) else p
    p = p >> peel("b", *data.draw(st.sampled_from(["", "m", "n", "nm"]))) if data.draw(st.booleans()) else p
    if any(isinstance(piece, Pack) and piece.operand_loops[0][0] == "B" for piece in p.primitives):
        lanes, joined = data.draw(st.sampled_from([(0, 1), (4, 2), (4, 4), (8, 2)]))
        p = p >> vectorize("n", lanes=lanes, vectors_per_register=joined)
    if data.draw(st.booleans()):
        p = p >> unroll(k=data.draw(st.integers(1, 5)))
    try:
        assert computes(ops, p, "C:b,m,n = A:b,m,k x B:b,k,n", sizes)
    except CannotLower as reason:
        if not any(word in str(reason) for word in ("pack", "padded")):
            raise
        assume(False)


@pytest.mark.parametrize(
    ("p", "unknown", "known"),
    [
        (tile(q=4), "'q'", "m, n, k"),
        (tile(m=4) >> interchange("m2 n"), "'m2'", "n, m1"),
        (tile(m=4, n=16) >> interchange("m k"), "'k'", "tile(k=...)"),
        (tile(m=4) >> parallel("x"), "'x'", "n, m1"),
        (pack(D="m"), "'D'", "A, B, left, right"),
        (pack(A="x"), "'x'", "m, n"),
        (pad("x"), "'x'", "A, B"),
        (peel("x"), "'x'", "m, n"),
        (vectorize("x"), "'x'", "m, n, k"),
        (unroll(x=2), "'x'", "m, n, k"),
    ],
    ids=str,
)
def test_unknown_names_are_mistakes(ops: Any, p: Schedule, unknown: str, known: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        plan_of_schedule(p, ops.op(MATMUL, SIZES), AVX512)
    assert unknown in str(caught.value)
    assert known in str(caught.value)


@pytest.mark.parametrize(
    ("p", "why"),
    [
        (tile(m=4, n=16) >> tile(m=2) >> interchange("m2 m1"), "outer tile of m"),
        (tile(m=4, n=16) >> parallel("n1"), "outermost loops are m1"),
        (tile(k=4, m=4, n=16) >> parallel("k1"), "depend on each other"),
        (tile(m=8, n=16) >> tile(m=4) >> interchange("m2 n1") >> parallel("m1", "m2"), "of one iterator"),
        (tile(m=4, n=16) >> parallel("m1", "n1") >> pack(A="m1"), "between loops that the threads share"),
        (tile(m=4, n=16) >> pack("A") >> pack(A="m1"), "already"),
        (tile(m=8, n=16) >> tile(m=4) >> pack("A"), "two levels of tiles of m"),
        (tile(k=6) >> tile(k=3, m=4, n=16) >> pack(A="k1"), "two tiles of the reduction k"),
        (tile(m=4, n=16) >> pad("A"), "not packed"),
        (peel("m"), "not tiled"),
        (tile(m=4, n=16) >> pack("A") >> pad("A") >> peel("m"), "is padded"),
        (vectorize("k"), "summed"),
        (tile(n=1), "one point"),
        (unroll(m=2), "unrolled anyway"),
        (tile(k=2, m=2, n=16) >> nontemporal_stores(), "read again soon"),
        (tile(m=4, n=16) >> prefetch(A="m1"), "not contiguous along the lanes"),
        (tile(m=4, n=16) >> prefetch(B="m1"), "next iteration"),
        (tile(n=16, m=4) >> unroll("k") >> prefetch(B="n1"), "loop over the sum"),
        (tile(m=14, n=37) >> vectorize("n", lanes=4), "140 vectors"),
        (tile(m=4) | tile(m=5), "choice"),
    ],
    ids=str,
)
def test_refuses_with_a_reason(ops: Any, p: Schedule, why: str) -> None:
    with pytest.raises(CannotLower, match=why):
        plan_of_schedule(p, ops.op(MATMUL, SIZES), AVX512)


def test_the_output_must_hold_partial_sums(ops: Any) -> None:
    with pytest.raises(CannotLower, match="partial sums"):
        plan_of_schedule(tile(k=4), ops.op(MATMUL, SIZES, FLOAT32, FLOAT16), AVX512)
    op = ops.op(MATMUL, SIZES)
    op = ops.op(MATMUL, SIZES, epilogue=build.add(accumulator_var(FLOAT32), op.output))
    with pytest.raises(CannotLower, match="depends on the old output"):
        plan_of_schedule(tile(k=4), op, AVX512)


def test_lanes_across_the_output(ops: Any) -> None:
    across = tile(n=4, m=14) >> pack(A="n1") >> vectorize("m")
    assert computes(ops, across)
    assert computes(ops, tile(m=14) >> vectorize("m"))
    assert "turned to be stored" in explain_schedule(across, ops.op(MATMUL, SIZES), AVX512)
    with pytest.raises(CannotLower, match="must be complete"):
        plan_of_schedule(tile(k=4, m=14) >> vectorize("m"), ops.op(MATMUL, SIZES), AVX512)
    with pytest.raises(CannotLower, match="no factor depends on m"):
        plan_of_schedule(vectorize("m"), ops.op("C:m,n = A:k,n x B:k", SIZES), AVX512)


CROSSED = "C:c,b,a = A:a,d,b x B:c,d"
UNPACKED = {
    "a row at a time": tile(a=8) >> tile(a=1, b=16, c=3) >> pack_output("a1") >> vectorize("b"),
    "all of it": tile(b=32, a=21) >> tile(a=1, b=16, c=4) >> pack_output("b1") >> vectorize("b"),
    "narrow lanes": tile(a=9) >> tile(a=2, b=8, c=2) >> pack_output("a1") >> vectorize("b", lanes=4),
    "blocks of the sum": tile(a=16) >> tile(a=1, d=4, b=16, c=3) >> pack_output("a1") >> vectorize("b"),
    "panels": tile(a=16) >> tile(a=1, b=32, c=3) >> pack(A="a2", B="c") >> pack_output("a1") >> vectorize("b"),
    "a panel around it": tile(b=16, a=16) >> tile(a=1, c=3) >> pack(A="a1") >> pack_output("a1") >> vectorize("b"),
    "threads": tile(c=2, a=16) >> tile(a=1, b=16) >> pack_output("a1") >> parallel("c1", "a1") >> vectorize("b"),
    "past the caches": tile(a=16) >> tile(a=1, b=16) >> pack_output("a1") >> vectorize("b") >> nontemporal_stores(),
}


@pytest.mark.sampled  # sizes for each schedule
@pytest.mark.parametrize("p", UNPACKED.values(), ids=UNPACKED)
@pytest.mark.parametrize("sizes", [{"a": 21, "b": 37, "c": 5, "d": 9}, {"a": 32, "b": 32, "c": 6, "d": 8}], ids=str)
def test_results_are_kept_and_then_stored(ops: Any, p: Schedule, sizes: dict[str, int]) -> None:
    assert computes(ops, p, CROSSED, sizes)
    op = drop_unit_dims(ops.op(CROSSED, sizes))
    plan = plan_of_schedule(p, op, AVX512)
    assert plan_of_schedule(plan_to_schedule(plan, op), op, AVX512) == plan
    assert eval(repr(p), vars(primitives)) == p
    text = format_program(generate_contraction(op, plan))
    assert not re.search(r"C\[.*\] = c\.acc", text)
    assert "shuffle" in text
    assert ("# streaming" in text) == plan.nontemporal


ROWS = "C:e,d,c,b,a = A:d,a,b,f,e x B:f,c"
JOINED = {
    "pairs of rows": tile(e=1, d=2, c=3, a=24) >> pack(A="d1") >> vectorize("a", lanes=8, vectors_per_register=2),
    "three of a row": tile(e=1, d=4, b=2, c=3, a=24) >> pack(A="d1") >> vectorize("a", lanes=4, vectors_per_register=4),
    "whole runs": tile(e=1, d=2, c=3, a=32)
    >> pack(A="d1")
    >> vectorize("a", lanes=8, vectors_per_register=2)
    >> nontemporal_stores(),
    "an odd number": tile(e=1, d=3, c=3, a=24) >> pack(A="d1") >> vectorize("a", lanes=8, vectors_per_register=2),
    "both packed": tile(d=4, c=4)
    >> tile(d=2, c=2)
    >> pack(A="d2", B="c1")
    >> vectorize("a", lanes=8, vectors_per_register=2),
    "padded": tile(e=1, d=2, c=3, a=24)
    >> pack(A="d1", B="c1")
    >> pad("A", "B")
    >> vectorize("a", lanes=8, vectors_per_register=2),
    "blocks of the sum": tile(f=4, d=2, c=3)
    >> pack(A="d1")
    >> vectorize("a", lanes=8, vectors_per_register=2)
    >> unroll(f=2),
    "past the caches": tile(e=1, d=2, c=3, a=24)
    >> pack(A="d1")
    >> vectorize("a", lanes=8, vectors_per_register=2)
    >> nontemporal_stores(),
    "across": tile(c=3, d=24, e=2) >> pack(A="c1") >> vectorize("d", lanes=8, vectors_per_register=2),
}


@pytest.mark.sampled  # sizes for each schedule
@pytest.mark.parametrize("p", JOINED.values(), ids=JOINED)
@pytest.mark.parametrize("sizes", [(24, 3, 7, 6, 2, 9), (21, 2, 8, 5, 3, 8), (24, 2, 6, 24, 2, 5)], ids=str)
def test_vectors_of_several_rows_share_registers(ops: Any, p: Schedule, sizes: tuple[int, ...]) -> None:
    extents = dict(zip("abcdef", sizes, strict=True))
    assert computes(ops, p, ROWS, extents)
    op = drop_unit_dims(ops.op(ROWS, extents))
    plan = plan_of_schedule(p, op, AVX512)
    assert plan_of_schedule(plan_to_schedule(plan, op), op, AVX512) == plan
    assert eval(repr(p), vars(primitives)) == p


def test_registers_that_rows_share_have_no_idle_lanes(ops: Any) -> None:
    op = drop_unit_dims(ops.op(ROWS, dict(zip("abcdef", (24, 2, 6, 4, 2, 9), strict=True))))
    plan = plan_of_schedule(JOINED["pairs of rows"], op, AVX512)
    assert "6 x b 1 x c 3" not in explain_schedule(JOINED["pairs of rows"], op, AVX512)
    assert "float32x16 c.acc[9]" in format_program(generate_contraction(op, plan))


def test_joined_sums_go_on_from_the_old_output_and_through_the_epilogue(ops: Any) -> None:
    extents = dict(zip("abcdef", (21, 3, 7, 5, 2, 9), strict=True))
    plain = ops.op(ROWS, extents)
    doubled = build.mul(accumulator_var(FLOAT32), 2.0)
    op = ops.op(ROWS, extents, initial=plain.output, epilogue=doubled)
    arrays = ops.run(
        op, generate_contraction(drop_unit_dims(op), plan_of_schedule(JOINED["an odd number"], op, AVX512))
    )
    expected = 2 * (np.einsum("dabfe,fc->edcba", arrays["A"], arrays["B"]) + arrays["C"])
    assert np.array_equal(arrays["result"], expected)


def test_vectors_that_cannot_be_joined(ops: Any) -> None:
    op = ops.op(ROWS, dict(zip("abcdef", (24, 2, 6, 4, 2, 9), strict=True)))
    with pytest.raises(CannotLower, match="pack the factor"):
        plan_of_schedule(tile(d=2, a=24) >> vectorize("a", lanes=8, vectors_per_register=2), op, AVX512)
    with pytest.raises(CannotLower, match="more than a register"):
        plan_of_schedule(tile(d=2, a=24) >> pack(A="d1") >> vectorize("a", lanes=8, vectors_per_register=4), op, AVX512)
    with pytest.raises(CannotLower, match="are no vectors"):
        plan_of_schedule(tile(d=2, a=24) >> pack(A="d1") >> vectorize("a", lanes=1, vectors_per_register=2), op, AVX512)


def test_what_is_kept_is_stored_through_the_epilogue(ops: Any) -> None:
    sizes = {"a": 21, "b": 37, "c": 5, "d": 9}
    plain = ops.op(CROSSED, sizes)
    op = ops.op(CROSSED, sizes, epilogue=build.add(build.mul(accumulator_var(FLOAT32), 2.0), plain.output))
    plan = plan_of_schedule(UNPACKED["blocks of the sum"], op, AVX512)
    arrays = ops.run(op, generate_contraction(drop_unit_dims(op), plan))
    expected = 2 * np.einsum("adb,cd->cba", arrays["A"], arrays["B"]) + arrays["C"]
    assert np.array_equal(arrays["result"], expected)


@pytest.mark.parametrize(
    ("p", "why"),
    [
        (tile(a=8, b=16) >> pack_output("a1"), "across the lanes"),
        (tile(a=1, b=16) >> pack_output("a1") >> vectorize("b"), "across the lanes"),
        (tile(d=4, a=8) >> tile(a=1, b=16) >> pack_output("a1") >> vectorize("b"), "block of d"),
        (tile(b=16, a=8, c=2) >> pack_output("b1") >> parallel("b1", "a1") >> vectorize("b"), "many threads"),
        (tile(b=16, a=8, c=2) >> pack(B="c1") >> pad("B") >> pack_output("b1") >> vectorize("b"), "padded"),
    ],
    ids=str,
)
def test_results_that_cannot_be_kept(ops: Any, p: Schedule, why: str) -> None:
    with pytest.raises(CannotLower, match=why):
        plan_of_schedule(p, ops.op(CROSSED, {"a": 21, "b": 37, "c": 5, "d": 9}), AVX512)


def test_unrolling_two_reductions(ops: Any) -> None:
    text, sizes = "C:m,n = A:m,k,l x B:l,k,n", {"m": 5, "n": 18, "k": 7, "l": 3}
    assert computes(ops, tile(m=2, n=16) >> unroll("l", k=2), text, sizes)
    assert computes(ops, tile(m=2, n=16) >> interchange("l k") >> unroll(k=3), text, sizes)
    with pytest.raises(CannotLower, match="inside the loop over k"):
        plan_of_schedule(tile(m=2, n=16) >> unroll(k=2), ops.op(text, sizes), AVX512)


def test_iterators_of_one_value_may_be_named(ops: Any) -> None:
    p = tile(b=1, m=4, n=16) >> parallel("b1", "m1") >> pack(A="m1")
    assert computes(ops, p, "C:b,m,n = A:b,m,k x B:b,k,n", {"b": 1, **SIZES})


def test_loops_keep_their_names_apart_from_iterators(ops: Any) -> None:
    op = ops.op("C:m,m1,n = A:m,k,m1 x B:k,n", {"m": 5, "m1": 4, "n": 18, "k": 3})
    plan = plan_of_schedule(tile(m=2, m1=2, n=16) >> interchange("m.1 n1 m11") >> pack(A="m.1"), op, AVX512)
    arrays = ops.run(op, generate_contraction(op, plan))
    assert np.array_equal(arrays["result"], np.einsum("mkp,kn->mpn", arrays["A"], arrays["B"]))
    assert "pack(A='m.1')" in repr(plan_to_schedule(plan, op))


def test_alternatives() -> None:
    a, b, c = tile(m=2), tile(m=3), unroll(k=2)
    assert list((a | b).alternatives()) == [a, b]
    assert list(((a | b) >> (c | Schedule())).alternatives()) == [a >> c, a, b >> c, b]
    assert a | b | c == (a | b) | c
    assert repr((a | b) >> c) == "(tile(m=2) | tile(m=3)) >> unroll(k=2)"
    assert repr(a >> c | b) == "tile(m=2) >> unroll(k=2) | tile(m=3)"


def test_names_that_are_words_of_python() -> None:
    p = tile(**{"in": 4, "n": 8})
    assert eval(repr(p), vars(primitives)) == p


@pytest.mark.parametrize(
    "make",
    [
        lambda: tile(),
        lambda: tile(m=0),
        lambda: tile(m=2.5),  # type: ignore[arg-type]
        lambda: interchange("m"),
        lambda: interchange("m m"),
        lambda: pack(),
        lambda: pack("A", A="m1"),
        lambda: vectorize("n", lanes=12),
        lambda: vectorize("n", lanes=4, vectors_per_register=3),
        lambda: unroll(k=0),
        lambda: parallel("m", grain_size=-1),
    ],
)
def test_pieces_that_mean_nothing(make: Any) -> None:
    with pytest.raises(ArgumentError):
        make()


def test_pipelines_compose_only_with_pipelines() -> None:
    with pytest.raises(TypeError):
        tile(m=2) >> 3  # type: ignore[operator]
    with pytest.raises(TypeError):
        tile(m=2) | "tile(m=3)"  # type: ignore[operator]


def test_explains_every_piece(ops: Any) -> None:
    text = explain_schedule(PIPELINES["issue"], ops.op(MATMUL, SIZES), AVX512)
    assert len(text.splitlines()) == 8
    assert "loops m1 of 2, n1 of 2, k1 of 3 tiles" in text
    assert "B is copied in every iteration of n1" in text
    assert "register tile: m 4 x n 16, 4 vectors of 16" in text


def test_a_contraction_inside_a_parallel_loop_stays_serial(ops: Any) -> None:
    op = ops.op(MATMUL, SIZES)
    p = tile(m=4, n=16) >> parallel("m1")
    assert plan_of_schedule(p, op, AVX512).parallel_depth == 1
    assert plan_of_schedule(p, op, AVX512, parallel=False).parallel_depth == 0
    assert "stays serial" in explain_schedule(p, op, AVX512, parallel=False)


def test_packs_name_the_side_where_both_factors_read_one_tensor(ops: Any) -> None:
    op = ops.op("C:m,n = A:k,m x A:k,n", {"m": 20, "n": 20, "k": 5})
    p = tile(m=4, n=16) >> pack(right="m1")
    plan = plan_of_schedule(p, op, AVX512)
    assert [s.side for s in plan.packs] == [Side.RIGHT]
    assert "right='m1'" in repr(plan_to_schedule(plan, op))
    with pytest.raises(ArgumentError, match="two factors"):
        plan_of_schedule(pack("A"), op, AVX512)


def test_every_line_of_the_next_panel_is_asked_for_once(ops: Any) -> None:
    op = ops.op(MATMUL, {"m": 12, "n": 64, "k": 9})
    plan = plan_of_schedule(tile(n=32, m=3) >> unroll(k=3) >> prefetch(B="n1"), op, AVX512)
    region = dict(full_region({"m": 12, "n": 64, "k": 9}))
    asked: list[tuple[int | None, ...]] = []
    for m in range(4):
        here = region | {
            "m": IterRange(build.const(3 * m), 3, build.const(m)),
            "n": IterRange(build.const(0), 32, build.const(0)),
        }
        for k in range(0, 9, 3):
            hints = panel_prefetch.prefetch_hints_for_panel(
                op, plan, here, {"k": build.const(k), local_var("k"): build.const(k)}
            )
            where = [indices for s in blocks(hints) for _, indices in s.operands]
            asked += [tuple(map(build.integer, indices)) for indices in where]
    assert sorted(set(asked)) == [(k, n) for k in range(9) for n in (32, 48)]
    assert len(asked) == 4 * 3 * 2  # the last row of tiles has nothing left: it asks for the last row again


def blocks(s: Stmt) -> Sequence[Any]:
    return s.body if isinstance(s, Block) else (s,)


def test_what_goes_past_the_caches_is_stored_in_the_order_of_memory(ops: Any) -> None:
    sizes = {"e": 2, "b": 2, "a": 24, "g": 3}
    text = "C:e,b,a = A:e,a,g x B:b,g"
    p = tile(e=2, b=2, a=32) >> vectorize("a", lanes=16) >> nontemporal_stores()
    assert computes(ops, p, text, sizes)
    op = drop_unit_dims(ops.op(text, sizes))
    lines = [
        x
        for x in format_program(ops.module(op, generate_contraction(op, plan_of_schedule(p, op, AVX512)))).splitlines()
        if "# streaming" in x
    ]
    places = [tuple(map(int, re.findall(r"\d+", line.split("]")[0])[:3])) for line in lines]
    assert len(places) == 8
    assert places == sorted(places)
