"""Boxes around what a scope touches, and groups that share one, against enumeration."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product

import islpy as isl
import pytest

from tensor_comprehensions.polyhedral.gpu.promote.footprint import Reference, ReferenceGroup, bounding_box
from tensor_comprehensions.polyhedral.gpu.promote.footprint import reference_groups as groups_around
from tensor_comprehensions.polyhedral.scop.scop import CONTEXT, union_map

Point = tuple[int, ...]


def reference(tag: str, text: str, *, writes: bool = False, affine: bool = True) -> Reference:
    relation = isl.Map(text, CONTEXT)
    return Reference(tag, relation.get_tuple_name(isl.dim_type.out), relation, not writes, writes, affine)


def groups(references: Sequence[Reference], scope: isl.UnionMap) -> Mapping[str, tuple[ReferenceGroup, ...]]:
    return groups_around(references, scope, bounding_box)


def pairs(relation: isl.Map) -> dict[Point, set[Point]]:
    """The elements of each point of a relation without parameters."""
    found: dict[Point, set[Point]] = defaultdict(set)
    inputs = relation.dim(isl.dim_type.in_)

    def visit(point: isl.Point) -> None:
        at = point.get_multi_val()
        values = tuple(at.get_at(k).to_python() for k in range(at.dim(isl.dim_type.set)))
        found[values[:inputs]].add(values[inputs:])

    relation.wrap().foreach_point(visit)
    return dict(found)


def enumerate_boxes(group: ReferenceGroup) -> dict[Point, set[Point]]:
    """The elements of the box at each point where the scope has an instance, from the numbers of the box itself."""
    found: dict[Point, set[Point]] = {}
    for at in pairs(group.footprint):
        text = f"{{ [{', '.join(map(str, at))}] }}"
        point = isl.Set(text, CONTEXT).sample_point()
        firsts = [s.first.eval(point).to_python() for s in group.box.sides]
        lines = [
            [first + sum(p) for p in product(*(range(0, stride * extent, stride) for stride, extent in s.digits))]
            for first, s in zip(firsts, group.box.sides, strict=True)
        ]
        found[at] = set(product(*lines))
    return found


def check(found: Sequence[ReferenceGroup]) -> None:
    for group in found:
        touched, around = pairs(group.footprint), enumerate_boxes(group)
        assert touched
        for at, elements in touched.items():
            assert elements <= around[at]
        relation = pairs(group.box.relation.intersect_domain(group.footprint.domain()))
        assert relation == around
    for k, a in enumerate(found):
        for b in found[k + 1 :]:
            if a.tensor == b.tensor and (a.writes or b.writes):
                one, other = enumerate_boxes(a), enumerate_boxes(b)
                assert all(not elements & other.get(at, set()) for at, elements in one.items())


def tiles(m: int, n: int, r: int) -> isl.UnionMap:
    """Instances in tiles of 4 by 8 by 3."""
    bounds = f"0 <= i < {m} and 0 <= j < {n} and 0 <= k < {r}"
    return union_map(f"{{ S[i, j, k] -> [floor(i/4), floor(j/8), floor(k/3)] : {bounds} }}")


@pytest.mark.parametrize("sizes", [(8, 16, 6), (7, 11, 5), (4, 3, 1)])
def test_matmul_tiles(sizes: tuple[int, int, int]) -> None:
    references = [
        reference("w", "{ S[i, j, k] -> C[i, j] }", writes=True),
        reference("r0", "{ S[i, j, k] -> A[i, k] }"),
        reference("r1", "{ S[i, j, k] -> B[k, j] }"),
    ]
    found = groups(references, tiles(*sizes))
    m, n, r = sizes
    shapes = {t: [g.box.shape for g in gs] for t, gs in found.items()}
    assert shapes == {
        "C": [(min(4, m), min(8, n))],
        "A": [(min(4, m), min(3, r))],
        "B": [(min(3, r), min(8, n))],
    }
    check([g for gs in found.values() for g in gs])


def test_strides_are_skipped() -> None:
    found = groups([reference("r", "{ S[i, j, k] -> A[2i + 1, 3j - i, k] }")], tiles(8, 8, 3))["A"]
    (group,) = found
    assert [s.digits for s in group.box.sides] == [((2, 4),), ((1, 25),), ((1, 3),)]
    check(found)


def test_threads_take_every_so_manieth() -> None:
    scope = union_map("[t] -> { S[i] -> [floor(i/64)] : 0 <= i < 256 and i mod 16 = t and 0 <= t < 16 }")
    (group,) = groups([reference("w", "{ S[i] -> C[i] }", writes=True)], scope)["C"]
    (side,) = group.box.sides
    assert side.digits == ((16, 4),)
    assert group.box.relation.is_equal(
        isl.Map("[t] -> { [c] -> C[x] : 64c + t <= x <= 64c + t + 48 and (x - t) mod 16 = 0 }", CONTEXT)
    )


def test_neighbors_share_a_box_and_strangers_do_not() -> None:
    near = [reference(f"r{d}", f"{{ S[i, j, k] -> X[i + {d}, j] }}") for d in range(3)]
    far = reference("far", "{ S[i, j, k] -> X[i + 100, j] }")
    found = groups([*near, far], tiles(8, 8, 1))["X"]
    assert [[r.tag for r in g.references] for g in found] == [["r0", "r1", "r2"], ["far"]]
    assert found[0].box.shape == (6, 8)
    check(found)


def test_reads_that_only_touch_stay_apart() -> None:
    corner = [reference("a", "{ S[i, j, k] -> X[i, j] }"), reference("b", "{ S[i, j, k] -> X[i + 3, j + 7] }")]
    assert len(groups(corner, tiles(8, 8, 1))["X"]) == 2
    writing = [corner[0], reference("b", "{ S[i, j, k] -> X[i + 3, j + 7] }", writes=True)]
    (group,) = groups(writing, tiles(8, 8, 1))["X"]
    assert group.box.shape == (7, 15)
    assert group.reads
    assert group.writes


def test_data_poisons_what_is_written() -> None:
    gather = reference("g", "{ S[i, j, k] -> X[x, j] : 0 <= x < 50 }", affine=False)
    plain = reference("r", "{ S[i, j, k] -> X[i, j] }")
    write = reference("w", "{ S[i, j, k] -> X[i, j] }", writes=True)
    assert groups([plain, gather, write], tiles(8, 8, 1))["X"] == ()
    (alone,) = groups([plain, gather], tiles(8, 8, 1))["X"]
    assert [r.tag for r in alone.references] == ["r"]


def test_no_constant_extent_no_box() -> None:
    triangle = union_map("{ S[i, j] -> [i] : 0 <= j <= i < 9 }")
    (group,) = groups([reference("r", "{ S[i, j] -> X[j] }")], triangle)["X"]
    assert group.box.shape == (9,)  # the widest row
    unbounded = union_map("[n] -> { S[i, j] -> [i] : 0 <= j < n and 0 <= i < 9 }")
    assert groups([reference("r", "{ S[i, j] -> X[j] }")], unbounded)["X"] == ()
    assert groups([reference("w", "{ S[i, j] -> X[j] }", writes=True)], unbounded)["X"] == ()


@pytest.mark.parametrize("seed", range(60))
def test_random_references(seed: int) -> None:
    dice = random.Random(seed)

    def subscript() -> str:
        terms = [f"{dice.randint(-2, 3)}{name}" for name in "ijk"]
        text = " + ".join([*terms, str(dice.randint(-3, 3))])
        return f"floor(({text})/{dice.choice((2, 3))})" if dice.random() < 0.2 else text

    references = [
        reference(f"r{n}", f"{{ S[i, j, k] -> X[{subscript()}, {subscript()}] }}", writes=dice.random() < 0.3)
        for n in range(3)
    ]
    scope = tiles(dice.randint(1, 7), dice.randint(1, 9), dice.randint(1, 5))
    check(groups(references, scope)["X"])
