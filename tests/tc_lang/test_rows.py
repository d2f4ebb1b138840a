"""Which sizes count rows, and what is said of those that do not."""

from __future__ import annotations

import pytest

from tensor_comprehensions.tc_lang import compile_source
from tensor_comprehensions.tc_lang.dynamic_sizes.row_axes import find_axes
from tensor_comprehensions.tc_lang.dynamic_sizes.rows import CannotGeneralize, find_rows, list_row_size_candidates

ACCEPTED = {
    "def f(float(N,D) x) -> (o) { o(n,d) = exp(x(n,d)) }": ("N", {"D": 3}),
    "def f(float(N,D) x, float(M) b) -> (o) { o(n,m) = b(m)  o(n,m) += x(n,d) where m in 0:M }": (
        "N",
        {"D": 3, "M": 2},
    ),
    "def f(float(B,T,D) x, float(D) g) -> (o) { o(b,t,d) = x(b,t,d) * g(d) }": ("B T", {"D": 3}),
    "def f(float(V,D) t, int32(N) k) -> (o) { o(n,d) = t(k(n),d) }": ("N", {"V": 9, "D": 3}),
    "def f(float(N,H) x) -> (o) { o(n,h) = x(n,h) + x(n,h+1) where h in 0:4 }": ("N", {"H": 5}),
    "def f(float(N,D) x) -> (t, o) { t(n) +=! x(n,d)  o(n,d) = x(n,d) / t(n) }": ("N", {"D": 3}),
    "def f(float(N) x, float s) -> (o) { o(n) = x(n) * s }": ("N", {}),
    "def f(float(N,D) x) -> (o) { o(n,d) = x(n,d) / N }": ("N", {"D": 3}),
    "def f(float(N,D) x, float(D) w) -> (o) { p(d) = exp(w(d))  o(n,d) = x(n,d) * p(d) }": ("N", {"D": 3}),
    "def f(float(N,D) x) -> (o) { o(d,n) = x(n,d) }": ("N", {"D": 3}),
    "def f(float(D,N) x) -> (o) { o(d,n) = x(d,n) }": ("N", {"D": 3}),
    "def f(float(M,K) a, float(K,N) b) -> (c) { c(m,n) +=! a(m,k) * b(k,n) }": ("N", {"M": 2, "K": 3}),
}
SUMS = {
    "def f(float(D,N) x) -> (o) { o(d) +=! x(d,n) }": ("N", ()),
    "def f(float(M,N) a, float(N,K) b) -> (c) { c(m,k) +=! a(m,n) * b(n,k) }": ("N", ()),
    "def f(float(N,D) x) -> (o) { o(d) +=! x(n,d) }": ("N", ()),
    "def f(float(N,I) x, float(N,J) y) -> (o) { o(i,j) +=! x(n,i) * y(n,j) }": ("N", ()),
    "def f(float(N,D) x) -> (o) { o(d) max=! x(n,d) }": ("N", ()),
    "def f(float(N,D) x) -> (o) { o(d) *=! x(n,d) }": ("N", ()),
    "def f(float(B,T,D) x) -> (o) { o(d) +=! x(b,t,d) }": ("B T", ()),
    "def f(float(N,D) x) -> (m, o) { m(d) +=! x(n,d)  m(d) = m(d) / N  o(n,d) = x(n,d) - m(d) }": ("N", ("N",)),
    "def f(float(N,D) g, int32(N) k) -> (o) { o(i,d) = 0 where i in 0:9, d in 0:4  o(k(n),d) += g(n,d) }": ("N", ()),
}
REFUSED = {
    "def f(float(B,T,D) x) -> (o) { o(b,t,d) = x(b,t,d) / B }": ("B T", {"D": 3}, "its value decides"),
    "def f(float(N,D) x) -> (o) { o(d) = x(N-1,d) }": ("N", {"D": 3}, "other rows"),
    "def f(float(N,D) x) -> (o) { o(d) +=! x(n,d) * x(m,d) }": ("N", {"D": 3}, "two indices"),
    "def f(float(N,D) x) -> (o) { o(d) = x(0,d)  o(d) += x(n,d) }": ("N", {"D": 3}, "other rows"),
    "def f(float(N,D) x, float(D) w) -> (o) { o(d) = w(d)  o(d) += x(n,d) * o(d) }": ("N", {"D": 3}, "operand"),
    "def f(float(N,D) x, float(D) w) -> (o) { o(d) +=! w(d) where exists x(n,d) }": ("N", {"D": 3}, "without a row"),
    "def f(float(N,D) x, float(9) w) -> (o) { o(n,d) = x(n,d) * w(n % 9) }": ("N", {"D": 3}, "goes over it, decides"),
    "def f(float(N,D) x, float(9) w) -> (o) { o(n,d) = n * x(n,d) * w(n % 9) }": ("N", {"D": 3}, "over it, decides"),
    "def f(float(B,T) x) -> (o) { o(b,t) = x(b,t) * b }": ("B T", {}, "the value of 'b'"),
    "def f(float(N,D) x) -> (o) { o(n,d) = x(N-1-n,d) }": ("N", {"D": 3}, "N"),
    "def f(float(N) x) -> (o) { t(n) = x(n) * 2  o(n) = t(n) + t(n+1) }": ("N", {}, "number of rows"),
    "def f(float(N) x) -> (o) { t(n) = x(n) * 2  o(n) = t(n+1) where n in 0:N-1 }": ("N", {}, "number of rows"),
    "def f(float(N) x) -> (o) { o(n) = x(n) + x(2*n) }": ("N", {}, "goes from 0 to min"),
    "def f(float(N) x) -> (o) { o(n) = x(n) + x(2*n) where n in 0:(N+1)/2 }": ("N", {}, "other rows"),
    "def f(float(N) x) -> (o) { o() +=! x(n+1) * n }": ("N", {}, "the value of 'n'"),
    "def f(float(N) x) -> (o) { o(n) = x(n) + x(n+1) + N }": ("N", {}, "its value decides"),
    "def f(float(B,T) x) -> (o) { o(b,t) = x(b,t) + x(b,t+1) }": ("B T", {}, "other rows"),
    "def f(float(N) x) -> (o) { o(2*n) = x(n) }": ("N", {}, "goes from 0 to 2"),
    "def f(float(N,N) x) -> (o) { o(i,j) = x(i,j) }": ("N", {}, "has it twice"),
    "def f(float(B,D,T) x) -> (o) { o(b,d,t) = x(b,d,t) }": ("B T", {"D": 3}, "not beside"),
    "def f(float(N,D) x, int32(N) k) -> (o) { o(n,d) = x(k(n),d) }": ("N", {"D": 3}, "other rows"),
    "def f(float(N,D) x, int32(N) k) -> (float(N,D) o) { o(n,d) = 0  o(k(n),d) += x(n,d) }": ("N", {"D": 3}, "N"),
    "def f(float(N,D) x) -> (float(C,D) o) { o(n,d) = x(n,d) }".replace("float(C,D)", "float(4,D)"): (
        "N",
        {"D": 3},
        "N",
    ),
    "def f(float(B,T) x) -> (o) { o(b,t) = x(t,b) }": ("B T", {}, "another order"),
    "def f(float(B,T) x, float(T) y) -> (o) { o(b,t) = x(b,t) * y(t) }": ("B T", {}, "y"),
}


@pytest.mark.parametrize("source", ACCEPTED)
def test_sizes_that_count_rows(source: str) -> None:
    names, sizes = ACCEPTED[source]
    (function,) = compile_source(source)
    found = find_rows(function, names.split(), sizes)
    assert found.sizes == tuple(names.split())
    assert found.sizes in list_row_size_candidates(function, function.sizes)
    assert set(function.returns) <= set(found.tensors)


@pytest.mark.parametrize("source", SUMS)
def test_sizes_that_are_reduced_over(source: str) -> None:
    names, counts = SUMS[source]
    (function,) = compile_source(source)
    others = {name: 3 for name in function.sizes if name not in names.split()}
    found = find_rows(function, names.split(), others)
    assert (found.sizes, found.counts) == (tuple(names.split()), counts)
    assert found.sizes in list_row_size_candidates(function, function.sizes)


POSITIONS = {
    "def f(float(N,D) x) -> (o) { o(d) +=! x(n,d) * n }": ("N", True),
    "def f(float(N,D) x) -> (o) { o(n,d) = n < d ? x(n,d) : 0 }": ("N", True),
    "def f(float(N,D) x) -> (o) { o(n,d) = d < 2 ? x(n,d) : 0 }": ("N", False),
}


@pytest.mark.parametrize("source", POSITIONS)
def test_values_that_depend_on_the_number_of_their_row(source: str) -> None:
    name, expected = POSITIONS[source]
    (function,) = compile_source(source)
    assert find_rows(function, [name], {"D": 3}).positions is expected


WINDOWS = {
    "def f(float(N) x) -> (o) { o(n) = x(n) + x(n+1) }": ("N", {}, (1, 2)),
    "def f(float(N) x) -> (o) { o(n) = x(n-1) * n - x(n+1) }": ("N", {}, (1, 3)),
    "def f(float(N) x) -> (o) { o(n) = x(3*n+1) }": ("N", {}, (3, 2)),
    "def f(float(N,D) x) -> (o) { o(d) max=! x(2*n+k,d) where k in 0:2 }": ("N", {"D": 3}, (2, 2)),
    "def f(float(C,W) x, float(O,C,K) w) -> (o) { o(q,i) +=! x(c,i+2*k) * w(q,c,k) }": (
        "W", {"C": 3, "O": 4, "K": 3}, (1, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", WINDOWS)
def test_rows_that_are_computed_from_windows(source: str) -> None:
    name, sizes, expected = WINDOWS[source]
    (function,) = compile_source(source)
    found = find_rows(function, [name], sizes)
    assert ((found.step, found.reach), found.windowed) == (expected, ("x",))
    for count in (1, 2, 9):
        elements = found.sizes_for(count)[name]
        assert (elements - found.reach + found.step) // found.step == count
        assert not found.counts_rows({name: found.reach - found.step - 1})


@pytest.mark.parametrize("source", REFUSED)
def test_sizes_that_are_part_of_what_is_computed(source: str) -> None:
    names, sizes, reason = REFUSED[source]
    (function,) = compile_source(source)
    with pytest.raises(CannotGeneralize, match=reason) as refusal:
        find_rows(function, names.split(), sizes)
    assert refusal.value.name in names.split()


def test_an_inlined_call_that_needs_equal_sizes_is_refused_where_rows_decide() -> None:
    source = """
    def add(float(N) a, float(N) b) -> (c) { c(i) = a(i) + b(i) }
    def f(float(N,D) x, float(M,D) y) -> (o) { o(n,d) = x(n,d) + y(0,d) }
    """
    function = compile_source(source)[1]
    assert find_rows(function, ["N"], {"M": 2, "D": 3}).tensors == ("x", "o")


LOOP_ORDERS = {
    "def f(float(M,K) a, float(K,N) b) -> (c) { c(m,n) +=! a(m,k) * b(k,n) }": ("MNK", "NMK"),
    "def f(float(N,I) x, float(O,I) w, float(O) b) -> (y) { y(n,o) = b(o)  y(n,o) += x(n,i) * w(o,i) }": ("NO", "ON"),
    "def f(float(B,M,K) x, float(B,K,N) y) -> (c) { c(b,m,n) +=! x(b,m,k) * y(b,k,n) }": ("BMN", "BNM"),
    "def f(float(M,N) a, float(M) x, float(N) y) -> (c) { c(m,n) = a(m,n) + x(m) * y(n) }": ("MN", "MN"),
    "def f(float(T,D) q, float(U,D) k) -> (z) { s(t,u) +=! q(t,d) * k(u,d)  z(t) +=! exp(s(t,u)) }": ("TU", "TU"),
}
"""Defs, their dynamic sizes, and these in the order of the loops over blocks."""


@pytest.mark.parametrize("source", LOOP_ORDERS)
def test_loops_over_the_columns_of_products_are_around_those_over_their_rows(source: str) -> None:
    names, expected = LOOP_ORDERS[source]
    (function,) = compile_source(source)
    fixed = {name: 8 for name in function.sizes if name not in names}
    found = find_axes(function, tuple(names), fixed)
    assert not found.reasons
    assert [axis.sizes for axis in found.axes] == [(name,) for name in expected]
