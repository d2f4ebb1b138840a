"""The table of atoms against the instruction set's own formulas, lane by lane."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tensor_comprehensions.loop_ir.atoms import ATOMS, MATMUL, MOVE, Atom, AtomOperand, group_lanes, is_covering
from tensor_comprehensions.loop_ir.nodes import Space

DATA = json.loads((Path(__file__).parent / "data" / "atoms.json").read_text())
BY_OPCODE = {a.opcode: a for a in ATOMS.values() if a.threads.size > 1}


def layout_of(text: str) -> str:
    """A layout as the data spell it, in our notation."""
    shape, stride = text.split(":")
    return f"{shape} : {stride}".replace(",", ", ")


@cache
def atom_of(opcode: str) -> Atom:
    return BY_OPCODE[opcode]


@pytest.mark.parametrize("row", DATA["fragments"], ids=lambda r: r["name"])
def test_products(row: dict[str, Any]) -> None:
    atom = atom_of(row["ptx"])
    assert atom.kind == MATMUL
    assert list(atom.architectures) == row["archs"]
    assert str(atom.threads) == layout_of(row["threads"])
    total, *factors = atom.operands
    assert (total.rows, total.columns, factors[0].columns) == (row["m"], row["n"], row["k"])
    for name, operand in zip("CAB", (total, *factors), strict=True):
        expected = row["operands"][name]
        assert operand.dtype.name == row["dtypes"][name]
        assert (operand.rows, operand.columns) == (expected["rows"], expected["columns"])
        if "tv" not in expected:
            assert operand.layout is None
            assert operand.space.value == expected["memory"]
            continue
        assert operand.space is Space.REGISTER
        assert str(operand.layout) == layout_of(expected["tv"])
        assert operand.registers == expected["registers"]
        assert len(expected["samples"]) > 0
        for thread, value, *place in expected["samples"]:
            assert operand.place(thread, value) == tuple(place)


@pytest.mark.parametrize("row", DATA["moves"], ids=lambda r: r["name"])
def test_matrix_moves(row: dict[str, Any]) -> None:
    atom = ATOMS[row["name"]]
    assert (atom.kind, atom.opcode, str(atom.threads)) == (MOVE, row["ptx"], layout_of(row["threads"]))
    assert list(atom.architectures) == row["archs"]
    registers, memory = sorted(atom.operands, key=lambda o: o.space is not Space.REGISTER)
    assert [registers.rows, registers.columns] == [memory.rows, memory.columns] == row["image"]
    assert registers.dtype.bits == memory.dtype.bits == row["bits"]
    for lane, value, *place in row["samples"]:
        assert registers.place(lane, value) == tuple(place)
    shape, stride = row["row_address"].split(":")
    size = int(shape.strip("()").split(",")[0]), int(stride.strip("()").split(",")[0])
    for lane, value in product(range(32), range(8)):  # each lane points at a row, of which it gives the first element
        assert memory.place(lane, value) == (lane % size[0] * size[1] // 8, value)


def test_rows_of_the_data_are_all_of_their_kind_but_for_other_sizes_and_types() -> None:
    opcodes = {r["ptx"] for r in (*DATA["fragments"], *DATA["moves"])}
    assert opcodes <= set(BY_OPCODE)
    others = {a.opcode.split(".")[0] for a in BY_OPCODE.values() if a.opcode not in opcodes}
    assert others == {"mma", "wgmma", "movmatrix"}


def test_operands_are_covered_once() -> None:
    for atom in ATOMS.values():
        for operand in atom.operands:
            assert is_covering(operand), atom.name


def test_quad_pairs_divide_a_warp() -> None:
    groups = list(group_lanes(ATOMS["mma_m8n8k4_row_col_f32_f16"]))
    assert sorted(lane for g in groups for lane in g) == list(range(32))
    assert groups[1] == (4, 5, 6, 7, 20, 21, 22, 23)
    assert list(group_lanes(ATOMS["ldmatrix_x4"])) == [tuple(range(32))]


def test_wider_atoms_stand_first() -> None:
    names = list(ATOMS)
    for wide, narrow in (
        ("ldmatrix_x4", "ldmatrix_x2"),
        ("mma_m16n8k16_f32_f16", "mma_m16n8k8_f32_f16"),
        ("wgmma_m64n256k16_f32_bf16", "wgmma_m64n8k16_f32_bf16"),
        ("copy_async_16", "copy_async_4"),
        ("load_global_16", "load_global_2"),
    ):
        assert names.index(wide) < names.index(narrow)


def test_sums_of_two_neighboring_tiles_are_the_left_factor_of_a_step() -> None:
    atom = ATOMS["mma_m16n8k16_f32_f16"]
    total, left, _ = atom.operands
    for lane, value in product(range(32), range(8)):
        row, column = total.place(lane, value % 4)
        assert left.place(lane, value) == (row, column + 8 * (value // 4))


def test_quarters_in_the_wrong_order_are_another_layout() -> None:
    """Registers 1 and 2 of ldmatrix.x4 change places when the lanes give the quarters row by row."""
    matrices = ATOMS["ldmatrix_x4"].operands[0]
    left = ATOMS["mma_m16n8k16_f32_f16"].operands[1]

    def held(lane: int, value: int, *, by_rows: bool) -> tuple[int, int]:
        row, column = matrices.place(lane, value)
        matrix = row // 8
        below, beside = (matrix // 2, matrix % 2) if by_rows else (matrix % 2, matrix // 2)
        return row % 8 + 8 * below, column + 8 * beside

    every = list(product(range(32), range(8)))
    assert all(held(*p, by_rows=False) == left.place(*p) for p in every)
    assert not all(held(*p, by_rows=True) == left.place(*p) for p in every)


def test_operand_of_one_thread() -> None:
    operand: AtomOperand = ATOMS["load_shared_16"].operands[0]
    assert (operand.values, operand.registers, ATOMS["load_shared_16"].alignment) == (16, 4, 16)
