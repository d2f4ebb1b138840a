"""Operations that torch is better at stay as captured, whatever their sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tensor_comprehensions.dynamo_backend import backend, dynamic_shapes
from tensor_comprehensions.dynamo_backend.dynamic_shapes import CompileBudget
from tensor_comprehensions.dynamo_backend.kernel_or_eager import KernelOrEager

aten = torch.ops.aten
IMAGE = torch.randn(2, 3, 8, 8)
GRID = torch.rand(2, 5, 5, 2) * 2 - 1
WHOLE: dict[str, tuple[Callable[..., Any], Any]] = {
    "reflect": (lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect"), aten.reflection_pad2d.default),
    "replicate": (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), aten.replication_pad2d.default),
    "fold": (lambda x: F.fold(x.reshape(2, 12, 16), (5, 5), 2), aten.col2im.default),
    "unfold": (lambda x: F.unfold(x, 3), aten.im2col.default),
    "roll": (lambda x: x.roll(2, -1), aten.roll.default),
    "cumsum": (lambda x: x.cumsum(-1), aten.cumsum.default),
    "index_add": (lambda x: x.index_add(0, torch.tensor([0, 1]), x), aten.index_add.default),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), aten.upsample_bilinear2d.vec),
    "nearest": (lambda x: F.interpolate(x, size=(5, 12)), aten.upsample_nearest2d.vec),
    "grid_sample": (lambda x: F.grid_sample(x, GRID, align_corners=False), aten.grid_sampler_2d.default),
}


@pytest.fixture
def targets(kernels_always: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called in the graphs that are compiled, and in what stands against their kernels."""
    seen: list[Any] = []

    def record(module: fx.GraphModule) -> None:
        seen.extend(n.target for n in module.graph.nodes if n.op == "call_function")
        for child in module.children():
            if isinstance(child, KernelOrEager):
                record(child.graph)

    monkeypatch.setattr(backend, "observers", [lambda module, work: record(module)])
    return seen


@pytest.mark.parametrize("name", WHOLE)
def test_lookups_by_index_stay_whole(name: str, targets: list[Any]) -> None:
    function, target = WHOLE[name]
    fast = torch.compile(function, backend="tensor_comprehensions")
    inputs = [IMAGE.clone().requires_grad_() for _ in range(2)]
    found, expected = fast(inputs[0]), function(inputs[1])
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    names = {str(t).rpartition(".")[0] for t in targets}
    assert str(target).rpartition(".")[0] in names
    assert not names & {"aten.index", "aten._unsafe_index", "aten.index_put"}
    assert not any(str(t).startswith("prims.") for t in targets)


def test_the_rival_of_a_kernel_is_the_graph_as_captured(targets: list[Any]) -> None:
    def function(x: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x, (8,))).softmax(-1)

    torch.compile(function, backend="tensor_comprehensions")(IMAGE)
    assert {aten.native_layer_norm.default, aten.gelu.default, aten._softmax.default} <= set(targets)
    assert not {aten.rsqrt.default, aten.erf.default, aten.exp.default} & set(targets)


def test_upsampling_of_symbolic_sizes() -> None:
    function = torch.compile(
        lambda x: F.interpolate(x, scale_factor=2.0) * 2, backend="tensor_comprehensions", dynamic=True
    )
    for n in (4, 6, 6, 5):
        x = torch.randn(1, 2, n, n)
        torch.testing.assert_close(function(x), F.interpolate(x, scale_factor=2.0) * 2)


# --- sizes that change -------------------------------------------------------------------------------------------


def fused_sizes(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> list[int]:
    """For which of these sizes, one after another, kernels are made."""
    torch._dynamo.reset()
    found: list[int] = []
    fuse = backend.fuse_regions

    def record(module: fx.GraphModule, *bounds: Any) -> fx.GraphModule:
        values = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
        found.append(next(x.shape[0] for x in values if isinstance(x, Tensor)))
        return fuse(module, *bounds)

    monkeypatch.setattr(backend, "fuse_regions", record)

    def scores(x: Tensor) -> Tensor:  # which is another def for other sizes: rows meet columns
        return (x * 2).exp() @ x.t() + 1

    function = torch.compile(scores, backend="tensor_comprehensions", dynamic=True)
    for n in sizes:
        x = torch.randn(n, 3)
        torch.testing.assert_close(function(x), scores(x))
    return found


@pytest.mark.usefixtures("kernels_always")
def test_new_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused_sizes(monkeypatch, [*range(2, 40), 7, 7, 9]) == [7, 9]


@pytest.mark.usefixtures("kernels_always")
def test_the_more_sizes_the_more_often_one_has_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused_sizes(monkeypatch, [n for n in range(2, 12) for _ in range(2)]) == [2, 3, 4, 5]
    assert fused_sizes(monkeypatch, [n for n in range(2, 8) for _ in range(3)]) == list(range(2, 8))


@pytest.mark.usefixtures("kernels_always")
def test_sizes_wait_while_the_time_for_compiling_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_shapes, "budget", CompileBudget(0.0, 60.0))
    assert fused_sizes(monkeypatch, [3, 3, 3]) == []


def test_time_for_compiling_comes_back() -> None:
    now = [0.0]
    budget = CompileBudget(10.0, 60.0, lambda: now[0])

    def work() -> str:
        now[0] += 12
        return "done"

    assert budget.has_time()
    assert budget.spend(work) == "done"
    assert not budget.has_time()
    now[0] = 12 + 59.0
    assert not budget.has_time()
    now[0] = 12 + 61.0
    assert budget.has_time()
