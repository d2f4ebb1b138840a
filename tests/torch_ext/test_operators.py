"""Defs in torch's dispatcher: names, schemas, and what torch's own checks of operators say."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tests.helpers import differentiable as defs

OPS = tc.define("\n".join((defs.MATMUL, defs.SOFTMAX, defs.GEMM, defs.GATHER, defs.POOL, defs.EXTREMA, defs.CHAIN)))


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


# --- names and schemas ---------------------------------------------------------------------------------------------


def test_the_schema_says_what_the_def_says() -> None:
    schemas = {op.__name__: str(op.overload._schema).partition("(")[1:] for op in OPS}
    assert "".join(schemas["matmul"]) == "(Tensor A, Tensor B) -> Tensor"
    assert "".join(schemas["gemm"]) == "(Tensor A, Tensor B, Tensor alpha, Tensor beta, Tensor C) -> Tensor"
    assert "".join(schemas["pool"]) == "(Tensor a, SymInt k, SymInt s) -> Tensor"
    assert "".join(schemas["extrema"]) == "(Tensor x, Tensor y) -> (Tensor, Tensor, Tensor)"
    assert OPS.matmul.overload is getattr(torch.ops.tc, OPS.matmul.overload._opname).default


def test_a_name_tells_what_is_computed() -> None:
    """Another definition is another operator; the same one, also with another layout, is the same."""
    one = tc.define("def f(float(N) x) -> (y) { y(i) = 2 * x(i) }").f
    same = tc.define("# twice\ndef f(float(N) x) -> (y) { y(j) = 2*x(j) }").f
    other = tc.define("def f(float(N) x) -> (y) { y(i) = 3 * x(i) }").f
    given = tc.define("def f(float(N) x) -> (y) { y(i) = 2 * x(i) }", {"f": lambda i, o, g: [g[0]]}).f
    x = torch.ones(3)
    assert one.overload is same.overload
    assert len({op.overload for op in (one, other, given)}) == 3
    assert torch.equal(one.overload(x), 2 * x)
    assert torch.equal(other.overload(x), 3 * x)


def test_names_that_schemas_do_not_take() -> None:
    """Words of Python and of the schema language, an output called `out`, more outputs than there are letters."""
    words = ("lambda", "None", "self", "Tensor", "out", "is")
    op = tc.define(
        f"def f({', '.join(f'float(N) {w}' for w in words)}) -> (y) {{ y(i) = {' + '.join(f'{w}(i)' for w in words)} }}"
    ).f
    assert torch.equal(op.overload(*torch.eye(6)), torch.ones(6))
    returns = [f"y{n}" for n in range(30)]
    many = tc.define(
        f"def many(float x) -> ({', '.join(returns)}) {{ {' '.join(f'{r} = x + {n}' for n, r in enumerate(returns))} }}"
    ).many
    assert many.overload(torch.tensor(1.0))[29] == 30


def test_an_operator_outlives_the_op() -> None:
    def make() -> Any:
        return tc.define("def f(float(N) x) -> (y) { y(i) = x(i) * x(i) * x(i) }").f.overload

    overload = make()
    gc.collect()
    x = leaf(3)
    overload(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)


@pytest.mark.parametrize("count", [40, 70])
def test_more_arguments_than_torch_has_for_an_operator(count: int) -> None:
    """The def, or its gradient, is then a function of Python alone."""
    terms = " + ".join(f"(a{n}(i) * a{n}(i))" for n in range(count))
    op = tc.define(f"def f({', '.join(f'float(N) a{n}' for n in range(count))}) -> (b) {{ b(i) = {terms} }}").f
    values = [leaf(3) for _ in range(count)]
    found = op(*values)
    found.sum().backward()
    torch.testing.assert_close(found, sum(x * x for x in values))
    torch.testing.assert_close([x.grad for x in values], [2 * x.detach() for x in values])
    if count > 64:
        with pytest.raises(tc.ArgumentError, match="too large: operators of torch"):
            _ = op.overload


# --- torch's own checks --------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "contiguous": lambda: (torch.randn(4, 5), torch.randn(5, 3)),
    "permuted": lambda: (torch.randn(5, 4).t(), torch.randn(3, 5).t()),
    "sliced": lambda: (torch.randn(4, 10)[:, ::2], torch.randn(5, 6)[:, 1:4]),
    "empty": lambda: (torch.randn(4, 0), torch.randn(0, 3)),
    "requires grad": lambda: (leaf(4, 5), leaf(5, 3)),
    "permuted, requires grad": lambda: (torch.randn(5, 4).t().requires_grad_(), leaf(5, 3)),
    "empty, requires grad": lambda: (leaf(0, 5), leaf(5, 3)),
}


HIDDEN_BY_TORCH = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
"""What `opcheck` of torch 2.15 causes by reading gradients, and hides, unless warnings are errors."""


@HIDDEN_BY_TORCH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_finds_no_fault(layout: str) -> None:
    assert set(torch.library.opcheck(OPS.matmul.overload, LAYOUTS[layout]()).values()) == {"SUCCESS"}


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "gemm": lambda: (leaf(4, 5), leaf(5, 3), torch.tensor(2.0), torch.tensor(0.5), leaf(4, 3)),
    "pool": lambda: (leaf(9), 3, 2),
    "gather": lambda: (leaf(5, 3), torch.tensor([1, 4])),
    "extrema": lambda: (leaf(5), torch.randn(5)),
}


@HIDDEN_BY_TORCH
@pytest.mark.parametrize("name", CALLS)
def test_torch_finds_no_fault_with_other_kinds_of_arguments(name: str) -> None:
    assert set(torch.library.opcheck(OPS[name].overload, CALLS[name]()).values()) == {"SUCCESS"}


def test_the_variants_that_write_to_given_tensors() -> None:
    A, B, out = torch.randn(4, 5), torch.randn(5, 3), torch.empty(4, 3)
    write = getattr(torch.ops.tc, OPS.matmul.overload._opname).out
    assert set(torch.library.opcheck(write, (A, B), {"out": out}).values()) == {"SUCCESS"}
    assert write(A, B, out=out) is None
    torch.testing.assert_close(out, A @ B)
    with pytest.raises(tc.ArgumentError, match="with 'out' records neither"):
        write(leaf(4, 5), B, out=out)
    several = getattr(torch.ops.tc, OPS.chain.overload._opname).out
    x, y = torch.randn(3, 4), torch.tensor(2.0)
    a, z = torch.empty(3), torch.empty(4)
    several(x, y, a_out=a, z_out=z)
    torch.testing.assert_close((a, z), OPS.chain(x, y))


# --- mistakes ------------------------------------------------------------------------------------------------------


def test_mistakes_are_reported_as_by_the_op() -> None:
    x = torch.ones(2, 3)
    bad: list[tuple[tc.Op, tuple[Any, ...]]] = [
        (OPS.matmul, (x, x)),
        (OPS.matmul, (x, x.double())),
        (OPS.matmul, (x, x[0])),
        (OPS.gather, (x, torch.tensor([2]))),
        (OPS.pool, (x[0], 9, 1)),
    ]
    for op, arguments in bad:
        messages = []
        for call in (op, op.overload):
            with pytest.raises(tc.TCError) as caught:
                call(*arguments)
            messages.append((type(caught.value), str(caught.value)))
        assert messages[0] == messages[1]


def test_a_failing_call_leaves_what_it_would_write_to() -> None:
    out = torch.full((2, 3), 7.0)
    write = getattr(torch.ops.tc, OPS.gather.overload._opname).out
    with pytest.raises(tc.RangeError):
        write(torch.ones(2, 3), torch.tensor([0, 2]), out=out)
    assert out.eq(7).all()


# --- copies --------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, op: tc.Op) -> None:
        super().__init__()
        self.op, self.weight = op, torch.nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.op(x, self.weight)
        return result


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_ops_and_modules_are_copied(duplicate: Callable[[Any], Any]) -> None:
    layer, x = Layer(OPS.matmul), torch.randn(4, 5)
    twin = duplicate(layer)
    assert twin.op is not layer.op
    assert twin.op.overload is layer.op.overload
    torch.testing.assert_close(twin(x), layer(x))


def test_a_kernel_is_copied_as_itself_and_stays_in_its_process() -> None:
    kernel = OPS.matmul.compile(torch.randn(4, 5), torch.randn(5, 3))
    assert copy.copy(kernel) is kernel
    layer = Layer(kernel)
    assert copy.deepcopy(layer).op is kernel
    with pytest.raises(tc.ArgumentError, match="code of this process"):
        pickle.dumps(kernel)
