"""Sparse tensors as they are stored: every format holds every tensor, and nothing malformed passes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from patterns import formats, random_tensor, store
from torch.utils import _pytree as pytree

import tensor_comprehensions as tc
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.dispatch.sparse import pack
from tensor_comprehensions.dispatch.sparse.interop import as_sparse, from_torch
from tensor_comprehensions.dispatch.sparse.sparse_tensor import SparseTensor, to_format

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:Sparse invariant checks")
SHAPES = {1: (7,), 2: (6, 5), 3: (4, 3, 5)}
RNG = np.random.default_rng()  # what is stored where does not matter


@pytest.mark.parametrize("format", [f for rank in SHAPES for f in formats(rank)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_every_format_holds_every_tensor(format: Any, density: float) -> None:
    x = random_tensor(RNG, SHAPES[format.rank], density)
    t = store(x, format).check()
    assert torch.equal(t.to_dense(), x)
    assert torch.equal(t.to_dense()[tuple(t.coordinates())], t.values.reshape(-1)) or not format.is_unique
    again = SparseTensor.from_arrays(t.format, t.shape, t.levels, t.values)
    assert torch.equal(again.to_dense(), x)
    assert str(to_format(str(format), format.rank)) == str(format)


@pytest.mark.parametrize("source", ["csr", "csc", "coo", "dcsr", "sd", "bsr(2,5)", "uc", "dd(1,0)"])
@pytest.mark.parametrize("target", ["csr", "csc", "coo", "dcsc", "ds", "bsr(3,1)", "bsc(2,5)", "dense"])
def test_formats_are_converted(source: str, target: str) -> None:
    x = random_tensor(RNG, (6, 5), 0.4)
    t = store(x, source).to(target).check()
    assert t.format == to_format(target, 2)
    assert torch.equal(t.to_dense(), x)


def test_blocks_are_completed_and_stored_zeros_stay() -> None:
    x = torch.zeros(4, 6)
    x[1, 2] = 5
    t = store(x, "bsr(2,3)")
    assert (t.nnz, tuple(t.values.shape)) == (6, (1, 2, 3))
    assert t.to("csr").nnz == 6


def test_repeated_coordinates_are_added_or_kept() -> None:
    places, values = [[1, 0, 1], [2, 2, 2]], [1.0, 2.0, 4.0]
    added = SparseTensor.from_coordinates(places, values, (2, 3), "coo")
    kept = SparseTensor.from_coordinates(places, values, (2, 3), "uc")
    assert (added.nnz, kept.nnz) == (2, 3)
    assert torch.equal(added.to_dense(), kept.to_dense())
    assert kept.check().to("csr").values.tolist() == [2.0, 5.0]


TYPES = (torch.bool, torch.int8, torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types_of_values(dtype: torch.dtype) -> None:
    x = random_tensor(RNG, (6, 5), 0.5).to(dtype)
    t = as_sparse(x, "csc")
    assert (t.dtype, t.index_dtype) == (dtype, torch.int32)
    assert torch.equal(t.to_dense(), x)
    twice = SparseTensor.from_coordinates([[0, 0, 1], [1, 1, 2]], x.new_ones(3), (2, 3), "csr")
    assert twice.to_dense().tolist() == [[0, 1 if dtype is torch.bool else 2, 0], [0, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
@pytest.mark.parametrize("reduction", ["+", "*", "min", "max"])
def test_unsigned_elements_of_one_place_are_combined(dtype: torch.dtype, reduction: str) -> None:
    """torch does not compute with these types; large ones are negative as signed numbers."""
    large = torch.iinfo(dtype).max - 1
    values = torch.tensor([large, 1, 3], dtype=dtype)
    places = torch.tensor([[0, 0, 1], [1, 1, 2]])
    t = pack.from_coordinates(places, values, (2, 3), to_format("csr", 2), None, reduction)
    expected = {"+": large + 1, "*": large, "min": 1, "max": large}[reduction]
    assert t.values.tolist() == [expected, 3]


def test_indices_are_as_wide_as_asked_and_as_needed() -> None:
    assert store(torch.eye(3), "csr", torch.int64).index_dtype is torch.int64
    far = SparseTensor.from_coordinates([[2**31]], [1.0], (2**32,), "s")
    assert far.index_dtype is torch.int64


def test_gradients_flow_through_values() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    t = SparseTensor.from_coordinates([[0, 1, 1], [0, 0, 2]], values, (2, 3), "csr")
    (t.to("csc").to_dense() * torch.arange(6.0).reshape(2, 3)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 3.0, 5.0]


def test_a_tensor_is_a_tree_of_its_parts() -> None:
    t = store(random_tensor(RNG, (6, 5), 0.4), "csr")
    doubled = pytree.tree_map(lambda x: x * 2 if x is not None and x.is_floating_point() else x, t)
    assert isinstance(doubled, SparseTensor)
    assert torch.equal(doubled.to_dense(), 2 * t.to_dense())
    assert torch.equal(t.with_values(t.values + 1).to_dense(), t.to_dense() + (t.to_dense() != 0))
    assert repr(t).startswith("SparseTensor(csr, shape=(6, 5), nnz=")


# --- other libraries ---------------------------------------------------------------------------------------------

LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}


@pytest.mark.parametrize("name", ["coo", "csr", "csc", "bsr(3,1)", "bsc(2,5)", "dense"])
def test_torch_has_the_same_parts(name: str) -> None:
    x = random_tensor(RNG, (6, 5), 0.4)
    t = store(x, name, torch.int64)
    theirs = t.torch()
    assert torch.equal(theirs.to_dense(), x)
    if name == "dense":
        return
    back = as_sparse(theirs)
    assert back.format == t.format
    assert back.values.data_ptr() == t.values.data_ptr() or not t.nnz
    assert all(
        a is b is None or (a is not None and b is not None and torch.equal(a[1].long(), b[1].long()))
        for a, b in zip(t.levels, back.levels, strict=True)
    )


def test_coordinates_of_torch_with_dense_dimensions() -> None:
    x = random_tensor(RNG, (4, 3, 5), 0.2)
    t = as_sparse(x.to_sparse(2))
    assert str(t.format) == "uqd"
    assert torch.equal(t.to_dense(), x)
    assert torch.equal(t.torch().to_dense(), x)


def test_uncoalesced_coordinates_are_coalesced() -> None:
    theirs = torch.sparse_coo_tensor([[1, 0, 1], [2, 2, 2]], [1.0, 2.0, 4.0], (2, 3))
    assert as_sparse(theirs).values.tolist() == [2.0, 5.0]


@pytest.mark.parametrize("name", ["coo", "csr", "csc", "bsr"])
def test_scipy_has_the_same_parts(name: str) -> None:
    x = random_tensor(RNG, (6, 4), 0.4)
    theirs = getattr(sp, f"{name}_array")(x.numpy())
    t = as_sparse(theirs)
    assert str(t.format).startswith(name)
    assert torch.equal(t.to_dense(), x)
    np.testing.assert_array_equal(t.scipy().toarray(), x.numpy())


@pytest.mark.parametrize("kind", [sp.csr_array, sp.csc_array, sp.bsr_array])
def test_memory_after_the_elements_of_scipy_is_left_out(kind: type) -> None:
    """SciPy allows it, and keeps it until `prune` is called; it was an error."""
    dense = np.array([[0.0, 1, 2, 0], [3, 0, 0, 4]])
    x = kind(dense)
    x.data = np.concatenate((x.data, np.full_like(x.data[:1], 9)))
    x.indices = np.concatenate((x.indices, np.full(1, 99, x.indices.dtype)))
    t = tc.as_sparse(x).check()
    np.testing.assert_array_equal(t.to_dense().numpy(), dense)
    assert t.values.data_ptr() == x.data.ctypes.data
    op = tc.define("def f(double(N,M) A, double(M) v) -> (y) { y(i) +=! A(i,j) * v(j) }").f
    np.testing.assert_array_equal(op(x, np.ones(4)), dense.sum(1))


def test_indices_of_scipy_in_any_order_are_copied_and_its_others_become_csr() -> None:
    theirs = sp.csr_array((np.array([1.0, 2.0, 4.0]), np.array([2, 0, 2]), np.array([0, 3, 3])), shape=(2, 3))
    assert as_sparse(theirs).values.tolist() == [2.0, 5.0]
    assert theirs.nnz == 3
    assert str(as_sparse(sp.dia_array(np.eye(3))).format) == "csr"


class Subclass(sp.csr_array):
    """A user's own kind of matrix."""


@pytest.mark.parametrize("kind", [sp.dia_array, sp.lil_array, sp.dok_array, sp.dok_matrix, Subclass])
def test_calls_take_every_kind_of_scipy(kind: type) -> None:
    op = tc.define("def f(double(N,M) A, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }").f
    assert op(kind(np.array([[1.0, 0, 2], [0, 3, 0]])), np.ones(3)).tolist() == [3, 3]


def test_arrays_of_numpy_in_any_memory() -> None:
    """Other byte orders, negative strides and memory that must not be written."""
    x = np.arange(12.0).reshape(3, 4) % 5
    read_only = x.copy()
    read_only.flags.writeable = False
    for array in (x.astype(">f8"), x[::-1].copy()[::-1], read_only, x.astype(">f8")[:, ::-1].copy()[:, ::-1]):
        assert as_sparse(array, "csr").to_dense().tolist() == x.tolist()
    theirs = sp.csr_array(x)
    theirs.data, theirs.indices = theirs.data.astype(">f8"), theirs.indices[::-1].copy()[::-1]
    op = tc.define("def f(double(N,M) A, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }").f
    assert op(theirs, np.ones(4)).tolist() == x.sum(1).tolist()


def test_numpy_and_dense_tensors_need_a_format() -> None:
    x = np.array([[0.0, 3.0], [0.0, 0.0]])
    assert as_sparse(x, "csr").nnz == as_sparse(torch.from_numpy(x), "csc").nnz == 1
    with pytest.raises(ArgumentError, match="needs a format"):
        as_sparse(x)


@pytest.mark.parametrize("name", ["dcsr", "uc(1,0)", "csf"])
def test_layouts_that_others_lack_are_refused_with_a_way_out(name: str) -> None:
    t = store(random_tensor(RNG, (3,) * (3 if name == "csf" else 2), 0.4), name)
    for other in (t.torch, t.scipy):
        with pytest.raises(ArgumentError, match="convert it first"):
            other()


def test_batched_tensors_of_torch_are_refused() -> None:
    with pytest.raises(ArgumentError, match="batched"):
        from_torch(torch.eye(3).expand(2, 3, 3).to_sparse_csr())


# --- malformed parts ---------------------------------------------------------------------------------------------

POS, CRD, VALUES = [0, 2, 2, 3], [0, 1, 2], [1.0, 2.0, 3.0]
MALFORMED = [
    ([0, 2, 1, 3], CRD, VALUES, r"pos that goes back: pos\[2\] = 1 after 2"),
    ([1, 2, 2, 3], CRD, VALUES, r"pos\[0\] = 1"),
    ([0, 2, 2, 9], CRD, VALUES, "ends at 9, but 3"),
    ([0, 2, 3], CRD, VALUES, "length 4"),
    (POS, [0, 4, 2], VALUES, r"crd\[1\] = 4"),
    (POS, [-1, 1, 2], VALUES, r"crd\[0\] = -1"),
    (POS, [1, 0, 2], VALUES, "not sorted"),
    (POS, [1, 1, 2], VALUES, "twice"),
    (POS, CRD, [1.0, 2.0], r"expected: a shape of \(3,\)"),
    (POS, [0.0, 1.0, 2.0], VALUES, "int32 or int64"),
    (POS, [[0, 1, 2]], VALUES, "one dimension"),
    (None, CRD, VALUES, "needs pos"),
]


@pytest.mark.parametrize(("pos", "crd", "values", "says"), MALFORMED)
def test_malformed_parts_are_named(pos: Any, crd: Any, values: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        SparseTensor.from_arrays("csr", (3, 4), (None, (pos, crd)), values)


def test_arrays_of_dense_levels_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"level 0 of .* is dense, but has arrays"):
        SparseTensor.from_arrays("csr", (3, 4), ((None, [0]), (POS, CRD)), VALUES)
    arrays = (torch.tensor(POS), torch.tensor(CRD))
    unchecked = SparseTensor(to_format("csr", 2), (3, 4), ((None, None), arrays), torch.tensor(VALUES))
    with pytest.raises(ArgumentError, match=r"level 0 of .* is dense, but has arrays"):
        tc.define("def f(float(N,M) A) -> (y) { y(i) +=! A(i,j) }").f(unchecked)


def test_coordinates_below_repeats_are_sorted_together() -> None:
    def check(rows: list[int], columns: list[int], word: str = "uq") -> SparseTensor:
        levels = (([0, len(rows)], rows), (None, columns))
        return SparseTensor.from_arrays(word, (3, 4), levels, [1.0] * len(rows))

    assert check([0, 0, 2], [1, 3, 0]).nnz == 3
    with pytest.raises(ArgumentError, match=r"level 1 .* twice"):
        check([0, 0, 2], [1, 1, 0])
    assert check([0, 0, 2], [1, 1, 0], "uc").nnz == 3
    with pytest.raises(ArgumentError, match=r"level 1 .* not sorted"):
        check([0, 0, 2], [3, 1, 0])
    with pytest.raises(ArgumentError, match=r"level 1 .* has 2 coordinates"):
        check([0, 0, 2], [1, 3])


@pytest.mark.parametrize("word", ["csr", "coo", "dcsr", "uc", "bsr(2,2)", "csf"])
def test_any_flipped_bit_is_an_error_or_another_tensor(word: str) -> None:
    """Never an exception of another kind, never a read outside of an array."""
    x = random_tensor(RNG, (4,) * (3 if word == "csf" else 2), 0.5)
    t = store(x, word)
    arrays = [a for level in t.levels if level is not None for a in level if a is not None]
    for array in arrays:
        for n in range(len(array)):
            for bit in range(32):
                array.numpy().view(np.uint32)[n] ^= np.uint32(1 << bit)
                with suppress(ArgumentError):
                    t.check().to_dense()
                array.numpy().view(np.uint32)[n] ^= np.uint32(1 << bit)
    assert torch.equal(t.to_dense(), x)


def part(pos: Any = POS, crd: Any = CRD, values: Any = VALUES, shape: Any = (3, 4)) -> SparseTensor:
    return SparseTensor.from_arrays("csr", shape, (None, (pos, crd)), values)


def elements(places: Any, values: Any = (1.0,), shape: Any = (3, 3), format: str = "csr", index: Any = None) -> Any:
    return SparseTensor.from_coordinates(places, values, shape, format, index)


def make_damaged(**parts: Any) -> Any:
    theirs = sp.csr_array(np.eye(3))
    for name, array in parts.items():
        setattr(theirs, name, array)
    return as_sparse(theirs)


MISTAKES: list[tuple[Any, str]] = [
    (lambda: elements("ab"), "torch makes no tensor of the coordinates"),
    (lambda: elements([[0, 1], [0]]), "torch makes no tensor of the coordinates"),
    (lambda: elements([[0], [0]], ["a"]), "torch makes no tensor of the values"),
    (lambda: elements([[0], [0]], None), "torch makes no tensor of the values"),
    (lambda: elements([[0], [0]], shape=3), "a shape is a sequence of whole numbers"),
    (lambda: elements([[0], [0]], shape=(3.5, 3)), "a shape is a sequence of whole numbers"),
    (lambda: elements([[0], [0]], shape=(-3, 3)), "negative or too large"),
    (lambda: elements([[0], [0]], shape=(2**70, 3)), "negative or too large"),
    (lambda: elements([[0], [0]], index=torch.int16), "indices have another type"),
    (lambda: elements([[0], [0]], index="int32"), "indices have another type"),
    (lambda: elements([[0], [0]], shape=(2**40, 3), format="coo", index=torch.int32), "do not reach an extent"),
    (lambda: elements([[0], [0]], shape=(2**50, 3)), "there is no memory"),
    (lambda: elements([[0], [0]], shape=(2**50, 2**50), format="coo").to_dense(), "there is no memory"),
    (lambda: part(pos="ab"), "torch makes no tensor of pos of level 1"),
    (lambda: part(crd=None), "torch makes no tensor of crd of level 1"),
    (lambda: part(values=None), "torch makes no tensor of the values"),
    (lambda: part(shape=None), "a shape is a sequence of whole numbers"),
    (lambda: SparseTensor.from_arrays("csr", (3, 4), None, VALUES), "levels are a sequence"),  # type: ignore[arg-type]
    (lambda: part().with_values(None), "values are a torch tensor"),  # type: ignore[arg-type]
    (lambda: part().with_values(torch.ones(3).half()).scipy(), "SciPy holds no elements of float16"),
    (lambda: as_sparse(np.array([["a"]]), "csr"), "torch makes no tensor of the array"),
    (lambda: as_sparse(np.ma.masked_array(np.eye(3)), "csr"), "masked"),
    (lambda: as_sparse(torch.eye(3, device="meta"), "csr"), "a meta tensor"),
    (lambda: as_sparse(torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.quint8), "csr"), "a quantized tensor"),
    (lambda: make_damaged(data=np.ones((3, 1))), "values of 2 dimensions"),
    (lambda: make_damaged(data=np.ones(3, np.longdouble)), "torch makes no tensor of the values"),
    (lambda: make_damaged(indptr=np.array([0, 3])), "has pos of length 2"),
    (lambda: make_damaged(indices=np.array([0, 1, 2], np.uint32)), "crd of the type uint32"),
]


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize(("make", "says"), MISTAKES)
def test_what_makes_no_sparse_tensor(make: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        make()


@pytest.mark.parametrize(
    ("format", "says"),
    [
        ("crs", "did you mean csr"),
        ("csr(", "is not a format"),
        ("csf(0,1)", "not an order"),
        (7, "is a word"),
        ("", "not a format"),
    ],
)
def test_formats_that_there_are_not(format: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        SparseTensor.from_arrays(format, (3, 4, 5), (None,), [1.0])


def test_blocks_must_divide() -> None:
    with pytest.raises(ArgumentError, match="blocks of 4 do not divide a dimension of 6"):
        SparseTensor.from_coordinates([[0], [0]], [1.0], (6, 8), "bsr(4,4)")
    with pytest.raises(ArgumentError, match="coordinate 9 of element 0"):
        SparseTensor.from_coordinates([[9], [0]], [1.0], (6, 8), "csr")
    with pytest.raises(ArgumentError, match="holds one coordinate"):
        SparseTensor.from_coordinates([[0, 0], [0, 1]], [1.0, 2.0], (6, 8), "dq")


def test_an_error_about_a_format_names_a_conversion_that_works() -> None:
    op = tc.define("def f(float(N,M) A: csc, float(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }").f
    dense, x = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]), torch.rand(3)
    for A in (dense, dense.to_sparse_csr(), tc.as_sparse(dense, "csr")):
        with pytest.raises(tc.ArgumentError) as caught:
            op(A, x)
        assert caught.value.suggestion == 'pass tc.as_sparse(A, "csc")'
        torch.testing.assert_close(op(tc.as_sparse(A, "csc"), x), dense @ x)
