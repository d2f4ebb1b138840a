"""Calls of loaded kernels on torch tensors in plain Python: slower than `fastpath`, which may be unavailable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.dtypes import DType
from ...core.memory_layout import storage_extent
from .huge_pages import advise_huge_pages
from .object_code import Executable

_ALIGNMENT = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """The tensors that a kernel accepts as one operand: exactly this type, these sizes, and strides in elements.

    Strides of dimensions of size 1 and of tensors without elements are ignored.
    """

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """The bytes from the first element to the end of the last one."""
        return storage_extent(self.sizes, self.strides) * self.dtype.size


class CpuLauncher:
    """Calls a loaded kernel on torch tensors that fit it.

    Usage: `if launcher.accepts(*inputs): outputs = launcher(*inputs)`.
    """

    __slots__ = ("_arena", "_executable", "_fail", "_inputs", "_offsets", "_order", "_outputs", "_spans")

    def __init__(
        self,
        executable: Executable,
        inputs: Sequence[OperandSpec],
        outputs: Sequence[OperandSpec],
        order: Sequence[int],
        temporaries: Sequence[int],
        fail: Callable[[int, int], BaseException],
    ) -> None:
        """Prepare calls.

        Args:
            inputs: the tensors of a call, in order.
            outputs: new tensors that a call makes and returns.
            order: for each of `Module.arguments`, its index among the inputs followed by the outputs.
            temporaries: bytes of each of `Module.temporaries`.
            fail: makes the exception for a failure that the kernel reports, from site + 1 and its value.
        """
        self._executable = executable
        self._inputs = [(_torch_type(o), o.sizes, _significant_strides(o)) for o in inputs]
        self._spans = [o.span for o in inputs]
        self._outputs = [(_torch_type(o), o.sizes, o.strides) for o in outputs]
        self._order = tuple(order)
        self._offsets, self._arena = arena_offsets(temporaries)
        self._fail = fail

    def accepts(self, *tensors: Any) -> bool:
        """Whether the arguments, of any Python types, are ordinary dense CPU tensors that fit `inputs` one by one."""
        return len(tensors) == len(self._inputs) and all(map(_has_expected_layout, tensors, self._inputs))

    def are_disjoint(self, tensors: Sequence[torch.Tensor], written: int) -> bool:
        """Whether none of the last `written` inputs overlaps the memory of another one."""
        places = [(x.data_ptr(), x.data_ptr() + span) for x, span in zip(tensors, self._spans, strict=True)]
        return not any(
            start < other_stop and other_start < stop
            for n, (start, stop) in enumerate(places[-written:], len(places) - written)
            for other_start, other_stop in places[:n]
        )

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The output, or a tuple when there are several or none. The inputs must have been accepted."""
        outputs = [
            torch.empty_strided(sizes, strides, dtype=dtype, device="cpu") for dtype, sizes, strides in self._outputs
        ]
        for x in outputs:
            advise_huge_pages(x.data_ptr(), x.nbytes)
        self.run(*inputs, *outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def run(self, *tensors: torch.Tensor) -> None:
        """Run on the inputs followed by the outputs, which must fit the operands and not overlap."""
        addresses = [tensors[n].data_ptr() for n in self._order]
        if self._arena:
            arena = torch.empty(self._arena, dtype=torch.uint8, device="cpu")
            base = arena.data_ptr()
            advise_huge_pages(base, self._arena)
            addresses += [base + offset for offset in self._offsets]
        failed, value = self._executable(addresses)
        if failed:
            raise self._fail(failed, value)


def _torch_type(o: OperandSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, o.dtype.name)
    return dtype


def _significant_strides(o: OperandSpec) -> tuple[tuple[int, int], ...]:
    """(dimension, stride) for each dimension whose stride matters."""
    if 0 in o.sizes:
        return ()
    return tuple((d, s) for d, (n, s) in enumerate(zip(o.sizes, o.strides, strict=True)) if n != 1)


def _has_expected_layout(x: Any, wanted: tuple[torch.dtype, tuple[int, ...], tuple[tuple[int, int], ...]]) -> bool:
    dtype, sizes, strides = wanted
    if not is_plain_cpu_tensor(x) or x.dtype is not dtype or x.shape != sizes:
        return False
    found = x.stride()
    return all(found[d] == s for d, s in strides)


def is_plain_cpu_tensor(x: Any) -> bool:
    """Whether `x` is an ordinary dense tensor on the CPU whose memory holds its values."""
    if type(x) not in _PLAIN or x.layout is not torch.strided or not x.is_cpu:
        return False
    return not (x.is_neg() or x._is_zerotensor() or _is_wrapped(x))


_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def arena_offsets(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The offset of each temporary in one aligned arena, and the bytes of the arena."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return tuple(offsets), total if not sizes else max(total, 1)
