"""What a call accepts as an argument, what it refuses, and that it never copies what can be read in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tensor_comprehensions as tc
from tensor_comprehensions.core import dtypes
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.dispatch import arguments
from tensor_comprehensions.dispatch.arguments import ParameterSpec

MATRIX = ParameterSpec("f", "x", dtypes.FLOAT32, ("M", "N"))
NUMBER = ParameterSpec("f", "alpha", dtypes.FLOAT32, ())


def quiet(make: Callable[[], object]) -> object:
    """torch warns of kinds of tensors that it will drop; that is not our concern here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


class Methods(torch.Tensor):
    pass


class Evil:
    def __repr__(self) -> str:
        raise KeyError("no")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "none": (lambda: None, "is a NoneType"),
    "list": (lambda: [[1.0, 2.0]], "is a list"),
    "number": (lambda: 3.0, "is a float"),
    "object": (Evil, "is an Evil"),
    "rank": (lambda: torch.ones(2), "has 1 dimensions instead of 2"),
    "dtype": (lambda: torch.ones(2, 2, dtype=torch.float64), "x.to(torch.float32)"),
    "complex": (lambda: torch.ones(2, 2, dtype=torch.complex64), "elements of type complex64"),
    "sparse": (lambda: torch.ones(2, 2).to_sparse(), "layout is sparse_coo"),
    "csr": (lambda: quiet(lambda: torch.ones(2, 2).to_sparse_csr()), "layout is sparse_csr"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "layout is mkldnn"),
    "meta": (lambda: torch.ones(2, 2, device="meta"), "on the device meta and has no values"),
    "nested": (lambda: quiet(lambda: torch.nested.nested_tensor([torch.ones(2)])), "layout is nested"),
    "quantized": (
        lambda: quiet(lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)),
        "elements of type qint8",
    ),
    "subclass": (lambda: torch.ones(2, 2).as_subclass(Methods), "is a Methods, a subclass"),
    "fake": (lambda: FakeTensorMode().from_tensor(torch.ones(2, 2)), "is a FakeTensor"),
    "gradient": (lambda: torch.ones(2, 2, requires_grad=True), "torch.no_grad()"),
    "masked": (lambda: np.ma.masked_array(np.ones((2, 2), "f4")), "masked array"),
    "numpy float64": (lambda: np.ones((2, 2)), "elements of type float64"),
    "numpy object": (lambda: np.full((2, 2), None), "elements of type object"),
    "numpy strings": (lambda: np.full((2, 2), "a"), "elements of type str"),
    "numpy record": (lambda: np.zeros((2, 2), [("a", "f4")]), "elements of type void"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_value_that_no_kernel_can_read_is_refused_by_name(kind: str) -> None:
    make, part = REFUSED[kind]
    with pytest.raises(ArgumentError, match="argument 'x' of f") as caught:
        arguments.to_tensor(MATRIX, make())
    assert part in str(caught.value)
    assert "expected: float32(M,N) x" in str(caught.value)


def test_a_tensor_under_a_torch_func_transform_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no memory of its own"):
        torch.func.vmap(lambda x: arguments.to_tensor(MATRIX, x))(torch.ones(3, 2, 2))


def test_a_tensor_whose_storage_was_taken_away_is_refused() -> None:
    x = torch.ones(2, 2)
    x.untyped_storage().resize_(8)
    with pytest.raises(ArgumentError, match="beyond its storage of 8 bytes"):
        arguments.to_tensor(MATRIX, x)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[::2, 1:],
        lambda x: x[0].expand(3, 6),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
    ],
)
def test_what_can_be_read_in_place_is_not_copied(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = make(torch.randn(4, 6))
    assert arguments.to_tensor(MATRIX, x) is x


def test_a_parameter_is_accepted_where_no_gradient_is_recorded() -> None:
    x = torch.nn.Parameter(torch.ones(2, 2))
    with torch.no_grad():
        assert arguments.to_tensor(MATRIX, x) is x


def test_lazy_views_are_made_real() -> None:
    x = torch.randn(2, 2, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert torch.equal(arguments.to_tensor(MATRIX, x), x.clone())
    zero = torch._efficientzerotensor(2, 2)
    assert arguments.to_tensor(MATRIX, zero).data_ptr() != 0


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a,
        lambda a: a.T,
        lambda a: a[::2],
        lambda a: np.broadcast_to(a[0], (5, 6)),
        lambda a: a.view(np.matrix),
    ],
)
def test_numpy_arrays_share_their_memory(make: Callable[[np.ndarray], np.ndarray]) -> None:
    array = make(np.random.default_rng(0).random((4, 6), "f4"))
    x = arguments.to_tensor(MATRIX, array)
    assert x.data_ptr() == array.__array_interface__["data"][0]
    np.testing.assert_array_equal(x.numpy(), array)


def test_a_read_only_array_is_read_without_a_warning() -> None:
    array = np.ones((2, 2), "f4")
    array.setflags(write=False)
    assert arguments.to_tensor(MATRIX, array).data_ptr() == array.__array_interface__["data"][0]
    assert not array.flags.writeable


def make_unaligned_array() -> np.ndarray:
    return np.frombuffer(bytearray(33), "f4", 8, offset=1).reshape(2, 4)


@pytest.mark.parametrize(
    "array",
    [
        np.ones((4, 6), "f4")[::-1],
        np.ones((1, 6), "f4")[::-1],
        np.ones((4, 1), "f4")[:, ::-1],
        np.arange(6, dtype=">f4").reshape(2, 3),
        make_unaligned_array(),
    ],
    ids=str,
)
def test_numpy_layouts_that_torch_cannot_express_are_copied(array: np.ndarray) -> None:
    np.testing.assert_array_equal(arguments.to_tensor(MATRIX, array).numpy(), array)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (dtypes.FLOAT32, 2), (dtypes.FLOAT32, 0.5), (dtypes.FLOAT64, np.float32(0.5)), (dtypes.INT8, -128),
        (dtypes.UINT64, 2**64 - 1), (dtypes.BOOL, True), (dtypes.BFLOAT16, 0.5), (dtypes.INT32, np.int64(7)),
        (dtypes.FLOAT32, torch.tensor(3.0)), (dtypes.FLOAT32, np.array(3.0, "f4")),
    ],
)  # fmt: skip
def test_numbers(dtype: dtypes.DType, value: object) -> None:
    x = arguments.to_tensor(ParameterSpec("f", "alpha", dtype, ()), value)
    assert x.shape == ()
    assert x.dtype is arguments.TORCH_TYPES[dtype]
    assert x.item() == (value.item() if isinstance(value, torch.Tensor) else value)


@pytest.mark.parametrize(
    ("dtype", "value", "part"),
    [
        (dtypes.INT8, 128, "does not fit"), (dtypes.UINT8, -1, "does not fit"), (dtypes.INT64, 2**63, "does not fit"),
        (dtypes.INT32, 1.0, "is a float"), (dtypes.BOOL, 1, "is an int"), (dtypes.FLOAT32, 1j, "is a complex"),
        (dtypes.FLOAT64, 10**400, "does not fit"), (dtypes.FLOAT32, np.datetime64("2020"), "is a date"),
        (dtypes.FLOAT32, "1", "is a str"), (dtypes.FLOAT32, torch.ones(1), "has 1 dimensions instead of 0"),
    ],
)  # fmt: skip
def test_numbers_refused(dtype: dtypes.DType, value: object, part: str) -> None:
    with pytest.raises(ArgumentError, match="argument 'alpha' of f") as caught:
        arguments.to_tensor(ParameterSpec("f", "alpha", dtype, ()), value)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("make", "overlapping"),
    [
        (lambda b: b[:4, :4], False),
        (lambda b: b.t(), False),
        (lambda b: b[0].expand(3, 8), True),
        (lambda b: b[0].unfold(0, 3, 1), True),
        (lambda b: b[0].unfold(0, 3, 3), False),
        (lambda b: b[:0].expand(0, 8), False),
        (lambda b: b[0].expand(1, 8), False),
    ],
)
def test_overlaps_itself(make: Callable[[torch.Tensor], torch.Tensor], overlapping: bool) -> None:
    assert arguments.overlaps_itself(make(torch.zeros(8, 8))) is overlapping


@pytest.mark.parametrize(
    ("x", "y", "shared"),
    [
        (lambda b: b, lambda b: b, True),
        (lambda b: b[:, :4], lambda b: b[:, 4:], False),
        (lambda b: b[::2], lambda b: b[1::2], False),
        (lambda b: b[::2], lambda b: b[::3], True),
        (lambda b: b[:4], lambda b: b[4:], False),
        (lambda b: b[:0], lambda b: b, False),
        (lambda b: b, lambda b: b.clone(), False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_share_memory(
    x: Callable[[torch.Tensor], torch.Tensor],
    y: Callable[[torch.Tensor], torch.Tensor],
    shared: bool,
    dtype: torch.dtype,
) -> None:
    base = torch.zeros(8, 8, dtype=dtype)
    assert arguments.share_memory(x(base), y(base)) is shared


class Elsewhere:
    """An array of another library, as the array API standard describes them."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda x: Elsewhere(np.from_dlpack(x)))


class Nameless(Elsewhere):
    __array_namespace__ = None


def test_arrays_of_other_libraries_go_in_and_come_out() -> None:
    add = tc.from_expression("y(i) = a(i) + b(i)")
    a, b = np.arange(4, dtype=np.float32), np.ones(4, dtype=np.float32)
    for _ in range(3):
        result = add(Elsewhere(a), Elsewhere(b))
        assert isinstance(result, Elsewhere)
        np.testing.assert_array_equal(result.array, a + b)
    assert isinstance(add(Elsewhere(a), b), Elsewhere)
    assert isinstance(add(a, Elsewhere(b)), np.ndarray)
    assert isinstance(add(torch.from_numpy(a), Elsewhere(b)), torch.Tensor)
    assert isinstance(add(Nameless(a), Nameless(b)), torch.Tensor)


def test_arrays_of_other_libraries_that_torch_cannot_read() -> None:
    add = tc.from_expression("y(i) = a(i) + b(i)")
    with pytest.raises(tc.ArgumentError, match="'a' of expression has elements of type"):
        add(Elsewhere(np.zeros(3)), Elsewhere(np.zeros(3)))
    with pytest.raises(tc.ArgumentError, match="'a' of expression is an array that torch cannot read"):
        add(Elsewhere(np.zeros(3, dtype="M8[s]")), Elsewhere(np.zeros(3)))
    with pytest.raises(tc.ArgumentError, match="'a' of expression is an array that torch cannot read: 'lost'"):
        add(Failing(np.zeros(3, np.float32)), np.zeros(3, np.float32))


class Failing(Elsewhere):
    def __dlpack__(self, **how: Any) -> Any:
        raise KeyError("lost")


class Unnamable(Elsewhere):
    def __array_namespace__(self) -> Any:
        raise RuntimeError("there is none")


def test_arrays_of_a_library_that_cannot_be_named_give_tensors() -> None:
    add = tc.from_expression("y(i) = a(i) + b(i)")
    ones = Unnamable(np.ones(3, np.float32))
    assert torch.equal(add(ones, ones), torch.full((3,), 2.0))


class Strict(Elsewhere):
    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda x: 1 / 0)


def test_outputs_that_the_library_of_the_arguments_cannot_read() -> None:
    add = tc.from_expression("y(i) = a(i) + b(i)")
    ones = Strict(np.ones(3, np.float32))
    with pytest.raises(tc.ArgumentError, match="library of the arguments cannot read the outputs: division by zero"):
        add(ones, ones)
