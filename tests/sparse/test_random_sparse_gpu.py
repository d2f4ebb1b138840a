"""Random sparse defs for GPUs: the CUDA text, run by the emulator, gives the values and places of the reference.

`python -m tools.fuzz sparse-gpu` runs many more. A seed that fails is run again by `check_seed(seed)`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tests.helpers.sparse_programs import RandomDef, Unusable, operand_value, random_def
from tests.sparse.test_random_sparse import check_results

pytestmark = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)
SETTINGS = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=15, phases=(Phase.explicit, Phase.generate)
)
SMALL = replace(parse_gpu_target("cuda:sm_90"), num_sms=1)
"""A GPU of one processor: the grid goes round several times, and few threads have nothing to do."""
REFUSALS = ("no kernel for GPUs", "would have to be stored in another order")


@SETTINGS
@given(st.integers(0, 2**62))
def test_programs(seed: int) -> None:
    check_seed(seed)


def check_seed(seed: int) -> bool:
    """Make a program, and run it in the emulator; whether there is a kernel for it."""
    r = Random(seed)
    program = random_def(r)
    if r.random() < 0.3:
        program = replace(program, source=with_dense_results(program.source))
    note(f"seed {seed}\n{program.source}\n{program.sizes} {program.formats}")
    return check_program(r, program)


def with_dense_results(source: str) -> str:
    """The text with all results dense."""
    head, arrow, rest = source.partition("->")
    returns, brace, body = rest.partition("{")
    return head + arrow + re.sub(r": \w+(\([\d,]*\))?", "", returns) + brace + body


def check_program(r: Random, program: RandomDef) -> bool:
    op = tc.define(program.source).f
    try:
        values = {x.name: operand_value(r, x, program.sizes, program.special) for x in program.operands}
    except Unusable:
        return False
    initial = {}
    for x in program.initial:
        dtype = getattr(torch, op.function.tensor(x.name).dtype.name)
        initial[x.name] = operand_value(r, x, program.sizes, program.special).to(dtype)
    try:
        kernel = op.compile(*values.values(), target=SMALL, **initial)
    except ArgumentError as refusal:
        if any(text in str(refusal) for text in REFUSALS):
            return False
        raise
    found = kernel.emulate(*values.values(), **initial)
    results = dict(zip(op.function.returns, found if isinstance(found, tuple) else (found,), strict=True))
    check_results(program, values | initial, program.sizes, results)
    return True
