"""`torch.compile(backend="tensor_comprehensions")` computes what eager computes, in training and in inference."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tensor_comprehensions.graphs import backend as graphs
from tensor_comprehensions.graphs import choice
from tests.graphs.models import MODELS

KERNELS = {"mlp": 0.9, "transformer": 0.5, "residual": 0.5, "gated": 0.9, "lstm": 0.5, "embedding": 0.5}
"""The least share of the forward work that kernels take; attention and gradients of convolutions stay with torch."""


@pytest.fixture(autouse=True)
def _kernels_always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Which of the two sides is faster depends on the machine; here it is always the kernel."""
    monkeypatch.setattr(choice, "faster", lambda ours, theirs: True)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module) -> nn.Module:
    found: nn.Module = torch.compile(model, backend="tensor_comprehensions")
    return found


@pytest.mark.parametrize("name", MODELS)
def test_models_agree_with_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    rewritten = graphs._rewritten
    monkeypatch.setattr(
        graphs, "_rewritten", lambda m, taken: shares.append(graphs.share(m.graph, taken)) or rewritten(m, taken)
    )
    make, data = MODELS[name]
    model, x = make(), data()
    other = copy.deepcopy(model)
    fast = compiled(other)
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for _ in range(2)]
    expected, found = model(inputs[0]), fast(inputs[1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(expected)
    expected.backward(direction)
    found.backward(direction)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-4)
    if x.is_floating_point():
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(other.eval())(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    assert shares[0] >= KERNELS[name]


def test_sizes_that_change_are_left_to_torch() -> None:
    function = torch.compile(lambda x: (x * 2).exp().sum(1), backend="tensor_comprehensions", dynamic=True)
    for n in (3, 5, 7):
        x = torch.randn(n, 4)
        torch.testing.assert_close(function(x), (x * 2).exp().sum(1))


def test_layers_that_are_alike_share_an_operator() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(3)))
    before = len(graphs._operators)
    with torch.no_grad():
        parts = [compiled(layer) for layer in model]
        x = torch.randn(4, 8)
        for part in parts:
            x = part(x)
    assert len(graphs._operators) == before + 1


def test_the_log_tells_what_was_taken_and_what_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "tensor_comprehensions.graph"):
        torch.compile(lambda x: torch.sort((x * 2).exp())[0] + 1, backend="tensor_comprehensions")(torch.randn(4))
    said = caplog.text
    assert "aten.sort.default stays with torch: not in the table" in said
    assert "aten.add.Tensor stays with torch: alone" in said
    assert "t0(i0) = exp((x0(i0) * 2.0)) where i0 in 0:4" in said
    assert "1 kernels take 2 operations, 67 % of the work" in said


def test_nothing_outside_of_a_region_comes_between_its_nodes() -> None:
    def function(x: Tensor) -> Tensor:
        a = (x * 2).exp()
        b = torch.sort(a)[0]  # torch's: it needs a, and what follows needs both
        c = a + b * 2
        return c.cumsum(0) + a.sum() + c.exp()

    x = torch.randn(6)
    torch.testing.assert_close(torch.compile(function, backend="tensor_comprehensions")(x), function(x))


def test_outputs_that_are_inputs_or_views() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2).exp()
        return x, y.t(), y.reshape(-1), y, y[1:]

    x = torch.randn(3, 4)
    for ours, theirs in zip(torch.compile(function, backend="tensor_comprehensions")(x), function(x), strict=True):
        torch.testing.assert_close(ours, theirs)
