"""Reports on tile kernels, and on products of defs on tensor cores."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.dtypes import FLOAT16
from tensor_comprehensions.explain.gpu import bank_rows
from tensor_comprehensions.explain.kernel_report import SAME_BYTES, Report, Section
from tensor_comprehensions.loop_ir.atoms import ATOMS
from tensor_comprehensions.loop_ir.nodes import Buffer, Space, Type
from tensor_comprehensions.loop_ir.swizzled_buffer import swizzle_offset
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.tiles.library.hopper import gemm90
from tensor_comprehensions.tiles.library.product import gemm80

from .test_report import check_page


def test_a_tile_kernel_has_a_report() -> None:
    a, b = torch.zeros(128, 64).half(), torch.zeros(96, 64).half()
    kernel = gemm80.compile(a, b, target="cuda:sm_80")
    report = kernel.explain()
    check_page(report)
    assert "def gemm80" in report.find_listing("def").text
    assert report.find_listing("schedule").text == kernel.source("tiles").rstrip()
    assert report.find_listing("loops").text == kernel.source("loops").rstrip()
    assert report.find_listing("cuda").text == kernel.source("cuda").rstrip()
    assert report.sizes == (("C", (128, 96)), ("A", (128, 64)), ("B", (96, 64)))
    sections = {s.title: s for s in report.sections}
    (multiply,) = (text for text in sections["instructions of gemm80"].text if text.startswith("mma_"))
    assert "32 threads together" in multiply
    assert {"shared sA", "shared sB"} <= sections.keys()
    if nvrtc.is_nvrtc_available():
        assert report.matches == SAME_BYTES
        linked, instructions = report.find_listing("ptx").count_links()
        assert linked > 0.9 * instructions > 0


def section(report: Report, title: str) -> Section:
    return next(s for s in report.sections if s.title == title)


def check_pipeline(report: Report) -> dict[str, tuple[int, ...]]:
    """What a step uses was filled before, and not again since. Returns the rows by their names."""
    (grid,) = section(report, "pipeline").grids
    rows = dict(zip(grid.rows, grid.cells, strict=True))
    fills, uses = (next(cells for name, cells in rows.items() if verb in name) for verb in ("fill", "use"))
    for step, stage in enumerate(uses):
        if stage >= 0:
            filled = [n for n, other in enumerate(fills[: step + 1]) if other == stage]
            assert len(filled) == sum(other == stage for other in uses[: step + 1])
    assert max(fills) < grid.count
    check_page(report)
    return rows


def test_a_pipeline_of_copies_by_all_threads() -> None:
    a, b = torch.zeros(256, 320).half(), torch.zeros(96, 320).half()
    report = gemm80.compile(a, b, target="cuda:sm_80").explain()
    rows = check_pipeline(report)
    assert rows == {
        "fill sA, sB": (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, -1, -1),
        "use sA, sB": (-1, -1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0),
    }
    (grid,) = section(report, "pipeline").grids
    assert grid.columns == ("before", "before", *map(str, range(10)))
    (groups,) = section(report, "groups of threads").grids
    assert groups.cells == ((0, 32), (64, 96))


def test_a_pipeline_of_roles() -> None:
    a, b = torch.zeros(512, 512).bfloat16(), torch.zeros(512, 512).bfloat16()
    rows = check_pipeline(gemm90.compile(a, b, target="cuda:sm_90").explain())
    assert len(rows) == 2
    assert all(cells == (0, 1, 2, 3, 0, 1, 2, 3) for cells in rows.values())
    assert len({name.split()[0] for name in rows}) == 2  # each of its own threads


def test_grids_of_instructions_show_who_holds_what() -> None:
    a, b = torch.zeros(128, 64).half(), torch.zeros(96, 64).half()
    report = gemm80.compile(a, b, target="cuda:sm_80").explain()
    found = section(report, "threads of mma_m16n8k16_f32_f16")
    for grid, operand in zip(found.grids, ATOMS["mma_m16n8k16_f32_f16"].operands, strict=True):
        assert (len(grid.cells), len(grid.cells[0])) == (operand.rows, operand.columns)
        held = Counter(thread for row in grid.cells for thread in row)
        assert held == dict.fromkeys(range(32), operand.values)  # each thread holds as many elements
        places = {operand.place(5, value) for value in range(operand.values)}
        assert {(r, c) for r, row in enumerate(grid.cells) for c, thread in enumerate(row) if thread == 5} == places


def test_banks_of_swizzled_rows() -> None:
    """Eight rows that a warp reads a column of 16 bytes of are in different banks, by the places of the elements."""
    swizzled = Buffer("s", Type(FLOAT16), (64, 64), (64, 1), Space.SHARED, swizzle=(3, 3, 3))
    rows = list(bank_rows(swizzled))
    assert rows[1][:2] == (swizzle_offset(64, (3, 3, 3)) // 2 % 32,) * 2
    assert len({row[0] for row in rows[:8]}) == 8
    plain = Buffer("s", Type(FLOAT16), (64, 64), (64, 1), Space.SHARED)
    assert {row[0] for row in bank_rows(plain)} == {0}


@pytest.mark.parametrize(("size", "chosen"), [(1024, "on tensor cores"), (256, "without tensor cores")])
def test_why_tensor_cores(size: int, chosen: str) -> None:
    x = torch.zeros(size, size).half()
    mm = tc.define("def mm(half(M,K) A, half(K,N) B) -> (C) { C(i,j) +=! A(i,k) * B(k,j) }").mm
    report = mm.explain(x, x, target="cuda:sm_90")
    (decision,) = (d for d in report.about("lowering") if "tensor cores" in d.chosen)
    assert chosen in decision.chosen
    taken, without = (decision.number(f"cycles {how} tensor cores") for how in ("on", "without"))
    assert (taken < 0.75 * without) == (chosen == "on tensor cores")
    assert not report.about("split")
    check_page(report)
