"""Graphs with symbolic sizes: regions that are one kernel for all sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import tensor_comprehensions as tc
from tensor_comprehensions.dynamo_backend import kernel_or_eager
from tensor_comprehensions.dynamo_backend.kernel_or_eager import MOST_FIXED
from tensor_comprehensions.dynamo_backend.symbolic_regions import PROBES, _merge_defs

pytestmark = pytest.mark.usefixtures("kernels_always")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 5))


def mean_loss(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x).softmax(1) ** 2).mean()


def count_kernels(work: Callable[[], object]) -> tuple[int, int]:
    """How many kernels a call compiles, and how many of them are for all sizes."""
    before = tc.statistics()
    work()
    after = tc.statistics()
    return after.compiled - before.compiled, after.ranged - before.ranged


def train(fast: Callable[..., Tensor], net: nn.Module, inputs: Sequence[Tensor], tolerance: float = 1e-4) -> None:
    """Compare values and gradients of a compiled loss with those of eager torch."""
    for x in inputs:
        other = copy.deepcopy(net)
        found, right = fast(net, x), mean_loss(other, x)
        torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)
        found.backward()
        right.backward()
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance)
            p.grad = None
        for b, c in zip(net.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(b, c, rtol=tolerance, atol=tolerance)


def test_thirty_batches_train_with_two_kernels() -> None:
    net, fast = mlp(), torch.compile(mean_loss, backend="tensor_comprehensions", dynamic=True)
    inputs = [torch.randn(n, 12) for n in range(2, 32)]
    assert count_kernels(lambda: train(fast, net, inputs)) == (2, 2)


def gate_halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return a * torch.sigmoid(b)


def test_halves_of_any_size_need_one_kernel() -> None:
    """The graph is for even sizes only, so the numbers that stand for sizes have to be even."""
    fast = torch.compile(gate_halves, backend="tensor_comprehensions", dynamic=True)

    def run() -> None:
        for shape in ((47, 76), (16, 66), (3, 14), (64, 128), (8, 512)):
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x), gate_halves(x))

    assert count_kernels(run) == (1, 1)


@pytest.mark.parametrize("shape", [(47, 76), (2, 38)])
def test_gradients_of_halves(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, requires_grad=True)
    fast = torch.compile(gate_halves, backend="tensor_comprehensions", dynamic=True)
    (found,) = torch.autograd.grad(fast(x).sum(), x)
    (expected,) = torch.autograd.grad(gate_halves(x).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("small_regions")
def test_a_gradient_that_sums_over_any_size_and_views_what_it_sums() -> None:
    """The block for few terms would read memory directly that the other blocks read through windows."""

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        largest = x.max(0)[0]
        return largest * y, largest.amin(-1, keepdim=True)

    fast = torch.compile(program, backend="tensor_comprehensions")
    for n in (5, 7, 6):
        inputs = torch.randn(n, 3, 4, requires_grad=True), torch.randn(n, 3, 4, dtype=torch.float64, requires_grad=True)
        found, expected = (torch.autograd.grad([x.sum() for x in call(*inputs)], inputs) for call in (fast, program))
        torch.testing.assert_close(found, expected)


def test_sizes_that_change_become_symbols_by_themselves() -> None:
    net, fast = mlp().requires_grad_(False), torch.compile(mean_loss, backend="tensor_comprehensions")

    def work() -> None:
        for n in (5, 9, *range(2, 30)):
            x = torch.randn(n, 12)
            torch.testing.assert_close(fast(net, x), mean_loss(net, x))

    assert count_kernels(work) == (2, 1)  # of which one is for the first size


def test_marks_of_torch_make_one_kernel() -> None:
    fast = torch.compile(lambda x: x.softmax(1) * 2, backend="tensor_comprehensions")

    def work() -> None:
        for n in range(2, 32):
            x = torch.randn(n, 7)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(fast(x), x.softmax(1) * 2)

    assert count_kernels(work) == (1, 1)


def test_convolutions_and_batch_norms_train_by_batch() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5))
    fast = torch.compile(mean_loss, backend="tensor_comprehensions")
    inputs = [torch.randn(n, 3, 8, 8) for n in (2, 3, 7, 13)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    compiled, ranged = count_kernels(lambda: train(fast, net, inputs, 1e-3))
    assert compiled == ranged > 0


def test_two_symbols_count_rows_together() -> None:
    fast = torch.compile(lambda x, g: F.gelu(x) * g, backend="tensor_comprehensions", dynamic=True)
    g = torch.randn(6)

    def work() -> None:
        for b, t in ((2, 3), (5, 7), (11, 2), (3, 30)):
            x = torch.randn(b, t, 6)
            torch.testing.assert_close(fast(x, g), F.gelu(x) * g)

    assert count_kernels(work) == (1, 1)


def test_two_sizes_that_change_have_one_kernel() -> None:
    fast = torch.compile(lambda x, g: F.gelu(x) * g, backend="tensor_comprehensions", dynamic=True)

    def work() -> None:
        for n in range(2, 20):
            x, g = torch.randn(n, n + 3), torch.randn(n + 3)
            torch.testing.assert_close(fast(x, g), F.gelu(x) * g)

    assert count_kernels(work) == (1, 1)


def test_rows_of_any_length_have_one_kernel() -> None:
    fast = torch.compile(lambda x: (x + 1).softmax(-1), backend="tensor_comprehensions", dynamic=True)

    def work() -> None:
        for n in range(2, 20):
            x = torch.randn(n, 3 * n + 1)
            torch.testing.assert_close(fast(x), (x + 1).softmax(-1))

    assert count_kernels(work) == (1, 1)


def scores(x: Tensor, y: Tensor) -> Tensor:
    return ((x @ y.transpose(1, 2)) * 0.5).softmax(-1)


@pytest.mark.parametrize(("wins", "kernels"), [(True, (2, 1)), (False, (1, 0))])
def test_a_product_that_loses_at_the_first_sizes_compiles_no_kernel_for_all(
    wins: bool, kernels: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel for exactly these sizes is compiled first: it is as fast, and takes a part of the time."""
    monkeypatch.setattr(kernel_or_eager, "kernel_is_faster", lambda ours, theirs: wins)
    fast = torch.compile(scores, backend="tensor_comprehensions")

    def work() -> None:
        for n in (20, 33, 7):
            x, y = torch.randn(3, n, 16), torch.randn(3, n + 9, 16)
            torch._dynamo.mark_dynamic(x, 1)
            torch._dynamo.mark_dynamic(y, 1)
            torch.testing.assert_close(fast(x, y), scores(x, y))

    assert count_kernels(work) == kernels


def test_permuted_inputs_are_taken_as_they_lie() -> None:
    fast = torch.compile(lambda x, y: x.t() @ y, backend="tensor_comprehensions", dynamic=True)

    def work() -> None:
        for n in range(2, 20):
            x, y = torch.randn(n, 300), torch.randn(n, 200)
            torch._dynamo.mark_static(x, 1)
            torch._dynamo.mark_static(y, 1)
            torch.testing.assert_close(fast(x, y), x.t() @ y, rtol=1e-4, atol=1e-4)

    assert count_kernels(work) == (1, 1)


def test_rows_that_meet_columns_have_few_kernels() -> None:
    fast = torch.compile(lambda x: (x * 2) @ x.t() + 1, backend="tensor_comprehensions", dynamic=True)

    def work() -> None:
        for n in range(2, 20):
            x = torch.randn(n, 7)
            torch.testing.assert_close(fast(x), (x * 2) @ x.t() + 1, rtol=1e-4, atol=1e-4)

    assert count_kernels(work)[1] == MOST_FIXED


def merge(text: str) -> str:
    return _merge_defs(*(text.format(*(x for p in probe for x in (p, 1.0 / (4 * p)))) for probe in PROBES))[0]


def test_defs_that_differ_in_sizes_alone_are_merged() -> None:
    assert merge("x({0}, 3) 0:{0}") == "x(N0, 3) 0:N0"
    assert merge("x({0}) y({2}) 0:{2}") == "x(N0) y(N1) 0:N1"
    assert merge("x({0}) = s * {1!r}") == "x(N0) = s * (1.0 / (N0 * 4.0))"
    assert merge("x({0}) = s / {0}.0") == "x(N0) = s / N0"
    assert merge("x({0}) = s + 1009.0 * 1e-05") == "x(N0) = s + 1009.0 * 1e-05"


def test_defs_that_differ_in_more_are_not() -> None:
    first, second = (f"x({p[0]}) = y(i + {p[0] + 1})" for p in PROBES)
    assert _merge_defs(first, second)[0] == ""
    assert _merge_defs("x(3) = 2", "x(3) = 2 + 1")[0] == ""
    assert _merge_defs("x(3) = 0.5", "x(3) = 0.25")[0] == ""


def positive_elements(x: Tensor) -> Sequence[Tensor]:
    y = x[x > 0] * 2
    return y.sum() + y.exp().mean(), y.relu() + 1, (x * 3).tanh() * 2


def repeated_rows(x: Tensor) -> Sequence[Tensor]:
    return (torch.repeat_interleave(x, torch.arange(x.shape[0]) % 3, dim=0).tanh() * 2,)


def rows_by_a_sum(x: Tensor) -> Sequence[Tensor]:
    n = int(x.abs().sum().int().item())
    check: Callable[[bool], None] = torch._check
    check(n >= 2)
    check(n < 100)
    return ((torch.zeros(n, x.shape[0]) + x.sum(1)).tanh().sum(0) * 2,)


def dropout_with_its_state(x: Tensor) -> Sequence[Tensor]:
    dropped = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(F.gelu(x), 0.3), x, use_reentrant=False)
    return (dropped * 2 + 1,)


@pytest.mark.usefixtures("small_regions")
@pytest.mark.parametrize(
    "function", [positive_elements, repeated_rows, rows_by_a_sum, dropout_with_its_state], ids=lambda f: f.__name__
)
def test_sizes_that_operations_find_stay_with_torch(function: Callable[[Tensor], Sequence[Tensor]]) -> None:
    """They are not among the symbols of the inputs, and a number read from a kernel's result is its result."""
    fast = torch.compile(function, backend="tensor_comprehensions", dynamic=True)
    for rows in (5, 7, 6):
        x, other = (torch.linspace(-1, 1, rows * 4).view(rows, 4).requires_grad_() for _ in range(2))
        results = []
        for f, given in ((function, x), (fast, other)):
            torch.manual_seed(rows)
            with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
                results.append(f(given))
            torch.stack([y.sum() for y in results[-1]]).sum().backward()
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(other.grad, x.grad)


def test_taps_that_may_be_as_large_as_images_stay_with_torch() -> None:
    """The numbers that stand for symbols would make a result of negative sizes."""

    def convolve(x: Tensor, taps: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, taps)) * 2

    fast, taps = torch.compile(convolve, backend="tensor_comprehensions", dynamic=True), torch.randn(4, 3, 3, 3)
    for n in (7, 9):
        x = torch.randn(2, 3, n, n + 1)
        torch.testing.assert_close(fast(x, taps), convolve(x, taps), rtol=1e-4, atol=1e-4)
