"""Calling operators: values, layouts, outputs, numbers, arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.core import knobs

SOURCE = """
def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }
def gemm(float(M,K) A, float(K,N) B, float alpha) -> (C) {
    C(m,n) = 0.5 * C(m,n)
    C(m,n) += alpha * A(m,k) * B(k,n)
}
def moments(float(N,D) x) -> (mean, square) {
    mean(n) +=! x(n,d)
    mean(n) = mean(n) / D
    square(n) +=! x(n,d) * x(n,d)
    square(n) = square(n) / D
}
def double(float(N,C,H,W) x) -> (y) { y(n,c,h,w) = 2 * x(n,c,h,w) }
def total(float(N) x) -> (s) { s +=! x(i) }
def pool(float(N) x, int k, int s) -> (y) { y(i) max=! x(s*i+j) where j in 0:k }
def lookup(float(V,D) table, long(B) words) -> (out) { out(b,d) = table(words(b),d) }
def into(float(N) x) -> (out) { out(i) += x(i) }
"""


@pytest.fixture(scope="module")
def ops() -> tc.Library:
    return tc.define(SOURCE)


def close(x: object, y: object) -> None:
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "contiguous": lambda m, n: torch.randn(m, n),
    "transposed": lambda m, n: torch.randn(n, m).t(),
    "sliced": lambda m, n: torch.randn(2 * m, 3 * n)[::2, n : 2 * n],
    "stepped": lambda m, n: torch.randn(m, 2 * n)[:, ::2],
    "broadcast row": lambda m, n: torch.randn(n).expand(m, n),
    "broadcast column": lambda m, n: torch.randn(m, 1).expand(m, n),
    "overlapping": lambda m, n: torch.randn(m + n).unfold(0, n, 1)[:m],
}


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", ["contiguous", "transposed", "broadcast column"])
def test_tensors_are_read_through_their_strides(ops: tc.Library, left: str, right: str) -> None:
    a, b = LAYOUTS[left](9, 20), LAYOUTS[right](20, 17)
    before = a.clone(), b.clone()
    close(ops.matmul(a, b), a @ b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


def test_channels_last(ops: tc.Library) -> None:
    x = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    y = ops.double(x)
    close(y, 2 * x)
    assert y.is_contiguous()


def test_several_outputs_are_a_tuple(ops: tc.Library) -> None:
    x = torch.randn(6, 33)
    result = ops.moments(x)
    assert isinstance(result, tuple)
    close(result, (x.mean(1), x.square().mean(1)))


def test_numbers_for_0d_parameters(ops: tc.Library) -> None:
    a, b, c = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    want = 0.5 * c + 3 * (a @ b)
    for three in (3, 3.0, np.float32(3), torch.tensor(3.0), np.array(3, "f4")):
        close(ops.gemm(a, b, three, C=c), want)


def test_inout_outputs_are_functional(ops: tc.Library) -> None:
    a, b, c = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    before = c.clone()
    result = ops.gemm(a, b, 1, C=c)
    assert torch.equal(c, before)
    assert result.data_ptr() != c.data_ptr()
    close(ops.gemm(a, b, 1, C=c[0].expand(3, 5)), 0.5 * c[0].expand(3, 5) + a @ b)


def test_an_inout_output_called_out_takes_its_initial_value(ops: tc.Library) -> None:
    x = torch.randn(5)
    close(ops.into(x, out=torch.ones(5)), x + 1)


def test_specialized_numbers(ops: tc.Library) -> None:
    x = torch.randn(20)
    close(ops.pool(x, 3, 2), torch.nn.functional.max_pool1d(x[None], 3, 2)[0])
    close(ops.pool(x, 2, 5), torch.nn.functional.max_pool1d(x[None], 2, 5)[0])
    close(ops.pool(x, torch.tensor(4, dtype=torch.int32), 1), torch.nn.functional.max_pool1d(x[None], 4, 1)[0])


def test_0d_outputs(ops: tc.Library) -> None:
    x = torch.randn(100)
    close(ops.total(x), x.sum())
    assert ops.total(x).shape == ()


def test_empty_tensors(ops: tc.Library) -> None:
    assert ops.matmul(torch.ones(0, 3), torch.ones(3, 4)).shape == (0, 4)
    close(ops.matmul(torch.ones(2, 0), torch.ones(0, 4)), torch.zeros(2, 4))
    close(ops.total(torch.ones(0)), torch.tensor(0.0))


# --- arrays -----------------------------------------------------------------------------------------------------


def test_arrays_in_arrays_out(ops: tc.Library) -> None:
    a, b = np.random.default_rng(0).random((2, 4, 4), "f4")
    result = ops.matmul(a, b.T)
    assert isinstance(result, np.ndarray)
    np.testing.assert_allclose(result, a @ b.T, rtol=1e-4)
    assert all(isinstance(m, np.ndarray) for m in ops.moments(a))


def test_one_tensor_among_arrays_gives_tensors(ops: tc.Library) -> None:
    assert isinstance(ops.matmul(torch.ones(2, 2), np.ones((2, 2), "f4")), Tensor)


# --- out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "stepped"])
def test_out_is_written_through_its_strides(ops: tc.Library, layout: str) -> None:
    a, b = torch.randn(6, 8), torch.randn(8, 5)
    out = LAYOUTS[layout](6, 5)
    assert ops.matmul(a, b, out=out) is out
    close(out, a @ b)


def test_out_leaves_the_rest_of_its_memory_alone(ops: tc.Library) -> None:
    base = torch.full((8, 9), 7.0)
    ops.matmul(torch.randn(6, 8), torch.randn(8, 5), out=base[1:7, 2:7])
    base[1:7, 2:7] = 7.0
    assert (base == 7.0).all()


def test_out_of_several_outputs(ops: tc.Library) -> None:
    x, out = torch.randn(3, 8), (torch.empty(3), torch.empty(3))
    assert ops.moments(x, out=out) is out
    close(out, (x.mean(1), x.square().mean(1)))


def test_an_inout_output_may_be_updated_in_place(ops: tc.Library) -> None:
    a, b, c = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    want = 0.5 * c + a @ b
    ops.gemm(a, b, 1.0, C=c, out=c)
    close(c, want)


def test_writing_to_out_counts_as_a_change_for_autograd(ops: tc.Library) -> None:
    out = torch.empty(2, 2)
    before = out._version
    ops.matmul(torch.ones(2, 2), torch.ones(2, 2), out=out)
    assert out._version > before


def test_interleaved_memory_is_not_shared_memory(ops: tc.Library) -> None:
    base = torch.randn(4, 8)
    want = base[:, :4] @ base[:, :4]
    close(ops.matmul(base[:, :4], base[:, :4].clone(), out=base[:, 4:]), want)


# --- data-dependent subscripts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [-1, 5, 2**40, -(2**63)])
def test_a_subscript_out_of_bounds_is_named_and_nothing_changes(ops: tc.Library, word: int) -> None:
    table, words = torch.randn(5, 3), torch.tensor([0, word, 4])
    out = torch.full((3, 3), 7.0)
    with pytest.raises(tc.RangeError, match="a subscript of 'table' is out of bounds in dimension 0") as error:
        ops.lookup(table, words, out=out)
    assert error.value.found == str(word)
    assert (out == 7.0).all()
    close(ops.lookup(table, torch.tensor([0, 4, 4])), table[[0, 4, 4]])


# --- what does not change the values ----------------------------------------------------------------------------


def test_the_strides_of_dimensions_of_one_element_make_no_new_kernel(ops: tc.Library) -> None:
    op = tc.define(SOURCE).matmul
    b = torch.randn(4, 5)
    for a in (torch.randn(1, 4), torch.randn(3, 4)[:1], torch.randn(4, 1).t(), torch.randn(2, 3, 4)[0, 1:2]):
        close(op(a, b), a @ b)
    assert len(op._kernels.routes) == 1


def test_interpret_gives_the_same(ops: tc.Library) -> None:
    a, b, c = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    op = tc.define(SOURCE).gemm
    with knobs.override_knobs(interpret=True):
        result = op(a, b, 2.0, C=c)
    assert len(op._kernels.routes) == 0
    close(result, ops.gemm(a, b, 2.0, C=c))
    close(result, ops.gemm.reference(a, b, 2.0, C=c))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_kernels_and_in_the_reference(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    op = tc.define(f"def f({name}(M,K) A, {name}(K,N) B) -> (C) {{ C(m,n) +=! A(m,k) * B(k,n) }}").f
    a, b = torch.randn(5, 40).to(dtype), torch.randn(40, 6).to(dtype)
    want = (a.float() @ b.float()).to(dtype)
    for result in (op(a, b), op.reference(a, b)):
        assert result.dtype is dtype
        torch.testing.assert_close(result, want, rtol=2e-2, atol=2e-2)


def test_modes_of_torch_do_not_lead_outputs_elsewhere(ops: tc.Library) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with torch.inference_mode():
        close(ops.matmul(a, b), a @ b)
    torch.set_default_device("meta")
    try:
        result = ops.matmul(a, b)
    finally:
        torch.set_default_device(None)
    close(result, a @ b)
    torch.set_default_dtype(torch.float64)
    try:
        result = ops.matmul(a, b)
    finally:
        torch.set_default_dtype(torch.float32)
    close(result, a @ b)


# --- infer, compile, inspection ---------------------------------------------------------------------------------


def test_infer(ops: tc.Library) -> None:
    assert ops.matmul.infer((4, 8), (8, 6)) == (4, 6)
    assert ops.matmul.infer(torch.ones(4, 8), np.ones((8, 6))) == (4, 6)
    assert ops.moments.infer([5, 3]) == ((5,), (5,))
    assert ops.pool.infer((20,), 3, 2) == (9,)
    assert ops.gemm.infer((4, 8), (8, 6), 1.0, C=(4, 6)) == (4, 6)
    assert ops.total.infer((0,)) == ()


@pytest.mark.parametrize("kind", ["tc", "schedule", "loops", "c", "llvm", "asm"])
def test_sources(ops: tc.Library, kind: str) -> None:
    kernel = ops.matmul.compile(torch.ones(4, 8), torch.ones(8, 6))
    text = kernel.source(kind)
    assert text.strip()
    part = {"tc": "C(m,n) +=!", "c": "#include", "llvm": "define ", "asm": "kernel_0:", "loops": "for", "schedule": "C"}
    assert part[kind] in text


def test_a_kernel_tells_its_cost_and_runs(ops: tc.Library) -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    kernel = ops.matmul.compile(a, b, options=tc.CpuOptions(fusion="min"))
    assert 0 < kernel.compile_seconds < 60
    assert kernel.resources["kernels"] >= 1
    close(kernel(a, b), a @ b)
    assert "matmul" in repr(kernel)


def test_options_make_kernels_of_their_own() -> None:
    op = tc.define(SOURCE).matmul
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    op.compile(a, b)
    op.compile(a, b, options=tc.CpuOptions(use_microkernels=False))
    op.compile(a, b)
    assert len(op._kernels.routes) == 2


def test_show_is_text_and_picture(ops: tc.Library) -> None:
    picture = ops.matmul.show(torch.ones(4, 8), torch.ones(8, 6))
    assert str(picture) == ops.matmul.compile(torch.ones(4, 8), torch.ones(8, 6)).source("schedule")
    assert picture._repr_svg_().startswith("<svg")
    assert str(ops.matmul.show()) == str(picture)
