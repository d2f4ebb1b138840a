"""Random programs times random legal options: compiled kernels equal the reference, and every schedule is proved."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc
from tensor_comprehensions.options import FUSION_STRATEGIES, CpuOptions

from ..helpers.programs import Program, programs

OPTIONS = st.builds(
    CpuOptions,
    fusion=st.sampled_from(FUSION_STRATEGIES),
    tile=st.sampled_from(((), (1,), (4,), (8, 3), (0, 5, 2))),
    interleave=st.sampled_from((0, 1, 3)),
    grain_size=st.sampled_from((0, 1, 64, 32768)),
    use_microkernels=st.booleans(),
    localize_temporaries=st.booleans(),
    split_k=st.sampled_from((0, 1, 2, 4)),
)


def inputs(program: Program, seed: int) -> list[torch.Tensor]:
    generator = np.random.default_rng(seed)
    sizes = dict(program.sizes)
    shapes = [tuple(sizes[d] for d in dims) for _, dims in program.inputs]
    return [torch.from_numpy(np.asarray(generator.uniform(-1, 1, shape), np.float32)) for shape in shapes]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), OPTIONS, st.integers(0, 1000))
def test_compiled_programs_equal_the_reference(program: Program, options: CpuOptions, seed: int) -> None:
    op = tc.define(program.source).f
    tensors = inputs(program, seed)
    kernel = op.compile(*tensors, options=options)
    actual, expected = kernel(*tensors), op.reference(*tensors)
    for a, e in zip(_tuple(actual), _tuple(expected), strict=True):
        torch.testing.assert_close(a, e, rtol=2e-4, atol=2e-4, equal_nan=True)


def _tuple(x: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)
