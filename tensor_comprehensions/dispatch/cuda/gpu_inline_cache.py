"""The fast path of a call on a CUDA device: the kernels of earlier calls, found by the arguments alone.

Invariant: an entry only accepts calls for which the slow path (`GpuKernelTable.call`) would give the same result.
Nothing here waits for the device, unless the kernel has checks to report.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.memory_layout import storage_extent
from ...runtime.cuda import launch
from ...runtime.cuda.launch import CudaLauncher
from ..arguments import TORCH_TYPES, ParameterSpec, to_tensor
from ..call_steps import Arguments, CallSignature, copy_tensor
from ..inline_cache import LIMIT, MISS, is_plain_call


@dataclass(frozen=True, slots=True, eq=False)
class CachedGpuCall:
    """A launcher for calls with one layout. spans: the bytes that each tensor spans."""

    launcher: CudaLauncher
    spans: tuple[int, ...]


class GpuInlineCache:
    """The cached calls of one operator on one device.

    They are found by layouts, by the values of specialized numbers, and by whether a call passes `out`.
    """

    def __init__(self, call_signature: CallSignature, device: torch.device) -> None:
        function = call_signature.function
        self._device, self._count = device, len(call_signature.parameters)
        self._numbers = [(n, p, _list_accepted_types(p)) for n, p in enumerate(call_signature.parameters) if not p.dims]
        self._special = tuple(n for n, p in enumerate(function.parameters) if p.is_compile_time)
        self._initial = tuple(p.name for p in function.inouts)
        self._sources = tuple(self._initial.index(r) if r in self._initial else None for r in function.returns)
        self.only_tensors = not self._numbers and not self._initial
        self._last: dict[Hashable, CachedGpuCall] = {}
        self._known: dict[Hashable, CachedGpuCall] = {}
        self._constants: dict[Hashable, Tensor] = {}

    def direct_function(self) -> Callable[..., Any] | None:
        """A function for calls like the last one, if `only_tensors` holds; it returns NotImplemented for others."""
        cached = self._last.get(((), False)) if self.only_tensors else None
        if cached is None:
            return None
        call = cached.launcher.call
        return lambda *tensors: call(*tensors) if is_plain_call(tensors) else NotImplemented

    def call(self, tensors: Sequence[Any], out: Any, initial: Mapping[str, Any]) -> Any:
        """The result of a call, or MISS."""
        if len(tensors) != self._count or len(initial) != len(self._initial):
            return MISS
        special = tuple([tensors[n] for n in self._special])
        if any(type(value) is not int for value in special):  # a tensor's value may change
            return MISS
        tensors = self.with_numbers(tensors) if self._numbers else tensors
        values: list[Any] = [initial.get(name) for name in self._initial]
        wanted = () if out is None else out if type(out) is tuple else (out,)
        everything = (*tensors, *values, *wanted)
        cached = self._find((special, bool(wanted)), everything)
        if cached is None or not is_plain_call(everything):
            return MISS
        if not (values or wanted):
            return cached.launcher(*tensors)
        if wanted:
            if not self._has_no_alias(cached, everything):
                return MISS
            for x, source in zip(wanted, self._sources, strict=True):
                if source is not None and values[source] is not x:
                    copy_tensor(values[source], x)
            cached.launcher.run(*tensors, *wanted)
            torch._C._increment_version(wanted)
            return out
        made = cached.launcher.allocate_outputs()
        for x, source in zip(made, self._sources, strict=True):
            if source is not None:
                x.copy_(values[source])
        cached.launcher.run(*tensors, *made)
        return made[0] if len(made) == 1 else tuple(made)

    def add(self, launcher: CudaLauncher, arguments: Arguments, special: Sequence[int], out: Sequence[Tensor]) -> None:
        """Cache the call for others like one that has succeeded, which wrote to `out` if there is any."""
        tensors = (*arguments.inputs, *arguments.initial, *out)
        kind = (tuple(special), bool(out))
        if len(self._known) >= LIMIT:
            self._known.clear()
        cached = CachedGpuCall(launcher, tuple(map(_compute_span_bytes, tensors)))
        self._last[kind] = self._known[kind, _make_layout_key(tensors)] = cached

    def with_numbers(self, values: Sequence[Any]) -> list[Any]:
        """`values` with Python numbers replaced by tensors on the device.

        Calls with the same number on the same stream share a tensor; a CUDA graph under capture gets its own.
        """
        tensors = list(values)
        place = None if launch.is_capturing() else launch.current_stream(self._device.index)
        for n, wanted, types in self._numbers:
            value = values[n]
            if type(value) in types:
                key = (n, place, value or str(value))  # 0.0 and -0.0 are equal
                found = None if place is None else self._constants.get(key)
                if found is None:
                    found = scalar_to_device(self._device, wanted, value)
                    if len(self._constants) >= LIMIT:
                        self._constants.clear()
                    if place is not None:
                        self._constants[key] = found
                tensors[n] = found
        return tensors

    def _find(self, kind: Hashable, everything: Sequence[Any]) -> CachedGpuCall | None:
        cached = self._last.get(kind)
        if cached is not None and cached.launcher.accepts(*everything):
            return cached
        try:
            cached = self._known.get((kind, _make_layout_key(everything)))
        except (AttributeError, RuntimeError, TypeError):  # some arguments are not dense tensors
            return None
        if cached is not None and cached.launcher.accepts(*everything):
            self._last[kind] = cached
            return cached
        return None

    def _has_no_alias(self, cached: CachedGpuCall, everything: Sequence[Tensor]) -> bool:
        """Whether no destination overlaps the memory of another argument, except its own initial value."""
        places = [(x.data_ptr(), x.data_ptr() + n) for x, n in zip(everything, cached.spans, strict=True)]
        first = len(places) - len(self._sources)
        for n, (start, stop) in enumerate(places[first:], first):
            source = self._sources[n - first]
            for other, (begin, end) in enumerate(places[:n]):
                if begin < stop and start < end and not (source is not None and other == self._count + source):
                    return False
                if begin < stop and start < end and everything[other] is not everything[n]:
                    return False
        return True


def scalar_to_device(device: torch.device, wanted: ParameterSpec, value: object) -> Tensor:
    """A number as a 0-d tensor on a device, without a device sync. Raises ArgumentError if `wanted` does not fit it."""
    number = to_tensor(wanted, value)
    return torch.full((), number.item(), dtype=TORCH_TYPES[wanted.dtype], device=device)


def _list_accepted_types(expected: ParameterSpec) -> tuple[type, ...]:
    return (bool,) if expected.dtype.is_bool else (int,) if expected.dtype.is_integer else (float, int)


def _make_layout_key(tensors: Sequence[Any]) -> Hashable:
    return tuple([(x.dtype, x.shape, x.stride()) for x in tensors])


def _compute_span_bytes(x: Tensor) -> int:
    return storage_extent(x.shape, x.stride()) * x.element_size()
