"""Reads as layouts: movement along iterators, and which iterators are one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.layouts import AccessStride, Layout, LayoutRead, can_merge, coalesce_together


def reads(extents: dict[str, int], *tensors: str) -> list[LayoutRead]:
    """Contiguous row-major tensors, each subscripted by plain iterators."""
    return [
        LayoutRead.of(extents, [{i: 1} for i in t], [d for _, d in Layout.row_major([extents[i] for i in t]).flat])
        for t in tensors
    ]


def test_movement() -> None:
    extents = {"c": 3, "w": 8, "h": 6}
    image = LayoutRead.of(extents, [{"h": 2}, {"w": -1}, {"c": 1}], (60, 3, 1), (1, 7, 0))
    assert image.layout == Layout((3, 8, 6), (1, -3, 120))
    assert image.origin == 81
    assert [image.movement(i) for i in "cwh"] == [
        AccessStride.CONTIGUOUS,
        AccessStride.STRIDED,
        AccessStride.STRIDED,
    ]
    diagonal = LayoutRead.of(extents, [{"w": 1}, {"w": -1}], (2, 3))
    assert diagonal.movement("w") is AccessStride.REVERSED
    assert diagonal.movement("h") is AccessStride.BROADCAST
    assert diagonal.step("w") == -1


def test_iterators_and_modes_correspond() -> None:
    with pytest.raises(InternalError, match="a read of"):
        LayoutRead(("a", "b"), Layout((2, 3, 4), (1, 2, 6)))


def test_fusion_of_indices_as_in_the_paper() -> None:
    extents = dict(zip("fedcbag", (3, 4, 5, 6, 7, 8, 9), strict=True))
    c, a, b = "fedcba", "aged", "cbfg"
    groups = coalesce_together(reads(extents, c, a, b))
    assert {"".join(reversed(g)) for g in groups} == {"f", "ed", "cb", "a", "g"}
    assert coalesce_together([]) == ()


def test_three_iterators_become_one() -> None:
    extents = {"i": 2, "j": 3, "k": 4}
    assert coalesce_together(reads(extents, "ijk", "ijk")) == (("k", "j", "i"),)
    assert coalesce_together(reads(extents, "ijk", "jik")) == (("i",), ("j",), ("k",))
    assert can_merge(reads(extents, "ijk"), "k", "j")
    assert not can_merge(reads(extents, "ijk"), "j", "k")


@given(
    st.permutations("abcd"),
    st.permutations("abcd"),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.integers(0, 4),
)
def test_merged_iterators_walk_evenly(first: list[str], second: list[str], sizes: list[int], dropped: int) -> None:
    extents = dict(zip("abcd", sizes, strict=True))
    both = reads(extents, "".join(first), "".join(second)[dropped:])
    groups = coalesce_together(both)
    assert sorted(i for g in groups for i in g) == list("abcd")
    for read in both:
        for group in groups:
            walk = Layout(tuple(extents[i] for i in group), tuple(read.step(i) for i in group))
            assert list(walk.offsets()) == [n * read.step(group[0]) for n in range(walk.size)]
