"""Tensors against what they promise, enumerated; and the tensors of the kernels that the design writes out.

`pytest tests/tiles --examples 30000` draws as many tensors for each law, `--hypothesis-seed` the same ones again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tensor_comprehensions import tiles as t
from tensor_comprehensions.core.dtypes import BFLOAT16, FLOAT32
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.layouts import Layout, concatenate, parse
from tensor_comprehensions.layouts.layout import flatten_tuple
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.nodes import Space, Var
from tensor_comprehensions.tiles.tensor_levels import TensorLevel
from tensor_comprehensions.tiles.tensors import Tensor

from ..helpers.index_expressions import value
from ..helpers.random_layouts import LAYOUTS, compact

law = settings(deadline=None, max_examples=60)
TILERS = st.one_of(
    st.none(), st.integers(1, 9), st.builds(Layout, st.sampled_from((2, 3, 4)), st.sampled_from((1, 2, 3, 4)))
)
SHAPES = st.lists(st.sampled_from((1, 2, 3, 4, 5, 6, 7, 12)), min_size=1, max_size=3).filter(lambda s: prod(s) <= 48)
TENSORS = SHAPES.flatmap(
    lambda shape: st.permutations(range(len(shape))).map(
        lambda order: t.DataTensor((TensorLevel.of(compact(shape, list(order))),), dtype=FLOAT32, memory=Space.GLOBAL)
    )
)
"""Of one level, with every offset once."""
I, J, M = Var("i"), Var("j"), Var("m")  # noqa: E741


def attempt(operation: Callable[..., Tensor], *operands: object) -> t.DataTensor | None:
    """The result, or None where the operation refuses with its tensor in the message."""
    try:
        result = operation(*operands)
    except ArgumentError as error:
        message = error.message
    else:
        assert isinstance(result, t.DataTensor)
        return result
    assert str(getattr(operation, "__self__", None)) in message
    return None


def coordinates(tensor: Tensor) -> Iterator[tuple[int, ...]]:
    """Those of the outermost level, the last dimension fastest; dimensions that were kept whole take none."""
    outer = tensor.parts[0]
    return product(*(range(outer.dimension(n)[0].size) for n, whole in enumerate(outer.whole) if not whole))


def elements(tensor: Tensor) -> Iterator[tuple[int, bool]]:
    """The offset of every element, level after level, and whether it exists."""
    if not tensor.parts:
        yield value(tensor.offset), tensor.predicate is None or bool(value(tensor.predicate))
        return
    for at in coordinates(tensor):
        yield from elements(tensor[at])


@law
@given(TENSORS, st.data())
def test_tiles_have_each_element_once_and_know_what_is_beyond(tensor: t.DataTensor, data: st.DataObject) -> None:
    tiled: Tensor | None = tensor
    for _ in range(data.draw(st.integers(1, 2))):
        before = tiled
        tiled = attempt(tiled.tile, *(data.draw(TILERS) for _ in tensor.shape)) if tiled is not None else None
    if tiled is None:
        assert before is not None
        return
    assume(tiled.size <= 600)
    assert sorted(at for at, exists in elements(tiled) if exists) == list(range(tensor.size))
    assert tiled.size >= tensor.size


@law
@given(TENSORS, st.data())
def test_the_element_of_a_tile_is_the_one_that_numbers_say(tensor: t.DataTensor, data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 5)) for _ in tensor.shape]
    tiled = tensor.tile(*sizes)
    for outer in coordinates(tiled):
        for inner in coordinates(tiled[outer]):
            at = [o * size + c for o, size, c in zip(outer, sizes, inner, strict=True)]
            element = tiled[outer][inner]
            exists = element.predicate is None or bool(value(element.predicate))
            assert exists == all(c < n for c, n in zip(at, map(int, tensor.shape), strict=True))
            if exists:
                assert value(element.offset) == value(tensor[tuple(at)].offset)


@law
@given(TENSORS, st.data())
def test_variables_find_the_elements_that_numbers_find(tensor: t.DataTensor, data: st.DataObject) -> None:
    tiled = tensor.tile(*(data.draw(st.integers(1, 5)) for _ in tensor.shape))
    tiled = data.draw(st.sampled_from([tiled, tiled.join(*range(len(tensor.shape)))]))
    outer, inner = (data.draw(st.sampled_from(list(coordinates(x)))) for x in (tiled, tiled[(0,) * len(tensor.shape)]))
    names = {**{f"o{n}": c for n, c in enumerate(outer)}, **{f"i{n}": c for n, c in enumerate(inner)}}
    found = tiled[tuple(Var(f"o{n}") for n in range(len(outer)))][tuple(Var(f"i{n}") for n in range(len(inner)))]
    given_numbers = tiled[outer][inner]
    assert value(found.offset, names) == value(given_numbers.offset)
    exists = [p is None or bool(value(p, names)) for p in (found.predicate, given_numbers.predicate)]
    assert exists[0] == exists[1]


@law
@given(TENSORS, st.data())
def test_a_reshaped_level_has_the_same_elements_in_row_major_order(tensor: t.DataTensor, data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([n for n in range(1, 9) if tensor.size % n == 0]))
    for shape in ((rows, tensor.size // rows), (tensor.size // rows, rows), tensor.size):
        if (changed := attempt(tensor.reshape, 0, shape)) is not None:
            assert list(elements(changed)) == list(elements(tensor))
        else:
            assert len(tensor.shape) > 1


@law
@given(TENSORS, st.data())
def test_joined_dimensions_count_with_the_first_fastest(tensor: t.DataTensor, data: st.DataObject) -> None:
    rank = len(tensor.shape)
    joined = data.draw(st.permutations(range(rank)))[: data.draw(st.integers(1, rank))]
    rest = [n for n in range(rank) if n not in joined]
    place = sum(n < joined[0] for n in rest)
    whole = tensor.join(*joined)
    for at in coordinates(tensor):
        number = Layout.column_major(tuple(tensor.shape[n] for n in joined))
        one = sum(at[n] * d for n, d in zip(joined, flatten_tuple(number.stride), strict=True))
        found = [at[n] for n in rest]
        assert value(whole[(*found[:place], one, *found[place:])].offset) == value(tensor[at].offset)
        parts = tuple(at[n] for n in joined)
        assert value(whole[(*found[:place], parts, *found[place:])].offset) == value(tensor[at].offset)


@law
@given(TENSORS)
def test_transposed_twice_is_the_tensor(tensor: t.DataTensor) -> None:
    assert tensor == tensor.T.T
    for at in coordinates(tensor):
        assert tensor.T[at[::-1]] == tensor[at]


@law
@given(TENSORS, LAYOUTS, LAYOUTS)
def test_a_partition_gives_each_thread_its_values(tensor: t.DataTensor, threads: Layout, values: Layout) -> None:
    tv = concatenate(threads, values)
    if (found := attempt(tensor.partition, tv)) is None:
        return
    assert (found.count, found.size) == (threads.size, tv.size)
    for thread in range(threads.size):
        expected = tuple(tensor.levels[0](threads(thread) + values(v)) for v in range(values.size))
        assert found[thread].swizzled_offsets() == expected
        assert value(found[I].offset, {"i": thread}) == tensor.levels[0](threads(thread))


@law
@given(st.data())
def test_indices_are_the_coordinates_of_a_thread(data: st.DataObject) -> None:
    threads = t.threads(f"[{data.draw(st.sampled_from((12, 32, 96, 128)))}].thread")
    for _ in range(data.draw(st.integers(1, 2))):
        size = data.draw(st.sampled_from([n for n in range(1, 33) if threads.levels[-1].size % n == 0]))
        threads = threads.tile(size)
    level = data.draw(st.integers(0, len(threads.levels) - 1))
    count = threads.levels[level].size
    rows = data.draw(st.sampled_from([n for n in range(1, 9) if count % n == 0]))
    threads = threads.reshape(level, (rows, count // rows))
    part = data.draw(st.sampled_from(threads.reshape(0, threads.count).split(*_halves(threads.count))))
    formulas = [part.indices(n, thread=Var("t")) for n in range(len(part.levels))]
    inside = {value(part.offset) + at for at in part.offsets()}
    for number in inside:
        found = part
        for indices in formulas:
            found = found[tuple(b.const(value(e, {"t": number})) for e in indices)]
        assert value(found.offset) == number


def _halves(n: int) -> tuple[int, ...]:
    return (n // 2, n - n // 2) if n > 1 else (n,)


@law
@given(st.lists(st.lists(LAYOUTS, min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_tensor_is_read_as_it_prints(levels: list[list[Layout]]) -> None:
    tensor = t.DataTensor(
        tuple(TensorLevel.of(concatenate(*modes)) for modes in levels), dtype=BFLOAT16, memory=Space.SHARED
    )
    assert t.tensor(str(tensor)) == tensor
    assert t.tensor(f" {str(tensor).replace(',', ' , ')} ") == tensor


# --- the tensors of the design's kernels ----------------------------------------------------------------------------


def test_the_tensors_of_a_product() -> None:
    a = t.tensor("[512,256].fp16.GL").tile(128, 32)
    assert str(a) == "[(4,8):(32768,32)].[(128,32):(256,1)].fp16.GL"
    assert str(a[I]) == "[8:32].[(128,32):(256,1)].fp16.GL"
    assert (a[I].count, a[I].shape, a[I][J].shape) == (8, (8,), (128, 32))
    shared = t.tensor("[3,128,32].fp16.SH.Sw<2,3,3>")
    assert str(shared[I]) == "[(128,32):(32,1)].fp16.SH.Sw<2,3,3>"
    warp = t.threads("[128].thread").tile(32).reshape(0, (2, 2))
    assert str(warp) == "[(2,2):(64,32)].[32:1].thread"
    assert t.threads("[2,2].[32].thread") == warp


def test_a_dimension_that_is_kept_whole_takes_no_index() -> None:
    x = t.tensor("[1000,64].fp16.GL").tile(4, None)
    assert str(x[I]) == "[(4,64):(64,1)].fp16.GL"
    assert str(x[I].tile(1, None)[J]) == "[(1,64):(0,1)].fp16.GL"
    w = t.tensor("[3,64,64].fp16.GL")[M].tile(None, 16)
    assert (w.count, str(w[I])) == (4, "[(64,16):(64,1)].fp16.GL")


def test_the_gates_of_a_cell_are_one_dimension() -> None:
    w = t.tensor("[4,32,64].fp16.GL").join(0, 1)
    assert str(w) == "[((4,32),64):((2048,64),1)].fp16.GL"
    tile = w.tile(4 * 8, 16)[I, J]
    assert str(tile) == "[((4,8),16):((2048,64),1)].fp16.GL"
    assert str(tile[(2, None), :]) == "[(8,16):(64,1)].fp16.GL"
    assert value(tile[(2, None), :].offset, {"i": 1, "j": 3}) == 2 * 2048 + 8 * 64 + 3 * 16


def test_roles_are_parts_of_the_threads() -> None:
    load, products = t.threads("[384].thread").tile(128).split(1, 2)
    assert (str(load), str(products)) == ("[1:128].[128:1].thread", "[2:128].[128:1].thread")
    assert [value(e, {"thread.x": 300}) for level in (0, 1) for e in products.indices(level)] == [1, 44]


def test_a_fragment_is_a_partition() -> None:
    """Sums of m16n8: rows 0 to 7 and 8 to 15, two neighbors each."""
    tile = t.tensor("[16,8].fp32.SH").partition("((4,8),(2,2)):((32,1),(16,8))")
    for lane in range(32):
        rows, columns = (lane // 4, lane // 4 + 8), (lane % 4 * 2, lane % 4 * 2 + 1)
        assert tile[lane].swizzled_offsets() == tuple(8 * row + column for row in rows for column in columns)


def test_guards_that_nothing_can_fail_go() -> None:
    x = t.tensor("[100].fp32.GL").tile(32)
    assert [x[n].extents for n in range(4)] == [(), (), (), (100,)]
    assert x[3][3].predicate is None
    assert x[3][4].predicate == b.FALSE
    assert x[I][J].predicate == b.lt(b.add(b.mul(I, 32), J), 100)


def test_a_layout_as_a_tiler_is_also_text() -> None:
    x = t.tensor("[32].fp32.GL")
    assert x.tile("(4,2):(1,16)") == x.tile(parse("(4,2):(1,16)"))


A, X = t.tensor("[100,64].fp16.GL"), t.tensor("[100,64].fp16.GL").tile(32, 16)
THREADS = t.threads("[3,4].[32].thread")


@pytest.mark.parametrize(
    ("wrong", "message", "expected"),
    [
        (lambda: A.tile(3), "cannot tile [(100,64):(64,1)].fp16.GL by [3]", "2 sizes"),
        (lambda: A.tile(0, 2), "by [0, 2]", "sizes of 1 or more"),
        (lambda: A.tile(True, 2), "by [True, 2]", "sizes of 1 or more"),
        (lambda: A.tile("(4,4):(1,2)", None), "by [(4,4):(1,2), _]: cannot complement", ""),
        (lambda: A.tile("4:", None), "the layout ends too early", ""),
        (lambda: A[0, 0].tile(1), "cannot tile [].fp16.GL", "a tensor with a level"),
        (lambda: THREADS.tile(5), "32 threads are no whole number of tiles", ""),
        (lambda: A.reshape(1, (4, 4)), "at level 1", "a level of 0 to 0"),
        (lambda: A.reshape(0, (4, 4)), "to (4, 4) at level 0", "sizes of together 6400"),
        (lambda: t.tensor("[(4,6):(1,10)].fp32.GL").reshape(0, (3, 8)), "to (3, 8) at level 0: cannot compose", ""),
        (lambda: A.reshape(0, "ab"), "to ab at level 0", "sizes of together 6400"),
        (lambda: A.reshape(0, (80, -80)), "to (80, -80) at level 0", "sizes of together 6400"),
        (lambda: A.join("a"), "along ('a',)", "different dimensions of 0 to 1"),
        (lambda: A.partition(4), "by 4", "a layout of threads and values"),
        (lambda: t.tensor("[4].fp16.SH").swizzled("Sw<1,1,1>"), "by Sw<1,1,1>", "a Swizzle"),
        (lambda: A.join(), "cannot join", "different dimensions of 0 to 1"),
        (lambda: A.join(0, 2), "along (0, 2)", "different dimensions of 0 to 1"),
        (lambda: A.split(50, 50), "cannot split", "a single dimension"),
        (lambda: A[I].split(60), "into (60,)", "counts of together 64"),
        (lambda: X[0, 0, 0], "cannot index", "at most 2 coordinates"),
        (lambda: X[4], "cannot index", "a coordinate of 4 in dimension 0"),
        (lambda: X[-1], "cannot index", "a coordinate of 4 in dimension 0"),
        (lambda: X[1:2], "cannot index", "a coordinate of 4 in dimension 0"),
        (lambda: X[None, (1, 0)], "cannot index", "a coordinate of 4 in dimension 1"),
        (lambda: X[1.5], "cannot index", "a coordinate of 4 in dimension 0"),
        (lambda: X[b.const(1.0, FLOAT32)], "cannot index", "a coordinate of 4 in dimension 0"),
        (lambda: X[0, 0].predicate, "cannot guard", "an index for every dimension"),
        (lambda: X.partition("(32,8):(1,32)"), "cannot partition", "one level"),
        (lambda: A.partition("(32,7):(1,32)"), "by (32, 7) : (1, 32): cannot compose", ""),
        (lambda: A.swizzled(t.Swizzle(3, 3, 3)), "by Sw<3,3,3>", "a tensor in SH"),
        (lambda: A[I].swizzled_offsets(), "cannot enumerate", "a number"),
        (lambda: THREADS.indices(2), "at level 2", "a level of 0 to 1"),
    ],
)
def test_mistakes_name_the_tensor_and_what_was_expected(wrong: object, message: str, expected: str) -> None:
    assert callable(wrong)
    with pytest.raises(ArgumentError) as error:
        wrong()
    assert message in error.value.message
    assert expected in error.value.expected
