"""Every pass leaves the effect of random programs as it was, and what it makes passes the verifier."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from loop_programs import assert_same_effect, module, programs

from tensor_comprehensions.core.errors import CannotLower
from tensor_comprehensions.loop_ir.nodes import Loop, LoopKind, Stmt
from tensor_comprehensions.loop_ir.passes.partition_loops import partition_loops
from tensor_comprehensions.loop_ir.passes.scalar_promotion import hoist_accumulators
from tensor_comprehensions.loop_ir.passes.simplify import simplify
from tensor_comprehensions.loop_ir.passes.unroll import unroll_loops
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.loop_ir.rewrite import walk_stmts
from tensor_comprehensions.loop_ir.verify import verify

quick = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@quick
@given(programs())
def test_passes_keep_the_effect(program: Stmt) -> None:
    verify(module(program))
    try:
        stages = [vectorize_loops(program)]
    except CannotLower:
        return
    for step in (unroll_loops, hoist_accumulators, simplify):
        stages.append(step(stages[-1]))
    for stage in stages:
        verify(module(stage))
        assert_same_effect(program, stage)
    assert not any(
        isinstance(s, Loop) and s.kind in (LoopKind.VECTOR, LoopKind.UNROLLED) for s in walk_stmts(stages[-1])
    )


@quick
@given(programs())
def test_passes_on_scalar_loops_keep_the_effect(program: Stmt) -> None:
    for step in (unroll_loops, simplify, partition_loops, lambda s: hoist_accumulators(unroll_loops(s))):
        assert_same_effect(program, step(program))


@quick
@given(programs())
def test_simplify_is_done_after_one_run(program: Stmt) -> None:
    once = simplify(program)
    assert simplify(once) is once


@pytest.mark.parametrize("step", [vectorize_loops, unroll_loops, hoist_accumulators])
@quick
@given(programs())
def test_nothing_to_do_gives_the_same_object(step, program: Stmt) -> None:
    try:
        done = hoist_accumulators(unroll_loops(vectorize_loops(program)))
    except CannotLower:
        return
    assert step(done) is done
