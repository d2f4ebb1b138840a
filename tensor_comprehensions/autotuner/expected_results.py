"""The expected results of a def on given inputs, with error bounds for candidates.

The reference evaluator computes them if it is fast enough. Otherwise the default kernel does, after the reference
evaluator has confirmed it at smaller sizes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from ..compiler.compiled_kernel import CompiledCpuKernel
from ..compiler.cpu_passes import compile_function
from ..core.errors import CannotLower, InternalError, RangeError, TCError
from ..core.memory_layout import contiguous_strides
from ..dispatch.arguments import TORCH_TYPES
from ..options import CpuOptions
from ..runtime.cpu.host import host
from ..tc_lang.binding.ranges import output_shapes
from ..tc_lang.ir import Const, Role, Size
from ..tc_lang.reference import evaluator as reference
from . import tuner_pb2 as pb
from .problem import KINDS, Problem, fill_inputs
from .timing import LoadedCandidate, ProblemMemory, TimedLaunch

MAX_REFERENCE_POINTS = 1 << 25
"""The maximum number of points for the reference evaluator, which computes them in a second or two."""
MAX_ROUNDING_ERRORS = 32
"""The rounding errors that are allowed, for any order of summation, relative to the largest element times the square
root of the longest sum.
"""
DEFAULT_TOLERANCE_FACTOR = 1 << 8
"""The multiple of the usual tolerance beyond which the default kernel is wrong; cancellation takes it above 1."""
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True, slots=True)
class ExpectedOutputs:
    """The correct outputs, and for each the absolute error that its elements may have."""

    outputs: tuple[Tensor, ...]
    allowed: tuple[float, ...]

    def fault(self, outputs: Sequence[Tensor]) -> tuple[pb.Status, str] | None:
        """The status and a description of the first wrong output, or None."""
        for number, (x, right, allowed) in enumerate(zip(outputs, self.outputs, self.allowed, strict=True)):
            problem = find_fault(x, right, allowed)
            if problem is not None:
                return problem[0], f"output {number}: {problem[1]}"
        return None


def find_fault(x: Tensor, right: Tensor, allowed: float) -> tuple[pb.Status, str] | None:
    """The status and a description if an element of `x` differs from `right` by more than `allowed`, else None."""
    if not x.dtype.is_floating_point:
        a, b = (t.view(torch.uint8) if t.dtype is torch.bool else t for t in (x, right))
        wrong = int((a != b).sum())
        return (pb.WRONG_RESULT, f"{wrong} of {x.numel()} elements are wrong") if wrong else None
    if not x.numel():
        return None
    low, high = map(float, (x - right).aminmax())
    if -allowed <= low and high <= allowed:  # then neither bound is infinite or NaN
        return None
    finite = right.isfinite()
    strange = int((~x.isfinite() & finite).sum())
    if strange:
        return pb.NAN, f"{strange} of {x.numel()} elements are not finite and should be"
    if not bool(((x == right) | (x.isnan() & right.isnan()) | finite).all()):
        return pb.WRONG_RESULT, "an element should not be finite"
    off = max_deviation(x, right)
    return (pb.WRONG_RESULT, f"an element is off by {off:.3g}, allowed {allowed:.3g}") if off > allowed else None


def max_deviation(x: Tensor, right: Tensor) -> float:
    """The largest absolute difference of finite elements; 0 for integers."""
    if not x.numel() or not x.dtype.is_floating_point:
        return 0.0
    difference = (x - right).abs_() if x.dtype is right.dtype else (x.to(right.dtype) - right).abs_()
    return float(difference.nan_to_num_(0.0, 0.0, 0.0).max())


class OutputOracle:
    """Computes the correct results of one problem; caches them in memory and, for other workers, in `folder`."""

    def __init__(self, problem: Problem, folder: Path | None) -> None:
        self.problem, self.folder = problem, folder
        self._known: dict[tuple[str, int], ExpectedOutputs] = {}
        self._default: CompiledCpuKernel | None = None
        self._verified = False

    def expected_outputs(self, memory: ProblemMemory, kind: str, seed: int) -> ExpectedOutputs:
        """The expected outputs for the inputs in `memory`, which were filled for `kind` and `seed`.

        Raises InternalError if the default kernel is wrong, RangeError if the inputs lead out of a tensor.
        """
        known = self._known.get((kind, seed)) or self._load(kind, seed)
        if known is None:
            known = self._compute_expected(memory)
            self._save(known, kind, seed)
        if seed == 0:
            self._known[kind, seed] = known
        return known

    def _compute_expected(self, memory: ProblemMemory) -> ExpectedOutputs:
        if self.problem.points <= MAX_REFERENCE_POINTS:
            outputs = reference_outputs(memory)
            return ExpectedOutputs(outputs, self._allowed_deviations(memory, outputs))
        if not self._verified:
            verify_small(self.problem)
            self._verified = True
        outputs = self._run_default_kernel(memory)
        return ExpectedOutputs(outputs, tuple(allow_rounding(x, self.problem.longest_sum) for x in outputs))

    def _run_default_kernel(self, memory: ProblemMemory) -> tuple[Tensor, ...]:
        if self._default is None:
            bound = self.problem.bound
            self._default = compile_function(bound, self.problem.message.source, CpuOptions(), host())
        failed = TimedLaunch(
            LoadedCandidate(self._default.executable, self._default.temporaries), memory
        ).run_with_poisoned_outputs()
        if failed:
            raise RangeError(f"the inputs of {self.problem.function.name} lead out of a tensor")
        return tuple(x.clone() for x in memory.outputs)

    def _allowed_deviations(self, memory: ProblemMemory, outputs: Sequence[Tensor]) -> tuple[float, ...]:
        """For each output the usual tolerance, or 4 times the error of the default kernel if that is larger."""
        allowed = []
        for mine, right in zip(self._run_default_kernel(memory), outputs, strict=True):
            usual, off = allow_rounding(right, self.problem.longest_sum), max_deviation(mine, right)
            fault = find_fault(mine, right, DEFAULT_TOLERANCE_FACTOR * usual)
            if fault is not None:
                raise InternalError(f"the default kernel of {self.problem.function.name} is wrong: {fault[1]}")
            allowed.append(max(usual, 4 * off))
        return tuple(allowed)

    # --- files shared with other workers ---

    def _path(self, kind: str, seed: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{self.problem.digest}_{kind}_{seed}.npz"

    def _load(self, kind: str, seed: int) -> ExpectedOutputs | None:
        path = self._path(kind, seed)
        if path is None or not path.exists():
            return None
        bound = self.problem.bound
        with np.load(path, allow_pickle=False) as arrays:
            outputs = []
            for number, name in enumerate(bound.returns):
                t = bound.tensor(name)
                raw = torch.from_numpy(arrays[f"output{number}"])
                outputs.append(raw.view(TORCH_TYPES[t.dtype]).reshape(t.shape))
            return ExpectedOutputs(tuple(outputs), tuple(map(float, arrays["allowed"])))

    def _save(self, known: ExpectedOutputs, kind: str, seed: int) -> None:
        path = self._path(kind, seed)
        if path is None or seed:
            return
        arrays = {f"output{n}": x.reshape(-1).view(torch.uint8).numpy() for n, x in enumerate(known.outputs)}
        unfinished = path.with_suffix(f".{uuid4().hex}.tmp")
        with unfinished.open("wb") as f:
            np.savez(f, allow_pickle=False, allowed=np.array(known.allowed), **arrays)
        os.replace(unfinished, path)


def allow_rounding(right: Tensor, longest_sum: int) -> float:
    """The usual tolerance of an output: some rounding errors of its type, more in longer sums; 0 for integers."""
    digits = _DIGITS.get(right.dtype)
    if digits is None or not right.numel():
        return 0.0
    largest = float(right.abs().nan_to_num_(0.0, 0.0, 0.0).max())
    return max(1e-30, largest) * MAX_ROUNDING_ERRORS * sqrt(longest_sum) * 2.0**-digits


def reference_outputs(memory: ProblemMemory) -> tuple[Tensor, ...]:
    """The results of the reference evaluator for the inputs in `memory`. Raises RangeError."""
    bound = memory.problem.bound
    names = [t.name for role in (Role.INPUT, Role.INOUT) for t in bound.tensors if t.role is role]
    arrays = {
        name: (x.float() if x.dtype is torch.bfloat16 else x).numpy()
        for name, x in zip(names, memory.inputs, strict=True)
    }
    values = reference.evaluate_def(bound, arrays)
    return tuple(
        torch.from_numpy(np.array(values[name], order="C")).to(TORCH_TYPES[bound.tensor(name).dtype])
        for name in bound.returns
    )


# --- smaller sizes -----------------------------------------------------------------------------------------------


def verify_small(problem: Problem) -> None:
    """Compare the default kernel with the reference evaluator at sizes small enough for it. Raises InternalError."""
    small = shrink_problem(problem)
    for kind in KINDS:
        memory = ProblemMemory(small)
        fill_inputs(memory.inputs, small, kind, 0)
        OutputOracle(small, None).expected_outputs(memory, kind, 0)


def shrink_problem(problem: Problem) -> Problem:
    """The problem with its largest sizes halved until the reference evaluator is quick."""
    sizes = _collect_size_values(problem)
    small = problem
    while small.points > MAX_REFERENCE_POINTS:
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[largest] < 2:
            break
        for divisor in (2, 3, 4):  # one size may be illegal and another legal
            attempt = {**sizes, largest: max(1, sizes[largest] // divisor)}
            try:
                small = _resize_problem(problem, attempt)
                small.bound  # noqa: B018 - do the sizes fit?
            except (TCError, CannotLower):
                continue
            sizes = attempt
            break
        else:
            break
    return small


def _collect_size_values(problem: Problem) -> dict[str, int]:
    found: dict[str, int] = {}
    symbols = (*problem.function.parameters, *problem.function.inouts)
    for symbol, t in zip(symbols, problem.tensors, strict=True):
        for extent, n in zip(symbol.extents or (), t.shape, strict=False):
            if isinstance(extent, Size):
                found[extent.name] = n
    return found


def _resize_problem(problem: Problem, sizes: dict[str, int]) -> Problem:
    function = problem.function
    scalars = {
        p.name: int.from_bytes(t.values, "little", signed=True)
        for p, t in zip(function.parameters, problem.message.inputs, strict=True)
        if p.is_compile_time
    }
    shapes = output_shapes(function, sizes, scalars)
    limit = min(sizes.values(), default=1)

    def shape(symbol: object, t: pb.Tensor) -> list[int]:
        name, extents = symbol.name, symbol.extents  # type: ignore[attr-defined]
        if extents is None:
            return list(shapes[name])
        return [sizes[e.name] if isinstance(e, Size) else int(e.value) if isinstance(e, Const) else n
                for e, n in zip(extents, t.shape, strict=True)]  # fmt: skip

    message = pb.Problem()
    message.CopyFrom(problem.message)
    for symbols, tensors in ((function.parameters, message.inputs), (function.inouts, message.initial)):
        for symbol, t in zip(symbols, tensors, strict=True):
            _resize_tensor(t, shape(symbol, t), limit)
    return Problem(message)


def _resize_tensor(t: pb.Tensor, shape: Sequence[int], limit: int) -> None:
    if list(shape) == list(t.shape):
        return
    if t.HasField("values"):
        whole = np.frombuffer(t.values, np.dtype({"bool": "uint8"}.get(t.dtype, t.dtype))).reshape(tuple(t.shape))
        part = whole[tuple(slice(n) for n in shape)]
        t.values = np.ascontiguousarray(part if t.dtype == "bool" else part % max(1, limit)).tobytes()
    t.ClearField("shape")
    t.ClearField("strides")
    t.shape.extend(shape)
    t.strides.extend(contiguous_strides(shape))
