"""Every rule keeps the value to the bit; directed examples of what the simplifier makes of statements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_programs import RANGES, booleans, evaluate, floats, integers, same_bits, values

from tensor_comprehensions.core.dtypes import BFLOAT16, BOOL, FLOAT16, FLOAT32, FLOAT64, INT64
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.intervals import Interval
from tensor_comprehensions.loop_ir.nodes import (
    COMPARISONS,
    Allocate,
    Binary,
    Block,
    Broadcast,
    Call,
    Cast,
    Check,
    Const,
    Expr,
    If,
    Let,
    Load,
    Loop,
    LoopKind,
    Ramp,
    ReduceLanes,
    Select,
    Space,
    Store,
    Unary,
)
from tensor_comprehensions.loop_ir.passes import simplify_rules
from tensor_comprehensions.loop_ir.passes.simplify import simplify

INTERVALS = {name: Interval(*where) for name, where in RANGES.items()}
quick = settings(max_examples=30, deadline=None, derandomize=True)
LANES = st.sampled_from([1, 4])


def binary(ops: tuple[str, ...], operands: Callable[[int], st.SearchStrategy[Expr]]) -> st.SearchStrategy[Expr]:
    return LANES.flatmap(lambda n: st.builds(Binary, st.sampled_from(ops), operands(n), operands(n)))


def broadcasts(of: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return of.map(lambda e: Broadcast(e, 4))


def with_constant(op: str, value: float, swap: bool = False) -> st.SearchStrategy[Expr]:
    constant = b.const(value, FLOAT32)
    return floats().map(lambda e: Binary(op, constant, e) if swap else Binary(op, e, constant))


def sums_by_constants(op: str) -> st.SearchStrategy[Expr]:
    coefficient, divisor = st.integers(-16, 16), st.sampled_from([2, 4, 8, 16])
    names = st.sampled_from([b.var(n) for n in RANGES])
    terms = st.builds(
        lambda i, a, j, c: b.add(b.add(b.mul(i, a), b.mul(j, 8)), c), names, coefficient, names, coefficient
    )
    return st.builds(lambda e, d: Binary(op, e, b.const(d)), terms, divisor)


def digits_by_constants(op: str, inner: str) -> st.SearchStrategy[Expr]:
    """Quotients and remainders of each other, with something added in between."""
    names = st.sampled_from([b.var(n) for n in RANGES])
    sizes, coefficient = st.sampled_from([2, 3, 4, 8, 32]), st.integers(-4, 4)
    terms = st.builds(lambda i, n, j, a, c: b.add(b.add(Binary(inner, i, b.const(n)), b.mul(j, a)), c),
                      names, sizes, names, coefficient | st.just(0), coefficient)  # fmt: skip
    return st.builds(lambda e, n: Binary(op, e, b.const(n)), terms, sizes)


MASKED = b.buffer("masked", FLOAT32, (4,))
SHAPES: dict[simplify_rules.Rule, st.SearchStrategy[Expr]] = {
    simplify_rules.fold: st.one_of(
        binary(("add", "sub", "mul", "min", "max"), integers),
        binary(("and", "or"), booleans),
        integers(4).map(lambda e: Unary("neg", Unary("neg", e))),
        st.builds(Select, st.booleans().map(lambda v: b.const(v, BOOL)), integers(), integers()),
        st.builds(Ramp, integers(), st.integers(0, 1), st.just(4)),
    ),
    simplify_rules.broadcast_late: st.builds(
        Binary, st.sampled_from(["add", "mul", "min", "lt"]), broadcasts(integers()), broadcasts(integers())
    ),
    simplify_rules.divide_terms: sums_by_constants("div"),
    simplify_rules.remainder_of_terms: sums_by_constants("mod"),
    simplify_rules.divide_factor: sums_by_constants("div"),
    simplify_rules.remainder_of_factor: sums_by_constants("mod"),
    simplify_rules.quotient_of_quotient: digits_by_constants("div", "div"),
    simplify_rules.remainder_of_remainder: digits_by_constants("mod", "mod"),
    simplify_rules.decide_minimum: binary(("min",), integers),
    simplify_rules.decide_maximum: binary(("max",), integers),
    simplify_rules.decide_comparison: binary(COMPARISONS, integers),
    simplify_rules.multiply_by_one: st.one_of(with_constant("mul", 1.0), with_constant("mul", 1.0, swap=True)),
    simplify_rules.divide_by_one: with_constant("div", 1.0),
    simplify_rules.add_negative_zero: st.one_of(with_constant("add", -0.0), with_constant("add", -0.0, swap=True)),
    simplify_rules.subtract_zero: with_constant("sub", 0.0),
    simplify_rules.same_operand: booleans().map(lambda e: Binary("and", e, e)),
    simplify_rules.negate_comparison: st.one_of(
        binary(COMPARISONS, integers).map(lambda e: Unary("not", e)),
        binary(COMPARISONS, floats).map(lambda e: Unary("not", e)),
    ),
    simplify_rules.select_of_same: st.builds(lambda c, e: Select(c, e, e), booleans(), floats()),
    simplify_rules.select_of_booleans: st.builds(
        lambda c, yes: Select(c, b.const(yes, BOOL), b.const(not yes, BOOL)), booleans(), st.booleans()
    ),
    simplify_rules.cast_constant: st.builds(
        lambda v, t: Cast(b.const(v), t),
        st.integers(-(2**60), 2**60) | st.integers(-3000, 3000),
        st.sampled_from([FLOAT16, BFLOAT16, FLOAT32, FLOAT64]),
    ),
    simplify_rules.cast_broadcast: broadcasts(integers()).map(lambda e: Cast(e, FLOAT32)),
    simplify_rules.unary_broadcast: broadcasts(floats()).map(lambda e: Unary("neg", e)),
    simplify_rules.call_on_broadcasts: broadcasts(floats()).map(lambda e: Call("fabs", (e,))),
    simplify_rules.masked_load: st.booleans().map(lambda v: Load(MASKED, (b.ramp(0, 1, 4),), b.const(v, BOOL, 4))),
    simplify_rules.reduce_broadcast: st.builds(ReduceLanes, st.sampled_from(["min", "max"]), broadcasts(floats())),
}


def test_every_rule_has_a_shape() -> None:
    assert set(SHAPES) == {rule for group in simplify_rules.RULES.values() for rule in group}


@pytest.mark.parametrize("rule", SHAPES, ids=lambda r: r.__name__)
def test_rule_keeps_the_value(rule: simplify_rules.Rule) -> None:
    applied = 0

    @quick
    @given(SHAPES[rule], values())
    def check(e: Expr, at: dict[str, int]) -> None:
        nonlocal applied
        new = rule(e, INTERVALS)
        if new is not None:
            applied += 1
            assert new.type == e.type
            assert new != e
            assert same_bits(value_of(new, at), value_of(e, at))

    check()
    assert applied, "the rule never applied to its own shape"


def value_of(e: Expr, at: dict[str, int]) -> np.ndarray:
    """The lanes of `e`; loads are of a buffer that holds 1, 2, 3, 4."""
    if isinstance(e, Load):
        held = np.arange(1, 5, dtype=np.float32)
        return held if e.mask is None or b.is_true(e.mask) else held * 0
    return evaluate(e, at)


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("shape", [integers, booleans, floats], ids=["integers", "booleans", "floats"])
def test_simplify_keeps_the_value(shape: Callable[[int], st.SearchStrategy[Expr]], lanes: int) -> None:
    @quick
    @given(shape(lanes), values())
    def check(e: Expr, at: dict[str, int]) -> None:
        new = simplify(e, INTERVALS)
        assert new.type == e.type
        assert same_bits(evaluate(new, at), evaluate(e, at))
        assert simplify(new, INTERVALS) is new

    check()


ROW, J, K = b.var("i"), b.var("j"), b.var("k")
A = b.buffer("A", FLOAT32, (64,))
SET = b.store(A, (ROW,), 1.0)


def loop(body, start=0, stop=16, **more) -> Loop:
    return Loop("i", b.const(start), b.const(stop), body, **more)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b.add(b.mul(ROW, 4), b.sub(J, b.mul(ROW, 4))), J),
        (b.add(b.mul(b.div(J, 8), 8), b.mod(J, 8)), J),
        (b.div(b.add(b.mul(J, 16), K), 16), b.add(J, 0)),
        (b.mod(b.add(b.mul(J, 16), K), 16), K),
        (b.minimum(ROW, 9), ROW),
        (b.sub(5, ROW), b.sub(5, ROW)),
        (b.div(ROW, 10), b.const(0)),
    ],
)
def test_index_arithmetic(before: Expr, after: Expr) -> None:
    assert simplify(before, INTERVALS) == after


def test_index_arithmetic_in_canonical_form_is_left_alone() -> None:
    e = b.add(b.add(b.mul(ROW, 16), J), 3)
    assert simplify(e, INTERVALS) is e


def test_an_empty_loop_goes() -> None:
    assert simplify(loop(SET, 3, 3)) == Block(())


def test_a_loop_of_one_trip_is_its_body() -> None:
    assert simplify(loop(SET, 3, 5, step=2)) == b.store(A, (3,), 1.0)


def test_a_branch_that_never_runs_goes() -> None:
    assert simplify(loop(If(b.lt(ROW, b.const(16)), SET, b.store(A, (0,), 2.0)))) == loop(SET)


def test_a_branch_that_may_run_stays() -> None:
    guarded = loop(If(b.lt(ROW, b.const(15)), SET))
    assert simplify(guarded) is guarded


def test_the_last_value_of_a_strided_loop_bounds_its_ramp() -> None:
    masked = Store(A, (b.ramp(ROW, 1, 8),), b.const(0.0, FLOAT32, 8), None, b.lt(b.ramp(ROW, 1, 8), b.const(16)))
    assert simplify(loop(masked, step=8)) == loop(Store(A, (b.ramp(ROW, 1, 8),), b.const(0.0, FLOAT32, 8)), step=8)


def test_a_mask_that_is_not_always_true_stays() -> None:
    body = Store(A, (b.ramp(ROW, 1, 8),), b.const(0.0, FLOAT32, 8), None, b.lt(b.ramp(ROW, 1, 8), b.const(22)))
    longer = loop(body, stop=24, step=8)
    assert simplify(longer) is longer


def test_a_name_that_nothing_uses_goes() -> None:
    assert simplify(Let("unused", b.load(A, 0), b.store(A, (1,), 1.0))) == b.store(A, (1,), 1.0)


def test_a_buffer_that_nothing_reads_goes() -> None:
    private = b.buffer("t", FLOAT32, (), Space.SCRATCH)
    body = Allocate((private,), b.block(b.store(private, (), 2.0), b.store(A, (1,), 1.0)))
    assert simplify(body) == b.store(A, (1,), 1.0)


def test_a_check_that_always_holds_goes() -> None:
    assert simplify(loop(b.block(Check(b.ge(ROW, b.const(0)), 0, ROW), SET))) == loop(SET)


def test_wrapping_arithmetic_of_data_is_left_alone() -> None:
    data = b.buffer("data", INT64, (1,))
    grows = b.gt(b.add(b.load(data, 0), 1), b.load(data, 0))  # false where the sum wraps around
    assert simplify(grows) is grows


@pytest.mark.parametrize("op", ["add", "mul"])
def test_float_zeros_are_left_alone(op: str) -> None:
    e = Binary(op, b.load(A, 0), Const(0.0, b.load(A, 0).type))
    assert simplify(e) is e


def test_a_parallel_loop_keeps_its_grain() -> None:
    inner = b.store(A, (b.add(b.add(ROW, 1), 1),), 1.0)
    new = simplify(loop(b.block(inner, Block(())), kind=LoopKind.PARALLEL, grain=4))
    assert isinstance(new, Loop)
    assert (new.kind, new.grain) == (LoopKind.PARALLEL, 4)
