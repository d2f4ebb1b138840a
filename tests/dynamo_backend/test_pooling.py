"""Pooling with the places of the maxima, and its gradients, are kernels that compute what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_comprehensions.dynamo_backend import backend

CASES: dict[str, dict[str, Any]] = {
    "side by side": {"kernel_size": 2},
    "side by side, with a rest": {"kernel_size": (3, 2)},
    "with gaps": {"kernel_size": 2, "stride": 3},
    "with gaps and padding": {"kernel_size": 2, "stride": (3, 2), "padding": 1},
    "overlapping": {"kernel_size": 3, "stride": 2, "padding": 1},
    "without strides": {"kernel_size": (3, 5), "stride": 1, "padding": (1, 2)},
    "with a dilation": {"kernel_size": 2, "stride": 1, "dilation": 2},
    "one tap": {"kernel_size": 1, "stride": 2},
}


@pytest.fixture
def pooled_by_torch(small_regions: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that stay with torch."""
    found: list[str] = []

    def note_what_is_left(module: torch.fx.GraphModule, _: int) -> None:
        found.extend(str(n.target) for n in module.graph.nodes if "pool" in str(n.target))

    monkeypatch.setattr(backend, "observers", [note_what_is_left])
    return found


def image(*shape: int) -> Tensor:
    """An image with many equal elements, some infinite, and a few that are NaN."""
    torch.manual_seed(0)
    x = torch.randint(0, 3, shape).float()
    x[torch.rand(shape) < 0.1] = torch.inf
    x[torch.rand(shape) < 0.02] = torch.nan
    x[..., :4, :4] = -torch.inf
    return x


def assert_same(function: Callable[[Tensor], Any], x: Tensor) -> None:
    compiled = torch.compile(function, backend="tensor_comprehensions")
    torch.testing.assert_close(compiled(x), function(x), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(2, 3, 8, 11), (3, 9, 12)])
def test_places_are_those_of_torch(name: str, shape: tuple[int, ...], pooled_by_torch: list[str]) -> None:
    assert_same(lambda x: F.max_pool2d(x, **CASES[name], return_indices=True), image(*shape))
    assert not pooled_by_torch


@pytest.mark.sampled  # types for each window
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_go_to_the_first_maximum(name: str, dtype: torch.dtype, pooled_by_torch: list[str]) -> None:
    x = torch.randint(0, 3, (2, 3, 8, 11)).to(dtype)
    leaf = x.clone().requires_grad_()
    function = torch.compile(lambda x: F.max_pool2d(x * 2, **CASES[name]), backend="tensor_comprehensions")
    y = function(leaf)
    direction = torch.arange(y.numel()).view(y.shape).to(dtype) % 7
    (found,) = torch.autograd.grad(y, leaf, direction)
    expected = torch.autograd.grad(F.max_pool2d(leaf * 2, **CASES[name]), leaf, direction)[0]
    torch.testing.assert_close(found, expected)
    assert not pooled_by_torch


AVERAGES: dict[str, dict[str, Any]] = {
    "side by side": {"kernel_size": 2},
    "side by side, with a rest": {"kernel_size": 3},
    "overlapping": {"kernel_size": 3, "stride": 1, "padding": 1},
    "overlapping, of what is inside": {
        "kernel_size": (3, 5),
        "stride": 1,
        "padding": (1, 2),
        "count_include_pad": False,
    },
    "with a divisor": {"kernel_size": (2, 3), "stride": 1, "divisor_override": 5},
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("shape", [(2, 3, 8, 11), (3, 8, 11)])
def test_averages_and_their_gradients(name: str, shape: tuple[int, ...], pooled_by_torch: list[str]) -> None:
    leaf = torch.randn(shape, requires_grad=True)
    expected = F.avg_pool2d(leaf * 2, **AVERAGES[name])
    found = torch.compile(lambda x: F.avg_pool2d(x * 2, **AVERAGES[name]), backend="tensor_comprehensions")(leaf)
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    gradients = (torch.autograd.grad(y, leaf, direction)[0] for y in (found, expected))
    torch.testing.assert_close(*gradients)
    assert not pooled_by_torch


@pytest.mark.parametrize("padding", [0, 1])
def test_averages_of_parts_of_windows_in_steps(padding: int) -> None:
    x = image(2, 3, 9, 8).nan_to_num(posinf=3, neginf=-3)
    options: dict[str, Any] = {"stride": 2, "padding": padding, "count_include_pad": False}
    compiled = torch.compile(lambda x: F.avg_pool2d(x, 3, **options) * 2, backend="tensor_comprehensions")
    torch.testing.assert_close(compiled(x), F.avg_pool2d(x, 3, **options) * 2)


@pytest.mark.usefixtures("small_regions")
def test_windows_of_one_row_and_of_one_column() -> None:
    for size in ((2, 3, 3, 9), (2, 3, 9, 3), (1, 1, 3, 3)):
        assert_same(lambda x: F.max_pool2d(x, 3, return_indices=True), image(*size))


def test_windows_beyond_the_padding_stay_with_torch(pooled_by_torch: list[str]) -> None:
    assert_same(lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True, return_indices=True), image(2, 3, 8, 10))
    assert_same(lambda x: F.max_pool2d(x, 2, 2, 1, dilation=2, return_indices=True), image(2, 3, 8, 10))
    assert pooled_by_torch == [str(torch.ops.aten.max_pool2d_with_indices.default)] * 2
