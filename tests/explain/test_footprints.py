"""Footprints: no less than the interpreter touches, and as much where the report says so."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

import tensor_comprehensions as tc
from tensor_comprehensions.compiler.compiled_kernel import PassContext
from tensor_comprehensions.compiler.cpu_passes import PASSES
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.dispatch.random_inputs import sample_arguments
from tensor_comprehensions.explain.footprints import footprint_of
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.interpret.memory import CheckedMemory
from tensor_comprehensions.loop_ir.interpret.ops import storage_dtype
from tensor_comprehensions.loop_ir.nodes import Module, Space
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.target import AVX512
from tests.helpers.gpu_suite import Case

from .test_origins import GROUPS, cases

EXACT = {
    "copy": "def f(float(N) x) -> (y) { y(i) = x(i) }",
    "product": "def f(float(M,K) A, float(K,N) B) -> (C) { C(i,j) +=! A(i,k) * B(k,j) }",
    "strided": "def f(float(N) x) -> (y) { y(i) = x(2 * i) where i in 0:20 }",
    "shifted": "def f(float(N) x) -> (y) { y(i) = x(i) + x(i + 1) + x(i + 2) }",
    "window": "def f(float(N) x, float(K) w) -> (y) { y(i) +=! x(i + k) * w(k) }",
    "broadcast": "def f(float(M) x, float(N) z) -> (y) { y(i,j) = x(i) * z(j) }",
}


class Recorder:
    """Which elements of each buffer a run reaches, as the interpreter finds their places."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.touched: dict[str, set[int]] = defaultdict(set)
        self.spaces: dict[str, Space] = {}
        place, points = CheckedMemory.place, CheckedMemory.points

        def find_place(memory: CheckedMemory, indices: Any, mask: Any) -> Any:
            found = place(memory, indices, mask)
            if found is not None:
                self.note(memory, found)
            return found

        def find_points(memory: CheckedMemory, indices: Any, mask: Any) -> Any:
            found = points(memory, indices, mask)
            self.note(memory, found[0])
            return found

        monkeypatch.setattr(CheckedMemory, "place", find_place)
        monkeypatch.setattr(CheckedMemory, "points", find_points)

    def note(self, memory: CheckedMemory, where: tuple[Any, ...]) -> None:
        b = memory.buffer
        self.spaces[b.name] = b.space
        flat = np.ravel_multi_index(np.broadcast_arrays(*where), (1, *b.shape)) if b.shape else 0
        self.touched[b.name] |= set(np.atleast_1d(flat).ravel().tolist())


def compare(module: Module, arrays: dict[str, np.ndarray], recorder: Recorder) -> list[bool]:
    """The footprint of each buffer beside what a run touches: whether each is exact."""
    try:
        interpret(module, arrays)
    except InternalError:
        return []
    sizes = {b.name: b.type.dtype.size for b in (*module.arguments, *module.temporaries)}
    boxes = [footprint_of(k.body) for k in module.kernels]
    certain = []
    for name, elements in recorder.touched.items():
        if recorder.spaces[name] is not Space.GLOBAL:
            continue
        found = [box[name] for box in boxes if name in box]
        counted = len(elements) * sizes[name]
        assert sum(size for size, _ in found) >= counted, name
        if len(found) == 1:
            size, is_exact = found[0]
            assert not is_exact or size == counted, (name, size, counted)
            certain.append(is_exact)
    return certain


@pytest.mark.parametrize("name", EXACT)
def test_affine_subscripts_are_counted_exactly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = tc.define(EXACT[name]).f
    arguments, initial = sample_arguments(op.function, {n: 41 if n == "N" else 7 for n in op.function.sizes})
    kernel = op.compile(*arguments, options=tc.CpuOptions(use_microkernels=False, grain_size=0), **initial)
    module = kernel.compiled.rerun_until("simplify")
    shapes = {b.name: np.zeros(b.shape, storage_dtype(b.type.dtype)) for b in module.arguments}
    certain = compare(module, shapes, Recorder(monkeypatch))
    assert len(certain) > 1
    assert all(certain)


def loops_of(case: Case) -> tuple[Module, dict[str, np.ndarray]]:
    """The loops of a program after all passes, and its arrays by their canonical names."""
    context, results, value = PassContext(CpuOptions(), AVX512), {}, case.bound
    for step in PASSES[:-3]:
        made: Any = step.apply(value, context, results)
        value = results[step.name] = made
    module: Any = value
    names = {f"a{n}": t.name for n, t in enumerate(case.bound.tensors)}
    arrays = {}
    for b in module.arguments:
        known = case.arrays.get(names[b.name])
        kind = storage_dtype(b.type.dtype)
        arrays[b.name] = np.zeros(b.shape, kind) if known is None else np.array(known, kind).reshape(b.shape)
    return module, arrays


@pytest.mark.sampled
@pytest.mark.parametrize("group", range(GROUPS))
def test_footprints_of_all_programs(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    certain: list[bool] = []
    for case in cases()[group::GROUPS]:
        with monkeypatch.context() as patched:
            module, arrays = loops_of(case)
            certain += compare(module, arrays, Recorder(patched))
    assert certain
    assert any(certain)
