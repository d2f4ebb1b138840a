"""Mathematical functions in every vector width against float64: at most 2 ulp in float32, and C's special values."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from llvm_harness import module, run

from tensor_comprehensions.core.dtypes import FLOAT32, FLOAT64, DType
from tensor_comprehensions.core.math_functions import FUNCTIONS
from tensor_comprehensions.loop_ir import build as ir
from tensor_comprehensions.loop_ir.nodes import Call, Loop, LoopKind
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.target import CpuTarget
from tests.helpers.anywhere import TARGETS

TINY, HUGE = np.float32(1e-45), np.float32(3.4e38)
SPECIAL = np.array(
    [0.0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, 10, -10, np.inf, -np.inf, np.nan, TINY, -TINY, 1e-39, -1e-40, 1.2e-38,
     HUGE, -HUGE, 1e30, -1e30, 1e10, 88.7, 88.8, -87.3, -103.9, -104.1, 127.9, 128.1, -149.5, 39000.0, 1e-10, 9.0],
    np.float32,
)  # fmt: skip
EXACT = (
    "floor", "ceil", "trunc", "rint", "fabs", "sqrt", "copysign", "fmin", "fmax", "fmod", "fdim", "round", "fma",
    "nearbyint", "logb", "remainder", "nextafter", "tf32",
)  # fmt: skip
NUMPY_LIMIT = 4
"""Of code that is interpreted, by NumPy's functions."""
MODEST = {"sin": 1e5, "cos": 1e5, "tan": 1e5}  # beyond, float64's own argument reduction is what is tested
on_targets = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)


@functools.cache
def samples(arity: int) -> tuple[np.ndarray, ...]:
    """Special values in all combinations, then dense ones over many magnitudes."""
    r = np.random.default_rng(5)
    special = np.meshgrid(*[SPECIAL] * arity) if arity < 3 else [np.tile(SPECIAL, 3)[i : i + 60] for i in range(3)]
    dense = []
    for k in range(arity):
        magnitudes = np.exp2(r.uniform(-30, 20, 4000)) * r.choice([-1, 1], 4000)
        near = np.linspace(-12, 12, 6001) if k == 0 else r.uniform(-12, 12, 6001)
        dense.append(np.concatenate([special[k].ravel(), magnitudes, near, r.uniform(-1, 1, 2000)]).astype(np.float32))
    return tuple(dense)


def evaluate(
    name: str, lanes: int, target: CpuTarget, inputs: tuple[np.ndarray, ...], dtype: DType = FLOAT32
) -> np.ndarray:
    function, n = FUNCTIONS[name], len(inputs[0])
    i = ir.var("i")
    buffers = [ir.buffer(f"X{k}", dtype, (n,)) for k in range(function.arity)]
    value = Call(name, tuple(ir.load(b, i) for b in buffers))
    kind = LoopKind.VECTOR if lanes > 1 else LoopKind.SERIAL
    loop = Loop(
        "i",
        ir.const(0),
        ir.const(n),
        ir.store(ir.buffer("Y", dtype, (n,)), (i,), value),
        kind,
        vector_factors=(lanes, 1),
    )
    arrays = {b.name: x for b, x in zip(buffers, inputs, strict=True)} | {"Y": np.zeros(n, dtype.name)}
    return run(module(vectorize_loops(loop)), arrays, target)[0]["Y"]


def errors_in_ulp(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """How many float32 units in the last place each value is off; infinite where a special value is missed."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(np.float32)
        unit = np.spacing(np.maximum(np.abs(rounded), np.float32(1.17549435e-38))).astype(np.float64)
        error = np.abs(got.astype(np.float64) - exact) / unit
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        # At the edge of the range, the largest number stands for infinity and the other way round.
        edge = (np.abs(exact) >= 3.4028235e38) & (np.abs(got) >= 3.4028235e38) & (np.sign(exact) == np.sign(got))
        return np.where(same | edge, 0, np.where(np.isfinite(error), error, np.inf))


@pytest.mark.sampled  # functions, each at every width
@on_targets
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32(name: str, target: CpuTarget) -> None:
    inputs = samples(FUNCTIONS[name].arity)
    exactly = np.float32 if name in ("nextafter", "tf32") else np.float64
    with np.errstate(all="ignore"):
        exact = np.asarray(FUNCTIONS[name].evaluate(*(x.astype(exactly) for x in inputs)), np.float64)
    for lanes in {1, 8, target.lanes(32), 2 * target.lanes(32)}:
        error = errors_in_ulp(evaluate(name, lanes, target, inputs), exact)
        if name in MODEST:
            error = error[np.abs(inputs[0]) < MODEST[name]]
        worst = int(np.argmax(error))
        limit = 0.5 if name in EXACT else 2 if target.runs_here() else NUMPY_LIMIT
        assert error[worst] <= limit, f"{name}{tuple(x[worst] for x in inputs)}, {lanes} lanes: {error[worst]} ulp"


@on_targets
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "tf32"])
def test_float64(name: str, target: CpuTarget) -> None:
    """Within a few units of NumPy's results, where these are not at the edge of the range."""
    r = np.random.default_rng(3)
    inputs = tuple(r.uniform(-9, 9, 500) for _ in range(FUNCTIONS[name].arity))
    with np.errstate(all="ignore"):
        expected = np.asarray(FUNCTIONS[name].evaluate(*inputs))
    for lanes in (1, target.lanes(64)):
        got = evaluate(name, lanes, target, inputs, FLOAT64)
        np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-15)


@on_targets
def test_erf_goes_up_to_one(target: CpuTarget) -> None:
    """What is multiplied by 1 + erf(x) vanishes far below 0."""
    x = np.linspace(-6, 6, 20001).astype(np.float32)
    for lanes in {1, 8, target.lanes(32)}:
        got = evaluate("erf", lanes, target, (x,))
        assert np.abs(got).max() == 1
        assert np.array_equal(got[np.abs(x) > 4], np.sign(x[np.abs(x) > 4]))
