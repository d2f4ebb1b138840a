"""Random programs times random legal options: the emitted text, run on the CPU, gives what the reference gives.

The trees are proved on the way, and every access and barrier of the text is checked by the emulator.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensor_comprehensions.codegen.gpu import cuda_printer
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target

from ...helpers.gpu_suite import Case, case_of, check, map_case, memory_of, random_options
from ...helpers.programs import Program, programs

H200 = parse_gpu_target("cuda:sm_90")


def case(program: Program, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    sizes = dict(program.sizes)
    shapes = {name: tuple(sizes[d] for d in dims) for name, dims in program.inputs}
    arrays = {name: np.asarray(rng.uniform(-1, 1, shape), np.float32) for name, shape in shapes.items()}
    return case_of("f", program.source, None, arrays, set())


def options(seed: int) -> MappingOptions | None:
    """Every fourth time the default."""
    return random_options(Random(seed), H200) if seed % 4 else None


@pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler")
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(programs(), st.integers(0, 10000)), min_size=12, max_size=12))
def test_mapped_programs_equal_the_reference(drawn: list[tuple[Program, int]]) -> None:
    cases = [case(program, seed) for program, seed in drawn]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TC_VERIFY", "1")
        modules = [map_case(c, options(seed), H200) for c, (_, seed) in zip(cases, drawn, strict=True)]
    texts = [cuda_printer.emit_cuda(m) for m in modules]
    for c, module, emulated in zip(cases, modules, emulator.build_emulated(texts), strict=True):
        arrays = memory_of(c, module)
        assert emulator.run_emulated_module(emulated, module, arrays) == (0, 0)
        check(c, arrays)
