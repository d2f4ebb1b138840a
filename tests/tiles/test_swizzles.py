"""Banks, counted; swizzles, chosen and proven; descriptors, followed to the bytes of their tile."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_comprehensions import tiles as t
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.layouts import Layout, Swizzle
from tensor_comprehensions.loop_ir.nodes import Var
from tensor_comprehensions.loop_ir.shared_memory_banks import count_bank_conflict_turns
from tensor_comprehensions.tiles.swizzles import ACCESSES, Access, candidates

law = settings(deadline=None)
COLUMNS = Access(32, 8, Layout((32, 1), (1, 0)))
"""A warp reads a column."""


@pytest.mark.parametrize("j", range(1, 7))
def test_one_rule_frees_all_accesses_of_halves(j: int) -> None:
    tile = t.tensor(f"[64,{8 << j}].fp16.SH")
    expected = t.Swizzle(min(3, j), 3, max(3, j))
    assert [t.conflicts(tile.swizzled(expected), access) for access in ACCESSES] == [0, 0, 0]
    assert t.choose_swizzle(tile, list(ACCESSES)) == expected


@pytest.mark.parametrize(("dtype", "columns"), [("int8", 64), ("bf16", 32), ("fp32", 32), ("int8", 128)])
def test_a_choice_is_for_chunks_of_16_bytes(dtype: str, columns: int) -> None:
    tile = t.tensor(f"[64,{columns}].{dtype}.SH")
    found = t.choose_swizzle(tile, ["ldmatrix_x4_rows", "store_rows_16"])
    assert found is not None
    assert 1 << found.base == 16 // tile.dtype.size
    assert t.conflicts(tile.swizzled(found), "ldmatrix_x4_rows") == 0
    assert t.conflicts(tile, "ldmatrix_x4_rows") > 0


def test_no_swizzle_is_chosen_where_none_is_needed() -> None:
    assert t.choose_swizzle(t.tensor("[64,64].fp16.SH"), ["store_rows_16"]) is None
    assert t.choose_swizzle(t.tensor("[64,40].fp16.SH"), ["store_rows_16"]) is None


def test_the_fewest_turns_are_chosen_where_nothing_frees_all() -> None:
    tile = t.tensor("[64,64].fp32.SH")
    found = t.choose_swizzle(tile, [COLUMNS])
    turns = [t.conflicts(tile.swizzled(s), COLUMNS) for s in (None, *candidates(tile))]
    assert found is not None
    assert t.conflicts(tile.swizzled(found), COLUMNS) == min(turns) > 0


@pytest.mark.parametrize("swizzle", candidates(t.tensor("[64,64].fp16.SH")))
def test_a_swizzled_tile_stays_in_its_memory(swizzle: t.Swizzle) -> None:
    tile = t.tensor("[64,64].fp16.SH").swizzled(swizzle)
    assert sorted(tile.swizzled_offsets()) == list(range(64 * 64))


@law
@given(st.lists(st.integers(0, 63), min_size=32, max_size=32), st.sampled_from((2, 4, 8, 16)))
def test_turns_are_the_words_of_the_busiest_bank(chunks: list[int], width: int) -> None:
    addresses = [chunk * width for chunk in chunks]
    served = min(32, 128 // width)
    turns = 0
    for first in range(0, 32, served):
        words = {(a + byte) // 4 for a in addresses[first : first + served] for byte in range(width)}
        turns += max(Counter(word % 32 for word in words).values()) - 1
    assert count_bank_conflict_turns(addresses, width) == turns


@pytest.mark.parametrize(
    ("tile", "access", "message", "expected"),
    [
        ("[64,64].fp16.GL", "store_rows_16", "cannot count the conflicts", "rows and columns in SH"),
        ("[64].fp16.SH", "store_rows_16", "cannot count the conflicts", "rows and columns in SH"),
        ("[64,64].fp16.SH", "ldmatrix", "no access is named 'ldmatrix'", "ldmatrix_x4_rows"),
        ("[24,64].fp16.SH", "ldmatrix_x4_rows", "no whole number of accesses", "parts of 16 x 16"),
        ("[64,64].fp16.SH.Sw<2,1,3>", "store_rows_16", "tears the 8 elements", "neighbors"),
        ("[(64,64):(1,64)].fp16.SH", "store_rows_16", "tears the 8 elements", "neighbors"),
    ],
)
def test_what_has_no_conflicts_to_count(tile: str, access: str, message: str, expected: str) -> None:
    with pytest.raises(ArgumentError, match=message) as error:
        t.conflicts(t.tensor(tile), access)
    assert expected in error.value.expected


def test_a_tile_that_begins_anywhere_has_no_conflicts_to_count() -> None:
    stages = t.tensor("[3,64,64].fp16.SH")
    assert t.conflicts(stages[0], "store_rows_16") == 0
    for stage in (1, Var("s")):
        with pytest.raises(ArgumentError, match="cannot count the conflicts"):
            t.conflicts(stages[stage], "store_rows_16")


# --- descriptors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [128, 64, 32])
@pytest.mark.parametrize(("dtype", "base"), [("int8", 4), ("fp16", 3), ("fp32", 2)])
def test_a_descriptor_along_k_leads_to_the_elements_of_its_tile(width: int, dtype: str, base: int) -> None:
    size, address = 16 >> base, 3 * 8 * width
    columns = width // size
    tile = t.tensor(f"[64,{columns}].{dtype}.SH").swizzled(t.Swizzle((width // 16).bit_length() - 1, base, 3))
    places, step = tile.swizzled_offsets(), 32 // size  # columns that one instruction takes
    for first in range(0, columns, step):
        found = t.descriptor(major="K", swizzle=width, address=address, first=first, bits=8 * size)
        for row in range(64):
            for k in range(step):
                assert found.place(row, k) == address + size * places[row + 64 * (first + k)]


@pytest.mark.parametrize("width", [128, 64, 32])
@pytest.mark.parametrize("rows", [16, 64])
def test_a_descriptor_along_rows_leads_to_the_elements_of_its_tile(width: int, rows: int) -> None:
    across, address = width // 2, 5 * 8 * width
    tile = t.tensor(f"[4,{rows},{across}].fp16.SH").swizzled(t.Swizzle((width // 16).bit_length() - 1, 3, 3))
    places = tile.swizzled_offsets()
    for first in range(0, rows, 16):
        found = t.descriptor(major="MN", swizzle=width, address=address, first=first, rows=rows)
        for m in range(4 * across):
            for k in range(16):
                place = places[m // across + 4 * (first + k + rows * (m % across))]
                assert found.place(m, k) == address + 2 * place


def test_a_descriptor_prints_its_bits() -> None:
    assert str(t.descriptor(major="K", swizzle=128, address=1024)) == "0x4000004000010040"


@pytest.mark.parametrize(
    ("wrong", "message", "expected"),
    [
        ({"major": "M"}, "this major", "K or MN"),
        ({"swizzle": 16}, "this swizzle", "128, 64 or 32 bytes"),
        ({"bits": 4}, "this bits", "8, 16 or 32"),
        ({"major": "MN", "rows": 64, "bits": 8}, "this bits", "16"),
        ({"address": 512}, "this address", "a multiple of 1024"),
        ({"address": 1 << 18}, "this address", "an operand below 262144"),
        ({"first": 4}, "this first", "a multiple of 8"),
        ({"first": 64}, "this first", "in a row of 64"),
        ({"first": -8}, "this first", "in a row of 64"),
        ({"major": "MN"}, "this rows", "a multiple of 8"),
        ({"major": "MN", "rows": 12}, "this rows", "a multiple of 8"),
        ({"major": "MN", "rows": 64, "first": 64}, "this first", "below 64"),
        ({"major": "MN", "rows": 2048}, "this rows", "below 2048"),
        ({"address": 261120, "major": "MN", "rows": 64, "first": 56}, "this address", "an operand below 262144"),
    ],
)
def test_what_no_descriptor_leads_to(wrong: dict[str, object], message: str, expected: str) -> None:
    with pytest.raises(ArgumentError, match=message) as error:
        t.descriptor(**{"major": "K", "swizzle": 128, "address": 1024, **wrong})  # type: ignore[arg-type]
    assert expected in error.value.expected


def test_what_is_no_number_or_no_tile_is_refused() -> None:
    with pytest.raises(ArgumentError, match="is not a swizzle"):
        Swizzle("a", 2, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="conflicts are those of a tile"):
        t.conflicts(5, "ldmatrix_x4_rows")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cannot have this address"):
        t.descriptor(major="K", swizzle=128, address="y")  # type: ignore[arg-type]
