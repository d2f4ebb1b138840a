"""Where no machine code can be made for torch's dispatcher, operators go through Python and do the same."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.runtime import boxed


@pytest.mark.parametrize("version", ["2.12.0", "2.14.1+cpu", "3.0"])
def test_other_versions_of_torch_get_no_machine_code(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert boxed.available()
    monkeypatch.setattr(torch, "__version__", version)
    assert not boxed.available()


def test_an_operator_without_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxed, "available", lambda: False)
    op = tc.define("def fallback_scale(float(N) x, float(N) w) -> (y) { y(i) = x(i) * w(i) }").fallback_scale
    x, w = torch.randn(5), torch.randn(5, requires_grad=True)
    for _ in range(3):
        assert torch.equal(op.overload(x, w.detach()), x * w.detach())
    op.overload(x, w).sum().backward()
    assert torch.equal(w.grad, x)
    with pytest.raises(tc.ArgumentError, match="size"):
        op.overload(x, torch.randn(4))
    assert torch.equal(torch.func.vmap(op.overload)(x.expand(3, 5), w.detach().expand(3, 5))[1], x * w.detach())
