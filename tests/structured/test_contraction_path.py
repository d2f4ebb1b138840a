"""The order of contraction against all orders, and the defs it leads to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from tensor_comprehensions.einsum_frontend.equation import parse_equation
from tensor_comprehensions.einsum_frontend.to_def import equation_to_def
from tensor_comprehensions.structured.contraction_path import MAX_EXACT_OPERANDS, Labels, best_path


def all_costs(operands: Sequence[Labels], output: Labels, sizes: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Multiplications and memory of every order, by trying them."""
    if len(operands) == 1:
        yield 0, 0
        return
    for i in range(len(operands)):
        for j in range(i):
            rest = [f for n, f in enumerate(operands) if n not in (i, j)]
            both = operands[i] | operands[j]
            kept = both & output.union(*rest)
            here = prod(sizes[x] for x in both)
            memory = prod(sizes[x] for x in kept) if rest else 0
            for operations, more in all_costs([*rest, kept], output, sizes):
                yield here + operations, memory + more


OPERANDS = st.lists(st.frozensets(st.sampled_from("abcdef"), max_size=4), min_size=1, max_size=5)


@given(OPERANDS, st.lists(st.integers(1, 9), min_size=6, max_size=6), st.frozensets(st.sampled_from("abcdef")))
def test_the_best_of_all_orders(operands: list[Labels], numbers: list[int], wanted: Labels) -> None:
    sizes = dict(zip("abcdef", numbers, strict=True))
    output = wanted & frozenset().union(*operands)
    # As in a def, what only one operand has was summed before.
    operands = [
        f & output.union(*(g for m, g in enumerate(operands) if m != n)) if len(operands) > 1 else f
        for n, f in enumerate(operands)
    ]
    order = best_path(operands, output, sizes)
    assert (order.operations, order.memory) == min(all_costs(operands, output, sizes))
    assert len(order.steps) == len(operands) - 1
    assert sorted(n for step in order.steps for n in step) == list(range(max(0, 2 * len(operands) - 2)))


def test_a_chain_starts_at_its_thin_end() -> None:
    chain = [frozenset("ab"), frozenset("bc"), frozenset("cd"), frozenset("d")]
    sizes = dict.fromkeys("abcd", 100)
    order = best_path(chain, frozenset("a"), sizes)
    assert order.operations == 3 * 100**2
    assert order.steps[0] == (2, 3)


def test_long_chains_are_contracted_greedily() -> None:
    names = "abcdefghijklm"
    chain = [frozenset(pair) for pair in pairwise(names)]
    assert len(chain) > MAX_EXACT_OPERANDS
    order = best_path(chain, frozenset("am"), dict.fromkeys(names, 4))
    assert order.operations == (len(chain) - 1) * 4**3


def test_a_def_has_one_statement_per_pair() -> None:
    shapes = [(9, 8, 7), (7, 6), (6, 5), (5, 9)]
    assert equation_to_def(parse_equation("abc,cd,de,ea->b", shapes), ["float32"] * 4) == (
        "def einsum(float32(N_a,N_b,N_c) X0, float32(N_c,N_d) X1, float32(N_d,N_e) X2, float32(N_e,N_a) X3)"
        " -> (out) {\n"
        "  T0(c, e) +=! X1(c, d) * X2(d, e)\n"
        "  T1(c, a) +=! T0(c, e) * X3(e, a)\n"
        "  out(b) +=! X0(a, b, c) * T1(c, a)\n"
        "}\n"
    )


def test_products_without_a_better_order_stay_one_statement() -> None:
    text = equation_to_def(parse_equation("ij,ij,ij->i", [(3, 4)] * 3), ["float32"] * 3)
    assert text.count("\n  ") == 1
    assert "out(i) +=! X0(i, j) * X1(i, j) * X2(i, j)" in text


def test_what_one_operand_has_alone_is_summed_first() -> None:
    text = equation_to_def(parse_equation("abc,bd->d", [(3, 4, 5), (4, 6)]), ["float32"] * 2)
    assert "S0(b) +=! X0(a, b, c)" in text
    assert "out(d) +=! S0(b) * X1(b, d)" in text
