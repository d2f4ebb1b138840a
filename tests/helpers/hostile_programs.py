"""Random programs whose names are those that lowering gives: they compute what the reference evaluator says."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

import tensor_comprehensions as tc
from tensor_comprehensions.options import MappingOptions

from ..core.test_wide_programs import arguments, check_equal, options, outcome
from .renaming import SAMPLES, SM90, hostile, rename_program
from .wide_programs import wide_program


def check_hostile_program(r: Random) -> None:
    """Draw a program and compare what it computes; half of them are such as lowering has most names for."""
    if r.random() < 0.5:
        _check_sample(r)
    else:
        _check_wide(r)


def _check_sample(r: Random) -> None:
    source, sizes = r.choice(SAMPLES)
    text, _ = rename_program(source, hostile(r), "f")
    sizes = {n: max(1, r.choice((1, 1, 2)) * min(size, 130) // r.choice((1, 1, 2, 3))) for n, size in sizes.items()}
    op = tc.define(text).f
    function = tc.define(source).f.function
    tensors = [_values(p, sizes, r) for p in function.parameters]
    initial = {own.name: _values(p, sizes, r) for p, own in zip(function.inouts, op.function.inouts, strict=True)}
    _check(text, op, r, tensors, initial, lambda found, expected: _close(found, expected))


def _values(p: Any, sizes: dict[str, int], r: Random) -> torch.Tensor:
    shape = tuple(sizes[e.name] for e in p.extents)
    generator = torch.Generator().manual_seed(r.randrange(2**32))
    if p.dtype.is_integer:
        return torch.randint(0, max(1, sizes["M"]), shape, generator=generator)
    return torch.randint(-3, 4, shape, generator=generator).to(getattr(torch, p.dtype.name))


def _check_wide(r: Random) -> None:
    program = wide_program(r)
    text, names = rename_program(program.source, hostile(r), "f")
    tensors, initial = arguments(r, program)
    initial = {names[name]: value for name, value in initial.items()}
    try:
        op = tc.define(text).f
        op.infer(*(t if isinstance(t, int) else tuple(t.shape) for t in tensors), **initial)
    except tc.TCError:
        return
    _check(text, op, r, tensors, initial, lambda found, expected: check_equal(program, found, expected))


def _check(text: str, op: Any, r: Random, tensors: Sequence[Any], initial: dict[str, Any], compare: Any) -> None:
    expected = outcome(op.reference, *tensors, **initial)
    try:
        kernel = op.compile(*tensors, options=options(r), **initial)
        compare(outcome(kernel, *tensors, **initial), expected)
        if r.random() < 0.1:
            assert all(kernel.source(kind) for kind in ("schedule", "loops", "c"))
        if r.random() < 0.1:  # with its checks of every name
            mapping = r.choice((None, MappingOptions(tile=(8, 8, 8), threads=(8, 4), shared_memory=True)))
            op.compile(*tensors, options=mapping, target=SM90, **initial)
    except Exception as error:
        if not isinstance(error, tc.ArgumentError) or "cannot be mapped" not in str(error):
            raise AssertionError(f"{text}\n{error}") from error


def _close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2 if x.dtype is torch.float16 else 1e-5, atol=1e-2)
