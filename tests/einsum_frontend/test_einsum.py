"""`tc.einsum` means what `torch.einsum` means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.einsum_frontend.lookup import operator_for

SIZES = {"a": 3, "b": 4, "c": 5, "d": 2, "e": 6, "i": 3, "j": 4, "k": 5, "l": 2, "N": 7}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4 if expected.dtype == torch.float32 else 1e-12)


def tensors(equation: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(equation))
    terms = equation.replace(" ", "").split("->")[0].split(",")
    return [torch.randn([SIZES[i] for i in t], generator=generator, dtype=dtype) for t in terms]


@pytest.mark.parametrize(
    "equation",
    [
        "ij,jk->ik", "ij,jk", "ij,kj->ik", "ij,jk->ki", "bij,bjk->bik", "ij->ji", "ij", "ji", "ij->i", "ij->", "i,i",
        "i,i->", "i,j", "i,j->ji", "ii", "ii->i", "iij->j", "iji,j->i", "ij,ij->ij", "ij,j->i", "ij,ji", "ij,ij,ij->i",
        "ik,jk,lk->ijl", "abc,cd,de,ea->b", "abcd,ec->ebda", "aebc,ebd->adc", "ij, jk -> ik", "Ni,iN->N", "i,j,k->kji",
        "ijk,jil->kl", "a,b,c,d,e->", "ab,c->b", "abc,d->ad", ",ij->ji", ",,i", "", "->", ",->",
    ],
)  # fmt: skip
def test_equations(equation: str) -> None:
    operands = tensors(equation)
    close(tc.einsum(equation, *operands), torch.einsum(equation, *operands))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...ij,...jk->...ik", ((2, 3, 4), (2, 4, 5))),
        ("...ij,...jk->...ik", ((7, 2, 3, 4), (2, 4, 5))),
        ("...ij,...jk", ((1, 3, 4), (6, 4, 5))),
        ("...ij,jk", ((3, 4), (4, 5))),
        ("i...,...j->j...i", ((3, 4, 5), (4, 1, 2))),
        ("...i->i", ((2, 3, 4),)),
        ("...", ((2, 3),)),
        ("...,...", ((2, 1), (3,))),
        ("...ii->...i", ((2, 3, 3),)),
        ("i->...i", ((4,),)),
        ("ij,ik->jk", ((4, 5), (1, 3))),
        ("i,i->i", ((1,), (5,))),
        ("i,i", ((1,), (1,))),
        ("ij,jk->ik", ((0, 3), (3, 2))),
        ("ij,jk->ik", ((2, 0), (0, 3))),
        ("ij,ij,ij", ((1, 4), (3, 1), (1, 1))),
    ],
)
def test_ellipses_and_sizes_of_one_and_zero(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    operands = [torch.randn(shape) for shape in shapes]
    close(tc.einsum(equation, *operands), torch.einsum(equation, *operands))


def test_strided_operands_out_and_numpy() -> None:
    a, b = torch.randn(6, 4).t(), torch.randn(12, 5)[::2]
    close(tc.einsum("ij,jk", a, b), a @ b)
    out = torch.empty(5, 4)
    assert tc.einsum("ij,jk->ki", a, b, out=out) is out
    close(out, (a @ b).t())
    x = tc.einsum("ij,jk", a.numpy(), b.numpy())
    assert isinstance(x, np.ndarray)
    np.testing.assert_allclose(x, a.numpy() @ b.numpy(), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int64])
def test_types(dtype: torch.dtype) -> None:
    a, b = torch.arange(12).reshape(3, 4).to(dtype), torch.arange(8).reshape(4, 2).to(dtype)
    close(tc.einsum("ij,jk->ik", a, b), torch.einsum("ij,jk->ik", a, b))


def test_calls_with_other_sizes_share_a_def() -> None:
    first, second = (operator_for("ij,jk", torch.ones(n, 4), torch.ones(4, 5)) for n in (2, 3))
    assert first is second


@pytest.mark.parametrize(
    ("equation", "shapes", "words"),
    [
        ("ij,jk", [(2, 3)], "subscripts for 2 operands, got 1"),
        ("ij", [(2, 3), (2, 3)], "subscripts for 1 operand, got 2"),
        ("ij", [], "subscripts for 1 operand, got 0"),
        ("i..", [(2, 3)], r"found '\.' that is not part of an ellipsis"),
        ("......i", [(2,)], "two ellipses"),
        ("i$", [(2,)], r"invalid subscript '\$'"),
        ("i->i->i", [(2,)], "invalid subscript"),
        ("ij", [(2, 3, 4)], "operand 0 has 3 dimensions, and 2 subscripts"),
        ("...ij", [(2,)], "operand 0 has 1 dimension, and 2 subscripts"),
        ("ij,jk", [(2, 3), (4, 5)], "subscript 'j' has size 3 in operand 0 and 4 in operand 1"),
        ("...,...", [(2, 3), (2, 4)], "dimension 1 of the ellipsis has size 3 in operand 0 and 4 in operand 1"),
        ("ii", [(1, 3)], "'i' is repeated in operand 0, whose sizes are 1 and 3"),
        ("i->j", [(2,)], "output subscript 'j' is in no operand"),
        ("i->ii", [(2,)], "output subscript 'i' occurs more than once"),
    ],
)
def test_mistakes_are_reported_in_the_words_of_einsum(equation: str, shapes: list[tuple[int, ...]], words: str) -> None:
    with pytest.raises(tc.ArgumentError, match=words) as mistake:
        tc.einsum(equation, *(torch.ones(shape) for shape in shapes))
    assert equation in str(mistake.value)


def test_operands_that_are_no_tensors() -> None:
    with pytest.raises(tc.ArgumentError, match="operand 1 is a list, not a tensor"):
        tc.einsum("i,i", torch.ones(1), [1.0])
    with pytest.raises(tc.ArgumentError, match="operand 0 is a nested tensor"):
        tc.einsum("ijk->ij", torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)], layout=torch.jagged))
    with pytest.raises(tc.ArgumentError, match="the equation is an int"):
        tc.einsum(3, torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(tc.ArgumentError, match="the equation is a list"):
        tc.einsum([0, 1], torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(tc.ArgumentError, match="operand 0 has elements of type complex64"):
        tc.einsum("ij,j->i", torch.ones(1, 1, dtype=torch.complex64), torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16])
@pytest.mark.parametrize("equation", ["ij->", "ij->i", "ii->", "ij->ji", "ii->i", "ij", "..."])
def test_one_operand_has_the_type_of_torch(equation: str, dtype: torch.dtype) -> None:
    x = torch.ones(300, 300).to(dtype) if "ii" in equation else torch.ones(3, 300).to(dtype)
    expected = torch.einsum(equation, x)
    found = tc.einsum(equation, x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,jk->ijk", "ij,jl->", "ij,kl->", "ij,jk,kl->il", "ij,ij->i"])
def test_products_of_integers_keep_their_type_and_sums_of_one_do_not(equation: str, dtype: torch.dtype) -> None:
    sizes = {"i": 3, "j": 40, "k": 5, "l": 2}
    operands = [
        torch.full([sizes[label] for label in term], 5).to(dtype) for term in equation.partition("->")[0].split(",")
    ]
    try:
        expected = torch.einsum(equation, *operands)
    except RuntimeError:  # torch multiplies no int64 by other types
        expected = torch.einsum(equation, *(x.long() for x in operands))
    found = tc.einsum(equation, *operands)
    assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


def test_bools_are_moved_and_counted_but_not_multiplied() -> None:
    x = torch.tensor([[True, False, True]])
    assert torch.equal(tc.einsum("ij->ji", x), x.t())
    assert tc.einsum("ij->", x).item() == 2
    with pytest.raises(tc.ArgumentError, match="einsum: the operands are bool"):
        tc.einsum("ij,ij->ij", x, x)


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, list[Tensor]]:
    """A random equation with operands: repeated subscripts, sizes of 1, an ellipsis, implicit outputs."""
    labels = draw(st.lists(st.sampled_from("abcdE"), min_size=1, max_size=4, unique=True))
    sizes = {label: draw(st.integers(1, 4)) for label in labels}
    dots = draw(st.lists(st.integers(1, 3), max_size=2))
    terms, operands = [], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(draw(st.integers(1, 4))):
        letters = draw(st.lists(st.sampled_from(labels), max_size=3))
        covered = dots[draw(st.integers(0, len(dots))) :]
        at = draw(st.integers(0, len(letters)))
        once = draw(st.sampled_from([None, *letters]))  # a subscript of size 1 in this operand
        before, after = ([1 if i == once else sizes[i] for i in part] for part in (letters[:at], letters[at:]))
        covered = [draw(st.sampled_from((1, size))) for size in covered]
        terms.append("".join(letters[:at]) + ("..." if covered else "") + "".join(letters[at:]))
        operands.append(torch.randn([*before, *covered, *after], generator=generator, dtype=torch.float64))
    equation = ",".join(terms)
    if draw(st.booleans()):
        used = sorted(set("".join(terms)) - {"."})
        chosen = draw(st.lists(st.sampled_from(used), unique=True)) if used else []
        at = draw(st.integers(0, len(chosen)))
        middle = "..." if "..." in equation and draw(st.booleans()) else ""
        equation += "->" + "".join(chosen[:at]) + middle + "".join(chosen[at:])
    return equation, operands


@settings(max_examples=200, deadline=None)
@given(problems())
def test_random_equations_define_the_same(problem: tuple[str, list[Tensor]]) -> None:
    equation, operands = problem
    close(operator_for(equation, *operands).reference(*operands), torch.einsum(equation, *operands))


@settings(max_examples=15, deadline=None)
@given(problems())
def test_random_equations_compile_to_the_same(problem: tuple[str, list[Tensor]]) -> None:
    equation, operands = problem
    close(tc.einsum(equation, *operands), torch.einsum(equation, *operands))
