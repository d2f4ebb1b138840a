"""Random programs over the whole language, mapped as random options say: the emulator gives what the reference does."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings

from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target

from ..core import test_wide_programs as wide
from ..helpers.gpu_suite import random_options

TARGET = parse_gpu_target("cuda:sm_90")


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler")
@settings(wide.SOME, max_examples=max(1, wide.SOME.max_examples // 2))
@given(wide.RANDOMS)
def test_emulated(r: Random) -> None:
    program, op, tensors, initial = wide.draw_program(r)
    expected = wide.outcome(op.reference, *tensors, **initial)
    options = r.choice((None, random_options(r, TARGET)))
    kernel = op.compile(*tensors, target=TARGET, options=options, **initial)
    wide.check_equal(program, wide.outcome(kernel.emulate, *tensors, **initial), expected)
