"""Sizes that change and are no number of leading rows: lengths of rows and sequences, sides of products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.api import Op
from tensor_comprehensions.compiler import range_passes
from tensor_comprehensions.compiler.compiled_kernel import CompiledRangeKernel
from tensor_comprehensions.compiler.row_block_sizes import list_variants
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.dispatch import inline_cache
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.nodes import If, Loop, Stmt, Window
from tensor_comprehensions.loop_ir.rewrite import map_stmt, mentions, walk_stmts
from tensor_comprehensions.loop_ir.row_blocks import block_variable, first_row_variable, rows_variable
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.runtime.fastpath import launch_ir
from tests.helpers.row_kernels import check_interpreter, check_machine_code, range_kernels

SOFTMAX = """
def softmax(float(N,D) x) -> (m, e, s, out) {
    m(n) max=! x(n,d)
    e(n,d) = exp(x(n,d) - m(n))
    s(n) +=! e(n,d)
    out(n,d) = e(n,d) / s(n)
}
"""
LAYER_NORM = """
def layer_norm(float(N,D) x, float(D) g) -> (out) {
    m(n) +=! x(n,d)
    m(n) = m(n) / D
    v(n) +=! (x(n,d) - m(n)) * (x(n,d) - m(n))
    v(n) = v(n) / D
    out(n,d) = (x(n,d) - m(n)) * rsqrt(v(n) + 1e-5) * g(d)
}
"""
SCALE = "def scale(float(N,D) x, float(D) g) -> (o) { o(n,d) = x(n,d) * g(d) }"
TRANSPOSE = "def turn(float(N,D) x) -> (o) { o(d,n) = x(n,d) }"
PRODUCT = "def product(float(N,K) a, float(K,D) b) -> (c) { c(n,d) +=! a(n,k) * b(k,d) }"
LAYER = """
def layer(float(N,K) x, float(D,K) w, float(D) b) -> (y) {
    y(n,d) = b(d)
    y(n,d) += x(n,k) * w(d,k)
    y(n,d) = fmax(y(n,d), 0)
}
"""
DECODE = """
def decode(float(N,K) q, float(N,D,K) k, float(N,D,K) v) -> (o) {
    s(n,d) +=! q(n,i) * k(n,d,i)
    m(n) max=! s(n,d)
    e(n,d) = exp(s(n,d) - m(n))
    z(n) +=! e(n,d)
    o(n,i) +=! e(n,d) * v(n,d,i)
    o(n,i) = o(n,i) / z(n)
}
"""
ATTENTION = """
def attention(float(T,K) q, float(T,K) k, float(T,K) v) -> (o) {
    s(t,u) +=! q(t,i) * k(u,i)
    m(t) max=! s(t,u)
    e(t,u) = exp(s(t,u) - m(t))
    z(t) +=! e(t,u)
    o(t,i) +=! e(t,u) * v(u,i)
    o(t,i) = o(t,i) / z(t)
}
"""
CAUSAL = """
def causal(float(T) q, float(T) k, float(T) v) -> (o, p) {
    s(t,u) = q(t) * k(u)
    o(t) +=! u <= t ? s(t,u) * v(u) : 0
    p(u) max=! u <= t ? s(t,u) : -1e30
}
"""
LATEST = """
def latest(float(T) q, float(D) k, float(D) v) -> (o) {
    o(t) +=! d <= t + D - T ? q(t) * k(d) * v(d) : 0
}
"""
CAUSAL_SOFTMAX = """
def causal_softmax(float(T,D) x) -> (o) {
    m(t) max=! d <= t ? x(t,d) : -inf
    e(t,d) = d <= t ? exp(x(t,d) - m(t)) : 0
    z(t) +=! e(t,d)
    o(t,d) = e(t,d) / z(t)
}
"""
PLACES = "def places(float(N,D) x) -> (o, p) { o(n,d) = x(n,d) + sin(n * 0.1 + d)  p(d) +=! n % 3 == 0 ? x(n,d) : 0 }"
BATCH_NORM = """
def batch_norm(float(N,D,3,4) x, float(D) g) -> (y) {
    m(d) +=! x(n,d,h,w)
    m(d) = m(d) / (N * 12)
    v(d) +=! (x(n,d,h,w) - m(d)) * (x(n,d,h,w) - m(d))
    s(d) = rsqrt(v(d) / (N * 12) + 1e-5) * g(d)
    y(n,d,h,w) = (x(n,d,h,w) - m(d)) * s(d)
}
"""
SQUARE = """
def square(float(N,N) a, float(N,D) b, float(N,D) c) -> (o) {
    t(m,d) +=! a(k,m) * b(k,d)
    o(m,d) = c(m,d) + t(m,d)
}
"""
MIDDLE = "def f(float(B,N,3) x) -> (o) { o(b,n,c) = x(b,n,c) + 1 }"
Sizes = Mapping[str, int]
Make = Callable[[Sizes], tuple[Any, ...]]


def shapes(*tensors: str) -> Make:
    """Returns random tensors whose dimensions are sizes, one for each string."""
    return lambda sizes: tuple(torch.randn([sizes[d] for d in dims]) for dims in tensors)


PROGRAMS: dict[str, tuple[str, Make, tuple[str, ...]]] = {
    "softmax": (SOFTMAX, shapes("ND"), ("D",)),
    "layer_norm": (LAYER_NORM, shapes("ND", "D"), ("ND",)),
    "scale": (SCALE, shapes("ND", "D"), ("D", "ND")),
    "transpose": (TRANSPOSE, shapes("ND"), ("D", "ND")),
    "product": (PRODUCT, shapes("NK", "KD"), ("D", "K", "NDK")),
    "square": (SQUARE, shapes("NN", "ND", "ND"), ("ND", "N")),
    "layer": (LAYER, shapes("NK", "DK", "D"), ("DK", "K")),
    "decode": (DECODE, shapes("NK", "NDK", "NDK"), ("D", "DK")),
    "attention": (ATTENTION, shapes("TK", "TK", "TK"), ("T",)),
    "causal": (CAUSAL, shapes("T", "T", "T"), ("T",)),
    "causal_softmax": (CAUSAL_SOFTMAX, shapes("TD"), ("TD",)),
    "latest": (LATEST, shapes("T", "D", "D"), ("TD",)),
    "places": (PLACES, shapes("ND"), ("ND",)),
    "batch_norm": (
        BATCH_NORM,
        lambda sizes: (torch.randn(sizes["N"], sizes["D"], 3, 4), torch.randn(sizes["D"])),
        ("N",),
    ),
    "middle": (MIDDLE, lambda sizes: (torch.randn(sizes["N"], sizes["D"], 3),), ("D",)),
}
CASES = [(name, dynamic) for name, (_, _, sets) in PROGRAMS.items() for dynamic in sets]


def op_of(name: str, dynamic: Any) -> Op:
    renamed = {"N"} if name == "middle" and dynamic else dynamic
    (op,) = tc.define(PROGRAMS[name][0], dynamic=renamed)
    return op


def arguments(name: str, dynamic: str, value: int) -> tuple[Any, ...]:
    sizes = {"N": 5, "D": 33, "K": 19, "T": 21} | {d: value + 3 * n for n, d in enumerate(dynamic)}
    return PROGRAMS[name][1](sizes)


@pytest.mark.sampled  # sizes of each program
@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_every_size_is_right(name: str, dynamic: str) -> None:
    op = op_of(name, set(dynamic))
    for value in (33, 0, 1, 2, 7, 31, 67, 130, 300):
        check_machine_code(op, arguments(name, dynamic, value), {})
    (kernel,) = range_kernels(op)
    assert len(op.kernels) == 1
    assert set(kernel.dynamic_sizes) >= ({"N"} if name == "middle" else set(dynamic))
    for value in (0, 1, 11):
        check_interpreter(op, kernel, arguments(name, dynamic, value), {})


@pytest.mark.parametrize(("name", "dynamic"), [("softmax", "D"), ("product", "K"), ("attention", "T")])
def test_two_hundred_sizes_need_three_kernels(name: str, dynamic: str) -> None:
    op, draw = op_of(name, None), np.random.default_rng(7)
    for value in draw.integers(0, 200, 200):
        op(*arguments(name, dynamic, int(value)))
    assert (len(op.kernels), sum(k.is_range for k in op.kernels)) == (3, 1)
    check_machine_code(op, arguments(name, dynamic, 201), {})


def test_strides_of_calls_need_one_more_kernel() -> None:
    op = op_of("scale", {"D"})
    for d in (7, 40, 1, 300):
        g = torch.randn(d)
        for x in (torch.randn(5, d), torch.randn(5, d + 4)[:, :d], torch.randn(5, 2 * d + 1)[:, d + 1 :]):
            for _ in range(2):
                assert torch.equal(op(x, g), x * g)
    assert len(op.kernels) == 2


def test_transposed_operands_need_one_more_kernel() -> None:
    op = op_of("product", set("NDK"))
    for n in (7, 40, 90):
        a, b = torch.randn(n, n + 1), torch.randn(n + 1, n + 2)
        for x, y in ((a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())):
            for _ in range(2):
                torch.testing.assert_close(op(x, y), x @ y, rtol=1e-4, atol=1e-4)
    assert len(op.kernels) == 3


def test_a_growing_cache_compiles_once() -> None:
    op = op_of("decode", {"D"})
    keys, values, q = torch.randn(4, 64, 16), torch.randn(4, 64, 16), torch.randn(4, 16)
    for length in range(1, 65):
        k, v = keys[:, :length], values[:, :length]
        expected = torch.nn.functional.scaled_dot_product_attention(q[:, None], k, v, scale=1.0)[:, 0]
        torch.testing.assert_close(op(q, k, v), expected, rtol=1e-4, atol=1e-4)
    assert len(op.kernels) <= 2  # and one for the whole cache, or for a single head, which are contiguous


def test_results_do_not_depend_on_threads() -> None:
    op, found = op_of("softmax", {"D"}), []
    x, before = torch.randn(64, 1000), torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(op(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_blocks_add_to_is_read_under_the_name_that_they_write() -> None:
    """Some blocks see the sum in another shape than others."""
    text = """
    def gram(float(N,D) x) -> (s) {
        t(i,d) = x(i,d) * 2
        a(i,j) +=! t(i,d) * x(j,d)
        s(i,j) = a(i,j) + 1
    }
    """
    (op,) = tc.define(text, dynamic={"D"})
    for n in (2, 3, 4):
        for d in (7, 1, 0, 200):
            check_machine_code(op, (torch.randn(n, d),), {})
    assert len(op.kernels) == 3


def test_gradients_of_rows_of_any_length() -> None:
    (op,) = tc.define(SCALE, dynamic={"D"})
    for d in (5, 1, 40, 130):
        x, g = torch.randn(6, d, requires_grad=True), torch.randn(d, requires_grad=True)
        op(x, g).square().sum().backward()
        mine = x.grad, g.grad
        x.grad = g.grad = None
        (x * g).square().sum().backward()
        for a, b in zip(mine, (x.grad, g.grad), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_updates_of_what_the_caller_gives() -> None:
    (op,) = tc.define("def f(float(N,D) x) -> (float(N) o) { o(n) += x(n,d) }", dynamic={"D"})
    for d in (5, 0, 1, 40, 300):
        check_machine_code(op, (torch.randn(6, d),), {"o": torch.randn(6)})
    assert len(op.kernels) == 1


# --- guards ----------------------------------------------------------------------------------------------------------

Guard = Callable[..., Any]


def _probe_calls(op: Op) -> None:
    """Calls after the first that a kernel for it may not serve, or not so: all are right, or refused."""
    g, wide = torch.randn(9), torch.randn(6, 40)
    op(wide[:5, :9].contiguous(), g)
    for x in (wide[:6, :9].contiguous(), wide[:5, :9], wide[:5, :18:2].as_strided((5, 9), (18, 2))):
        assert torch.equal(op(x, g), x * g)
    other = torch.randn(18)[::2]
    x = wide[:5, :9].contiguous()
    assert torch.equal(op(x, other), x * other)
    with pytest.raises(tc.ArgumentError):
        op(wide[:5, :12].contiguous(), g)


CONDITIONS: dict[str, tuple[str, str, int, int]] = {
    "rows": ("x", "sizes", 0, launch_ir.FIRST_PARAMETER + 7),
    "columns": ("x", "sizes", 1, launch_ir.FIRST_PARAMETER + 7),
    "weights": ("g", "sizes", 0, launch_ir.FIRST_PARAMETER + 7),
    "distance of rows": ("x", "strides", 0, launch_ir.ANY),
    "distance of columns": ("x", "strides", 1, 2),
    "distance of weights": ("g", "strides", 0, launch_ir.ANY),
}


def test_calls_that_a_cached_call_may_not_serve() -> None:
    _probe_calls(op_of("scale", {"D"}))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_condition_of_a_cached_call_matters(condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, or with another one, a probe fails."""
    tensor, part, dimension, instead = CONDITIONS[condition]
    original: Guard = inline_cache._row_guard

    def change(compiled: CompiledRangeKernel, t: Any, *rest: Any) -> Any:
        guard = original(compiled, t, *rest)
        if t.name != tensor or not rest:
            return guard
        values = list(getattr(guard, part))
        values[dimension] = instead
        return replace(guard, **{part: tuple(values)})

    monkeypatch.setattr(inline_cache, "_row_guard", change)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        _probe_calls(op_of("scale", {"D"}))


def test_the_interpreter_finds_a_wrong_stride() -> None:
    """A window that claims another distance between rows is no part of its source."""
    op = op_of("transpose", {"D"})
    op(torch.randn(5, 9))
    module = range_kernels(op)[0].rerun_until("join")
    verify(module)

    def change(s: Stmt) -> Stmt:
        new = map_stmt(s, lambda e: e, change)
        if isinstance(new, Window) and any(new.buffer.stride_variables):
            return replace(new, buffer=replace(new.buffer, stride_variables=()))
        return new

    wrong = replace(module, kernels=tuple(replace(k, body=change(k.body)) for k in module.kernels))
    with pytest.raises(InternalError):
        verify(wrong)


@pytest.mark.parametrize(
    ("name", "dynamic", "is_open"),
    [("softmax", "D", True), ("layer_norm", "D", True), ("causal_softmax", "TD", True), ("product", "K", False)],
)
def test_loops_over_rows_are_opened_where_all_code_is_such_loops(name: str, dynamic: str, is_open: bool) -> None:
    op = op_of(name, set(dynamic))
    op(*arguments(name, dynamic, 40))
    (kernel,) = range_kernels(op)
    assert kernel.has_open_loops == is_open
    windows = [s for k in kernel.rerun_until("join").kernels for s in walk_stmts(k.body) if isinstance(s, Window)]
    assert bool(windows) != is_open


def test_register_tiles_of_several_rows_are_found_before_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    opened = range_passes.open_same_rows

    def count(*given: Any) -> Any:
        tried.append(given)
        return opened(*given)

    monkeypatch.setattr(range_passes, "open_same_rows", count)
    layer = tc.define(PROGRAMS["layer"][0], dynamic={"N"}).layer
    layer(*arguments("layer", "N", 9))
    assert not tried
    text = "def conv(float(N,C,H) x, float(O,C,K) w) -> (o) { o(n,q,h) +=! x(n,c,h+k) * w(q,c,k) }"
    conv = tc.define(text, dynamic={"N"}).conv
    conv(torch.randn(3, 4, 34), torch.randn(5, 4, 3))
    assert tried, "each row has a register tile of its own"
    (kernel,) = range_kernels(conv)
    assert kernel.has_open_loops


@pytest.mark.parametrize(("name", "dynamic"), [("attention", "T"), ("product", "NDK")])
def test_remaining_rows_have_no_code_for_the_most_terms_of_a_sum(name: str, dynamic: str) -> None:
    op = op_of(name, set(dynamic))
    op(*arguments(name, dynamic, 21))
    (kernel,) = range_kernels(op)
    variants = list_variants(kernel.axes, kernel.sizes)
    terms = {rows: {v[-1] for v in variants if v[0] == rows} for rows in (32, 8)}
    assert 32 in terms[32]
    assert 32 not in terms[8]


@pytest.mark.parametrize("name", ["layer", "product"])
def test_few_columns_of_a_product_have_no_code_for_more_rows(name: str) -> None:
    op, (_, make, _) = op_of(name, set("NDK")), PROGRAMS[name]
    for size in (0, 1, 7, 8, 25, 33, 47, 72):
        check_machine_code(op, make(dict.fromkeys("NDK", size)), {})
    (kernel,) = range_kernels(op)
    columns, *_ = kernel.sizes
    few = [v for v in list_variants(kernel.axes, kernel.sizes) if v[0] < columns[0].rows]
    assert few
    assert all(v[1] <= v[0] for v in few)


TRANSPOSITION = "def f(float(N,D) x) -> (y) { y(d,n) = x(n,d) }"


@pytest.mark.parametrize(("text", "shapes_of"), [(PRODUCT, [(64, 16), (16, 320)]), (TRANSPOSITION, [(64, 320)])])
def test_large_blocks_compute_no_more_columns_twice_than_once(text: str, shapes_of: list[tuple[int, int]]) -> None:
    """With 320 columns, 192 of them were computed twice, which took 1.6 times as long as without."""
    (op,) = tc.define(text, dynamic={"D"})
    check_machine_code(op, tuple(map(torch.randn, shapes_of)), {})
    (kernel,) = range_kernels(op)
    (columns,) = kernel.sizes
    large = [size for size in columns if size.rows > 8]
    assert large
    assert all(2 * size.overlap_from > size.rows for size in large)


@pytest.mark.parametrize(("name", "dynamic"), [("layer", "K"), ("product", "K"), ("layer", "NDK")])
def test_sums_of_few_terms_run_all_stages_in_one_block(name: str, dynamic: str) -> None:
    op = op_of(name, set(dynamic))
    _, make, _ = PROGRAMS[name]
    for size in (0, 1, 7, 8, 9, 128, 129, 300):
        check_machine_code(op, make({"N": 40, "D": 64, "K": 12} | dict.fromkeys(dynamic, size)), {})
    (kernel,) = range_kernels(op)
    bodies = [k.body for k in kernel.rerun_until("join").kernels]
    few = build.le(build.var(rows_variable(0)), 128)
    choices = [s for body in bodies for s in walk_stmts(body) if isinstance(s, If) and s.condition == few]
    assert len(choices) == (dynamic == "K"), "the code of several axes would be long"


def test_images_are_normalized_channel_by_channel_in_blocks_of_one_size() -> None:
    op = op_of("batch_norm", {"N"})
    op(torch.randn(9, 64, 3, 4), torch.randn(64))
    (kernel,) = range_kernels(op)
    channels, images = ([size.rows for size in axis] for axis in kernel.sizes)
    assert channels == [1]
    loops = [s for k in kernel.rerun_until("join").kernels for s in walk_stmts(k.body) if isinstance(s, Loop)]
    assert sum(s.var == block_variable(1) for s in loops) == 3, "a loop for each stage, whose last block is shorter"
    assert len(images) > 1


def test_blocks_that_a_mask_leaves_out_have_code_of_their_own() -> None:
    text = "def f(float(T,I) q, float(D,I) k) -> (o) { o(t) +=! d <= t ? q(t,i) * k(d,i) : 0 }"
    found = []
    for mask in ("d <= t", "d % 2 == 0", "d * t < 9", "d <= t || t < 3"):
        (op,) = tc.define(text.replace("d <= t", mask), dynamic={"T", "D"})
        check_machine_code(op, (torch.randn(70, 4), torch.randn(75, 4)), {})
        module = range_kernels(op)[0].rerun_until("join")
        tests = [s.condition for k in module.kernels for s in walk_stmts(k.body) if isinstance(s, If)]
        found.append(any(mentions(e, {first_row_variable(0), first_row_variable(1)}) for e in tests))
    assert found == [True, False, False, False]


MASKED_PRODUCT = "def f(float(T,D) p, float(D,I) v) -> (o) { o(t,i) +=! MASK ? p(t,d) * v(d,i) : 0 }"


@pytest.mark.parametrize("mask", ["d <= t", "d + 3 <= t", "t - d < 0", "d <= t && t - 40 < d"])
def test_the_mask_of_blocks_on_its_diagonal_is_known(mask: str) -> None:
    (op,) = tc.define(MASKED_PRODUCT.replace("MASK", mask), dynamic={"T", "D"})
    for t, d in ((70, 75), (64, 64), (40, 8), (1, 1), (33, 64), (0, 5)):
        check_machine_code(op, (torch.randn(t, d), torch.randn(d, 64)), {})
    (kernel,) = range_kernels(op)
    check_interpreter(op, kernel, (torch.randn(45, 37), torch.randn(37, 64)), {})
    lines = format_program(kernel.rerun_until("join")).splitlines()
    ends = (".first * -1 + first.1 <= 0", ".first + first.1 * -1 <= 0")
    assert any(all(end in line for end in ends) for line in lines if line.lstrip().startswith("if"))


@pytest.mark.parametrize("mask", ["d <= 2 * t", "d <= t", "3 * t < d"])
def test_masks_are_known_for_all_terms_of_a_block(mask: str) -> None:
    """Code that was chosen for 32 terms ran for 128 of them."""
    (op,) = tc.define(MASKED_PRODUCT.replace("MASK", mask), dynamic={"T", "D"})
    for t, d in ((70, 75), (100, 300), (128, 128), (32, 200)):
        check_machine_code(op, (torch.randn(t, d), torch.randn(d, 64)), {})


# --- windows ---------------------------------------------------------------------------------------------------------

WINDOWS: dict[str, tuple[str, Make, str]] = {
    "shift": ("def f(float(N,D) x) -> (o) { o(n,d) = x(n,d+2) where d in 0:D-2 }", shapes("ND"), "D"),
    "stencil": (
        "def f(float(N,D) x) -> (o) { o(n,d) = x(n-1,d) + x(n+1,d) + x(n,d-1) * d - x(n,d+1) * n }", shapes("ND"), "ND",
    ),
    "differences": ("def f(float(N,D) x) -> (o) { o(n) +=! (x(n,d+1) - x(n,d)) * x(n,d) }", shapes("ND"), "D"),
    "pool": (
        "def f(float(N,D) x) -> (o) { o(n,d) max=! x(2*n+i,3*d+k) where i in 0:3, k in 0:2 }", shapes("ND"), "ND",
    ),
    "convolution": (
        "def f(float(N,C,D) x, float(O,C,K) w, float(O) b) -> (o) {"
        "o(n,q,d) = b(q)  o(n,q,d) += x(n,c,d+k) * w(q,c,k)  o(n,q,d) = fmax(o(n,q,d), 0) }",
        lambda sizes: (torch.randn(2, 3, sizes["D"]), torch.randn(4, 3, 3), torch.randn(4)), "D",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_rows_that_are_computed_from_windows(name: str) -> None:
    text, make, dynamic = WINDOWS[name]
    (op,) = tc.define(text, dynamic=set(dynamic))

    def arguments(value: int) -> tuple[Any, ...]:
        return make({"N": 5, "D": 33} | {d: value + 3 * n for n, d in enumerate(dynamic)})

    for value in (33, 2, 3, 4, 9, 67, 130):
        check_machine_code(op, arguments(value), {})
    (kernel,) = range_kernels(op)
    assert len(op.kernels) == 1
    for value in (2, 12):
        check_interpreter(op, kernel, arguments(value), {})
    with pytest.raises(tc.RangeError):
        op(*arguments(0))


def test_windows_of_operands_that_are_slices() -> None:
    (op,) = tc.define(WINDOWS["pool"][0], dynamic={"N", "D"})
    for n in (3, 8, 41):
        for x in (torch.randn(n, n + 1), torch.randn(n, n + 9)[:, 4 : n + 5]):
            expected = torch.nn.functional.max_pool2d(x[None], (3, 2), (2, 3))[0]
            for _ in range(2):
                assert torch.equal(op(x), expected)
    assert len(op.kernels) == 2
