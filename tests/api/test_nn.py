"""Defs as layers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import tensor_comprehensions as tc

LINEAR = """
def linear(float(B,I) x, float(O,I) weight, float(O) bias) -> (y) {
    y(b,o) +=! x(b,i) * weight(o,i)
    y(b,o) = y(b,o) + bias(o)
}
"""


def layer(**kwargs) -> tc.Module:
    return tc.Module(LINEAR, ("weight", "bias"), sizes={"I": 6, "O": 4}, **kwargs)


def test_it_is_a_layer() -> None:
    torch.manual_seed(0)
    ours, theirs = layer(), nn.Linear(6, 4)
    assert [(n, p.shape) for n, p in ours.named_parameters()] == [(n, p.shape) for n, p in theirs.named_parameters()]
    assert ours.weight.abs().max() <= 6**-0.5
    assert ours.weight.std() > 0
    assert not ours.bias.any()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 6)
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    assert torch.allclose(ours.weight.grad, theirs.weight.grad, atol=1e-4)
    assert "linear(" in repr(ours)


def test_it_learns() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(layer(), nn.ReLU()), torch.randn(64, 6)
    target = nn.functional.linear(x, torch.randn(4, 6)).relu()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "save"])
def test_it_is_copied(how: str) -> None:
    module, x = layer(), torch.randn(2, 6)
    module(x)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(module))
    elif how == "deepcopy":
        other = copy.deepcopy(module)
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(module(x), other(x))
    assert other.weight is not module.weight


def test_initial_values_and_buffers() -> None:
    module = tc.Module(LINEAR, {"weight": nn.init.ones_, "bias": torch.arange(4)}, sizes={"I": 6, "O": 4})
    assert module.weight.eq(1).all()
    assert torch.equal(module.bias.detach(), torch.arange(4.0))
    fixed = tc.Module(LINEAR, {"bias": 0.5}, sizes={"O": 4}, buffers={"weight": torch.ones(4, 6)})
    assert torch.equal(fixed(torch.ones(1, 6)), torch.full((1, 4), 6.5))
    assert [*fixed.state_dict()] == ["bias", "weight"]
    assert [n for n, _ in fixed.named_parameters()] == ["bias"]


def test_an_operator_and_a_def_by_name() -> None:
    program = LINEAR + "def twice(float(N) x, float(N) w) -> (y) { y(i) = 2 * w(i) * x(i) }"
    assert tc.Module(program, ["w"], sizes={"N": 3}).op.__name__ == "twice"
    assert tc.Module(program, name="linear").op.__name__ == "linear"
    assert tc.Module(tc.define(program).twice, {"w": 1.0}, sizes={"N": 3})(torch.ones(3)).eq(2).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tc.Module(LINEAR, ["wieght"], sizes={"I": 1, "O": 1}), "no input 'wieght'"),
        (lambda: tc.Module(LINEAR, ["weight"], sizes={"I": 1}), "size 'O'"),
        (lambda: tc.Module(LINEAR, {"bias": torch.ones(3)}, sizes={"O": 4}), "another shape"),
        (lambda: tc.Module("def f(int(N) x) -> (y) { y(i) = x(i) }", ["x"], sizes={"N": 1}), "no gradient"),
        (lambda: tc.Module("def f(float forward) -> (y) { y = forward }", ["forward"]), "already"),
        (lambda: tc.Module(LINEAR, ["weight"], sizes={"I": -1, "O": 1}), "size 'I' is -1"),
        (lambda: tc.Module(LINEAR, ["weight"], sizes={"I": 2.5, "O": 1}), "size 'I' is 2.5"),
        (lambda: tc.Module(LINEAR, {"bias": "zeros"}, sizes={"O": 4}), "is a str"),
        (lambda: tc.Module(LINEAR, {"bias": lambda _: 1 / 0}, sizes={"O": 4}), "fills 'bias' failed"),
        (lambda: tc.Module(LINEAR, buffers={"bias": 3}), "cannot be a buffer"),
        (lambda: tc.Module(LINEAR, ["bias"], sizes={"O": 4}, buffers={"bias": torch.ones(4)}), "cannot be a buffer"),
        (lambda: tc.Module(LINEAR, "wieght"), "no input 'wieght'"),
        (lambda: layer()(), "takes 1 inputs"),
        (lambda: layer()(torch.ones(2, 6), torch.ones(2)), "takes 1 inputs"),
        (lambda: layer()(torch.ones(2, 5)), "size"),
        (lambda: tc.Module(LINEAR, name="nil"), "no def"),
    ],
)  # fmt: skip
def test_mistakes(make, words: str) -> None:
    with pytest.raises(tc.ArgumentError, match=words):
        make()
