"""Transposed, strided and grouped convolutions and their gradients are kernels that compute what torch computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_comprehensions.api import define
from tensor_comprehensions.dynamo_backend import backend

r = torch.randn


@dataclass(frozen=True)
class Case:
    """A convolution: the shapes of data and weights, and its other arguments."""

    data: Sequence[int]
    weight: Sequence[int]
    turned: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def function(self) -> Callable[[Tensor, Tensor], Tensor]:
        names = {3: (F.conv1d, F.conv_transpose1d), 4: (F.conv2d, F.conv_transpose2d)}
        convolve: Any = names[len(self.data)][self.turned]
        return lambda x, w: convolve(x * 2, w, **self.options).relu()


CASES = {
    "windows side by side": Case((2, 6, 5, 4), (6, 9, 2, 2), options={"stride": 2}),
    "overlapping": Case((2, 6, 5, 4), (6, 9, 4, 4), options={"stride": 2, "padding": 1}),
    "of several lengths": Case((2, 6, 5, 4), (6, 9, 3, 3), options={"stride": 2, "padding": 1, "output_padding": 1}),
    "with gaps": Case((1, 3, 4, 4), (3, 8, 1, 1), options={"stride": 2, "output_padding": 1}),
    "in groups": Case((2, 6, 5, 4), (6, 3, 3, 2), options={"stride": (2, 1), "output_padding": (1, 0), "groups": 3}),
    "of one channel each": Case((2, 6, 7), (6, 1, 3), options={"stride": 3, "groups": 6}),
    "without strides": Case((2, 6, 7), (6, 9, 3), options={"dilation": 2, "padding": 1}),
    "gradients of strides": Case((2, 8, 8, 6), (9, 8, 3, 3), False, {"stride": 2, "padding": 1}),
    "gradients of strides, few channels": Case((2, 3, 8, 6), (4, 3, 7, 5), False, {"stride": (2, 1), "padding": 2}),
    "gradients of strides, odd sizes": Case((2, 8, 9, 7), (9, 8, 3, 3), False, {"stride": 2}),
    "of a size that is no multiple": Case((2, 6, 5, 4), (6, 9, 3, 3), options={"stride": 2, "padding": 1}),
    "gradients of gaps": Case((2, 8, 8, 6), (9, 8, 1, 1), False, {"stride": 2}),
    "gradients of groups": Case((2, 16, 7, 6), (32, 8, 3, 3), False, {"padding": 1, "groups": 2}),
    "gradients of channels": Case((2, 6, 8, 6), (6, 1, 3, 3), False, {"stride": 2, "padding": 1, "groups": 6}),
    "few places": Case((3, 8, 2, 2), (16, 8, 3, 3), False, {"padding": 1}),
    "few places with strides": Case((2, 8, 4, 6), (8, 8, 3, 3), False, {"padding": 1, "stride": 2}),
    "one place of several images": Case((5, 8, 3), (4, 8, 3), False),
    "few places, transposed": Case((2, 8, 1, 2), (8, 4, 2, 2), options={"stride": 2}),
    "gradients of large images": Case((2, 32, 64, 68), (8, 32, 3, 3), False, {"padding": 1}),
}  # fmt: skip


@pytest.fixture
def convolved_by_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The convolutions that stay with torch."""
    found: list[str] = []

    def note_what_is_left(module: torch.fx.GraphModule, work: int) -> None:
        calls = (str(n.target) for n in module.graph.nodes if n.op == "call_function")
        found.extend(target for target in calls if "convolution" in target)

    monkeypatch.setattr(backend, "observers", [note_what_is_left])
    return found


def run_with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = function(*leaves)
    direction = torch.linspace(-1, 1, result.numel()).view(result.shape)
    return [result.detach(), *torch.autograd.grad(result, leaves, direction)]


@pytest.mark.sampled  # strides, paddings and groups
@pytest.mark.usefixtures("small_regions")
@pytest.mark.parametrize("name", CASES)
def test_convolutions_agree_with_torch(name: str, convolved_by_torch: list[str]) -> None:
    torch.manual_seed(0)
    inputs = r(CASES[name].data), r(CASES[name].weight)
    function = CASES[name].function()
    expected = run_with_gradients(function, *inputs)
    found = run_with_gradients(torch.compile(function, backend="tensor_comprehensions"), *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert not convolved_by_torch


@pytest.mark.usefixtures("small_regions")
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_with_other_groups_follow_each_other(kernel: int, convolved_by_torch: list[str]) -> None:
    """The groups of the first split the channels in another way than those of the second."""

    def function(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = F.conv2d(x, first, padding=kernel // 2, groups=4)
        return F.conv2d(y, second, padding=kernel // 2, groups=3).relu()

    inputs = r(2, 12, 5, 6), r(12, 3, kernel, kernel), r(24, 4, kernel, kernel)
    found = run_with_gradients(torch.compile(function, backend="tensor_comprehensions"), *inputs)
    torch.testing.assert_close(found, run_with_gradients(function, *inputs), rtol=1e-3, atol=1e-3)
    assert not convolved_by_torch


@pytest.mark.usefixtures("kernels_always")
@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_check_weights_that_are_computed(transposed: bool, convolved_by_torch: list[str]) -> None:
    """Padding multiplies weights by 0, which is NaN if the weights overflow in the conversion of autocast."""
    convolve = F.conv_transpose2d if transposed else F.conv2d

    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return convolve(x, w, padding=1).relu()

    fast = torch.compile(function, backend="tensor_comprehensions")
    x, w = r(2, 8, 6, 6), r(8, 8, 3, 3)
    torch.testing.assert_close(run_with_gradients(fast, x, w), run_with_gradients(function, x, w), rtol=3e-2, atol=5e-2)
    w[0, 0, 0, 0] = torch.finfo(torch.float32).max
    torch.testing.assert_close(fast(x, w), function(x, w), rtol=3e-2, atol=5e-2, equal_nan=True)
    assert not convolved_by_torch


@pytest.mark.usefixtures("small_regions")
@pytest.mark.parametrize(
    "options", [{"stride": 2, "dilation": 2}, {"stride": 2, "padding": 1}, {"stride": 3, "output_padding": 1}], ids=str
)
def test_other_transposed_convolutions_stay_with_torch(options: dict[str, int]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv_transpose2d(x, w, **options) * 2

    inputs = r(1, 3, 4, 4), r(3, 2, 4 - options.get("padding", 0), 3)
    fast = torch.compile(function, backend="tensor_comprehensions")
    torch.testing.assert_close(run_with_gradients(fast, *inputs), run_with_gradients(function, *inputs))


@pytest.mark.usefixtures("small_regions")
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_infinite_weight_meets_no_element_outside_of_the_data(value: float) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv_transpose2d(x, w, stride=2, padding=1)

    x, w = r(1, 3, 4, 4), r(3, 2, 4, 4)
    w[0, 0, 0, 0] = value
    fast = torch.compile(function, backend="tensor_comprehensions")
    torch.testing.assert_close(fast(x, w).isfinite(), function(x, w).isfinite())


def test_an_infinite_permuted_weight_meets_no_padding(small_regions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes the tensor that is permuted, and that is checked."""
    kernels: list[bool] = []
    monkeypatch.setattr(backend, "observers", [lambda m, _: kernels.extend("region" in str(n) for n in m.graph.nodes)])

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w.transpose(0, 1), padding=1)

    x, w = r(1, 3, 5, 5), r(3, 2, 3, 3)
    fast = torch.compile(function, backend="tensor_comprehensions")
    torch.testing.assert_close(fast(x, w), function(x, w))
    assert any(kernels)
    w[0, 0, 0, 0] = torch.inf
    torch.testing.assert_close(fast(x, w).isfinite(), function(x, w).isfinite())


def test_rows_of_a_concatenation_with_an_upsampled_image_stay_whole(
    kernels_always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fell into pairs, the phases of the transposed convolution, over which vectors had two lanes."""
    texts: list[str] = []

    def record(text: str, **options: Any) -> Any:
        texts.append(text)
        return define(text, **options)

    monkeypatch.setattr(backend, "define", record)
    x, other, up, w = r(2, 16, 7, 9), r(2, 8, 14, 18), r(16, 8, 2, 2), r(8, 16, 3, 3)

    def run(x: Tensor, other: Tensor, up: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(torch.cat([F.conv_transpose2d(x, up, stride=2), other], 1), w, padding=1)

    found = torch.compile(run, backend="tensor_comprehensions")(x, other, up, w)
    torch.testing.assert_close(found, run(x, other, up, w), rtol=1e-4, atol=1e-4)
    joined = [line for text in texts for line in text.splitlines() if "< 8 ?" in line]
    assert joined
    assert all(line.endswith("in 0:18") for line in joined)
