"""The names of a program reach nothing that is made of it: renamed programs give the same code, byte by byte.

`TC_RENAMINGS=20` tries as many renamings of each program, instead of two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from cases import CASES, Case

import tensor_comprehensions as tc
from tensor_comprehensions.cache.key import make_key
from tensor_comprehensions.compiler.compiled_kernel import PassContext
from tensor_comprehensions.compiler.cpu_passes import KINDS, PASSES, Pass
from tensor_comprehensions.compiler.gpu_passes import GPU_PASSES, GpuPassContext
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.dispatch.call_steps import normalize_arguments, shapes_of
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.target import AVX512
from tensor_comprehensions.tc_lang.ir import BoundFunction

from ..helpers.renaming import SM90, Draw, harmless, hostile, rename_program

RENAMINGS = int(os.environ.get("TC_RENAMINGS", "2"))

pytestmark = pytest.mark.filterwarnings("ignore:.*a quotient of integers rounds down")


def bound_of(case: Case, source: str, names: Mapping[str, str]) -> tuple[Any, BoundFunction]:
    """The checked def of a case, whose in/out outputs have these names, and the def at its sizes."""
    inputs, initial = case.arrays()
    op = getattr(tc.define(source), main(case))
    given = normalize_arguments(
        op._kernels.call_signature, list(inputs.values()), {names[n]: x for n, x in initial.items()}
    )
    return op.function, op._kernels.bind(shapes_of(op.function, given))


def main(case: Case) -> str:
    return str(case.record.get("fn") or case.source.split("def", 1)[1].split("(")[0].strip())


def emit_text(passes: tuple[Pass, ...], bound: BoundFunction, job: Any) -> str:
    value: Any = bound
    for step in passes:
        value = step.run(value, job)
        if step.name == "emit":
            break
    return str(value)


def on_gpu(bound: BoundFunction) -> str:
    try:
        return emit_text(GPU_PASSES, bound, GpuPassContext(None, SM90))
    except ArgumentError as error:  # what cannot be mapped
        return str(error)


@pytest.mark.sampled  # programs for one property of the canonical form
@pytest.mark.parametrize("case", [c for c in CASES if c.error is None], ids=lambda c: c.id)
def test_renamed_programs_give_the_same_code(case: Case) -> None:
    kept = {n: n for n in case.arrays()[1]}
    try:
        function, bound = bound_of(case, case.source, kept)
    except tc.TCError:
        assert case.record.get("may_reject"), case.source
        return
    job = PassContext(CpuOptions(), AVX512)
    key, cpu, gpu = (
        make_key(function, bound, AVX512, options=CpuOptions()),
        emit_text(PASSES, bound, job),
        on_gpu(bound),
    )
    for seed in range(RENAMINGS):
        draw = (hostile if seed % 2 else harmless)(Random(f"{case.id}{seed}"))
        text, names = rename_program(case.source, draw, main(case))
        function, other = bound_of(case, text, names)
        assert make_key(function, other, AVX512, options=CpuOptions()) == key, text
        assert emit_text(PASSES, other, job) == cpu, text
        assert on_gpu(other) == gpu, text


@pytest.mark.parametrize("case", [c for c in CASES if c.error is None][::8], ids=lambda c: c.id)
def test_renamed_programs_read_alike(case: Case) -> None:
    """The loops and the schedule that people see are those of the canonical program, under the names of theirs."""
    texts = set()
    for seed in range(2):
        numbers: dict[str, str] = {}
        draw = harmless(Random(seed))

        def numbered(taken: set[str], draw: Draw = draw, numbers: dict[str, str] = numbers) -> str:
            name = draw(taken)
            numbers[name] = f"name{len(numbers)}"
            return name

        text, names = rename_program(case.source, numbered, main(case))
        inputs, initial = case.arrays()
        try:
            op = getattr(tc.define(text), main(case))
            kernel = op.compile(*inputs.values(), target=AVX512, **{names[n]: x for n, x in initial.items()})
        except tc.TCError:
            assert case.record.get("may_reject"), case.source
            return
        shown = "\n".join(kernel.source(kind) for kind in ("loops", "schedule", "c") if kind in KINDS)
        texts.add(re.sub(r"zq\d+q", lambda found, numbers=numbers: numbers[found[0]], shown))
    assert len(texts) == 1
