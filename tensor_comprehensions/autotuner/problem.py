"""Tuning problems: a def with the layouts of its arguments as a message, and how a worker rebuilds it.

Invariant: the same message gives the same inputs in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ArgumentError
from ..core.memory_layout import storage_extent
from ..dispatch.arguments import TORCH_TYPES
from ..dispatch.call_steps import Arguments, ArgumentShapes, CallSignature, bind_sizes, canonical_strides, with_strides
from ..tc_lang import compile_source
from ..tc_lang.ir import BoundFunction, Function
from . import tuner_pb2 as pb

MAX_VALUE_BYTES = 1 << 27
"""The maximum bytes of the values of one argument in a message."""


def problem_message(function: Function, arguments: Arguments, seed: int) -> pb.Problem:
    """The message for a call with `arguments`: integer tensors and scalars include their values, others do not.

    Raises ArgumentError if there are too many values.
    """
    return pb.Problem(
        source=function.source,
        name=function.name,
        inputs=[_tensor_to_message(x) for x in arguments.inputs],
        initial=[_tensor_to_message(x) for x in arguments.initial],
        seed=seed,
    )


def _tensor_to_message(x: Tensor) -> pb.Tensor:
    message = pb.Tensor(dtype=_get_dtype_name(x.dtype), shape=x.shape, strides=canonical_strides(x))
    if not x.dtype.is_floating_point or not x.ndim:
        size = x.numel() * x.element_size()
        if size > MAX_VALUE_BYTES:
            raise ArgumentError(f"an argument has {size} bytes of subscripts", expected=f"at most {MAX_VALUE_BYTES}")
        message.values = _raw_bytes(x.detach().contiguous()).numpy().tobytes()
    return message


def _get_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _raw_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return x.reshape(-1).view(torch.uint8) if x.dtype is not torch.bool else x.reshape(-1).to(torch.uint8)


@dataclass(frozen=True)
class Problem:
    """A problem that a worker rebuilds from its message."""

    message: pb.Problem

    @cached_property
    def digest(self) -> str:
        """A hash of the problem, including its values and seed."""
        return sha256(self.message.SerializeToString(deterministic=True)).hexdigest()[:24]

    @cached_property
    def function(self) -> Function:
        """The def. Raises TCError, or ArgumentError if the program has no def of this name."""
        found = [f for f in compile_source(self.message.source) if f.name == self.message.name]
        if not found:
            raise ArgumentError(f"the program has no def {self.message.name!r}")
        return found[0]

    @property
    def tensors(self) -> tuple[pb.Tensor, ...]:
        """Inputs and then initial values."""
        return (*self.message.inputs, *self.message.initial)

    @cached_property
    def bound(self) -> BoundFunction:
        """The def for these layouts. Raises TCError."""
        sizes = ArgumentShapes(
            tuple(tuple(t.shape) for t in self.message.inputs),
            tuple(tuple(t.shape) for t in self.message.initial),
            tuple(
                (p.name, int(_parse_tensor_values(t)[()]))
                for p, t in zip(self.function.parameters, self.message.inputs, strict=True)
                if p.is_compile_time
            ),
        )
        self._check_types()
        bound = bind_sizes(CallSignature.of(self.function), sizes)
        return with_strides(bound, [tuple(t.strides) for t in self.message.inputs])

    def _check_types(self) -> None:
        symbols = (*self.function.parameters, *self.function.inouts)
        if len(symbols) != len(self.tensors):
            raise ArgumentError(f"{self.function.name} takes {len(symbols)} tensors, not {len(self.tensors)}")
        for symbol, t in zip(symbols, self.tensors, strict=True):
            bad = len(t.shape) != symbol.rank or len(t.strides) != symbol.rank
            if bad or t.dtype != symbol.dtype.name or any(n < 0 for n in (*t.shape, *t.strides)):
                raise ArgumentError(f"'{symbol.name}' of {self.function.name} is described wrongly", found=str(t))

    @property
    def points(self) -> int:
        """The number of statement instances that the reference evaluator computes."""
        return sum(prod(i.extent for i in s.indices) for s in self.bound.statements)

    @property
    def longest_sum(self) -> int:
        """The maximum number of terms that are reduced into one element."""
        return max((prod(i.extent for i in s.reduction_indices) for s in self.bound.statements), default=1) or 1


# --- inputs ------------------------------------------------------------------------------------------------------

KINDS = ("whole", "normal")
"""Inputs for every candidate: small whole numbers, whose sums are exact in any order, and normally distributed ones."""
MORE_KINDS = (*KINDS, "wide")
"""The kinds of inputs for a winner: also magnitudes from a thousandth to a thousand."""
PERIOD = (1 << 22) - 3
"""Elements after which random values repeat: a prime, so that rows and planes differ for all sizes."""


def fill_inputs(memory: Sequence[Tensor], problem: Problem, kind: str, seed: int) -> None:
    """Fill `memory`, the strided tensors of inputs and then of initial values, with values of `kind`.

    Gaps between elements are filled, too.
    """
    for number, (x, t) in enumerate(zip(memory, problem.tensors, strict=True)):
        if t.HasField("values"):
            _copy_values_into(x, _parse_tensor_values(t))
            continue
        generator = torch.Generator().manual_seed((problem.message.seed * 1000003 + seed * 101 + number) & (2**63 - 1))
        flat = x.as_strided((storage_extent(x.shape, x.stride()),), (1,))
        values = _draw_values(kind, min(flat.numel(), PERIOD), generator)
        for start in range(0, flat.numel(), PERIOD):
            part = flat[start : start + PERIOD]
            part.copy_(values[: part.numel()])


def _draw_values(kind: str, count: int, generator: torch.Generator) -> Tensor:
    if kind == "whole":
        return torch.randint(-4, 5, (count,), generator=generator, dtype=torch.int8)
    values = torch.randn(count, generator=generator)
    if kind == "wide":
        values *= torch.pow(10.0, torch.rand(count, generator=generator) * 6 - 3)
    return values


def _copy_values_into(x: Tensor, values: np.ndarray) -> None:
    """Write values into a tensor whose elements may share memory."""
    source = torch.from_numpy(np.array(values))
    if x.dtype is torch.bfloat16:
        x.copy_(source.view(torch.bfloat16))
    else:
        x.numpy()[...] = source.to(x.dtype).numpy()


def _parse_tensor_values(t: pb.Tensor) -> np.ndarray:
    """The values in a message; those of bfloat16 as 16-bit integers. Raises ArgumentError."""
    dtype = np.dtype({"bfloat16": "int16", "bool": "uint8"}.get(t.dtype, t.dtype)).newbyteorder("<")
    if len(t.values) != prod(t.shape) * dtype.itemsize:
        raise ArgumentError("an argument has another number of values than elements")
    return np.frombuffer(t.values, dtype).reshape(tuple(t.shape))


def torch_type(name: str) -> torch.dtype:
    """The torch dtype called `name`. Raises ArgumentError."""
    for dtype in TORCH_TYPES.values():
        if _get_dtype_name(dtype) == name:
            return dtype
    raise ArgumentError(f"there is no type {name!r}")
