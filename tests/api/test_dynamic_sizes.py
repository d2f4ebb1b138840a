"""Sizes that change from call to call: which kernels are made, and that they are right."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.api import Op
from tensor_comprehensions.core.knobs import override_knobs
from tests.helpers.row_kernels import check_interpreter, check_machine_code, range_kernels

SOFTMAX = """
def softmax(float(N,D) x) -> (m, e, s, out) {
    m(n) max=! x(n,d)
    e(n,d) = exp(x(n,d) - m(n))
    s(n) +=! e(n,d)
    out(n,d) = e(n,d) / s(n)
}
"""
SCALE = "def scale(float(N,D) x, float(D) g) -> (o) { o(n,d) = x(n,d) * g(d) }"
LAYER = """
def layer(float(N,I) x, float(O,I) w, float(O) c) -> (y) {
    y(n,o) = c(o)
    y(n,o) += x(n,i) * w(o,i)
    y(n,o) = fmax(y(n,o), 0)
}
"""
MLP = """
def mlp(float(N,I) x, float(H,I) w, float(O,H) v) -> (h, y) {
    h(n,k) +=! x(n,i) * w(k,i)
    h(n,k) = fmax(h(n,k), 0)
    y(n,o) +=! h(n,k) * v(o,k)
}
"""
BATCHED = "def bmm(float(N,M,K) P, float(N,K,L) Q) -> (R) { R(n,i,j) +=! P(n,i,k) * Q(n,k,j) }"
LOOKUP = "def lookup(float(V,D) t, int32(N,L) k) -> (o) { o(n,d) +=! t(k(n,l),d) }"
UPDATE = "def update(float(N,D) x) -> (float(N,D) o) { o(n,d) += x(n,d) }"
TOKENS = "def tokens(float(B,T,D) x, float(D) g) -> (o) { o(b,t,d) = x(b,t,d) * g(d) }"


def op_of(text: str, dynamic: Any = None) -> Op:
    (op,) = tc.define(text, dynamic=dynamic)
    return op


def scale_arguments(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 5), torch.randn(5)


def counts(op: Op) -> tuple[int, int]:
    """How many kernels there are, and how many of these are for any number of rows."""
    return len(op.kernels), sum(k.is_range for k in op.kernels)


# --- the policy ----------------------------------------------------------------------------------------------------


def test_two_values_are_exact_and_the_third_makes_a_size_dynamic() -> None:
    op = op_of(SCALE)
    made = []
    for n in (4, 9, 4, 7, 100, 9, 1, 0, 5, 4):
        check_machine_code(op, scale_arguments(n), {})
        made.append(counts(op))
    assert made == [(1, 0), (2, 0), (2, 0), *[(3, 1)] * 7]


def test_a_marked_size_is_dynamic_from_the_first_call_on() -> None:
    for dynamic in ({"N"}, ["N"], {"N": None}, {"N": 32}, True):
        op = op_of(SCALE, dynamic)
        for n in (4, 0, 33):
            check_machine_code(op, scale_arguments(n), {})
        assert counts(op) == (1, 1)


def test_false_and_off_make_kernels_for_each_size() -> None:
    op = op_of(SCALE, False)
    for n in range(1, 6):
        op(*scale_arguments(n))
    assert counts(op) == (5, 0)
    with override_knobs(dynamic="off"):
        for dynamic in (None, {"N"}):
            op = op_of(SCALE, dynamic)
            for n in range(1, 6):
                op(*scale_arguments(n))
            assert counts(op) == (5, 0)


def test_always_makes_all_sizes_dynamic_that_can_be() -> None:
    with override_knobs(dynamic="always"):
        op = op_of(SCALE)
        op(*scale_arguments(3))
        assert counts(op) == (1, 1)


def test_a_size_that_is_not_marked_stays_a_number() -> None:
    op = op_of(SCALE, {"D"})
    for n in (2, 3):
        for d in (5, 1, 0, 70):
            check_machine_code(op, (torch.randn(n, d), torch.randn(d)), {})
    assert counts(op) == (2, 2)


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ("N", "dynamic is a str"),
        ({"M"}, "no def has a size 'M'"),
        ({"N": "x"}, "typical"),
        ({"N": 0}, "typical"),
        (3, "int"),
    ],
)
def test_what_means_nothing_is_refused(dynamic: Any, message: str) -> None:
    with pytest.raises(tc.ArgumentError, match=message):
        tc.define(SCALE, dynamic=dynamic)
    with pytest.raises(tc.ArgumentError, match=message):
        op_of(SCALE).compile(*scale_arguments(2), dynamic=dynamic)


def test_the_log_says_why_a_size_is_part_of_kernels(caplog: pytest.LogCaptureFixture) -> None:
    op = op_of("def last(float(N,D) x) -> (o) { o(d) = x(N-1,d) }", {"N"})
    with caplog.at_level("DEBUG", "tensor_comprehensions.cache"):
        check_machine_code(op, (torch.randn(3, 4),), {})
    assert "'N' stays part of the kernel: 'o' is computed from other rows of 'x'" in caplog.text
    assert counts(op) == (1, 0)


def test_a_kernel_compiled_for_any_size_is_one() -> None:
    op = op_of(SCALE)
    kernel = op.compile(*scale_arguments(3), dynamic={"N"})
    before = tc.statistics()
    for n in (0, 1, 3, 50):
        x, g = scale_arguments(n)
        assert torch.equal(kernel(x, g), x * g)
    assert tc.statistics().compiled == before.compiled
    exact = op.compile(*scale_arguments(3), dynamic=False)
    assert "loops over any number of rows" in kernel.source("schedule")
    assert "blocks of" not in exact.source("schedule")


def test_statistics_and_kernels_tell_what_was_made() -> None:
    before = tc.statistics()
    op = op_of(SCALE, {"N"})
    op(*scale_arguments(3))
    after = tc.statistics()
    assert (after.compiled - before.compiled, after.ranged - before.ranged) == (1, 1)
    assert after.seconds > before.seconds
    (kernel,) = op.kernels
    assert kernel.sizes == "x(N, 5), g(5)"
    assert kernel.is_range
    assert kernel.code_bytes > 0


def test_a_search_tunes_the_sizes_of_its_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    op = op_of(LAYER, {"N"})
    w, c = torch.randn(9, 6), torch.randn(9)
    op.autotune(torch.randn(40, 6), w, c, search="random", generations=1, population=4)
    with caplog.at_level("DEBUG", "tensor_comprehensions.cache"):
        for n in (40, 3, 40, 0, 7, 41, 100):
            check_machine_code(op, (torch.randn(n, 6), w, c), {})
    assert counts(op) == (2, 1)
    assert "layer: its options are for exactly these sizes" in caplog.text


def test_a_pickled_operator_has_the_same_marks() -> None:
    op = pickle.loads(pickle.dumps(op_of(SCALE, {"N": 8})))
    for n in (2, 3, 4):
        op(*scale_arguments(n))
    assert counts(op) == (1, 1)


# --- values --------------------------------------------------------------------------------------------------------

Make = Callable[[int], tuple[Any, ...]]
PROGRAMS: dict[str, tuple[str, Make]] = {
    "softmax": (SOFTMAX, lambda n: (torch.randn(n, 33),)),
    "layer": (LAYER, lambda n: (torch.randn(n, 20), torch.randn(40, 20), torch.randn(40))),
    "mlp": (MLP, lambda n: (torch.randn(n, 20), torch.randn(40, 20), torch.randn(10, 40))),
    "bmm": (BATCHED, lambda n: (torch.randn(n, 6, 9), torch.randn(n, 9, 7))),
    "lookup": (LOOKUP, lambda n: (torch.randn(11, 6), torch.randint(0, 11, (n, 3), dtype=torch.int32))),
    "double": (SCALE.replace("float", "double"), lambda n: (torch.randn(n, 5).double(), torch.randn(5).double())),
    "half": (SCALE.replace("float", "half"), lambda n: (torch.randn(n, 5).half(), torch.randn(5).half())),
    "vector": ("def f(float(N) x) -> (o) { o(n) = x(n) * x(n) }", lambda n: (torch.randn(n),)),
    "integers": ("def f(int32(N,4) x) -> (o) { o(n,i) = x(n,i) / 3 }", lambda n: (torch.randint(-9, 9, (n, 4)).int(),)),
    "constant": ("def f(float(N) x) -> (o) { o(n,j) = x(n) where j in 0:3 }", lambda n: (torch.randn(n),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_number_of_rows_is_right(name: str) -> None:
    text, make = PROGRAMS[name]
    op = op_of(text, {"N"})
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):  # of one kernel
            torch.set_num_threads(threads)
            for n in (5, 0, 1, 2, 3, 8, 11, 16, 21, 63, 64, 65, 127, 300):
                check_machine_code(op, make(n), {})
    finally:
        torch.set_num_threads(before)
    (kernel,) = range_kernels(op)
    if name != "half":
        for n in (0, 3, 13):
            check_interpreter(op, kernel, make(n), {})


@pytest.mark.parametrize("name", ["softmax", "layer", "mlp", "bmm", "vector"])
def test_two_hundred_sizes_need_three_kernels(name: str) -> None:
    text, make = PROGRAMS[name]
    op, draw = op_of(text), np.random.default_rng(7)
    for n in draw.integers(0, 200, 200):
        op(*make(int(n)))
    assert counts(op) == (3, 1)
    check_machine_code(op, make(201), {})


def test_in_out_outputs_start_with_what_the_caller_gives() -> None:
    op = op_of(UPDATE, {"N"})
    for n in (3, 0, 1, 40):
        x, o = torch.randn(n, 5), torch.randn(n, 5)
        before = o.clone()
        check_machine_code(op, (x,), {"o": o})
        assert torch.equal(o, before)
    assert counts(op) == (1, 1)


def test_results_are_written_where_the_caller_says() -> None:
    op = op_of(SCALE, {"N"})
    for n in (3, 0, 17):
        x, g = scale_arguments(n)
        out = torch.full((n, 5), torch.nan)
        assert op(x, g, out=out) is out
        assert torch.equal(out, x * g)
        wide = torch.full((n, 9), torch.nan)
        op(x, g, out=wide[:, 2:7])
        assert torch.equal(wide[:, 2:7], x * g)
        assert wide[:, :2].isnan().all()
        assert wide[:, 7:].isnan().all()


def test_several_leading_sizes_are_rows_together() -> None:
    op = op_of(TOKENS, {"B", "T"})
    g = torch.randn(6)
    for b, t in ((2, 3), (0, 4), (5, 0), (1, 1), (1, 9), (7, 1), (3, 50)):
        x = torch.randn(b, t, 6)
        for _ in range(2):
            assert torch.equal(op(x, g), x * g)
    assert counts(op) == (1, 1)
    (kernel,) = range_kernels(op)
    assert kernel.dynamic_sizes == ("B", "T")
    check_interpreter(op, kernel, (torch.randn(3, 5, 6), g), {})


def test_rows_that_are_not_equally_far_apart_share_another_kernel() -> None:
    op = op_of(TOKENS, {"B", "T"})
    g = torch.randn(6)
    op(torch.randn(2, 3, 6), g)
    for b, t in ((2, 3), (4, 5)):
        x = torch.randn(b, 2 * t, 6)[:, :t]
        for _ in range(2):
            assert torch.equal(op(x, g), x * g)
    assert counts(op) == (2, 2)


def test_a_stride_of_a_single_row_means_nothing() -> None:
    """The distance between batches does not follow from it, though it is as large."""
    op = op_of(TOKENS, {"B", "T"})
    g, memory = torch.randn(6), torch.randn(50)
    op(torch.randn(2, 3, 6), g)
    for strides in ((7, 7, 1), (6, 7, 1), (7, 6, 1)):
        x = memory.as_strided((4, 1, 6), strides)
        for _ in range(2):
            assert torch.equal(op(x, g), x * g)


@pytest.mark.parametrize("shape", [(5, 1, 8), (1, 1, 8), (1, 3, 1), (5, 3, 1), (1, 1, 1)])
def test_rows_that_are_one_row_of_memory(shape: tuple[int, ...]) -> None:
    """A stride of 0 does not follow from the stride of the next dimension."""
    op = op_of("def twice(float(N,C,H) x) -> (y) { y(n,c,i) = 2 * x(n,c,i) }", {"N", "C", "H"})
    dense = torch.randn(shape[0], 3, 8)
    for x in (dense, torch.randn(shape).expand(dense.shape)):
        for _ in range(2):
            assert torch.equal(op(x), 2 * x)


def test_rows_at_any_distance() -> None:
    op = op_of(SCALE, {"N"})
    g = torch.randn(5)
    for n in (3, 8, 1, 0, 20):
        wide = torch.randn(n, 12)
        for x in (wide[:, 3:8], wide[:, :5], torch.randn(1, 5).expand(n, 5), torch.randn(n, 10)[:, ::2]):
            for _ in range(2):
                assert torch.equal(op(x, g), x * g)
    assert sum(k.is_range for k in op.kernels) <= 5  # contiguous (one row, or none), and four distances


def test_columns_are_not_rows() -> None:
    op = op_of(SCALE, {"N"})
    for n in (3, 4):
        x, g = torch.randn(5, n).t(), torch.randn(5)
        for _ in range(2):
            assert torch.equal(op(x, g), x * g)


def test_a_subscript_from_data_is_checked_in_every_row() -> None:
    op = op_of(LOOKUP, {"N"})
    table = torch.randn(11, 6)
    for n in (1, 9, 70, 300):
        k = torch.randint(0, 11, (n, 3), dtype=torch.int32)
        op(table, k)
        k[n - 1, 2] = 11
        with pytest.raises(tc.RangeError, match="out of bounds in dimension 0"):
            op(table, k)
    assert counts(op) == (1, 1)


def test_a_size_that_differs_between_tensors_is_refused_as_ever() -> None:
    op = op_of("def f(float(N,D) x, float(N,D) y) -> (o) { o(n,d) = x(n,d) + y(n,d) }", {"N"})
    op(torch.randn(3, 4), torch.randn(3, 4))
    for wrong in ((4, 4), (3, 5)):
        with pytest.raises(tc.ArgumentError, match="another size"):
            op(torch.randn(3, 4), torch.randn(*wrong))


def test_gradients_have_the_sizes_of_their_def() -> None:
    op = op_of(SCALE.replace("float(D) g", "float(N,D) g").replace("g(d)", "g(n,d)"), {"N"})
    x, g = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    op(x, g).sum().backward()
    before = tc.statistics()
    for n in (2, 7, 30):
        x, g = torch.randn(n, 5, requires_grad=True), torch.randn(n, 5, requires_grad=True)
        op(x, g).sum().backward()
        assert torch.allclose(x.grad, g.detach())
        assert torch.allclose(g.grad, x.detach())
    assert tc.statistics().compiled == before.compiled


def test_torch_compile_runs_the_same_kernel_for_all_sizes() -> None:
    op = op_of(SOFTMAX, {"N"})
    op(torch.randn(3, 33))

    @torch.compile(dynamic=True, fullgraph=True, backend="aot_eager")
    def f(x: Tensor) -> Tensor:
        return op(x * 2)[3] + 1

    before = None
    for n in (4, 9, 30, 77):
        x = torch.randn(n, 33)
        assert torch.allclose(f(x), (2 * x).softmax(1) + 1, atol=1e-5)
        before = before or tc.statistics().compiled
    assert tc.statistics().compiled == before


def test_einsum_compiles_a_third_time_at_most() -> None:
    torch.manual_seed(0)
    w = torch.randn(7, 11)
    tc.einsum("ni,io->no", torch.randn(3, 7), w)
    before = tc.statistics()
    for n in range(4, 40):
        x = torch.randn(n, 7)
        assert torch.allclose(tc.einsum("ni,io->no", x, w), x @ w, atol=1e-5)
    assert tc.statistics().compiled - before.compiled <= 2


# --- other processes -----------------------------------------------------------------------------------------------


def test_another_process_compiles_nothing_for_any_size(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import sys, torch, tensor_comprehensions as tc
        (op,) = tc.define({LAYER!r}, dynamic={{"N"}})
        for n in map(int, sys.argv[1:]):
            x, w, c = torch.randn(n, 6), torch.randn(9, 6), torch.randn(9)
            assert torch.allclose(op(x, w, c), (x @ w.t() + c).relu(), atol=1e-5)
        s = tc.statistics()
        print(s.compiled, s.ranged, s.loaded, "islpy" in sys.modules)
        """
    )

    def run(*sizes: str) -> str:
        environment = {**os.environ, "TC_CACHE": "readwrite", "TC_CACHE_DIR": str(tmp_path), "TC_VERIFY": "0"}
        command = [sys.executable, "-c", program, *sizes]
        return subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout.strip()

    assert run("3", "50") == "1 1 0 True"
    assert run("7", "0", "64", "129") == "0 0 1 False"


def test_the_code_does_not_depend_on_the_sizes_that_were_seen() -> None:
    texts = set()
    for n in (2, 77):
        op = op_of(LAYER, {"N"})
        op(torch.randn(n, 6), torch.randn(9, 6), torch.randn(9))
        texts.add(range_kernels(op)[0].source("llvm"))
    assert len(texts) == 1


@pytest.mark.parametrize("kind", ["tc", "schedule", "loops", "c", "llvm", "asm"])
def test_kernels_can_be_looked_at(kind: str) -> None:
    kernel = op_of(SCALE).compile(*scale_arguments(3), dynamic=True)
    assert kernel.source(kind)


# --- sums over rows ------------------------------------------------------------------------------------------------

OUTER = "def outer(float(N,I) x, float(N,J) y) -> (w) { w(i,j) +=! x(n,i) * y(n,j) }"
EXTREMES = (
    "def extremes(float(N,D) x) -> (s, p, a, b) { s(d) +=! x(n,d) p(d) *=! x(n,d) a(d) max=! x(n,d) b(d) min=! x(n,d) }"
)
BATCH_NORM = """
def batch_norm(float(N,C) x, float(C) g) -> (y, m, v) {
    m(c) +=! x(n,c)
    m(c) = m(c) / N
    v(c) +=! (x(n,c) - m(c)) * (x(n,c) - m(c))
    v(c) = v(c) / N
    y(n,c) = (x(n,c) - m(c)) * rsqrt(v(c) + 1e-5) * g(c)
}
"""
SCATTER = """
def scatter(int32(N) k, float(N,D) g, float(V) unused) -> (o) {
    o(v,d) = 0 where v in 0:V, d in 0:D
    o(k(n),d) += g(n,d)
}
"""
SUMS: dict[str, tuple[str, Make]] = {
    "outer": (OUTER, lambda n: (torch.randn(n, 7), torch.randn(n, 5))),
    "extremes": (EXTREMES, lambda n: (torch.rand(n, 5) + 0.5,)),
    "batch_norm": (BATCH_NORM, lambda n: (torch.randn(n, 33), torch.randn(33))),
    "scatter": (
        SCATTER,
        lambda n: (torch.randint(0, 11, (n,), dtype=torch.int32), torch.randn(n, 6), torch.randn(11)),
    ),
    "total": ("def f(float(N,D) x) -> (o) { o +=! x(n,d) }", lambda n: (torch.randn(n, 9),)),
    "weights": (
        "def f(float(N,D) x, float(D) w) -> (p, o) { p(d) = exp(w(d))  o(n,d) = x(n,d) * p(d) }",
        lambda n: (torch.randn(n, 9), torch.randn(9)),
    ),
    "half": ("def f(half(N,D) x) -> (o) { o(d) +=! x(n,d) }", lambda n: (torch.randn(n, 9).half(),)),
    "flags": ("def f(bool(N,D) x) -> (o) { o(d) max=! x(n,d) }", lambda n: (torch.rand(n, 9) > 0.9,)),
    "temporary": (
        "def f(float(N,D) x) -> (o) { t(n,d) = exp(x(n,d)) s(d) +=! t(n,d) o(n,d) = t(n,d) / s(d) }",
        lambda n: (torch.randn(n, 9),),
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_any_number_of_rows_are_right(name: str) -> None:
    text, make = SUMS[name]
    op = op_of(text, {"N"})
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):  # of one kernel
            torch.set_num_threads(threads)
            for n in (5, 0, 1, 2, 7, 33, 127, 300):
                check_machine_code(op, make(n), {})
    finally:
        torch.set_num_threads(before)
    assert counts(op) == (1, 1)
    (kernel,) = range_kernels(op)
    if name not in ("half", "flags"):
        for n in (0, 1, 13):
            check_interpreter(op, kernel, make(n), {})


def test_sums_add_to_what_the_caller_gives() -> None:
    op = op_of("def f(float(N,D) x) -> (float(D) o) { o(d) += x(n,d) }", {"N"})
    for n in (3, 0, 40):
        x, o = torch.randn(n, 5), torch.randn(5)
        check_machine_code(op, (x,), {"o": o})
    assert counts(op) == (1, 1)


def test_a_sum_does_not_depend_on_threads() -> None:
    op, make = op_of(OUTER, {"N"}), SUMS["outer"][1]
    arguments = make(1000)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(op(*arguments))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], x) for x in found)


def test_a_subscript_of_a_sum_is_checked_before_anything_is_added() -> None:
    text = "def f(int32(N) k, float(N,D) g) -> (float(V,D) o) { o(k(n),d) += g(n,d) }"
    op = op_of(text, {"N"})
    for n in (1, 70):
        k, g, o = torch.randint(0, 11, (n,), dtype=torch.int32), torch.randn(n, 6), torch.randn(11, 6)
        check_machine_code(op, (k, g), {"o": o})
        k[n - 1] = 11
        with pytest.raises(tc.RangeError, match="out of bounds in dimension 0"):
            op(k, g, o=o)
    assert counts(op) == (1, 1)


def test_forty_training_steps_of_changing_batch_need_six_kernels() -> None:
    layer = op_of(LAYER)
    torch.manual_seed(0)
    w, c = (torch.randn(s, requires_grad=True) for s in ((9, 6), (9,)))
    before = tc.statistics()
    for n in np.random.default_rng(3).integers(1, 200, 40):
        x = torch.randn(int(n), 6)
        layer(x, w, c).square().sum().backward()
        found = w.grad, c.grad
        w.grad = c.grad = None
        torch.nn.functional.linear(x, w, c).relu().square().sum().backward()
        for mine, right in zip(found, (w.grad, c.grad), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-2)
        w.grad = c.grad = None
    after = tc.statistics()
    assert (after.compiled - before.compiled, after.ranged - before.ranged) == (6, 2)
