"""Random programs over the whole language: every way to run them gives what the reference evaluator gives.

`pytest --long` runs a hundred times as many.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc
from tensor_comprehensions.codegen.llvm import llvm_printer
from tensor_comprehensions.compiler.compiled_kernel import PassContext
from tensor_comprehensions.compiler.cpu_passes import PASSES, with_original_names
from tensor_comprehensions.core.dtypes import BFLOAT16, DType
from tensor_comprehensions.dispatch.call_steps import canonical_strides, normalize_arguments, shapes_of, with_strides
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.options import FUSION_STRATEGIES, CpuOptions
from tensor_comprehensions.runtime.cpu import host_symbols
from tensor_comprehensions.runtime.cpu.host import host
from tensor_comprehensions.target import AVX2, AVX512

from ..helpers.anywhere import SSE2, interpret_module
from ..helpers.wide_programs import WideProgram, wide_program

NEAR = replace(host(), cache=(1024, 4096, 16384))
"""So small that what programs touch is far more, and is read and written as large tensors are."""
FAR = replace(host(), name="skylake-avx512", cache=(512, 2048, 1 << 30))
EVERYWHERE = (host(), NEAR, AVX2, SSE2, FAR, AVX512)
RUNNABLE = [t for t in EVERYWHERE if t.runs_here()]
RANDOMS = st.randoms(use_true_random=False, note_method_calls=False)
EVERY = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=settings.default.max_examples * 2 // 5
)
SOME = settings(EVERY, max_examples=max(1, EVERY.max_examples // 5))


# --- what a program is called with ------------------------------------------------------------------------------


def values(r: Random, program: WideProgram, dtype: DType, shape: tuple[int, ...], indexes: bool) -> torch.Tensor:
    """A tensor of small numbers; of integers sometimes the extremes, of floats sometimes NaN and infinities."""
    rng = np.random.default_rng(r.randrange(2**32))
    if indexes:
        x = rng.integers(0, 4, shape).astype(dtype.name)
    elif dtype.is_bool:
        x = rng.integers(0, 2, shape).astype(bool)
    elif dtype.is_integer:
        limits = np.iinfo(dtype.name)
        low, high = (limits.min, limits.max) if r.random() < 0.3 else (max(limits.min, -5), 5)
        x = rng.integers(low, high, shape, dtype=dtype.name, endpoint=True)
    elif program.smooth:
        x = rng.uniform(-2, 2, shape)
    else:
        x = rng.integers(-3, 4, shape).astype(np.float64)
        if program.special and x.size:
            x = np.where(rng.uniform(size=shape) < 0.1, rng.choice([np.nan, np.inf, -np.inf, -0.0], shape), x)
    if dtype.is_float:
        return torch.from_numpy(np.array(x)).to(torch.bfloat16 if dtype == BFLOAT16 else getattr(torch, dtype.name))
    return torch.from_numpy(np.array(x))


def laid_out(r: Random, x: torch.Tensor) -> torch.Tensor:
    """`x` at other places: permuted, every second or third element of something larger, or one element many times."""
    kind = r.choice(("as it is", "as it is", "permuted", "stepped", "expanded"))
    if not x.ndim or not x.numel() or kind == "as it is":
        return x
    if kind == "permuted":
        order = r.sample(range(x.ndim), x.ndim)
        return x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])
    if kind == "expanded":
        return x.narrow(r.randrange(x.ndim), 0, 1).expand(x.shape)
    steps = [r.choice((1, 2, 3)) for _ in x.shape]
    large = torch.zeros([2 + n * s for n, s in zip(x.shape, steps, strict=True)], dtype=x.dtype)
    part = large[tuple(slice(2, 2 + n * s, s) for n, s in zip(x.shape, steps, strict=True))]
    part.copy_(x)
    return part


def arguments(r: Random, program: WideProgram) -> tuple[list[Any], dict[str, torch.Tensor]]:
    tensors = [laid_out(r, values(r, program, dtype, shape, ix)) for _, dtype, shape, ix in program.inputs]
    initial = {name: laid_out(r, values(r, program, dtype, shape, ix)) for name, dtype, shape, ix in program.inout}
    return [*tensors, *(value for _, value in program.scalars)], initial


def options(r: Random) -> CpuOptions:
    return CpuOptions(
        fusion=r.choice(FUSION_STRATEGIES),
        tile=r.choice(((), (), (1,), (4,), (8, 3), (0, 5, 2))),
        interleave=r.choice((0, 0, 1, 3)),
        grain_size=r.choice((32768, 0, 1, 64)),
        use_microkernels=r.random() < 0.6,
        localize_temporaries=r.random() < 0.6,
        split_k=r.choice((0, 0, 1, 2, 5)),
    )


# --- what must come out -----------------------------------------------------------------------------------------


def outcome(call: Any, *tensors: Any, **initial: Any) -> tuple[torch.Tensor, ...] | tuple[str, ...]:
    """The outputs, or what the error says was expected and found."""
    try:
        result = call(*tensors, **initial)
    except tc.RangeError as error:
        return tuple(line.strip() for line in str(error).splitlines() if line.strip().startswith(("expected", "found")))
    return result if isinstance(result, tuple) else (result,)


def check_equal(program: WideProgram, found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        if isinstance(x, str) or isinstance(y, str):
            assert x == y
            continue
        narrow = "float16" in program.source  # bfloat16 as well
        tolerance = (0.1 if narrow else 2e-3) if program.smooth and x.dtype.is_floating_point else 0.0
        wide = torch.float64 if x.dtype.is_floating_point else None
        a, b = (v.to(wide).numpy() if wide else v.numpy() for v in (x, y))
        assert x.dtype == y.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def draw_program(r: Random) -> tuple[WideProgram, tc.Op, list[Any], dict[str, torch.Tensor]]:
    """A program that the language takes, and the arguments of a call."""
    program = wide_program(r)
    tensors, initial = arguments(r, program)
    try:
        op = tc.define(program.source).f
        op.infer(*(t if isinstance(t, int) else tuple(t.shape) for t in tensors), **initial)
    except tc.TCError:
        reject()
    return program, op, tensors, initial


@EVERY
@given(RANDOMS)
def test_compiled(r: Random) -> None:
    program, op, tensors, initial = draw_program(r)
    expected = outcome(op.reference, *tensors, **initial)
    kernel = op.compile(*tensors, options=options(r), target=r.choice(RUNNABLE), **initial)
    check_equal(program, outcome(kernel, *tensors, **initial), expected)
    check_equal(program, outcome(kernel, *tensors, **initial), expected)  # by the short way


@SOME
@given(RANDOMS)
def test_interpreted_after_every_pass(r: Random) -> None:
    """With the interpreter's checks: no race, no element out of bounds, no read of what nothing wrote."""
    program, op, tensors, initial = draw_program(r)
    expected = outcome(op.reference, *tensors, **initial)
    given_ = normalize_arguments(op._kernels.call_signature, tensors, initial)
    bound = op._kernels.bind(shapes_of(op.function, given_))
    value: Any = with_strides(bound, [canonical_strides(x) for x in given_.inputs])
    job = PassContext(options(r), r.choice(EVERYWHERE))
    initials = dict(zip([p.name for p in op.function.inouts], given_.initial, strict=True))
    inputs = dict(zip([p.name for p in op.function.parameters], given_.inputs, strict=True))
    for step in PASSES:
        if step.name == "emit":
            break
        value = step.run(value, job)
        if step.name in ("simplify", "partition", "vectorize", "simplify_again"):
            check_interpreted(
                program, with_original_names(value, bound), inputs | initials, op.function.returns, expected
            )


def check_interpreted(
    program: WideProgram, module: Module, given_: dict[str, torch.Tensor], returns: Sequence[str], expected: Any
) -> None:
    arrays, failures = interpret_module(module, given_)
    assert bool(failures) == (bool(expected) and isinstance(expected[0], str))
    if not failures:
        pairs = zip(returns, expected, strict=True)
        found = [torch.from_numpy(arrays[n]).reshape(e.shape).to(e.dtype) for n, e in pairs]
        check_equal(program, found, expected)


def emit_kernel_text(seed: int) -> str:
    """The text of a program's kernel, as any process must make it."""
    r = Random(seed)
    program = wide_program(r)
    tensors, initial = arguments(r, program)
    try:
        op = tc.define(program.source).f
        given_ = normalize_arguments(op._kernels.call_signature, tensors, initial)
        value: Any = op._kernels.bind(shapes_of(op.function, given_))
    except tc.TCError as error:
        return str(error)
    for step in PASSES:
        if step.name == "emit":
            break
        value = step.run(value, PassContext(options(r), AVX2))
    return llvm_printer.emit_llvm(value, AVX2, host_symbols.vector_functions())


def test_the_emitted_text_does_not_depend_on_hash_seeds() -> None:
    """It is the same in another process as in this one, whose seed is random."""
    program = f"from {__name__} import emit_kernel_text\nprint(*map(emit_kernel_text, range(6)), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], env=os.environ | {"PYTHONHASHSEED": "1"},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.count("define") > 3
    assert done.stdout == "\n".join([*map(emit_kernel_text, range(6)), ""])
