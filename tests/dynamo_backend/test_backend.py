"""`torch.compile(backend="tensor_comprehensions")` computes what eager computes, in training and in inference."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tensor_comprehensions.dynamo_backend import backend as graphs
from tensor_comprehensions.dynamo_backend import kernel_or_eager
from tests.dynamo_backend.models import MODELS

pytestmark = pytest.mark.usefixtures("kernels_always")

KERNELS = {"mlp": 0.9, "transformer": 0.8, "residual": 0.9, "gated": 0.8, "lstm": 0.9, "embedding": 0.5}
"""The least share of the work that kernels take, forward and backward; a small product alone is left to torch."""


def compile_model(model: nn.Module) -> nn.Module:
    found: nn.Module = torch.compile(model, backend="tensor_comprehensions")
    return found


@pytest.mark.parametrize("name", MODELS)
def test_models_agree_with_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    rewritten = graphs._rewritten
    monkeypatch.setattr(
        graphs, "_rewritten", lambda m, taken: shares.append(graphs.flops_share(m.graph, taken)) or rewritten(m, taken)
    )
    make, data = MODELS[name]
    model, x = make(), data()
    other = copy.deepcopy(model)
    fast = compile_model(other)
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
        torch.testing.assert_close(compile_model(other.eval())(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    assert len(shares) >= 3
    assert min(shares) >= KERNELS[name]


def test_sizes_that_change_get_kernels_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs at most for five sizes, forward and backward: for the first size, and for all."""
    graphs_seen: list[object] = []
    kernels: list[int] = []
    compile_, fuse, fuse_all = graphs._compile, graphs.fuse_regions, graphs.fuse_symbolic_regions
    monkeypatch.setattr(graphs, "_compile", lambda m, e: graphs_seen.append(m) or compile_(m, e))
    monkeypatch.setattr(graphs, "fuse_regions", lambda m, *b: _count_kernels(fuse(m, *b), kernels))
    monkeypatch.setattr(
        graphs, "fuse_symbolic_regions", lambda m: (_count_kernels((made := fuse_all(m))[0], kernels), made[1])
    )
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8))
    other = copy.deepcopy(model)
    fast = compile_model(other)
    for n in (4, 3, 5, 7, 9, 9, 5):
        x = torch.randn(n, 6)
        for m, call in ((model, model), (other, fast)):
            m.zero_grad()
            call(x).square().sum().backward()
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-4)
    assert len(graphs_seen) <= 4
    assert len(kernels) == 2 + 2
    assert all(kernels)


def _count_kernels(module: torch.fx.GraphModule, kernels: list[int]) -> torch.fx.GraphModule:
    kernels.append(sum(isinstance(m, kernel_or_eager.KernelOrEager) for m in module.children()))
    return module


def test_symbols_from_the_start() -> None:
    function = torch.compile(lambda x: (x * 2).exp().sum(1), backend="tensor_comprehensions", dynamic=True)
    for n in (3, 5, 3, 0, 0, 1, 1):
        x = torch.randn(n, 4)
        torch.testing.assert_close(function(x), (x * 2).exp().sum(1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite(value: float) -> None:
    """torch leaves the zeros of the padding out, so that nothing at the border becomes NaN."""
    layer = nn.Conv2d(2, 3, 3, padding=1)
    fast = compile_model(layer)
    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    for weight in (None, value, 1.0):
        with torch.no_grad():
            if weight is not None:
                layer.weight[0, 0, 0, 0] = weight
        torch.testing.assert_close(fast(x), layer(x), equal_nan=True, rtol=1e-4, atol=1e-5)
        g = torch.randn(1, 3, 5, 4)
        found, expected = (torch.autograd.grad(f(x), (x, layer.weight), g) for f in (fast, layer))
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_the_parts_of_a_region_that_is_slower_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """First kernels with one product each, then products and the rest apart."""
    monkeypatch.setattr(kernel_or_eager, "kernel_is_faster", lambda ours, theirs: False)
    monkeypatch.setattr(graphs, "is_profitable", lambda region: True)
    bounds: list[graphs.RegionLimits] = []
    fuse = graphs.fuse_regions
    monkeypatch.setattr(graphs, "fuse_regions", lambda m, b=graphs.ANY: bounds.append(b) or fuse(m, b))

    def function(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).relu() @ w).tanh()

    x, w = torch.randn(4, 6), torch.randn(6, 6)
    fast = torch.compile(function, backend="tensor_comprehensions")
    for _ in range(2):
        torch.testing.assert_close(fast(x, w), function(x, w))
    assert bounds == [graphs.ANY, graphs.RegionLimits(1), *[graphs.RegionLimits(1, alone=True)] * 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bits(dtype: torch.dtype) -> None:
    model = MODELS["gated"][0]().to(dtype)
    x = torch.randn(2, 6, 32).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(compile_model(model)(x), model(x), rtol=3e-2, atol=3e-2)


def test_layers_that_are_alike_share_an_operator() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(3)))
    before = len(graphs._operators)
    with torch.no_grad():
        parts = [compile_model(layer) for layer in model]
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

    x = torch.rand(6) - 0.5  # the exponential of an exponential of more would make much of a rounding error
    torch.testing.assert_close(torch.compile(function, backend="tensor_comprehensions")(x), function(x))


def test_outputs_that_are_inputs_or_views() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2).exp()
        return x, y.t(), y.reshape(-1), y, y[1:]

    x = torch.randn(3, 4)
    for ours, theirs in zip(torch.compile(function, backend="tensor_comprehensions")(x), function(x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_hooks_see_the_modules_of_the_program_alone(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of kernels in a graph are not the user's: no hook sees them."""
    monkeypatch.setattr(kernel_or_eager, "kernel_is_faster", lambda ours, theirs: kernels)
    x = torch.randn(5, 6)
    seen: dict[str, list[str]] = {}
    for name in ("aot_eager", "tensor_comprehensions"):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8))
        compile_model, called = torch.compile(model, backend=name), list[str]()
        torch.testing.assert_close(compile_model(x), model(x))
        with register_module_forward_hook(lambda module, *_, to=called: to.append(type(module).__name__)):
            compile_model(x)
        seen[name] = called
        model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        model[1].register_forward_hook(lambda module, inputs, output: output * 2)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend=name)(x), model(x))
    assert set(seen["tensor_comprehensions"]) <= set(seen["aot_eager"])
