"""What may stand in for a plain tensor, and what looks at an op without calling it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import tensor_comprehensions as tc

OPS = tc.define("""
def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }
def pool(float(N) a, int64 k) -> (b) { b(i) max=! a(k * i + j) where i in 0:N / k, j in 0:k }
def scaled(float(M,K) A, float alpha) -> (C) { C(m,k) += alpha * A(m,k) }
""")
A, B = torch.randn(3, 4), torch.randn(4, 2)


class Marked(Tensor):
    """A subclass that adds nothing."""


class Noisy(Tensor):
    """A subclass that is asked for each function of torch."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


# --- subclasses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [False, True], ids=["at first", "after a plain call"])
def test_a_subclass_goes_in_and_comes_out(before: bool) -> None:
    if before:
        OPS.matmul(A, B)
    for call in (OPS.matmul, OPS.matmul.overload):
        y = call(A.as_subclass(Marked), B)
        assert type(y) is Marked
        torch.testing.assert_close(y.as_subclass(Tensor), A @ B)
    with pytest.raises(tc.ArgumentError, match="another size"):
        OPS.matmul(A.as_subclass(Marked), A)


def test_a_subclass_is_asked_and_recorded() -> None:
    x = A.clone().as_subclass(Noisy).requires_grad_()
    Noisy.seen.clear()
    OPS.matmul(x, B).sum().backward()
    assert any("matmul" in name for name in Noisy.seen)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.as_subclass(Tensor), B.sum(1).expand(3, 4))


def test_a_subclass_that_wraps_others_runs_the_op_on_each() -> None:
    x = TwoTensor(A.clone(), 2 * A).requires_grad_()
    y = OPS.matmul(x, B)
    torch.testing.assert_close((y.a, y.b), (A @ B, 2 * A @ B))
    y.sum().backward()
    torch.testing.assert_close(x.grad.b, B.sum(1).expand(3, 4))
    compiled = torch.compile(OPS.matmul, fullgraph=True, backend="aot_eager")(x.detach(), B)
    torch.testing.assert_close(compiled.b, 2 * A @ B)


def test_weights_that_are_computed_from_parameters() -> None:
    layer = nn.Linear(4, 2, bias=False)
    nn.utils.parametrizations.weight_norm(layer)
    OPS.matmul(A, layer.weight.t()).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


# --- shapes alone --------------------------------------------------------------------------------------------------


def test_tensors_on_meta_give_shapes() -> None:
    y = OPS.matmul(A.to("meta"), B.to("meta"))
    assert (y.device.type, y.shape) == ("meta", (3, 2))
    assert OPS.pool(torch.empty(9, device="meta"), 3).shape == (3,)
    with pytest.raises(tc.ArgumentError, match="another size"):
        OPS.matmul(A.to("meta"), A.to("meta"))
    with pytest.raises(tc.ArgumentError, match="on the device meta and has no values"):
        OPS.matmul(A, B.to("meta"))


def test_a_layer_on_meta() -> None:
    with torch.device("meta"):
        layer = tc.Module(OPS.matmul, ["B"], sizes={"K": 4, "N": 2})
    assert layer(torch.empty(3, 4, device="meta")).shape == (3, 2)


# --- looking at an op ----------------------------------------------------------------------------------------------


LOOKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "compile": lambda x, w: OPS.matmul.compile(x, w).source("loops"),
    "show": lambda x, w: str(OPS.matmul.show(x, w)),
    "reference": lambda x, w: OPS.matmul.reference(x, w).tolist(),
    "infer": lambda x, w: OPS.matmul.infer(x, w),
    "initial value": lambda x, w: OPS.scaled.compile(x, 2.0, C=x).source("loops"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_parameters_of_layers_can_be_looked_at(look: str) -> None:
    x, w = nn.Parameter(A), B.clone().requires_grad_()
    assert LOOKS[look](x, w) == LOOKS[look](A, B)
    assert x.requires_grad
    assert w.requires_grad


def test_a_kernel_of_parameters_records_its_calls() -> None:
    x = nn.Parameter(A)
    kernel = OPS.matmul.compile(x, B)
    kernel(x, B).sum().backward()
    assert x.grad is not None


# --- types of torch that kernels do not read -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64], ids=str)
def test_types_that_kernels_do_not_read(dtype: torch.dtype) -> None:
    x = A.to(dtype)
    messages = []
    compiled = torch.compile(OPS.matmul, fullgraph=True, backend="eager")
    for call in (OPS.matmul, OPS.matmul.overload, compiled):
        with pytest.raises(tc.ArgumentError) as caught:
            call(x, B)
        messages.append(str(caught.value))
    assert len(set(messages)) == 1
    assert f"has elements of type {str(dtype).removeprefix('torch.')}" in messages[0]
    assert "pass " in messages[0]
    if not dtype.is_complex:
        torch.testing.assert_close(OPS.matmul(x.to(torch.float32), B), x.float() @ B)
