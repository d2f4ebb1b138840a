"""Every atom of sm_75 and sm_80 on random bits: interpreter = emulator = the instruction set's formulas in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensor_comprehensions import layouts
from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.core.dtypes import FLOAT32, INT32
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir import nodes as ir
from tensor_comprehensions.loop_ir.atoms import ATOMS, WARP
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.intrinsics import INTRINSICS
from tensor_comprehensions.loop_ir.verify import verify
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator

from ..helpers import atom_proof
from ..helpers.atom_cases import (
    PRODUCTS,
    SEED,
    arrays_of,
    assert_right,
    build_module,
    cases,
    lanes_case,
    reuse_case,
    shuffle_case,
)

needs_compiler = pytest.mark.skipif(not emulator.is_emulator_available(), reason="there is no C++ compiler")


def test_all_rows_are_there() -> None:
    assert {n for n, i in INTRINSICS.items() if i.atom and i.group == WARP} <= set(cases())
    assert len(PRODUCTS) > 20


@pytest.mark.parametrize("name", cases())
def test_interpreter(name: str) -> None:
    c = cases()[name]
    verify(c.module)
    arrays = arrays_of(c)
    assert interpret(c.module, arrays) == []
    assert_right(c, arrays["out"])


@needs_compiler
def test_emulator() -> None:
    built = emulator.build_emulated([emit_cuda(c.module) for c in cases().values()])
    for c, emulated in zip(cases().values(), built, strict=True):
        arrays = arrays_of(c)
        assert emulator.run_emulated_module(emulated, c.module, arrays) == (0, 0)
        assert_right(c, arrays["out"])


@pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("name", [n for n in cases() if n not in ATOMS or n in ("movmatrix_trans", "mma_m8n8k4_f64")])
def test_calls_compile(name: str) -> None:
    resources = nvrtc.compile_text(emit_cuda(cases()[name].module).source, "sm_80").resources
    assert {r.spill_stores for r in resources.values()} == {0}


def test_lanes_that_have_not_met_are_a_race() -> None:
    c = lanes_case(np.random.default_rng(SEED), meet=False)
    with pytest.raises(InternalError, match="race"):
        interpret(c.module, arrays_of(c))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"first": False}, "race|undefined"),
        ({"last": False}, "race"),
        ({"threads": 96}, "disagree|deadlock|divergence"),
        ({"threads": 32}, "disagree|divergence"),
    ],
    ids=str,
)
def test_barriers_of_parts_that_are_wrong(fault: dict[str, Any], message: str) -> None:
    c = reuse_case(np.random.default_rng(SEED), **fault)
    with pytest.raises(InternalError, match=message):
        interpret(c.module, arrays_of(c))
    if emulator.is_emulator_available():
        with pytest.raises(InternalError, match=message):
            emulator.run_emulated_code(emit_cuda(c.module), c.module, arrays_of(c))


def test_results_are_numbers_often_enough() -> None:
    for atom in PRODUCTS:
        expected = cases()[atom.name].expected
        assert np.isnan(expected.astype(np.float64)).mean() < 0.5, f"{atom.name}, seed {SEED}"


@needs_compiler
def test_a_wrong_layout_is_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers 1 and 2 of the left factor change places in the table: both machines follow it."""
    name = "mma_m16n8k32_s32_s8_s8"
    atom, c = ATOMS[name], cases()[name]
    left = atom.operands[1]
    assert str(left.layout) == "((4, 8), (4, 2, 2)) : ((64, 1), (16, 8, 256))"
    swapped = replace(left, layout=layouts.Layout(((4, 8), (4, 2, 2)), ((64, 1), (16, 256, 8))))
    operands = (atom.operands[0], swapped, atom.operands[2])
    monkeypatch.setattr(ATOMS, "_all", {**ATOMS, name: replace(atom, operands=operands)})
    by_interpreter, by_emulator = arrays_of(c), arrays_of(c)
    interpret(c.module, by_interpreter)
    emulator.run_emulated_code(emit_cuda(c.module), c.module, by_emulator)
    np.testing.assert_array_equal(by_interpreter["out"], by_emulator["out"])
    assert not np.array_equal(by_emulator["out"], c.expected)


@pytest.mark.parametrize("attributes", [(0, 64), (16, 64), (1, 48), (1, 0)])
def test_barriers_of_parts_that_do_not_exist_are_refused(attributes: tuple[int, int]) -> None:
    module = build_module("m", ir.Invoke("barrier_part", (), attributes), (b.buffer("out", INT32, (4,)),))
    with pytest.raises(InternalError, match="no barrier of a part has this form"):
        verify(module)


def test_values_of_other_types_are_refused() -> None:
    c = shuffle_case(np.random.default_rng(SEED))
    r = b.register("r", FLOAT32)
    for values, message in (((), "takes other values"), ((b.const(1.0, FLOAT32),), "not int64")):
        call = ir.Invoke("shuffle_index", ((r, ()), (r, ())), (8,), values)
        with pytest.raises(InternalError, match=message):
            verify(build_module("m", b.allocate([r], call), c.module.arguments))


def test_proofs_on_devices_find_wrong_products() -> None:
    """Sums may be off by what tensor cores cut off, and by no more; whole numbers not at all."""
    c = cases()["mma_m16n8k16_f32_f16"]
    assert c.scale is not None
    finite = np.isfinite(c.scale) & np.isfinite(c.expected)
    assert atom_proof.difference(c, c.expected) == ""
    near = np.where(finite, c.expected + (c.scale * 2.0**-22).astype(np.float32), c.expected)
    assert atom_proof.difference(c, near) == ""
    assert "is" in atom_proof.difference(c, np.where(finite, c.expected + c.scale * np.float32(0.01), c.expected))
    whole = cases()["mma_m16n8k32_s32_s8_s8"]
    wrong = whole.expected.copy()
    wrong[0, 0] += 1
    assert "1 of" in atom_proof.difference(whole, wrong)
