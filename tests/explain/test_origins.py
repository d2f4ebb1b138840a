"""Every store of a lowered def says which statements it computes, and nothing but that changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.compiler.compiled_kernel import PassContext
from tensor_comprehensions.compiler.cpu_passes import PASSES
from tensor_comprehensions.core.decisions import open_book
from tensor_comprehensions.core.errors import TCError
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.loop_ir.origins import origins_in, statement_of
from tensor_comprehensions.options import CpuOptions, MappingOptions
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang.ir import BoundFunction
from tests.helpers.anywhere import AVX512
from tests.helpers.gpu_suite import Case, every, map_case

GROUPS = 8
SM80 = parse_gpu_target("cuda:sm_80")
OPTIONS = (
    CpuOptions(),
    CpuOptions(fusion="min", grain_size=0),
    CpuOptions(fusion="max", use_microkernels=False, split_k=3),
)


@cache
def cases() -> tuple[Case, ...]:
    return tuple(every())


def run(bound: BoundFunction, options: CpuOptions) -> tuple[list[Module], str]:
    """The modules after each pass, and the text that is printed of the last."""
    context, value, results = PassContext(options, AVX512), bound, {}
    modules: list[Module] = []
    for step in PASSES[:-2]:
        made: Any = step.apply(value, context, results)
        value = results[step.name] = made
        if isinstance(made, Module):
            modules.append(made)
    return modules, value


def missing(modules: Sequence[Module], bound: BoundFunction) -> list[str]:
    """The stores without an origin, and those whose origin is no statement of the def."""
    known = {statement_of(s.name) for s in bound.statements}
    found = []
    for kernel in (k for m in modules for k in m.kernels):
        for store, origin in origins_in(kernel.body):
            names = () if origin is None else origin.statements
            if not names or any(statement_of(name) not in known for name in names):
                found.append(f"{kernel.name}: {store}: {origin}")
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("options", OPTIONS, ids=["default", "apart", "together"])
def test_every_store_of_a_kernel_for_a_cpu(group: int, options: CpuOptions) -> None:
    for case in cases()[group::GROUPS]:
        plain, text = run(case.bound, options)
        assert all(origin is None for m in plain for k in m.kernels for _, origin in origins_in(k.body))
        with open_book():
            modules, same = run(case.bound, options)
        assert (modules, same) == (plain, text), case.name
        assert not missing(modules, case.bound), case.name


@pytest.mark.sampled
@pytest.mark.parametrize("group", range(GROUPS))
def test_every_store_of_a_cuda_kernel(group: int) -> None:
    for case in cases()[group::GROUPS]:
        for options in (None, MappingOptions()):
            try:
                plain = map_case(case, options, SM80)
            except TCError:
                continue
            with open_book():
                module = map_case(case, options, SM80)
            assert emit_cuda(module).source == emit_cuda(plain).source
            assert not missing([module], case.bound), case.name
