"""What every way to run GPU kernels is tried on: the conformance programs, and the benchmarks' defs at small sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks import sources
from tensor_comprehensions.compiler.gpu_passes import GPU_PASSES, GpuPassContext
from tensor_comprehensions.core.dtypes import BFLOAT16, DTYPES, DType
from tensor_comprehensions.core.errors import TCError
from tensor_comprehensions.core.memory_layout import contiguous_strides
from tensor_comprehensions.loop_ir.interpret.ops import round_to, storage_dtype
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.options import FUSION_STRATEGIES, GpuOptions, MappingOptions, check_mapping
from tensor_comprehensions.target import GpuTarget
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.binding.match_arguments import TensorType, match_arguments
from tensor_comprehensions.tc_lang.ir import BoundFunction, Role
from tensor_comprehensions.tc_lang.reference.evaluator import evaluate_def
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

sys.path.insert(0, str(Path(__file__).parent.parent / "conformance"))
from cases import CASES

SIZES = {
    "B": 3, "M": 9, "N": 10, "K": 11, "C": 4, "O": 3, "D": 13, "E": 7, "E1": 7, "E2": 6, "L": 5, "L1": 5, "L2": 4,
    "G": 2, "F": 3, "H": 8, "W": 10, "KH": 3, "KW": 3, "P": 12, "Q": 6, "I": 7, "J": 8, "R": 5, "S": 6, "T": 9,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A bound def (legalized), its inputs and initial values, and its outputs by the reference evaluator.

    tolerance: of outputs of 32 bits and more.
    """

    name: str
    bound: BoundFunction
    arrays: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    tolerance: float = 2e-4


def case_of(name: str, source: str, wanted: str | None, arrays: dict[str, Any], initial: set[str]) -> Case:
    """A case of one def of a text. arrays: of float32 for tensors of bfloat16."""
    functions = {f.name: f for f in compile_source(source)}
    function = functions[wanted or next(iter(functions))]
    narrow = {p.name for p in (*function.parameters, *function.inouts) if p.dtype == BFLOAT16}
    dtypes = {n: BFLOAT16 if n in narrow else DTYPES[a.dtype.name] for n, a in arrays.items()}
    types = {n: TensorType(dtypes[n], a.shape, contiguous_strides(a.shape)) for n, a in arrays.items()}
    scalars = {n: int(arrays[n]) for n in function.scalars}
    inputs = [t for n, t in types.items() if n not in initial]
    binding = match_arguments(function, inputs, {n: types[n] for n in initial}, scalars)
    bound = bind(function, binding.sizes, binding.scalars, binding.strides)
    return Case(name, legalize(bound), arrays, evaluate_def(bound, arrays))


@cache
def conformance() -> tuple[Case, ...]:
    """The conformance programs that have a value."""
    found = []
    for case in CASES:
        if case.error is not None:
            continue
        inputs, initial = case.arrays()
        try:
            found.append(case_of(case.id, case.source, case.record.get("fn"), {**inputs, **initial}, set(initial)))
        except TCError:
            assert case.record.get("may_reject"), case.source
    return tuple(found)


@cache
def benchmarks() -> tuple[Case, ...]:
    """The benchmarks' defs."""
    texts = {n.lower(): t for n, t in vars(sources).items() if n.isupper() and isinstance(t, str)}
    return tuple(small_case(name, text) for name, text in texts.items())


def small_case(name: str, text: str, sizes: Mapping[str, int] = SIZES) -> Case:
    """A def with small sizes and random inputs; those of integers are valid subscripts."""
    rng = np.random.default_rng(len(name))
    function = compile_source(text)[-1]
    arrays = {}
    for p in function.parameters:
        shape = tuple(int(sizes.get(str(getattr(e, "name", "")), getattr(e, "value", 4))) for e in p.extents or ())
        whole = p.dtype.is_integer
        values = rng.integers(0, 4, shape) if whole else rng.uniform(-1, 1, shape)
        arrays[p.name] = round_values(values, p.dtype)
    for p in function.inouts:
        shape = tuple(int(sizes[str(getattr(e, "name", ""))]) for e in p.extents or ())
        arrays[p.name] = round_values(rng.uniform(-1, 1, shape), p.dtype)
    return case_of(name, text, function.name, arrays, {p.name for p in function.inouts})


def every() -> Iterator[Case]:
    yield from conformance()
    yield from benchmarks()


def round_values(values: Any, dtype: DType) -> np.ndarray:
    """Values as tensors of a type hold them; float32 for bfloat16."""
    return round_to(np.asarray(values, np.float64), dtype).astype(storage_dtype(dtype))


def memory_of(case: Case, module: Module) -> dict[str, np.ndarray]:
    """Fresh arrays for the arguments of a module of `case`, in the form that the interpreter takes."""
    arrays = {}
    for b in module.arguments:
        kind = storage_dtype(b.type.dtype)
        given = case.arrays.get(b.name)
        arrays[b.name] = np.zeros(b.shape, kind) if given is None else np.array(given, kind, order="C")
    return arrays


def list_undefined_outputs(case: Case) -> frozenset[str]:
    """The outputs that have no initial value."""
    return frozenset(t.name for t in case.bound.tensors if t.role is Role.OUTPUT)


def check(case: Case, arrays: dict[str, np.ndarray]) -> None:
    """Do `arrays` hold what the reference evaluator gives?"""
    for name, expected in case.expected.items():
        tolerance = 2e-2 if expected.dtype.itemsize < 4 else case.tolerance
        found = arrays[name].reshape(expected.shape)
        if expected.dtype.kind == "f":
            wide = expected.astype("f8")
            np.testing.assert_allclose(found.astype("f8"), wide, rtol=tolerance, atol=tolerance, err_msg=case.name)
        else:
            np.testing.assert_array_equal(found, expected, err_msg=case.name)


def random_options(r: Random, target: GpuTarget) -> MappingOptions:
    """Legal options, small enough for small sizes to have several tiles, blocks and threads."""
    shared = r.random() < 0.5
    unroll = r.choice((1, 1, 4, 16, 64))
    options = MappingOptions(
        tile=tuple(r.choice((0, 1, 2, 4, 8, 16, 32)) for _ in range(r.randint(1, 4))),
        threads=tuple(r.choice(n) for n in ((1, 4, 8, 16, 32, 64), (1, 2, 4, 8), (1, 2))[: r.randint(1, 3)]),
        blocks=tuple(r.choice((1, 2, 8, 256)) for _ in range(r.randint(1, 3))),
        unroll=unroll,
        outer_fusion=r.choice(FUSION_STRATEGIES),
        intra_tile_fusion=r.choice(FUSION_STRATEGIES),
        shared_memory=shared,
        max_shared_memory=r.choice((0, 0, 2048, 16384)) if shared else 0,
        private_memory=r.random() < 0.5,
        shared_depth=r.choice((-1, -1, 0, 1, 2, 3)),
        private_depth=r.choice((-1, -1, 0, 1, 2, 3)),
        unroll_copy_shared=shared and unroll > 1 and r.random() < 0.5,
        read_only_cache=r.random() < 0.3,
        cooperative_reductions=r.random() < 0.5,
        split_k=r.choice((1, 1, 4)),
        collapse_loops=r.random() < 0.3,
        vector_width=r.choice((1, 1, 2, 4)),
        double_buffer=shared and r.random() < 0.3,
    )
    check_mapping(options, target)
    return options


def map_case(case: Case, options: GpuOptions | None, target: GpuTarget) -> Module:
    """The module that is printed for a case."""
    job = GpuPassContext(options, target)
    value: Any = case.bound
    for step in GPU_PASSES[2:4]:
        value = step.run(value, job)
        verify(value)
    module: Module = value
    return module
