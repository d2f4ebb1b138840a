"""Gradients of maxima find the elements that are equal to the maximum, in whatever kernel they were computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_comprehensions.dynamo_backend import kernel_or_eager

pytestmark = pytest.mark.usefixtures("small_regions")
SHAPES = {True: ((2, 7, 10), (5, 31, 10)), False: ((4, 15, 10),)}
"""Shapes of the input, for a graph of all sizes or of one."""

WEIGHT = torch.randn(10, 10)
PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "the largest of a row": lambda x: F.gelu(x).amax(1),
    "the least of a row of a product": lambda x: F.softplus(x @ WEIGHT).amin(1),
    "the largest of all": lambda x: (x * x - x * 0.1).amax(),
    "the largest of two dimensions": lambda x: F.silu(x).amax((0, 1)),
    "the infinity norm": lambda x: F.gelu(x).norm(p=float("inf"), dim=1),
    "the largest of a view": lambda x: F.gelu(x).flatten(1).amax(1),
    "the infinity norm of differences": lambda x: torch.cdist(F.gelu(x), F.gelu(x + 1), p=float("inf")),
    "the larger of two": lambda x: torch.maximum(F.softplus(x), F.softplus(x).flip(1)),
    "a mask of the largest": lambda x: torch.where(x.sin() == x.sin().amax(1, keepdim=True), x * 3, x),
}


@pytest.fixture(params=["kernel, torch", "torch, kernel"])
def mixed_winners(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels win every other race, so that forward and backward round differently."""
    wins = itertools.cycle((True, False) if request.param == "kernel, torch" else (False, True))
    monkeypatch.setattr(kernel_or_eager, "kernel_is_faster", lambda ours, theirs: next(wins))


@pytest.mark.sampled
@pytest.mark.usefixtures("mixed_winners")
@pytest.mark.parametrize("dynamic", [False, True], ids=["one size", "every size"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_find_the_maximum(name: str, dynamic: bool) -> None:
    program = PROGRAMS[name]
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="tensor_comprehensions", dynamic=dynamic)
    for shape in SHAPES[dynamic]:
        x = torch.randn(shape, requires_grad=True)
        (found,) = torch.autograd.grad(compiled(x).sum(), x)
        (expected,) = torch.autograd.grad(program(x).sum(), x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_compared_is_computed_again() -> None:
    """A layer saves its input, and not what its gradient computes from it."""
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.relu(torch.tanh(x * 2) + x), backend="tensor_comprehensions")
    x = torch.randn(8, 40, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        compiled(x)
    assert sum(t.numel() for t in saved) <= 2 * x.numel()
