"""Subscripts that data decides: values against torch, mistakes on every route, and what the large cases lower to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.errors import RangeError
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import Invoke, Module, Stmt, Store
from tensor_comprehensions.loop_ir.rewrite import walk_stmts
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.polyhedral.cpu.lower import lower_cpu
from tensor_comprehensions.target import AVX2, AVX512, CpuTarget
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

TAKE = "def f(float(M) X, {0}(N) I) -> (O) {{ O(n) = X(I(n)) }}"
BAG = "def f(float(E,D) T, int(B,L) I) -> (O) { O(b,d) +=! T(I(b,l),d) }"
ROWS = "def f(float(E,D) T, int(N) I) -> (O) { O(n,d) = T(I(n),d) }"
INTEGERS = {
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
}
# Subscripts that one loop looks at, that vectors look at, and that threads share.
ONE_BY_ONE, IN_VECTORS, IN_CHUNKS = 20, 1000, 1 << 20


def op(source: str) -> tc.Op:
    return tc.define(source).f


def choices(most: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + most)
    return torch.randint(0, most, shape, generator=generator).to(dtype)


# --- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("count", [1, 20, 65, 1000])
def test_types_of_subscripts(name: str, count: int) -> None:
    x, i = torch.randn(100), choices(100, count, dtype=INTEGERS[name])
    torch.testing.assert_close(op(TAKE.format(name))(x, i), x[i.long()], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["half", "bfloat16", "double", "uint8", "int64", "bool"])
def test_types_of_elements(name: str) -> None:
    dtype = {"half": torch.float16, "double": torch.float64}.get(name) or getattr(torch, name)
    x, i = choices(2, 300).to(dtype), choices(300, 7, 90, dtype=torch.int64)
    gather = op(f"def f({name}(M) X, int64(A,B) I) -> (O) {{ O(a,b) = X(I(a,b)) }}")
    torch.testing.assert_close(gather(x, i), x[i], rtol=0, atol=0)


def test_along_either_dimension() -> None:
    x, i = torch.randn(40, 50), choices(40, 40, 50, dtype=torch.int64)
    down = op("def f(float(M,N) X, int64(A,N) I) -> (O) { O(a,n) = X(I(a,n),n) }")
    along = op("def f(float(M,N) X, int64(M,A) I) -> (O) { O(m,a) = X(m,I(m,a)) }")
    torch.testing.assert_close(down(x, i), torch.gather(x, 0, i), rtol=0, atol=0)
    torch.testing.assert_close(along(x, i), torch.gather(x, 1, i), rtol=0, atol=0)


def test_in_two_dimensions() -> None:
    x, i, j = torch.randn(40, 50), choices(40, 9, 70), choices(50, 9, 70)
    pick = op("def f(float(M,N) X, int(A,B) I, int(A,B) J) -> (O) { O(a,b) = X(I(a,b),J(a,b)) * 2 }")
    torch.testing.assert_close(pick(x, i, j), x[i.long(), j.long()] * 2, rtol=0, atol=0)


def test_strided_subscripts_and_tables() -> None:
    x, i = torch.randn(60, 64)[::2, ::3], choices(30, 100, 6)[::3, 1::2]
    torch.testing.assert_close(op(BAG)(x, i), x[i.long()].sum(1), rtol=1e-5, atol=1e-5)


def test_nested() -> None:
    """A subscript read through a subscript, itself checked."""
    x, i, j = torch.randn(30), choices(30, 50), choices(50, 200)
    chase = op("def f(float(M) X, int(K) I, int(N) J) -> (O) { O(n) = X(I(J(n))) }")
    torch.testing.assert_close(chase(x, i, j), x[i.long()[j.long()]], rtol=0, atol=0)
    i[j[77]] = 30
    with pytest.raises(RangeError, match=r"'X' is out of bounds in dimension 0[^$]*found: 30"):
        chase(x, i, j)
    j[3] = -2
    with pytest.raises(RangeError, match=r"'I' is out of bounds in dimension 0[^$]*found: -2"):
        chase(x, i, j)


def test_through_computed_subscripts() -> None:
    """A temporary of this very def selects; it is checked once it is computed."""
    x, i = torch.randn(300), choices(100, 200)
    shifted = op("def f(float(M) X, int(N) I) -> (O) { J(n) = I(n) * 3  O(n) = X(J(n)) }")
    torch.testing.assert_close(shifted(x, i), x[i.long() * 3], rtol=0, atol=0)
    i[150] = 100
    with pytest.raises(RangeError, match=r"'X' is out of bounds in dimension 0[^$]*found: 300"):
        shifted(x, i)


def test_arithmetic_on_subscripts() -> None:
    x, i = torch.randn(100), choices(1 << 30, 200)
    hashed = op("def f(float(M) X, int(N) I) -> (O) { O(n) = X(I(n) % M) + X((I(n) + n) % M) }")
    expected = x[i.long() % 100] + x[(i.long() + torch.arange(200)) % 100]
    torch.testing.assert_close(hashed(x, i), expected, rtol=0, atol=0)
    assert "check" not in hashed.compile(x, i).source("loops")


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_no_subscripts(shape: tuple[int, ...]) -> None:
    x, i = torch.randn(7, 3), torch.zeros(shape, dtype=torch.int32)
    source = ROWS if len(shape) == 1 else BAG
    expected = x[i.long()] if len(shape) == 1 else x[i.long()].sum(1)
    torch.testing.assert_close(op(source)(x, i), expected)


def test_into_nothing() -> None:
    with pytest.raises(RangeError, match=r"'X'"):
        op(TAKE.format("int"))(torch.zeros(0), torch.zeros(100, dtype=torch.int32))


# --- mistakes ----------------------------------------------------------------------------------------------------


def fails(call: Callable[..., Any], *arguments: torch.Tensor) -> str:
    with pytest.raises(RangeError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8"])
@pytest.mark.parametrize("count", [ONE_BY_ONE, IN_VECTORS, IN_CHUNKS])
@pytest.mark.parametrize("value", [-1, 100, 127])
def test_the_first_subscript_outside_is_reported(name: str, count: int, value: int) -> None:
    if name == "uint8" and value < 0:
        value = 255
    take = op(TAKE.format(name))
    x, i = torch.randn(100), choices(100, count, dtype=INTEGERS[name])
    take(x, i)
    for place in (count - 1, count // 2 + 3, 5):  # each before the last one
        i[place] = value
        value = value - 1 if value > 101 else value
        message = fails(take, x, i)
        assert "'X' is out of bounds in dimension 0" in message
        assert "expected: 0 to 99" in message
        assert f"found: {int(i[place])}" in message


@pytest.mark.parametrize("value", [-(1 << 63), (1 << 63) - 1, 1 << 32, -(1 << 32)])
def test_values_of_any_size(value: int) -> None:
    x, i = torch.randn(100), choices(100, IN_VECTORS, dtype=torch.int64)
    i[500] = value
    assert f"found: {value}" in fails(op(TAKE.format("int64")), x, i)


def test_unsigned_values_that_no_signed_type_holds() -> None:
    x, i = torch.randn(100), choices(100, IN_VECTORS).to(torch.uint64)
    i.view(torch.int64)[500] = -1
    assert "'X' is out of bounds" in fails(op(TAKE.format("uint64")), x, i)


def test_the_same_failure_from_all_threads() -> None:
    """However the threads run, the first in the order of the indices is reported."""
    x, i = torch.randn(50, 60), choices(50, 2000, 700, dtype=torch.int64)
    pick = op("def f(float(M,N) X, int64(A,B) I, int64(A,B) J) -> (O) { O(a,b) = X(I(a,b),J(a,b)) }")
    j = choices(60, 2000, 700, dtype=torch.int64)
    for n in range(40, 2000, 41):
        i[n, (7 * n) % 700] = 50 + n
        j[n - 2, (11 * n) % 700] = -n
    messages = {fails(pick, x, i, j) for _ in range(10)}
    assert len(messages) == 1
    assert "dimension 0" in messages.pop()
    assert "found: 90" in fails(pick, x, i, j)
    i.clamp_(max=49)
    assert "found: -40" in fails(pick, x, i, j)
    assert "dimension 1" in fails(pick, x, i, j)


@pytest.mark.parametrize("count", [ONE_BY_ONE, IN_VECTORS, IN_CHUNKS])
def test_guarded(count: int) -> None:
    """What a condition forbids is neither read nor checked; what it allows is."""
    pad = op("def f(float(M) X, int(N) I) -> (O) { O(n) = I(n) >= 0 ? X(I(n)) : 0 }")
    x, i = torch.randn(100), choices(100, count)
    i[::3] = -7
    expected = torch.where(i < 0, 0.0, x[i.clamp(min=0).long()])
    torch.testing.assert_close(pad(x, i), expected, rtol=0, atol=0)
    i[count - 2] = 100
    message = fails(pad, x, i)
    assert "'X' is out of bounds in dimension 0" in message
    assert "found: 100" in message


def test_tensors_that_start_elsewhere() -> None:
    """The message counts as the program does."""
    source = "def f(float(N) X, int(K) I) -> (T, O) { T(n) = X(n - 5) where n in 5:N  O(k) = T(I(k)) }"
    x, i = torch.randn(50), choices(45, 200) + 5
    t, o = op(source)(x, i)
    torch.testing.assert_close(o, t[i.long() - 5], rtol=0, atol=0)
    i[100] = 4
    assert "expected: 5 to 49\n  found: 4" in fails(op(source), x, i)


def test_scattered_writes_are_checked_first() -> None:
    """A subscript on the left that is outside stops the call before it has written anything."""
    add = op("def f(int(N) I, float(N) X) -> (float(K) H) { H(I(n)) += X(n) }")
    i, x, h = choices(30, IN_VECTORS), torch.randn(IN_VECTORS), torch.randn(30)
    torch.testing.assert_close(add(i, x, H=h), h.index_add(0, i, x), rtol=1e-4, atol=1e-4)
    i[IN_VECTORS - 1] = 30
    before = h.clone()
    with pytest.raises(RangeError, match=r"'H' is out of bounds in dimension 0[^$]*found: 30"):
        add(i, x, H=h, out=h)
    assert torch.equal(h, before)


# --- scatters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("bins", [1, 3, 100])
def test_histogram(name: str, bins: int) -> None:
    count = op(f"def f({name}(N) I, int64(K) Z) -> (H) {{ H(k) = Z(k)  H(I(n)) += 1 }}")
    i, zero = choices(bins, 3000, dtype=INTEGERS[name]), torch.zeros(bins, dtype=torch.int64)
    assert torch.equal(count(i, zero), torch.bincount(i.long(), minlength=bins))


def test_scattered_rows() -> None:
    """The backward of an embedding: rows that meet are summed."""
    add = op("def f(int(N) I, float(N,D) G) -> (float(K,D) H) { H(I(n),d) += G(n,d) }")
    i, g, h = choices(20, 500), torch.randn(500, 33), torch.zeros(20, 33)
    torch.testing.assert_close(add(i, g, H=h), h.index_add(0, i, g), rtol=1e-4, atol=1e-4)


# --- prefetching -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bags", "words"), [(1, 1), (300, 1), (40, 2), (40, 15), (40, 16), (40, 17), (3, 200)])
@pytest.mark.parametrize("row", [8, 16, 48, 64, 200])
def test_sums_of_rows_of_a_large_table(bags: int, words: int, row: int) -> None:
    """The rows asked for ahead are those of the next bag where one ends, whatever is longer."""
    table = torch.randn((1 << 22) // row, row)
    i = choices(len(table), bags, words)
    kernel = op(BAG).compile(table, i)
    assert "prefetch(&T" in kernel.source("loops")
    expected = torch.nn.functional.embedding_bag(i, table, mode="sum")
    torch.testing.assert_close(kernel(table, i), expected, rtol=1e-4, atol=1e-4)


def module(source: str, target: CpuTarget, **sizes: int) -> Module:
    (function,) = compile_source(source)
    return lower_cpu(legalize(bind(function, sizes)), CpuOptions(), target)


def hints(m: Module) -> list[Invoke]:
    return [s for k in m.kernels for s in walk_stmts(k.body) if isinstance(s, Invoke)]


def stores(s: Stmt) -> list[Store]:
    return [c for c in walk_stmts(s) if isinstance(c, Store)]


TINY = replace(AVX512, cache=(64, 128, 256))


@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        (BAG, {"E": 40, "D": 16, "B": 3, "L": 50}),
        (BAG, {"E": 40, "D": 24, "B": 9, "L": 3}),
        (ROWS, {"E": 40, "D": 16, "N": 30}),
        ("def f(float(E,D) T, int(N) I) -> (O) { O(n,d) = I(n) > 3 ? T(I(n),d) : 0 }", {"E": 40, "D": 16, "N": 9}),
    ],
)
def test_hints_read_only_what_exists(source: str, sizes: dict[str, int]) -> None:
    """The interpreter evaluates the indices of a hint as those of a read: none is outside or undefined."""
    m = module(source, TINY, **sizes)
    assert hints(m)
    generator = np.random.default_rng(1)
    shape = (sizes["B"], sizes["L"]) if "B" in sizes else (sizes["N"],)
    arrays = {
        "T": generator.standard_normal((sizes["E"], sizes["D"])).astype(np.float32),
        "I": generator.integers(0, sizes["E"], shape, np.int32),
    }
    rows = arrays["T"][arrays["I"]]
    expected = rows.sum(1) if "B" in sizes else rows
    if "> 3" in source:
        expected = np.where(arrays["I"][:, None] > 3, rows, 0)
    arrays["O"] = np.zeros(expected.shape, np.float32)
    assert interpret(m, arrays) == []
    np.testing.assert_allclose(arrays["O"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        (BAG, {"E": 1000, "D": 64, "B": 3, "L": 50}),  # the second-level cache holds it
        (BAG, {"E": 1 << 20, "D": 4, "B": 3, "L": 50}),  # short rows
        (BAG, {"E": 1 << 10, "D": 4096, "B": 3, "L": 50}),  # rows that the hardware follows
        ("def f(float(E) T, int(N) I) -> (O) { O(n) = T(I(n)) }", {"E": 1 << 22, "N": 99}),  # no rows
        (
            "def f(float(E,D) T, int(N) I) -> (O) { J(n) = I(n) % E  O(n,d) = T(J(n) % E,d) }",
            {"E": 1 << 16, "D": 64, "N": 9},
        ),
    ],
)
def test_no_hints(source: str, sizes: dict[str, int]) -> None:
    assert hints(module(source, AVX2, **sizes)) == []


def test_rows_to_be_updated_are_asked_for_in_order_to_write() -> None:
    add = op("def f(int(N) I, float(N,D) G) -> (float(K,D) H) { H(I(n),d) += G(n,d) }")
    i, g, h = choices(20000, 500), torch.randn(500, 64), torch.zeros(20000, 64)
    kernel = add.compile(i, g, H=h)
    assert "prefetch(&H" in kernel.source("loops")
    assert "@llvm.prefetch.p0(ptr" in kernel.source("llvm")
    torch.testing.assert_close(kernel(i, g, H=h), h.index_add(0, i, g), rtol=1e-4, atol=1e-4)


def test_few_rows_of_a_large_table_stay_in_the_caches() -> None:
    """A table may be larger than the caches where what is touched of it is not."""
    few, many = (module(ROWS, AVX512, E=1 << 20, D=64, N=n) for n in (100, 1 << 17))
    assert [s.nontemporal for k in few.kernels for s in stores(k.body) if s.buffer.name == "O"] == [False]
    assert [s.nontemporal for k in many.kernels for s in stores(k.body) if s.buffer.name == "O"] == [True]
