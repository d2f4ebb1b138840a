"""What is written down: costs that are the compared numbers, logs, and nothing where nobody asks."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

import tensor_comprehensions as tc
from benchmarks.compile_time import recognize_contraction
from benchmarks.contractions import contractions
from tensor_comprehensions.codegen.c.c_printer import emit_c
from tensor_comprehensions.codegen.c.text_lines import split_marks
from tensor_comprehensions.codegen.gpu.cuda_printer import emit_cuda
from tensor_comprehensions.core.decisions import (
    SUBJECTS,
    Decision,
    close_book,
    is_recording,
    note_decision,
    open_book,
    record_decision,
)
from tensor_comprehensions.core.errors import TCError
from tensor_comprehensions.loop_ir.nodes import Store
from tensor_comprehensions.loop_ir.origins import origins_in
from tensor_comprehensions.loop_ir.show import LineNumbers, list_lines, separate_statements
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.runtime.cpu.host import host
from tensor_comprehensions.sparse.lower import lower
from tensor_comprehensions.structured.analysis.contraction_info import analyze_contraction
from tensor_comprehensions.structured.cost.plan_cost import Costs, expected_cycles, plan_costs, plan_cycles
from tensor_comprehensions.structured.match.drop_unit_dims import drop_unit_dims
from tensor_comprehensions.structured.planners.select import select_plan
from tensor_comprehensions.target import AVX2, AVX512
from tests.helpers.gpu_suite import map_case

from .test_origins import GROUPS, SM80, cases, run

CHOICE = Decision("plan", ("S0",), "this", "that")


def test_books() -> None:
    asked = []

    def make() -> Decision:
        asked.append(1)
        return CHOICE

    record_decision(make)
    assert not is_recording()
    assert not asked
    with open_book() as book:
        record_decision(make)
        note_decision(CHOICE)
        with close_book():
            assert not is_recording()
            record_decision(make)
        with open_book() as inner:
            pass
        assert is_recording()
    assert book.decisions == (CHOICE,)
    assert not inner.decisions
    assert len(asked) == 1
    with pytest.raises(KeyError):
        CHOICE.number("cycles")


@pytest.mark.parametrize("target", [AVX512, AVX2], ids=lambda t: t.name)
def test_costs_are_the_number_that_chose_the_plan(target: tc.CpuTarget) -> None:
    seen = 0
    for contraction in contractions("ci"):
        op = drop_unit_dims(recognize_contraction(contraction))
        with open_book() as book:
            plan = select_plan(op, target, parallel=True)
        assert plan == select_plan(op, target, parallel=True)  # as without a book, and as it is kept
        (decision,) = (d for d in book.decisions if d.subject == "plan")
        costs = plan_costs(op, plan, target)
        assert decision.number("total") == costs.total == plan_cycles(op, plan, target)
        for f in fields(Costs):
            if f.name not in ("exposed", "streams"):
                assert decision.number(f.name) == getattr(costs, f.name)
        if plan.output_panel_depth is None and not plan.instruction:
            (cycles,) = expected_cycles(analyze_contraction(op, plan.vector), [plan], target)
            assert cycles == costs.total
        numbers = [o.number for o in decision.others if o.number is not None]
        assert numbers == sorted(numbers)
        seen += 1
    assert seen > 10


@pytest.mark.sampled  # defs
@pytest.mark.parametrize("group", range(GROUPS))
def test_marks_of_cuda_texts_change_nothing_else(group: int) -> None:
    marked = 0
    for case in cases()[group::GROUPS]:
        try:
            with open_book():
                module = separate_statements(map_case(case, None, SM80))
        except TCError:
            continue
        plain = emit_cuda(module).source
        loops = list(list_lines(module))
        lines = list(split_marks(emit_cuda(module, marks=LineNumbers.of(loops)).source))
        assert "\n".join(text for text, _ in lines) == plain
        stores = {number for number, (_, s) in enumerate(loops, 1) if isinstance(s, Store)}
        assert stores <= {number for _, number in lines}, case.name
        marked += len(stores)
    assert marked


@pytest.mark.sampled  # defs
@pytest.mark.parametrize("group", range(GROUPS))
def test_marks_of_c_texts_change_nothing_else(group: int) -> None:
    for case in cases()[group::GROUPS]:
        module = separate_statements(run(case.bound, CpuOptions())[0][1])
        loops = list(list_lines(module))
        lines = list(split_marks(emit_c(module, marks=LineNumbers.of(loops))))
        assert "\n".join(text for text, _ in lines) == emit_c(module)
        stores = {number for number, (_, s) in enumerate(loops, 1) if isinstance(s, Store)}
        assert stores <= {number for _, number in lines}, case.name


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_every_store_of_a_sparse_kernel_has_an_origin() -> None:
    op = tc.define(
        "def f(float(M,K) A: csr, float(K,N) B: csr) -> (C: csr, y) { C(i,j) +=! A(i,k) * B(k,j)  y(i) +=! A(i,k) }"
    ).f
    a = tc.as_sparse(torch.eye(20).to_sparse_csr())
    program = op.compile(a, a).compiled.program
    with open_book():
        found = lower(program.problem, host())
    known = {s.name for s in program.problem.function.statements}
    stores = [o for m in found.phases for k in m.kernels for _, o in origins_in(k.body)]
    assert stores
    assert all(o is not None and o.statements and set(o.statements) <= known for o in stores)
    assert {name for o in stores if o is not None for name in o.statements} == known


def test_log_of_decisions(caplog: pytest.LogCaptureFixture) -> None:
    op = tc.define("def mm(float(M,K) A, float(K,N) B) -> (C) { C(i,j) +=! A(i,k) * B(k,j) }").mm
    x = torch.rand(61, 61)
    with caplog.at_level(logging.DEBUG, "tensor_comprehensions.why"):
        op.compile(x, x)
    lines = [r.getMessage() for r in caplog.records if r.name == "tensor_comprehensions.why"]
    assert any(line.startswith("mm: plan of S0: tile ") and "lanes along j" in line for line in lines)
    assert {line.split(": ")[1].split(" of ")[0] for line in lines} <= set(SUBJECTS)
    caplog.clear()
    op.compile(x, x, options=tc.CpuOptions(interleave=3))
    assert not [r for r in caplog.records if r.name == "tensor_comprehensions.why"]


def test_the_package_loads_no_report() -> None:
    program = (
        "import sys, torch, tensor_comprehensions as tc\n"
        "op = tc.define('def f(float(N) x) -> (y) { y(i) = x(i) + 1 }').f\n"
        "op(torch.ones(9))\n"
        "assert not [name for name in sys.modules if name.startswith('tensor_comprehensions.explain')]\n"
        "op.explain(torch.ones(9))\n"
        "assert 'tensor_comprehensions.explain.page' not in sys.modules\n"
        "assert 'tensor_comprehensions.explain.gpu' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
