"""Products that share tiles of rows: attention and its gradient run as one kernel that stores no scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensor_comprehensions as tc

EXAMPLES = Path(__file__).parents[2] / "examples"
MASKED = """def attention(float(B,H,Q,D) query, float(B,H,K,D) key, float(B,H,K,E) value, {mask}) -> (out) {{
    score(b,h,q,k) +=! query(b,h,q,d) * key(b,h,k,d)
    score(b,h,q,k) = {score}
    largest(b,h,q) max=! score(b,h,q,k)
    weight(b,h,q,k) = exp(score(b,h,q,k) - largest(b,h,q))
    total(b,h,q) +=! weight(b,h,q,k)
    mixed(b,h,q,e) +=! weight(b,h,q,k) * value(b,h,k,e)
    out(b,h,q,e) = mixed(b,h,q,e) / total(b,h,q)
}}"""
SCORES = {
    "bias": ("float(B,Q,K) bias", "score(b,h,q,k) * rsqrt(float(D)) + bias(b,q,k)"),
    "keys": ("bool(B,K) kept", "kept(b,k) ? score(b,h,q,k) * rsqrt(float(D)) : -inf"),
    "pairs": ("bool(B,Q,K) kept", "kept(b,q,k) ? score(b,h,q,k) * rsqrt(float(D)) : -inf"),
}
SHAPES = ((2, 2, 100, 37, 16, 24), (1, 5, 12, 150, 16, 16))


def example(name: str) -> tc.Op:
    return list(tc.define((EXAMPLES / f"{name}.tc").read_text()))[-1]


def inputs(shape: tuple[int, ...], *, gradients: bool = False) -> list[torch.Tensor]:
    b, h, q, k, d, e = shape
    torch.manual_seed(0)
    return [torch.randn(b, h, *rest, requires_grad=gradients) for rest in ((q, d), (k, d), (k, e))]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | float = 0.0) -> torch.Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5 + added
    return torch.softmax(scores, -1) @ v.double()


def causal_mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    later = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None]
    return torch.zeros(later.shape, dtype=torch.float64).masked_fill(later, -torch.inf)


@pytest.mark.parametrize(("name", "shape"), [("attention", SHAPES[0]), ("causal_attention", SHAPES[1])])
def test_attention_stores_no_scores(name: str, shape: tuple[int, ...]) -> None:
    q, k, v = inputs(shape)
    op = example(name)
    added = causal_mask(q, k) if "causal" in name else 0.0
    torch.testing.assert_close(op(q, k, v).double(), reference(q, k, v, added), rtol=1e-4, atol=1e-5)
    kernel = op.compile(q, k, v)
    assert (kernel.resources["kernels"], kernel.resources["temporary_bytes"]) == (1, 0)


@pytest.mark.parametrize(("name", "shape"), [("attention", SHAPES[1]), ("causal_attention", SHAPES[0])])
def test_the_gradient_of_attention_stores_no_scores(name: str, shape: tuple[int, ...]) -> None:
    ours, theirs = inputs(shape, gradients=True), inputs(shape, gradients=True)
    op = example(name)
    added = causal_mask(*theirs[:2]) if "causal" in name else 0.0
    out, expected = op(*ours), reference(*theirs, added)
    upstream = torch.randn(out.shape)
    found = torch.autograd.grad(out, ours, upstream)
    for mine, right in zip(found, torch.autograd.grad(expected, theirs, upstream.double()), strict=True):
        torch.testing.assert_close(mine.double(), right.double(), rtol=1e-3, atol=1e-4)
    backward = list(tc.define(op.backward_source()))[-1]
    b, h, rows = shape[:3]
    per_row = [torch.rand(b, h, rows) for _ in range(2)]
    kernel = backward.compile(*(t.detach() for t in (*ours, out)), *per_row, upstream)
    assert (kernel.resources["kernels"], kernel.resources["temporary_bytes"]) == (1, 0)
    assert "one after another" in kernel.source("schedule")


@pytest.mark.parametrize("name", SCORES)
def test_attention_with_a_mask_stores_no_scores(name: str) -> None:
    shape = SHAPES[1]
    b, _, rows, columns = shape[:4]
    mask, score = SCORES[name]
    op = list(tc.define(MASKED.format(mask=mask, score=score)))[-1]
    sizes = (b, columns) if name == "keys" else (b, rows, columns)
    values = torch.randn(sizes) if name == "bias" else torch.rand(sizes) > 0.3
    if name != "bias":
        values[..., 0] = True
    added = values if name == "bias" else torch.zeros(sizes).masked_fill(~values, -torch.inf)
    added = added[:, None, None] if name == "keys" else added[:, None]
    ours, theirs = inputs(shape, gradients=True), inputs(shape, gradients=True)
    out, expected = op(*ours, values), reference(*theirs, added)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(out.shape)
    found = torch.autograd.grad(out, ours, upstream)
    for mine, right in zip(found, torch.autograd.grad(expected, theirs, upstream.double()), strict=True):
        torch.testing.assert_close(mine.double(), right.double(), rtol=1e-3, atol=1e-4)
    kernel = op.compile(*(t.detach() for t in ours), values)
    assert (kernel.resources["kernels"], kernel.resources["temporary_bytes"]) == (1, 0)


def test_a_row_without_keys_is_nan_and_leaves_the_others_alone() -> None:
    shape = SHAPES[1]
    op = list(tc.define(MASKED.format(mask=SCORES["pairs"][0], score=SCORES["pairs"][1])))[-1]
    kept = torch.ones(shape[0], shape[2], shape[3], dtype=torch.bool)
    kept[0, 9] = False
    q, k, v = inputs(shape)
    out = op(q, k, v, kept)
    assert out[0, :, 9].isnan().all()
    out[0, :, 9] = 0
    expected = reference(q, k, v).float()
    expected[0, :, 9] = 0
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_scores_of_half_precision_inputs_are_float() -> None:
    text = (EXAMPLES / "attention.tc").read_text().replace("float(B", "bfloat16(B")
    text = text.replace("query(b,h,q,d) * key(b,h,k,d)", "float(query(b,h,q,d)) * float(key(b,h,k,d))")
    text = text.replace("* value(b,h,k,e)", "* float(value(b,h,k,e))")
    op = list(tc.define(text))[-1]
    q, k, v = (t.bfloat16() for t in inputs(SHAPES[1]))
    torch.testing.assert_close(op(q, k, v).double(), reference(q, k, v), rtol=1e-4, atol=1e-5)
    kernel = op.compile(q, k, v)
    assert (kernel.resources["kernels"], kernel.resources["temporary_bytes"]) == (1, 0)


def test_long_rows_get_smaller_tiles_or_kernels_of_their_own() -> None:
    for keys in (3000, 40000):
        q, k, v = inputs((1, 4, 33, keys, 8, 8))
        op = example("attention")
        torch.testing.assert_close(op(q, k, v).double(), reference(q, k, v), rtol=1e-4, atol=1e-5)


def test_memory_is_taken_only_of_what_nothing_reads_any_more() -> None:
    text = """def f(float(B,Q,D) x, float(B,K,D) y, float(B,K,E) v) -> (out, peak) {
        s(b,q,k) +=! x(b,q,d) * y(b,k,d)
        w(b,q,k) = s(b,q,k) * s(b,q,k)
        peak(b,q) max=! s(b,q,k) - w(b,q,k)
        out(b,q,e) +=! w(b,q,k) * v(b,k,e)
    }"""
    x, y, v = torch.randn(4, 130, 8), torch.randn(4, 50, 8), torch.randn(4, 50, 24)
    out, peak = tc.define(text).f(x, y, v)
    s = x.double() @ y.double().transpose(1, 2)
    torch.testing.assert_close(peak.double(), (s - s * s).amax(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.double(), (s * s) @ v.double(), rtol=1e-4, atol=1e-3)


def test_a_node_between_the_products_that_needs_a_whole_sum_waits_for_it() -> None:
    text = """def f(float(B,Q,D) x, float(B,K,D) y) -> (total, scaled) {
        s(b,q,k) +=! x(b,q,d) * y(b,k,d)
        w(b,q,k) = tanh(s(b,q,k))
        o(b,q,d) +=! w(b,q,k) * y(b,k,d)
        total(b,k,d) +=! w(b,q,k) * o(b,q,d)
        scaled(b,k,d) = total(b,k,d) * 2
    }"""
    x, y = torch.randn(5, 130, 16), torch.randn(5, 48, 16)
    total, scaled = tc.define(text).f(x, y)
    w = torch.tanh(x.double() @ y.double().transpose(1, 2))
    expected = w.transpose(1, 2) @ (w @ y.double())
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(scaled.double(), expected * 2, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("result", "staged"), [("total(k,b,d)", True), ("total(b,k,d)", False)])
def test_sums_whose_rows_lie_apart_add_up_in_a_buffer(result: str, staged: bool) -> None:
    text = f"""def f(float(B,Q,D) x, float(B,K,D) y) -> (o, total) {{
        s(b,q,k) +=! x(b,q,d) * y(b,k,d)
        w(b,q,k) = tanh(s(b,q,k))
        o(b,q,d) +=! w(b,q,k) * y(b,k,d)
        {result} +=! w(b,q,k) * x(b,q,d)
    }}"""
    x, y = torch.randn(5, 130, 19), torch.randn(5, 48, 19)
    op = tc.define(text).f
    expected = torch.tanh(x.double() @ y.double().transpose(1, 2)).transpose(1, 2) @ x.double()
    expected = expected.transpose(0, 1) if staged else expected
    torch.testing.assert_close(op(x, y)[1].double(), expected, rtol=1e-4, atol=1e-3)
    kernel = op.compile(x, y)
    assert (kernel.resources["kernels"], kernel.resources["temporary_bytes"]) == (1, 0)
    assert ("total.sums" in kernel.source("loops")) == staged


@pytest.mark.parametrize("finish", ["half(total(b,k,d) * 2)", "bias(k) + tanh(total(b,k,d))", "total(b,k,d) * n(b,d)"])
def test_sums_over_rows_get_their_epilogue_after_the_last_tile(finish: str) -> None:
    """Not if the epilogue reads what tiles compute: `n` is not ready before the last tile."""
    needs_tiles = "n(b,d)" in finish
    greatest = "n(b,d) max=! o(b,q,d)" if needs_tiles else ""
    text = f"""def f(float(B,Q,D) x, float(B,K,D) y, float(K) bias) -> (o, done) {{
        s(b,q,k) +=! x(b,q,d) * y(b,k,d)
        w(b,q,k) = tanh(s(b,q,k))
        o(b,q,d) +=! w(b,q,k) * y(b,k,d)
        {greatest}
        total(b,k,d) +=! w(b,q,k) * x(b,q,d)
        done(b,k,d) = {finish}
    }}"""
    x, y, bias = torch.randn(5, 130, 19), torch.randn(5, 48, 19), torch.randn(48)
    op = tc.define(text).f
    o, done = op(x, y, bias)
    w = torch.tanh(x.double() @ y.double().transpose(1, 2))
    total, sums = w.transpose(1, 2) @ x.double(), w @ y.double()
    expected = {"half": total * 2, "bias": bias[:, None] + total.tanh(), "tota": total * sums.amax(1)[:, None]}
    torch.testing.assert_close(o.double(), sums, rtol=1e-4, atol=1e-3)
    close = {"rtol": 1e-3, "atol": 5e-2} if "half" in finish else {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(done.double(), expected[finish[:4]].double(), **close)
    kernel = op.compile(x, y, bias)
    assert ("total.sums" in kernel.source("loops")) != needs_tiles
    assert needs_tiles or (kernel.resources["kernels"], kernel.resources["temporary_bytes"]) == (1, 0)


def test_sums_over_many_rows_round_less_than_one_long_sum() -> None:
    """Tiles continued the sum of earlier ones: gradients of attention had 1.3 times the error of torch's."""
    text = """def f(float(B,Q,D) x, float(B,K,D) y) -> (o, total) {
        s(b,q,k) +=! x(b,q,d) * y(b,k,d)
        w(b,q,k) = s(b,q,k) * s(b,q,k)
        o(b,q,d) +=! w(b,q,k) * y(b,k,d)
        total(b,k,d) +=! w(b,q,k) * x(b,q,d)
    }"""
    x, y = torch.randint(1, 4, (4, 2048, 16)) / 3, torch.randint(1, 4, (4, 24, 16)).float()
    op = tc.define(text).f
    assert "one after another" in op.compile(x, y).source("schedule")
    w = (x @ y.transpose(1, 2)).square()
    exact = w.double().transpose(1, 2) @ x.double()
    long_sum = torch.zeros(4, 24, 16)
    for row in range(x.shape[1]):
        long_sum += w[:, row, :, None] * x[:, row, None]
    found = op(x, y)[1]
    assert (found - exact).square().mean() < (long_sum - exact).square().mean() / 8


@pytest.mark.parametrize(("heads_last", "adds_mask"), [(True, False), (False, False), (True, True)])
def test_values_per_row_in_any_order_leave_the_lanes_along_the_rows(heads_last: bool, adds_mask: bool) -> None:
    """Torch stores one logarithm per row with the heads last. All keys were transposed for each tile because of it."""
    given, added = (", float(B,Q,K) mask", " + mask(b,q,k)") if adds_mask else ("", "")
    text = f"""def f(float(B,H,Q,D) x, float(B,H,K,D) y, float(B,H,Q) peak{given}) -> (o) {{
        s(b,h,q,k) +=! x(b,h,q,d) * y(b,h,k,d)
        w(b,h,q,k) = exp(s(b,h,q,k){added} - peak(b,h,q))
        o(b,h,q,d) +=! w(b,h,q,k) * y(b,h,k,d)
    }}"""
    x, y, peak, mask = (
        torch.randn(2, 4, 130, 16) / 4,
        torch.randn(2, 4, 48, 16),
        torch.rand(2, 4, 130),
        torch.rand(2, 130, 48),
    )
    if heads_last:
        peak = peak.transpose(1, 2).contiguous().transpose(1, 2)
    arguments = (x, y, peak, mask) if adds_mask else (x, y, peak)
    kernel = tc.define(text).f.compile(*arguments)
    s = x.double() @ y.double().transpose(2, 3) + (mask[:, None] if adds_mask else 0)
    expected = (s - peak[..., None]).exp() @ y.double()
    torch.testing.assert_close(kernel(*arguments).double(), expected, rtol=1e-4, atol=1e-3)
    (lanes,) = (line for line in kernel.source("schedule").splitlines() if "pack(" in line)
    assert ("vectorize('q'" in lanes) != adds_mask


@pytest.mark.parametrize("factors", [1, 2])
def test_one_mask_is_read_strided_instead_of_transposing_two_factors(factors: int) -> None:
    """The gradient of attention with a mask transposed all keys and values for each tile."""
    second = "t(b,q,k) +=! z(b,q,d) * v(b,k,d)" if factors == 2 else "t(b,q,k) = s(b,q,k)"
    text = f"""def f(float(B,Q,D) x, float(B,K,D) y, float(B,Q,D) z, float(B,K,D) v, bool(B,Q,K) kept) -> (o) {{
        s(b,q,k) +=! x(b,q,d) * y(b,k,d)
        {second}
        w(b,q,k) = kept(b,q,k) ? s(b,q,k) * t(b,q,k) : 0.0
        o(b,q,d) +=! w(b,q,k) * v(b,k,d) * z(b,q,d)
    }}"""
    x, z = (torch.randn(4, 130, 16) for _ in range(2))
    y, v = (torch.randn(4, 48, 16) for _ in range(2))
    kept = torch.rand(4, 130, 48) > 0.3
    kernel = tc.define(text).f.compile(x, y, z, v, kept)
    s = x.double() @ y.double().transpose(1, 2)
    t = z.double() @ v.double().transpose(1, 2) if factors == 2 else s
    expected = ((s * t).where(kept, 0) @ v.double()) * z.double()
    torch.testing.assert_close(kernel(x, y, z, v, kept).double(), expected, rtol=1e-3, atol=1e-2)
    chosen = kernel.source("schedule")
    assert chosen.count("vectorize('q'") == (2 if factors == 2 else 0)
    assert kernel.resources["kernels"] == 1


def test_a_product_does_not_join_pointwise_statements_by_the_row_that_it_sums_over() -> None:
    """A convolution of padded channels, which other statements made, ran in one thread, with all of them in memory."""
    text = """def f(float(4,8,20,20) x, float(8,8,3,3) w) -> (y) {
        a(n,c,i,j) = x(n,c,i,j) * x(n,c,i,j)
        b(n,c,i,j) = (i >= 1 && i < 21 && j >= 1 && j < 21 ? a(n,c,i-1,j-1) : 0.0) where i in 0:22, j in 0:22
        y(n,o,i,j) +=! b(n,c,i+p,j+q) * w(o,c,p,q) where i in 0:20, j in 0:20
    }"""
    x, w = torch.randn(4, 8, 20, 20), torch.randn(8, 8, 3, 3)
    op = tc.define(text).f
    expected = torch.nn.functional.conv2d(x.double().square(), w.double(), padding=1)
    torch.testing.assert_close(op(x, w).double(), expected, rtol=1e-4, atol=1e-4)
    kernel = op.compile(x, w)
    assert "one after another" not in kernel.source("schedule")
    assert kernel.resources["kernels"] == 2
