"""Attention and its gradient are one kernel each, which stores nothing but its results."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_comprehensions.dynamo_backend.kernel_or_eager import KernelOrEager

SHAPE = (2, 4, 100, 16)


@pytest.fixture
def kernels(kernels_always: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The compiled kernel of each region, in the order of the races."""
    found: list[Any] = []
    choose = KernelOrEager._choose

    def record(self: KernelOrEager, inputs: tuple[Tensor, ...]) -> None:
        choose(self, inputs)
        found.append(self.op.compile(*inputs))

    monkeypatch.setattr(KernelOrEager, "_choose", record)
    return found


def run_with_gradients(attend: Any, tensors: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, ...]:
    out = attend(*tensors)
    return (out, *torch.autograd.grad(out, tensors, upstream))


@pytest.mark.parametrize("kind", ["plain", "causal", "bias"])
def test_attention_and_its_gradient_store_only_their_results(kind: str, kernels: list[Any]) -> None:
    torch.manual_seed(0)
    tensors = tuple(torch.randn(SHAPE, requires_grad=True) for _ in range(3))
    mask = torch.randn(2, 1, SHAPE[2], SHAPE[2]) if kind == "bias" else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=kind == "causal")

    upstream = torch.randn(SHAPE)
    found = run_with_gradients(torch.compile(attend, backend="tensor_comprehensions"), tensors, upstream)
    for ours, right in zip(found, run_with_gradients(attend, tensors, upstream), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    assert [(k.resources["kernels"], k.resources["temporary_bytes"]) for k in kernels] == [(1, 0), (1, 0)]
    masked = [len(re.findall(r"\+=! where", k.source("schedule"))) for k in kernels]
    assert masked == ([3, 5] if kind == "causal" else [0, 0])  # both products and the total; all five products


@pytest.mark.parametrize("kind", ["plain", "causal", "kept"])
def test_attention_in_bfloat16_rounds_sums_at_the_end_of_their_loops(kind: str, kernels: list[Any]) -> None:
    """Sums over the queries and their rounded copies were kernels of their own, with the sums in memory."""
    torch.manual_seed(0)
    tensors = tuple(torch.randn(SHAPE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 1, SHAPE[2], SHAPE[2]) > 0.3 if kind == "kept" else None
    upstream = torch.randn(SHAPE).bfloat16()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=kind == "causal")

    found = run_with_gradients(torch.compile(attend, backend="tensor_comprehensions"), tensors, upstream)
    exact = tuple(x.detach().double().requires_grad_() for x in tensors)
    for ours, right in zip(found, run_with_gradients(attend, exact, upstream.double()), strict=True):
        torch.testing.assert_close(ours.double(), right.double(), rtol=2e-2, atol=3e-2)
    assert all(k.resources["temporary_bytes"] == 0 for k in kernels)
    assert kernels[-1].resources["kernels"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_kept_scores_is_no_temporary(dtype: torch.dtype, kernels: list[Any]) -> None:
    """The sums to add to the scores, which torch saves, were kept in float32, too, and results were kept unrounded."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 300, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.rand(1, 1, 300, 300) > 0.3

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    found = torch.compile(attend, backend="tensor_comprehensions")(q, k, v)
    exact = attend(q.double(), k.double(), v.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    assert (kernels[0].resources["kernels"], kernels[0].resources["temporary_bytes"]) == (2, 0)
