"""Where no machine code can be made for torch's dispatcher, operators go through Python and do the same."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.dispatch.inline_cache import dtype_number
from tensor_comprehensions.runtime.fastpath import availability
from tensor_comprehensions.torch_ext import graph_errors


def test_an_operator_without_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "is_fast_path_available", lambda: False)
    op = tc.define("def fallback_scale(float(N) x, float(N) w) -> (y) { y(i) = x(i) * w(i) }").fallback_scale
    x, w = torch.randn(5), torch.randn(5, requires_grad=True)
    for _ in range(3):
        assert torch.equal(op.overload(x, w.detach()), x * w.detach())
    op.overload(x, w).sum().backward()
    assert torch.equal(w.grad, x)
    with pytest.raises(tc.ArgumentError, match="size"):
        op.overload(x, torch.randn(4))
    assert torch.equal(torch.func.vmap(op.overload)(x.expand(3, 5), w.detach().expand(3, 5))[1], x * w.detach())


SOURCE = """
def fallback_add(float(N) x, float(N) w) -> (y) { y(i) = x(i) + w(i) }
def fallback_scale(float alpha, float(N) x) -> (y, z) { y(i) = alpha * x(i) z(i) = y(i) + 1 }
def fallback_axpy(float(N) x) -> (y) { y(i) += x(i) }
def fallback_pool(float(N) x, int k) -> (y) { y(i) max=! x(i+j) where j in 0:k }
"""


def test_calls_without_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "is_fast_path_available", lambda: False)
    ops = tc.define(SOURCE)
    x, w, out = torch.randn(9), torch.randn(9), torch.empty(9)
    for n in range(3):
        assert torch.equal(ops.fallback_add(x, w), x + w)
        assert torch.equal(ops.fallback_add(x[::2], w[::2]), x[::2] + w[::2])
        assert torch.equal(ops.fallback_add(x, w, out=out), x + w)
        assert torch.equal(ops.fallback_axpy(x, y=w), w + x)
        assert torch.equal(ops.fallback_pool(x, 9), x.max()[None])
        y, z = ops.fallback_scale(float(n), x)
        assert torch.equal(y, n * x)
        assert torch.equal(z, y + 1)
    direct = ops.fallback_add._direct
    assert direct is not None
    assert torch.equal(direct(x, w), x + w)
    assert direct(x, w.double()) is NotImplemented
    assert direct(x, None) is NotImplemented
    assert direct(x, w.clone().requires_grad_()) is NotImplemented
    assert ops.fallback_add(x, w.clone().requires_grad_()).requires_grad
    both = torch.randn(12)
    with pytest.raises(tc.ArgumentError, match="shares memory"):
        ops.fallback_add(x, both[:9], out=both[3:])
    assert torch.equal(ops.fallback_add(x, w._neg_view()), x - w)


def test_types_of_placeholders_may_be_torchs_numbers() -> None:
    """Some versions of torch pass a list of types to Python as numbers."""
    types = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    made = graph_errors._make_placeholders([], [], [], [0, 1, 2, 3], [dtype_number(t) for t in types])
    assert [x.dtype for x in made] == types
    assert [x.dim() for x in made] == [0, 1, 2, 3]
