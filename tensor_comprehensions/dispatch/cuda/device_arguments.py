"""Convert the arguments of a call to tensors on one CUDA device that a kernel can read and write in place.

Invariant: an invalid argument is found before any launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...core.errors import ArgumentError
from ...core.memory_layout import storage_extent
from ...runtime.cuda import launch
from ...runtime.cuda.launch import ALIGNMENT
from ...target import GpuTarget, parse_gpu_target
from ...tc_lang.ir import BoundFunction, Role
from ...tc_lang.ir import Tensor as BoundTensor
from ..arguments import (
    TORCH_TYPES,
    Convert,
    ParameterSpec,
    from_device_array,
    is_device_array,
    output_converter,
    overlaps_itself,
    to_tensor,
    with_article,
)
from ..call_steps import Arguments, ArgumentShapes, CallSignature, check_names, is_same_storage
from .gpu_inline_cache import scalar_to_device

KIND = "cuda"
"""torch's device type of CUDA devices."""


def is_any_on_device(values: Sequence[object]) -> bool:
    """Whether any value is a tensor on a CUDA device, or an array of another library on one."""
    return any(v.device.type == KIND if isinstance(v, Tensor) else is_device_array(v) for v in values)


def import_arrays(
    call_signature: CallSignature, values: Sequence[object], initial: Mapping[str, object]
) -> tuple[Sequence[object], Mapping[str, object], Convert | None]:
    """The arguments with device arrays of other libraries imported as tensors, and the converter of the outputs.

    Raises ArgumentError for an array that torch cannot read.
    """
    everything = (*values, *initial.values())
    if not any(map(is_device_array, everything)):
        return values, initial, None
    check_names(call_signature, values, initial)

    def read(expected: ParameterSpec, value: object) -> object:
        return from_device_array(expected, value) if is_device_array(value) else value

    return (
        [read(p, v) for p, v in zip(call_signature.parameters, values, strict=True)],
        {p.name: read(p, initial[p.name]) for p in call_signature.initial},
        output_converter(v for v in everything if isinstance(v, Tensor) or is_device_array(v)),
    )


def is_aligned(x: Tensor) -> bool:
    """Whether the address of a tensor is a multiple of `ALIGNMENT` bytes."""
    return x.data_ptr() % ALIGNMENT == 0


def resolve_gpu_target(wanted: GpuTarget | str | None) -> GpuTarget:
    """The target with this name; None is the target of torch's current CUDA device.

    Raises ArgumentError for an unknown name, and if there is no device.
    """
    if isinstance(wanted, GpuTarget):
        return wanted
    if wanted is None or wanted == "cuda":
        if not torch.cuda.is_available():
            raise ArgumentError(
                "there is no CUDA device",
                suggestion='name a target, such as target="cuda:sm_90"; kernel.emulate(...) runs it here',
            )
        return launch.device_target(torch.cuda.current_device())
    if not isinstance(wanted, str):
        raise ArgumentError(f"target is {with_article(type(wanted).__name__)}", expected='a target, or "cuda:sm_90"')
    return parse_gpu_target(wanted)


def device_of(values: Sequence[object]) -> torch.device:
    """The device of the first CUDA tensor in `values`, which has one."""
    return next(v.device for v in values if isinstance(v, Tensor) and v.device.type == KIND)


def gather_on_device(
    call_signature: CallSignature, values: Sequence[object], initial: Mapping[str, object], device: torch.device
) -> Arguments:
    """The arguments of a call, all on one CUDA device. Raises ArgumentError that names the first invalid one."""
    check_names(call_signature, values, initial)
    inputs = tuple([to_device_tensor(device, p, v) for p, v in zip(call_signature.parameters, values, strict=True)])
    return Arguments(
        inputs, tuple([to_device_tensor(device, p, initial[p.name]) for p in call_signature.initial]), None
    )


def shapes_without_sync(
    call_signature: CallSignature, arguments: Arguments, values: Sequence[object]
) -> ArgumentShapes:
    """As `call_steps.shapes_of`, without a device sync for scalars that the caller passed as Python numbers."""
    scalars = []
    for p, value, x in zip(call_signature.function.parameters, values, arguments.inputs, strict=True):
        if p.is_compile_time:
            scalars.append((p.name, int(x.item()) if isinstance(value, Tensor) else int(value)))  # type: ignore[call-overload]
    inputs, initial = ([tuple(x.shape) for x in xs] for xs in (arguments.inputs, arguments.initial))
    return ArgumentShapes(tuple(inputs), tuple(initial), tuple(scalars))


def to_device_tensor(device: torch.device, expected: ParameterSpec, value: object) -> Tensor:
    """`value` as a plain tensor on `device`; only numbers are moved there. Raises ArgumentError if it does not fit."""
    if isinstance(value, Tensor) and not (value.ndim or expected.dims) and value.device.type == "cpu" != device.type:
        value = value.item()
    if not isinstance(value, Tensor):
        if expected.dims:
            to_tensor(expected, value)
            raise expected.error(f"is not on the device {device} of the other tensors")
        return scalar_to_device(device, expected, value)
    if value.device != device:
        raise expected.error(
            f"is on the device {value.device}, and another argument on {device}", suggestion=f"pass x.to('{device}')"
        )
    if value.layout is not torch.strided:
        raise expected.error("is not dense", suggestion="pass x.to_dense()")
    if value.dtype is not TORCH_TYPES[expected.dtype]:
        raise expected.error(f"has elements of type {str(value.dtype).removeprefix('torch.')}")
    if value.ndim != len(expected.dims):
        raise expected.error(
            f"has {value.ndim} dimensions instead of {len(expected.dims)}", found=f"a shape of {tuple(value.shape)}"
        )
    plain = value.detach().resolve_neg()
    return torch.zeros_like(plain, device=device) if plain._is_zerotensor() else plain


def empty_output(bound: BoundFunction, name: str, device: torch.device) -> Tensor:
    t = bound.tensor(name)
    try:
        return torch.empty(t.shape, dtype=TORCH_TYPES[t.dtype], device=device)
    except RuntimeError as error:
        raise ArgumentError(f"there is no memory for '{name}' of {bound.name} on {device}: {error}") from error


def check_out_on_device(
    bound: BoundFunction, arguments: Arguments, out: object, device: torch.device
) -> tuple[Tensor, ...]:
    """Check `out`, and return one tensor on `device` for each output. Raises ArgumentError."""
    given = out if isinstance(out, tuple | list) else (out,)
    if len(given) != len(bound.returns):
        raise ArgumentError(
            f"'out' of {bound.name} has {len(given)} tensors", expected=f"{len(bound.returns)}: {bound.returns}"
        )
    tensors: list[Tensor] = []
    for name, x in zip(bound.returns, given, strict=True):
        wanted = bound.tensor(name)
        _check_destination(bound.name, wanted, x, device)
        assert isinstance(x, Tensor)
        initial = dict(zip((t.name for t in bound.tensors if t.role is Role.INOUT), arguments.initial, strict=True))
        others = [
            *arguments.inputs,
            *tensors,
            *(v for n, v in initial.items() if n != name or not is_same_storage(v, x)),
        ]
        if any(_may_overlap(x, other) for other in others):
            raise ArgumentError(
                f"the destination of '{name}' of {bound.name} shares memory with another argument",
                suggestion="leave 'out' away, or pass a tensor of its own",
            )
        tensors.append(x)
    return tuple(tensors)


def _check_destination(op: str, wanted: BoundTensor, x: object, device: torch.device) -> None:
    expected = ParameterSpec(op, f"out ({wanted.name})", wanted.dtype, tuple(map(str, wanted.shape)))
    if not isinstance(x, Tensor):
        raise expected.error(
            f"is {with_article(type(x).__name__)}", suggestion="pass a torch tensor of the output's shape"
        )
    tensor = to_device_tensor(device, expected, x)
    if tuple(tensor.shape) != wanted.shape:
        raise expected.error("has another shape than the output", found=f"a shape of {tuple(tensor.shape)}")
    if overlaps_itself(tensor):
        raise expected.error("has elements that share memory", suggestion="pass x.clone()")


def _may_overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the byte ranges that two tensors on one device span overlap."""

    def stretch(t: Tensor) -> tuple[int, int]:
        return t.data_ptr(), t.data_ptr() + storage_extent(t.shape, t.stride()) * t.element_size()

    if not x.numel() or not y.numel():
        return False
    (low, high), (other_low, other_high) = stretch(x), stretch(y)
    return low < other_high and other_low < high
