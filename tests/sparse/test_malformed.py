"""Parts with anything wrong in any place: an error that names the tensor, the level, the place and the value, or the
right result; never a crash, and no element outside of an array is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.dispatch.sparse.sparse_tensor import Level, SparseTensor
from tests.helpers.sparse_checks import arrays_of, interpret_def

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:Sparse invariant checks")
OPS = tc.define("""
def one(double(N) A, double(N) x) -> (y) { y +=! A(i) * x(i) }
def two(double(N,M) A, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }
def three(double(N,M,K) A, double(K) x) -> (y) { y(i,j) +=! A(i,j,k) * x(k) }
""")
WORDS = (
    "s",
    "u",
    "csr",
    "csc",
    "coo",
    "uc",
    "dcsr",
    "dq",
    "sd(1,0)",
    "bsr(2,2)",
    "bsc(2,1)",
    "csf",
    "uqd",
    "dss(2,0,1)",
)
SHAPES = {1: (5,), 2: (4, 4), 3: (3, 2, 4)}
FLIPS = (0, 1, 5, 31, 32, 63)


def tensor(word: str, dtype: torch.dtype) -> SparseTensor:
    """Some elements in two rows of three, or one in each row where the format has room for one."""
    rank = {"s": 1, "u": 1}.get(word, 3 if word.partition("(")[0] in ("csf", "uqd", "dss") else 2)
    shape = SHAPES[rank]
    full = np.random.default_rng(len(word)).random(shape) < 0.4
    if word == "dq":
        full = np.eye(*shape) > 0
    where = np.stack(np.nonzero(full))
    values = torch.arange(1.0, where.shape[1] + 1, dtype=torch.float64)
    return SparseTensor.from_coordinates(where, values, shape, word, dtype)


def with_array(t: SparseTensor, number: int, array: Any) -> SparseTensor:
    """`t` with another pos or crd, unchecked."""
    found = iter([array if n == number else x for n, x in enumerate(arrays_of(t)[:-1])])
    levels: list[Level] = []
    for level in t.levels:
        levels.append(None if level is None else (None if level[0] is None else next(found), next(found)))
    return SparseTensor(t.format, t.shape, levels, t.values)


def change_elements(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`x` with each of its elements changed in many ways, and which one is."""
    bits, limits = 8 * x.element_size(), torch.iinfo(x.dtype)
    for place, old in enumerate(x.tolist()):
        flipped = {(old ^ (1 << bit)) - (1 << bits if bit == bits - 1 else 0) for bit in FLIPS if bit < bits}
        for value in {*flipped, -1, 0, old - 1, old + 1, limits.max} - {old}:
            if limits.min <= value <= limits.max:
                new = x.clone()
                new[place] = value
                yield place, new


def check_call(t: SparseTensor, argument: Any) -> None:
    """A call with an argument that has the parts of `t`: an ArgumentError of `A`, or the right result."""
    op = (OPS.one, OPS.two, OPS.three)[t.ndim - 1]
    x = torch.arange(1.0, t.shape[-1] + 1, dtype=torch.float64)
    found = result_or_message(lambda: op(argument, x))
    if isinstance(found, str):
        assert "'A'" in found
        assert any(word in found for word in ("level", "values", "dimension", "coordinate")), found
        return
    (checked,) = interpret_def(op._kernels.sparse, (argument, x), {}).values()
    expected = t.check().to_dense() @ x
    assert torch.equal(found, expected)
    assert torch.equal(checked, expected)


def result_or_message(call: Callable[[], Any]) -> Any:
    """What a call gives, or the message of its ArgumentError."""
    try:
        return call()
    except tc.ArgumentError as error:
        return str(error)


@pytest.mark.parametrize("word", WORDS)
def test_any_element_of_any_array(word: str) -> None:
    t = tensor(word, torch.int64 if word in ("csr", "coo", "csf") else torch.int32)
    for number, x in enumerate(arrays_of(t)[:-1]):
        for place, new in change_elements(x):
            bad = with_array(t, number, new)
            check_call(bad, bad)
            if place == 0:
                check_call(t, t)


ARRAYS: dict[str, Callable[[Tensor], Any]] = {
    "shorter": lambda x: x[:-1],
    "longer": lambda x: torch.cat((x, x[-1:])),
    "empty": lambda x: x[:0],
    "backwards": lambda x: x.flip(0),
    "of two dimensions": lambda x: x[None],
    "of no dimension": lambda x: x.sum(),
    "int16": lambda x: x.short(),
    "uint8": lambda x: x.byte(),
    "bool": lambda x: x.bool(),
    "float64": lambda x: x.double(),
    "infinite": lambda x: torch.full((len(x),), torch.inf),
    "complex": lambda x: x.to(torch.complex64),
    "missing": lambda x: None,
    "a list": lambda x: x.tolist(),
    "NumPy's": lambda x: x.numpy(),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "with gaps": lambda x: torch.stack((x, torch.full_like(x, 99)), 1).reshape(-1)[::2],
    "expanded": lambda x: x[:1].expand(len(x)),
    "of the other type": lambda x: x.long() if x.dtype is torch.int32 else x.int(),
}


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("word", WORDS)
def test_any_kind_of_array(word: str, kind: str) -> None:
    t = tensor(word, torch.int32)
    for number, x in enumerate(arrays_of(t)[:-1]):
        bad = with_array(t, number, ARRAYS[kind](x))
        check_call(bad, bad)


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "shorter": lambda x: x[:-1],
    "longer": lambda x: torch.cat((x, x[-1:])),
    "of one dimension more": lambda x: x[None],
    "with gaps": lambda x: torch.stack((x, torch.full_like(x, 99)), x.ndim).reshape(-1)[::2].reshape(x.shape),
    "expanded": lambda x: x[:1].expand(x.shape),
    "infinite": lambda x: torch.full_like(x, torch.inf),
    "float32": lambda x: x.float(),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "a list": lambda x: x.tolist(),
    "missing": lambda x: None,
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("word", WORDS)
def test_any_kind_of_values(word: str, kind: str) -> None:
    t = tensor(word, torch.int32)
    bad = SparseTensor(t.format, t.shape, t.levels, VALUES[kind](t.values))
    op = (OPS.one, OPS.two, OPS.three)[t.ndim - 1]
    x = torch.arange(1.0, t.shape[-1] + 1, dtype=torch.float64)
    found = result_or_message(lambda: op(bad, x))
    if isinstance(found, str):
        assert "A" in found
        return
    (expected,) = interpret_def(op._kernels.sparse, (bad, x), {}).values()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("word", ["csr", "csc", "bsr(2,2)", "bsc(2,1)"])
def test_parts_of_torch(word: str) -> None:
    t = tensor(word, torch.int64)
    for number, x in enumerate(arrays_of(t)[:-1]):
        for _, new in change_elements(x):
            bad = with_array(t, number, new)
            check_call(bad, bad.torch())


@pytest.mark.parametrize("coalesced", [True, False])
def test_coordinates_of_torch(coalesced: bool) -> None:
    t = tensor("coo", torch.int64)
    for place in range(t.values.numel()):
        for d in range(2):
            for value in (-1, 0, 3, 4, 2**31, 2**62):
                where = t.coordinates()
                where[d, place] = value
                argument = torch.sparse_coo_tensor(
                    where, t.values, t.shape, is_coalesced=coalesced, check_invariants=False
                )
                found = result_or_message(partial(OPS.two, argument, torch.ones(4, dtype=torch.float64)))
                if isinstance(found, str):
                    assert "'A'" in found
                    continue
                assert ((where >= 0) & (where < 4)).all()
                expected = torch.zeros(4, dtype=torch.float64).index_add(0, where[0], t.values)
                assert torch.equal(found, expected)


@pytest.mark.parametrize("word", ["csr", "csc", "bsr(2,2)"])
def test_parts_of_scipy(word: str) -> None:
    pytest.importorskip("scipy")
    t = tensor(word, torch.int32)
    for name, x in zip(("indptr", "indices"), arrays_of(t)[:-1], strict=True):
        for _, new in change_elements(x):
            argument = t.scipy()
            setattr(argument, name, new.numpy())
            found = result_or_message(partial(OPS.two, argument, torch.ones(4, dtype=torch.float64)))
            if isinstance(found, str):
                assert "'A'" in found
                continue
            argument.prune()  # positions may end before the coordinates do
            assert torch.equal(found, torch.from_numpy(argument.toarray().sum(1)))


def test_coordinates_that_are_no_integers() -> None:
    with pytest.raises(tc.ArgumentError, match="integers"):
        SparseTensor.from_coordinates([[0.5], [1]], torch.ones(1), (2, 2), "csr")
    with pytest.raises(tc.ArgumentError, match="integers"):
        SparseTensor.from_coordinates([[float("inf")], [1]], torch.ones(1), (2, 2), "csr")
    with pytest.raises(tc.ArgumentError, match="where there is none"):
        SparseTensor.from_coordinates(np.zeros((2, 0)), torch.ones(0), (3, 0), "dq")
