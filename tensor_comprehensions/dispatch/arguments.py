"""Convert the arguments of a call to plain torch tensors on the CPU that a kernel can read through their strides.

Invariant: an invalid argument raises an `ArgumentError` that names the def's tensor; memory that a kernel can read in
place is not copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..core.dtypes import DTYPES, DType
from ..core.errors import ArgumentError
from ..core.memory_layout import storage_extent

TORCH_TYPES: dict[DType, torch.dtype] = {t: getattr(torch, name) for name, t in DTYPES.items()}
TYPES = {theirs: ours for ours, theirs in TORCH_TYPES.items()}
PLAIN = (Tensor, torch.nn.Parameter)
"""The tensor classes that own their memory; other subclasses may be wrappers."""
Convert = Callable[[Tensor], Any]
"""Converts a tensor to an array of another library that shares its memory."""
DLPACK_CUDA = frozenset((2, 13))
"""DLPack's kDLCUDA and kDLCUDAManaged."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """The declaration of one parameter of the def `op`; `dims` are its sizes as written."""

    op: str
    name: str
    dtype: DType
    dims: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}({','.join(self.dims)})" if self.dims else f"{self.dtype} number"

    def error(self, problem: str, *, found: str = "", suggestion: str = "") -> ArgumentError:
        """The error for this argument; `problem` continues a sentence that begins with its name."""
        return ArgumentError(
            f"argument '{self.name}' of {self.op} {problem}",
            expected=f"{self} {self.name}",
            found=found,
            suggestion=suggestion,
        )

    def kind_error(self, kind: str, value: str = "") -> ArgumentError:
        """The error for an argument of type `kind` that is neither a tensor, an array nor a number."""
        way_out = "pass a torch tensor or a NumPy array" + ("" if self.dims else " or a number")
        return self.error(f"is {with_article(kind)}", found=value, suggestion=way_out)


def to_tensor(expected: ParameterSpec, value: object) -> Tensor:
    """`value` as a plain tensor of the expected dtype and rank.

    Raises ArgumentError for anything else than a dense CPU tensor, a NumPy array, an array that speaks DLPack or, where
    the def expects a number, a Python number.
    """
    if isinstance(value, Tensor):
        tensor = _from_torch(expected, value)
    elif isinstance(value, np.ndarray):
        tensor = _from_numpy(expected, value)
    elif isinstance(value, bool | int | float | np.generic) and not expected.dims:
        return _from_number(expected, value)
    elif hasattr(value, "__dlpack__"):
        tensor = _from_torch(expected, _from_dlpack(expected, value))
    else:
        raise expected.kind_error(type(value).__name__, short_repr(value))
    _check_rank(expected, tensor)
    return tensor


def check_elements(expected: ParameterSpec, x: Tensor) -> None:
    """Check that a tensor, which may have no memory, has the expected dtype and rank. Raises ArgumentError."""
    _check_type(expected, x)
    _check_rank(expected, x)


def _check_rank(expected: ParameterSpec, x: Tensor) -> None:
    if x.ndim != len(expected.dims):
        raise expected.error(
            f"has {x.ndim} dimensions instead of {len(expected.dims)}", found=f"a shape of {tuple(x.shape)}"
        )


def _check_type(expected: ParameterSpec, x: Tensor) -> None:
    if x.dtype is not TORCH_TYPES[expected.dtype]:
        raise _wrong_type(expected, str(x.dtype).removeprefix("torch."), x.dtype in TYPES)


def _from_torch(expected: ParameterSpec, x: Tensor) -> Tensor:
    if type(x) not in PLAIN:
        raise expected.error(
            f"is a {type(x).__name__}, a subclass of torch.Tensor",
            suggestion="pass a plain tensor; x.as_subclass(torch.Tensor) makes one where the class only adds methods",
        )
    if x.is_nested or x.layout is not torch.strided:
        dense = "x.to_padded_tensor(0.0)" if x.is_nested else "x.to_dense()"
        raise expected.error(f"is not dense: its layout is {_get_layout_name(x)}", suggestion=f"pass {dense}")
    if x.is_meta:
        raise expected.error(
            "is on the device meta and has no values",
            suggestion="pass a tensor with values; where only shapes are wanted, all tensors are on meta",
        )
    if x.device.type != "cpu":
        raise expected.error(f"is on the device {x.device}", suggestion="pass x.cpu()")
    if torch._C._is_tracing():
        raise expected.error(
            "is traced by torch.jit, which records operators and not this call",
            suggestion="call the operator as `define` gives it; only a kernel of `compile` is none",
        )
    _check_type(expected, x)
    if x.requires_grad and torch.is_grad_enabled():
        raise expected.error(
            "requires a gradient, which is not recorded here",
            suggestion="pass x.detach(), or call under torch.no_grad()",
        )
    if x.is_neg():
        return x.resolve_neg()
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device="cpu")
    _check_memory(expected, x)
    return x


def _check_memory(expected: ParameterSpec, x: Tensor) -> None:
    try:
        held = x.untyped_storage().nbytes()
        x.data_ptr()
    except RuntimeError as error:
        raise expected.error(
            f"has no memory of its own: {error}", suggestion="call outside of torch.func transforms and tracing"
        ) from error
    if x.numel() and (x.storage_offset() + storage_extent(x.shape, x.stride())) * x.element_size() > held:
        raise expected.error(f"reaches beyond its storage of {held} bytes: the storage was resized")


def _from_numpy(expected: ParameterSpec, array: np.ndarray) -> Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise expected.error("is a masked array", suggestion="pass x.filled(value)")
    name = array.dtype.name
    if name != expected.dtype.name:
        raise _wrong_type(expected, name, name in DTYPES)
    try:
        return tensor_from_array(array)
    except TypeError as error:
        raise expected.error(
            f"is an array that torch cannot read: {error}", suggestion="pass a torch tensor"
        ) from error


def tensor_from_array(array: np.ndarray) -> Tensor:
    """A tensor in the memory of an array, or in a copy if torch cannot read that, for example in another byte order.

    Raises TypeError if torch has no such element type.
    """
    size = array.itemsize
    readable = all(s >= 0 and (n < 2 or s % size == 0) for n, s in zip(array.shape, array.strides, strict=True))
    if not (readable and array.dtype.isnative and array.flags.aligned):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", subok=False)
    return torch.from_numpy(_to_writable(array))


def _from_dlpack(expected: ParameterSpec, array: object) -> Tensor:
    try:
        return from_dlpack(array)
    except Exception as error:  # libraries raise any exception for memory that they cannot share
        raise _unreadable_error(expected, error) from error


def _unreadable_error(expected: ParameterSpec, error: Exception) -> ArgumentError:
    return expected.error(
        f"is an array that torch cannot read: {error}", suggestion="pass a torch tensor or a NumPy array"
    )


def is_device_array(value: object) -> bool:
    """Whether `value` is an array of another library than torch, such as CuPy, on a CUDA device."""
    if isinstance(value, Tensor | np.ndarray | np.generic | int | float):
        return False
    if not hasattr(value, "__dlpack_device__"):
        return hasattr(value, "__cuda_array_interface__")
    try:
        return value.__dlpack_device__()[0] in DLPACK_CUDA
    except Exception:  # of the caller's library; reading the array will raise it again
        return False


def from_device_array(expected: ParameterSpec, array: Any) -> Tensor:
    """A device array as a tensor in its memory; torch's current stream waits for its pending writes."""
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(expected, array)
    try:
        x = torch.as_tensor(array)
        if stream := array.__cuda_array_interface__.get("stream"):
            external: Any = torch.cuda.ExternalStream
            torch.cuda.current_stream(x.device).wait_stream(external(stream, x.device))
        return x
    except Exception as error:
        raise _unreadable_error(expected, error) from error


def output_converter(values: Iterable[object]) -> Convert | None:
    """The converter of outputs for a caller who passed `values`; None returns tensors.

    If no value is a tensor, it converts to arrays like the first one. For a library that does not follow the array API
    standard it is None.
    """
    found: Convert | None = None
    for value in values:
        if isinstance(value, Tensor):
            return None
        if found is None:
            found = _converter_to_library(value)
    return found


def _converter_to_library(value: object) -> Convert | None:
    if isinstance(value, np.ndarray):
        return to_numpy
    if not hasattr(value, "__dlpack__") or isinstance(value, np.generic):
        return None
    namespace = getattr(value, "__array_namespace__", None)
    if namespace is None:  # CuPy follows the standard but for that
        packages: Iterable[Any] = (sys.modules.get(c.__module__.partition(".")[0]) for c in type(value).__mro__)
        return next((p.from_dlpack for p in packages if hasattr(p, "from_dlpack")), None)
    try:
        convert: Convert = namespace().from_dlpack
    except Exception:  # of the caller's library, which then does not follow the standard
        return None
    return convert


def to_numpy(x: Tensor) -> np.ndarray:
    """The array in the memory of `x`."""
    return x.numpy()


class _Memory:
    """The memory of a read-only array, presented as writable because torch warns about read-only arrays.

    No kernel writes its inputs.
    """

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.array = array


def _to_writable(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable and type(array) is np.ndarray else np.asarray(_Memory(array))


def _from_number(expected: ParameterSpec, value: bool | int | float | np.generic) -> Tensor:
    number = value.item() if isinstance(value, np.generic) else value
    dtype = expected.dtype
    accepted = bool if dtype.is_bool else int if dtype.is_integer else (int, float)
    if not isinstance(number, accepted):
        raise expected.error(f"is {with_article(type(number).__name__)}", found=short_repr(number))
    try:
        in_type = float(number) if dtype.is_float else number
    except OverflowError:
        in_type = None
    if in_type is None or (
        dtype.is_integer and not _min_integer(dtype) <= in_type < _min_integer(dtype) + 2**dtype.bits
    ):
        raise expected.error(f"does not fit into {dtype}", found=short_repr(number))
    return torch.tensor(in_type, dtype=TORCH_TYPES[dtype], device="cpu")


def _min_integer(dtype: DType) -> int:
    return -(2 ** (dtype.bits - 1)) if dtype.is_signed else 0


def _wrong_type(expected: ParameterSpec, found: str, convertible: bool) -> ArgumentError:
    suggestion = f"pass x.to(torch.{expected.dtype}), or write '{found}' in the def" if convertible else ""
    if found.startswith("float8"):
        suggestion = f"pass x.to(torch.{expected.dtype}): kernels do not read floats of 8 bits"
    elif found.startswith("complex"):
        suggestion = "pass torch.view_as_real(x), which has one more dimension of size 2"
    return expected.error(f"has elements of type {found}", found=found, suggestion=suggestion)


def _get_layout_name(x: Tensor) -> str:
    return "nested" if x.is_nested else str(x.layout).removeprefix("torch.").lstrip("_")


def with_article(name: str) -> str:
    """`name` with its indefinite article."""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


# --- destinations ------------------------------------------------------------------------------------------------


def check_destination(op: str, name: str, x: object, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """Check that the output `name` may be written to `x`, and return it. Raises ArgumentError."""
    expected = ParameterSpec(op, f"out ({name})", dtype, tuple(map(str, shape)))
    if not isinstance(x, Tensor):
        raise expected.error(
            f"is {with_article(type(x).__name__)}", suggestion="pass a torch tensor of the output's shape"
        )
    tensor = _from_torch(expected, x)
    if tensor is not x:
        raise expected.error("is a view that negates or a tensor without memory", suggestion="pass torch.empty(...)")
    if tuple(x.shape) != shape:
        raise expected.error("has another shape than the output", found=f"a shape of {tuple(x.shape)}")
    if overlaps_itself(x):
        raise expected.error(
            "has elements that share memory", found=f"strides of {x.stride()}", suggestion="pass x.clone()"
        )
    return x


def check_no_alias(op: str, outputs: Iterable[tuple[str, Tensor]], others: Iterable[tuple[str, Tensor]]) -> None:
    """Check that no destination shares memory with another argument. Raises ArgumentError."""
    seen = list(others)
    for name, x in outputs:
        for other, y in seen:
            if share_memory(x, y):
                raise ArgumentError(
                    f"the destination of '{name}' of {op} shares memory with {other}",
                    suggestion="leave 'out' away, or pass a tensor of its own",
                )
        seen.append((f"the destination of '{name}'", x))


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of `x` may have the same address (exact for every layout made by slicing)."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return x.numel() > 0
            reach += stride * (size - 1)
    return False


_EFFORT: Any = 100_000  # candidate solutions; NumPy's stubs know only two of the values it takes


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether `x` and `y` may share a byte; also true if that is too hard to decide."""
    if not x.numel() or not y.numel():
        return False
    (low, high), (other_low, other_high) = _address_range(x), _address_range(y)
    if high <= other_low or other_high <= low:
        return False
    try:
        return np.shares_memory(_array(x), _array(y), max_work=_EFFORT)
    except np.exceptions.TooHardError:
        return True


def _address_range(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + storage_extent(x.shape, x.stride()) * x.element_size()


def _array(x: Tensor) -> np.ndarray:
    x = x.detach()
    return (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()


def parse_sizes(text: str) -> dict[str, float]:
    """Parse `M=64,alpha=0.5` into values by name. Raises ArgumentError."""
    values: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, number = part.partition("=")
        try:
            values[name.strip()] = int(number) if number.strip().lstrip("+-").isdigit() else float(number)
        except ValueError:
            equals = ""
        if not equals:
            raise ArgumentError(f"--sizes has the part {part!r}", expected="NAME=NUMBER, separated by commas")
    return values
