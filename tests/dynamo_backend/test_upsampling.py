"""Upsampling by whole factors and its gradients are kernels; other factors stay with torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_comprehensions.dynamo_backend import backend

Function = Callable[[Tensor], Tensor]


@pytest.fixture
def upsampled_by_torch(small_regions: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The upsampling that stays with torch, forward and backward."""
    found: list[str] = []

    def note_what_is_left(module: torch.fx.GraphModule, _: int) -> None:
        found.extend(str(n.target) for n in module.graph.nodes if "upsample" in str(n.target) and n.op != "placeholder")

    monkeypatch.setattr(backend, "observers", [note_what_is_left])
    return found


def assert_same(function: Function, x: Tensor, exactly: bool = False) -> None:
    """The results and the gradients are those of torch."""
    compiled = torch.compile(function, backend="tensor_comprehensions")
    mine, theirs = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
    found, expected = compiled(mine), function(theirs)
    torch.testing.assert_close(found, expected, **({"rtol": 0, "atol": 0} if exactly else {}))
    assert found.stride() == expected.stride()
    gradient = torch.randn_like(expected)
    found.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(mine.grad, theirs.grad)


def draw(*shape: int, channels_last: bool = False) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(shape)
    return x.to(memory_format=torch.channels_last) if channels_last else x


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("factor", [2, 3, 4, 7, (1, 2), (5, 1)])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
def test_images_become_larger(
    mode: str, factor: int | tuple[int, int], channels_last: bool, upsampled_by_torch: list[str]
) -> None:
    x = draw(2, 3, 5, 6, channels_last=channels_last)
    assert_same(lambda x: F.interpolate(x, scale_factor=factor, mode=mode) * 1.5, x)
    assert not upsampled_by_torch


@pytest.mark.parametrize(
    ("shape", "mode"),
    [((2, 3, 7), "nearest"), ((2, 3, 7), "linear"), ((1, 2, 3, 4, 5), "nearest"), ((1, 2, 3, 4, 5), "trilinear"),
     ((2, 3, 1, 4), "bilinear"), ((2, 3, 1, 1), "bilinear"), ((1, 1, 2, 2), "nearest")],
)  # fmt: skip
def test_any_number_of_dimensions(shape: tuple[int, ...], mode: str, upsampled_by_torch: list[str]) -> None:
    assert_same(lambda x: F.interpolate(x, scale_factor=2, mode=mode) * 1.5, draw(*shape))
    assert not upsampled_by_torch


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.interpolate(x, size=(7, 9), mode="bilinear") * 2,
        lambda x: F.interpolate(x, scale_factor=2.5) * 2,
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True) * 2,
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear") * 2,
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic") * 2,
        lambda x: F.interpolate(x, scale_factor=20) * 2,
    ],
)
def test_other_factors_stay_with_torch(function: Function, upsampled_by_torch: list[str]) -> None:
    assert_same(function, draw(2, 3, 4, 6))
    assert len(upsampled_by_torch) == 2


@pytest.mark.parametrize("size", [3, 49, 100])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_the_nearest_element_is_the_one_that_torch_rounds_to(size: int, mode: str) -> None:
    """In float32, 49 * (1 / 49) is below 1."""
    for factor in range(2, 17):
        assert_same(lambda x, k=factor: F.interpolate(x, size=x.shape[-1] * k, mode=mode) + 1, draw(1, 2, size), True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_every_type(mode: str, dtype: torch.dtype, upsampled_by_torch: list[str]) -> None:
    x = draw(2, 4, 6, 6).to(dtype)
    assert_same(lambda x: F.interpolate(x, scale_factor=2, mode=mode).relu(), x)
    assert not upsampled_by_torch


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_convolutions_read_larger_images(mode: str, channels_last: bool, upsampled_by_torch: list[str]) -> None:
    weight = draw(8, 4, 3, 3)
    x = draw(2, 4, 6, 6, channels_last=channels_last)
    assert_same(lambda x: F.conv2d(F.interpolate(x, scale_factor=2, mode=mode), weight, padding=1).relu(), x)
    assert not upsampled_by_torch


def test_integers_become_more() -> None:
    x = torch.arange(24, dtype=torch.uint8).view(1, 2, 3, 4)
    compiled = torch.compile(lambda x: F.interpolate(x, scale_factor=2), backend="tensor_comprehensions")
    assert torch.equal(compiled(x), F.interpolate(x, scale_factor=2))
