"""Programs at the edges of what a graph may hold give what eager gives, and raise nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_comprehensions.dynamo_backend import kernel_or_eager

pytestmark = pytest.mark.usefixtures("small_regions")

A = torch.randn(4, 6)
WHOLE = torch.arange(6)
NUMBER = torch.tensor(1.5)
MEAN = [0.1, -0.2, 0.3, 0.5, 0.25, 1.5]
WITH_INF = torch.full((5,), 1e10)


def chain(x: Tensor) -> Tensor:
    for _ in range(500):
        x = x.cumsum(0)
    return x * 2


def softmax_of_triangles(x: Tensor) -> Tensor:
    v = torch.triu(torch.where(x < x, x, x), 1)
    return torch.softmax(torch.cat([v, v * 2], -1), -1)


def all_signs(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y * 2 + 1, lambda y: y - 1, (x,))


def counted(x: Tensor) -> Tensor:
    """Both sides of a loop whose end only the data say."""
    return torch._higher_order_ops.while_loop(lambda y: y.sum() < 100, lambda y: (y * 2 + 1,), (x.abs() + 1,))[0]


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "concatenated triangles": (softmax_of_triangles, (torch.randn(5, 3, 4),)),
    "a constant": (lambda x: x * 2 + torch.tensor(3.0), (A,)),
    "constants of a row": (lambda x: (x - torch.tensor(MEAN)) / torch.tensor(MEAN), (A,)),
    "an index of constants": (lambda x: x[:, [0, 2]] * 2 + 1, (A,)),
    "a tensor from a tensor": (lambda x: x * x.new_tensor([1.0, 2, 3, 4, 5, 6]) + 1, (A,)),
    "quantiles": (lambda x: torch.quantile(x * 2, 0.3, dim=1), (A,)),
    "a branch": (all_signs, (A,)),
    "a loop": (counted, (A,)),
    "signals": (lambda x: x * torch.signal.windows.hann(6) + 1, (A,)),
    "dropout twice": (lambda x: F.dropout(x, 0.5) - F.dropout(x, 0.5) * 2, (torch.randn(50, 60),)),
    "numbers drawn out of order": (
        lambda x: (lambda a, b: torch.rand_like(x) * (b * 2).sum() - a)(torch.rand_like(x), torch.randn_like(x)), (A,)
    ),
    "lookups in a number": (
        lambda x: (x * 2).index_select(0, torch.tensor(0)) + x.index_add(0, torch.tensor(0), x * 3), (NUMBER,)
    ),
    "a sum by the index of one element": (
        lambda x: x[0].scatter_add(0, torch.tensor([4]), (x * 3)[0, :1]) * 2 + x[1], (A,)
    ),
    "biases that do not count": (
        lambda b, x, y: (
            torch.addmm(b, x, y, beta=0) + 1, torch.addmm(b, x, y, beta=0, alpha=2).exp(),
            torch.baddbmm(b.expand(2, 4, 4), x.expand(2, 4, 6), y.expand(2, 6, 4), beta=0) * 2,
            torch.addmv(b[0], x, y[:, 0], beta=0) * 2, torch.addr(b, x[:, 0], y[0], beta=0) + 1,
            torch.addbmm(b, x.expand(2, 4, 6), y.expand(2, 6, 4), beta=0) + 1,
        ),
        (torch.full((4, 4), torch.nan), A, torch.randn(6, 4)),
    ),
    "products that do not count": (
        lambda b, x, y: (
            torch.addmm(b, x, y, alpha=0) + 1, torch.addmv(b[0], x, y[:, 0], alpha=0) * 2,
            torch.baddbmm(b.expand(2, 4, 4), x.expand(2, 4, 6), y.expand(2, 6, 4), alpha=0) * 2,
            torch.addbmm(b, x.expand(2, 4, 6), y.expand(2, 6, 4), alpha=0) + 1,
        ),
        (torch.randn(4, 4), torch.full((4, 6), torch.nan), torch.randn(6, 4)),
    ),
    "softmax of a number": (lambda x: torch.softmax(x, 0) * 2, (NUMBER,)),
    "sum of a number": (lambda x: (x * 2).sum(0) + x + x.amax(-1) + x.mean(), (NUMBER,)),
    "variance of a number": (lambda x: torch.var(x * 2, correction=0) + x, (NUMBER,)),
    "variance of too few": (lambda x: torch.var(x, 0, correction=5) * 2, (torch.randn(3, 4),)),
    "sum of repeated rows": (lambda x: x.sum(0, keepdim=True).expand(9, 9).sum(0) * 2, (torch.randn(9, 9),)),
    "sum of zeros": (lambda x: x * 2 + torch.zeros(9, 9).sum(0) + torch.full((9, 3), 2.0).sum(1), (torch.randn(9),)),
    "product of repeated rows": (lambda x: (x[:1] * 2).expand(5, 6) @ (x[:, :1] * 3).expand(4, 5)[:1].expand(6, 5),
                                 (A,)),
    "greatest of repeated rows": (lambda x: (x[0] * 2).expand(9, 6).amax(0) + (x[0] * 3).expand(9, 6).mean((0, 1)),
                                  (A,)),
    "comparison of truth": (lambda b, x: (b == 2).float() * x + (b > 0.5).float(), (A[0] > 0, A)),
    "comparison with a double": (lambda d, x: (d > x).float() + 1,
                                 (torch.tensor(0.1, dtype=torch.float64), torch.full((4,), 0.1))),
    "comparison of 16 bits": (lambda x: (x == 0.1).float() + (x < 0.3), (torch.tensor([0.1, 0.3]).bfloat16(),)),
    "a large factor": (lambda x: x * 3000000000 + 1, (WHOLE,)),
    "the least of 64 bits": (lambda x: x.masked_fill(x > 0, torch.iinfo(torch.int64).min) + 1, (WHOLE,)),
    "the greatest of 64 bits": (lambda x: x.masked_fill(x > 3, torch.iinfo(torch.int64).max) - 1, (WHOLE,)),
    "the least of 32 bits": (lambda x: x.masked_fill(x > 0, -(2**31)) + 1, (WHOLE.int(),)),
    "large numbers": (lambda x: (torch.full((4, 6), 2**40) + x) * 2, (WHOLE,)),
    "a range of large numbers": (lambda x: (torch.arange(2**33, 2**33 + 6) + x) * 2, (WHOLE,)),
    "digits of a double": (lambda x: x * 0.1 + 1e-300 * x + 123456789.123456789, (A.double(),)),
    "160 parts": (lambda x: torch.cat([x, x + 1] * 80) * 2, (A,)),
    "30 parts": (lambda x: torch.stack([x, x + 1, x] * 10) + 1, (A,)),
    "a chain of 500": (chain, (torch.rand(1, 3),)),
    "nested deeply": (lambda x: deep(x), (A,)),
    "casts to 8 bits": (lambda x: (x * 100).to(torch.int8) + 1, (torch.randn(20) * 5,)),
    "casts to 16 bits": (lambda x: (x * 1e5).to(torch.uint16).int() + (x * 1e5).to(torch.int16), (torch.randn(20),)),
}  # fmt: skip


def deep(x: Tensor) -> Tensor:
    for k in range(40):
        x = torch.where(x > k, x * 0.5 - 1, x + k)
    return x


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_agree_with_eager(name: str) -> None:
    function, inputs = PROGRAMS[name]
    fast = torch.compile(function, backend="tensor_comprehensions")
    torch.manual_seed(1)
    expected = function(*inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(fast(*inputs), expected, rtol=1e-4, atol=1e-5, equal_nan=True)


STRIDED: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "a new first dimension": (lambda x: x.unsqueeze(0) * 2 + 1, A),
    "a new dimension of columns": (lambda x: x.t().unsqueeze(1).exp() * 2, A),
    "one row": (lambda x: x.split([1, 3])[0] * 2 + 1, A),
    "one image, channels last": (
        lambda x: x.relu() * 2, torch.randn(1, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    ),
    "one image of a product": (lambda x: (x @ x.t()).exp().unsqueeze(0) * 2, A),
    "sums that keep their dimension": (lambda x: (x * 2).sum(0, keepdim=True) + 1, A),
}  # fmt: skip


@pytest.mark.parametrize("name", STRIDED)
def test_strides_of_single_elements_are_those_of_eager(name: str) -> None:
    function, x = STRIDED[name]
    found, expected = torch.compile(function, backend="tensor_comprehensions")(x), function(x)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


def test_dropout_in_training_draws_what_eager_draws() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.6))
    fast = torch.compile(model, backend="tensor_comprehensions")
    grads = []
    for call in (model, fast):
        x = A.clone().requires_grad_()
        torch.manual_seed(2)
        call(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_the_gradient_of_a_part_of_repeated_columns() -> None:
    """It concatenates zeros and the gradient in both directions."""

    def function(x: Tensor) -> Tensor:
        return torch.exp((x / 2.5).repeat_interleave(2, 1).clamp(max=3)).split([1, 11], 1)[1].chunk(2, 0)[0]

    grads = []
    for call in (function, torch.compile(function, backend="tensor_comprehensions")):
        x = A.clone().requires_grad_()
        grads.append(torch.autograd.grad(call(x).sin().sum(), x))
    torch.testing.assert_close(grads[1], grads[0])


def test_the_gradient_of_a_repeated_mean() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        v = (x + y).mean()
        return torch.addcdiv(v, x, v.abs() + 1, value=-0.5)

    grads = []
    for call in (function, torch.compile(function, backend="tensor_comprehensions")):
        x, y = A.clone().requires_grad_(), (A + 1).requires_grad_()
        grads.append(torch.autograd.grad(call(x, y).sum(), (x, y)))
    torch.testing.assert_close(grads[1], grads[0])


def test_tensors_that_are_not_what_torch_announced() -> None:
    """torch announces a float32 gradient for the mean of 16 bits, and gives one of 16 bits."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(y, F.silu(x.mean()).expand(4, 6).squeeze()[0, 0])

    grads = []
    for call in (function, torch.compile(function, backend="tensor_comprehensions")):
        x, y = A.bfloat16().requires_grad_(), NUMBER.clone().requires_grad_()
        grads.append(torch.autograd.grad(call(x, y), (x, y)))
    torch.testing.assert_close(grads[1], grads[0])


def test_types_that_torch_did_not_announce_for_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch announces a float64 difference of float32 and float64, and computes one of float32 in the forward pass."""
    wins = itertools.chain([False], itertools.repeat(True))
    monkeypatch.setattr(kernel_or_eager, "kernel_is_faster", lambda ours, theirs: next(wins))

    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(1.5 - y, x)

    fast = torch.compile(function, backend="tensor_comprehensions", dynamic=True)
    for rows in (2, 4, 3):
        x, y = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True), torch.randn(rows, 6, requires_grad=True)
        found, expected = (torch.autograd.grad(call(x, y), (x, y)) for call in (fast, function))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("captures", [False, True])
def test_checks_stay(captures: bool) -> None:
    def asserted(x: Tensor) -> Tensor:
        torch._assert_async((x > 100).all(), "too small")
        return (x * 2).relu()

    def checked(x: Tensor) -> Tensor:
        torch._check((x > 100).sum().item() > 3)
        return (x * 2).relu()

    with torch._dynamo.config.patch(capture_scalar_outputs=captures):
        for function in (asserted, checked):
            fast = torch.compile(function, backend="tensor_comprehensions")
            torch.testing.assert_close(fast(A.abs() + 101), (A.abs() + 101) * 2)
            with pytest.raises(RuntimeError):
                fast(A)


def test_effects_keep_their_order() -> None:
    """The first check that fails speaks, whatever is computed from what."""

    def function(x: Tensor) -> Tensor:
        torch._assert_async((x < 1).all(), "first")
        y = (x * 2).exp()
        torch._assert_async((y < 1).all(), "second")
        return y + x

    with pytest.raises(RuntimeError, match="first"):
        torch.compile(function, backend="tensor_comprehensions")(A.abs() + 2)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_weights_that_change_unnoticed(value: float) -> None:
    """What is written through `data` raises no version."""
    layer = nn.Conv2d(2, 3, 3, padding=1)
    fast = torch.compile(layer, backend="tensor_comprehensions")
    x = torch.randn(1, 2, 5, 4)
    torch.testing.assert_close(fast(x), layer(x), rtol=1e-4, atol=1e-5)
    layer.weight.data[0, 0, 0, 0] = value
    torch.testing.assert_close(fast(x), layer(x), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("hidden", [False, True])
def test_small_outputs_are_looked_at_instead_of_large_weights(
    monkeypatch: pytest.MonkeyPatch, value: float, hidden: bool
) -> None:
    """Where they would show what is wrong: a comparison makes a number of a NaN."""
    convolution, norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16).eval()

    def function(x: Tensor) -> Tensor:
        y = norm(convolution(x)).relu()
        return (y > 0.1).float() + 1 if hidden else y

    seen: list[int] = []
    is_finite = kernel_or_eager.is_finite
    monkeypatch.setattr(kernel_or_eager, "is_finite", lambda x: seen.append(x.numel()) or is_finite(x))
    fast = torch.compile(function, backend="tensor_comprehensions")
    x = torch.randn(1, 16, 3, 3)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), function(x), rtol=1e-4, atol=1e-5)
        assert seen == [16 * 16 * 9 if hidden else 16 * 9]
        convolution.weight[0, 0, 0, 0] = value
        torch.testing.assert_close(fast(x), function(x), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_autocast_ends_where_torch_ends_it() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4), nn.Softmax(-1))
    fast = torch.compile(model, backend="tensor_comprehensions")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found, expected = fast(A), model(A)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
