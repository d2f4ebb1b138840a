"""Calls of loaded kernels on torch tensors, in about a microsecond: what builtins of `native` do for one kernel."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..dtypes import DType, Kind
from . import native
from .cpu import Executable

_ALIGNMENT = 64
_DLPACK_KINDS = {Kind.SIGNED: 0, Kind.UNSIGNED: 1, Kind.FLOAT: 2, Kind.BOOL: 6}
_BFLOAT = 4


@dataclass(frozen=True, slots=True)
class Operand:
    """The tensors a kernel takes in one place: exactly these sizes and strides, in elements, on the CPU.

    Strides of dimensions of size 1 and of tensors without elements are ignored.
    """

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Launcher:
    """A loaded kernel with the tensors that it takes.

    Usage: `if launcher.accepts(*inputs): outputs = launcher(*inputs)`.

    Attributes:
        accepts: builtin `(*tensors) -> bool`: whether the positional arguments, of any Python types, are ordinary
            dense CPU tensors that fit `inputs` one by one. It never raises.
    """

    __slots__ = ("_allocate", "_arena", "_call", "_fail", "_run", "_single", "accepts", "executable")

    def __init__(
        self,
        executable: Executable,
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        order: Sequence[int],
        temporaries: Sequence[int],
        fail: Callable[[int, int], BaseException],
    ) -> None:
        """Prepare calls.

        Args:
            inputs: the tensors of a call, in order.
            outputs: new tensors that a call makes and returns.
            order: for each of `Module.arguments`, its place among the inputs followed by the outputs.
            temporaries: bytes of each of `Module.temporaries`.
            fail: makes the exception for a failure that the kernel reports, from site + 1 and its value.
        """
        self.executable = executable
        self.accepts: Callable[..., bool] = native.builtin("match", _guards(inputs))
        offsets, self._arena = places(temporaries)
        self._run = native.builtin("run", _plan(executable, order, offsets))
        self._allocate = [_allocator(o) for o in outputs]
        self._single = len(outputs) == 1
        self._fail = fail
        self._call: Callable[..., Any] | None = None
        if self._single and not self._arena:
            plan = _packed([executable.address, len(order), *order]) + _guards(inputs)
            self._call = native.builtin("call", (plan, self._allocate[0], executable))

    @property
    def call(self) -> Callable[..., Any]:
        """A function `(*tensors)`: the launcher's result, or NotImplemented where `accepts` says no.

        For kernels with one output and no temporaries it is a builtin that gives NotImplemented also where the kernel
        fails or there is no memory for the output.
        """
        return self._attempt if self._call is None else self._call

    def _attempt(self, *inputs: torch.Tensor) -> Any:
        return self(*inputs) if self.accepts(*inputs) else NotImplemented

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The output, or a tuple when there are several or none. The inputs must have been accepted."""
        outputs = [allocate() for allocate in self._allocate]
        self.run(*inputs, *outputs)
        return outputs[0] if self._single else tuple(outputs)

    def run(self, *tensors: torch.Tensor) -> None:
        """Run on the inputs followed by the outputs, which must fit the operands and not overlap."""
        if self._arena:
            failure = self._run(*tensors, torch.empty(self._arena, dtype=torch.uint8, device="cpu"))
        else:
            failure = self._run(*tensors)
        if failure is not None:
            raise self._fail(*failure)


def _allocator(o: Operand) -> Callable[[], torch.Tensor]:
    """What makes a new tensor, by the quickest way there is: like one of these sizes whose memory is one element."""
    dtype, cpu = getattr(torch, o.dtype.name), torch.device("cpu")
    if math.prod(o.sizes) > 1:
        model = torch.empty((), dtype=dtype, device=cpu).expand(o.sizes)
        if _strides_like(model) == o.strides:
            return functools.partial(torch.empty_like, model)
    return functools.partial(torch.empty_strided, o.sizes, o.strides, dtype=dtype, device=cpu)


def _strides_like(model: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of `torch.empty_like(model)`; None where there is no memory for it.

    Tensors on torch's "meta" device would tell without memory, but the first of them imports sympy.
    """
    try:
        return torch.empty_like(model).stride()
    except RuntimeError:
        return None


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each temporary starts in one aligned arena, and the bytes of the arena."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, total if not sizes else max(total, 1)


def _guards(inputs: Sequence[Operand]) -> bytes:
    """What `match` compares with: the count; then dtype, rank, sizes, strides of each."""
    words = [len(inputs)]
    for o in inputs:
        kind = _BFLOAT if o.dtype.name == "bfloat16" else _DLPACK_KINDS[o.dtype.kind]
        words += [kind | o.dtype.bits << 8 | 1 << 16, len(o.sizes), *o.sizes]
        empty = 0 in o.sizes
        words += [native.ANY if empty or n == 1 else s for n, s in zip(o.sizes, o.strides, strict=True)]
    return _packed(words)


def _plan(executable: Executable, order: Sequence[int], offsets: Sequence[int]) -> bytes:
    """What `run` does: entry, number of arguments, number of temporaries; the argument at each slot; the offsets."""
    return _packed([executable.address, len(order), len(offsets), *order, *offsets])


def _packed(words: Sequence[int]) -> bytes:
    return struct.pack(f"={len(words)}q", *words)
