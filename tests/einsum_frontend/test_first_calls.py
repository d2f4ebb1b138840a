"""Calls of `tc.einsum` before kernels pay: torch computes them, and which they are depends on sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.knobs import override_knobs
from tensor_comprehensions.einsum_frontend import first_calls

EQUATION = "ni,io->no"


@pytest.fixture(autouse=True)
def fresh_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(first_calls, "_first_calls", {})
    with override_knobs(einsum="auto"):
        yield


def operands(n: int, inner: int = 7, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, inner).to(dtype), torch.randn(inner, 11).to(dtype)


def count_kernels(equation: str, calls: Sequence[Sequence[torch.Tensor]]) -> int:
    """How many kernels the calls make, whose results are right."""
    before = tc.statistics()
    for given in calls:
        found, expected = tc.einsum(equation, *given), torch.einsum(equation, *given)
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return tc.statistics().compiled - before.compiled


def test_sixty_sizes_compile_nothing() -> None:
    assert count_kernels(EQUATION, [operands(n) for n in range(1, 61)]) == 0


def test_torchs_results_are_contiguous_and_own_their_memory() -> None:
    a, b = torch.randn(5, 4), torch.randn(4, 6)
    assert count_kernels("ij,jk->ki", [(a, b)]) == 0
    assert count_kernels("ij,ij->ji", [(a, a)]) == 0
    assert count_kernels("bij,bjk,bk->i", [(torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 5))]) == 0


def test_sizes_of_calls_by_torch_count_as_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the third value a size is a parameter of the first kernel."""
    monkeypatch.setattr(first_calls, "ENOUGH_SECONDS", 4.5 * first_calls.CALL_SECONDS)
    equation = "nq,qo->no"
    before = tc.statistics()
    assert count_kernels(equation, [operands(n) for n in (3, 4, 5, 6)]) == 0
    assert count_kernels(equation, [operands(n) for n in (7, 3, 40, 4, 1)]) == 1
    assert tc.statistics().ranged == before.ranged + 1


def test_work_is_counted_from_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls are torch's, whatever they take; one with much work is not."""
    monkeypatch.setattr(first_calls, "ENOUGH_SECONDS", 6 * first_calls.CALL_SECONDS)
    calls = [operands(n, 32) for n in (5, 5, 900, 5, 2000, 5, 5)]

    def decide() -> list[bool]:
        first_calls._first_calls.clear()
        return [first_calls.are_first(EQUATION, given) for given in calls]

    found = decide()
    assert found == decide()
    assert found == sorted(found, reverse=True)
    assert found[0]
    assert not found[-1]
    first_calls._first_calls.clear()
    assert not first_calls.are_first(EQUATION, operands(100_000, 64))


@pytest.mark.parametrize(
    ("equation", "given"),
    [
        ("n,n->n", (torch.ones(3), torch.ones(1))),
        ("...i,io->...o", operands(3)),
        ("ni->n", (torch.ones(3, 4),)),
        (EQUATION, (torch.ones(3, 7), torch.ones(7, 11, dtype=torch.float64))),
        (EQUATION, operands(3, dtype=torch.int32)),
        (EQUATION, operands(3, dtype=torch.bfloat16)),
        (EQUATION, operands(3)[:1]),
        ("n,", operands(3)),
    ],
)
def test_other_calls_are_kernels_or_mistakes(equation: str, given: Sequence[torch.Tensor]) -> None:
    assert not first_calls.are_first(equation, given)


@pytest.mark.parametrize("given", [(), operands(3)[:1], (operands(3)[0], torch.ones(8, 11)), (1, 2)])
def test_mistakes_are_reported_as_ever(given: Sequence[torch.Tensor]) -> None:
    tc.einsum(EQUATION, *operands(3))
    with pytest.raises(tc.ArgumentError, match="einsum"):
        tc.einsum(EQUATION, *given)


def test_first_calls_have_gradients() -> None:
    a, b = (x.requires_grad_() for x in operands(3))
    tc.einsum(EQUATION, a, b).sum().backward()
    torch.testing.assert_close(a.grad, b.detach().sum(1).expand(3, 7))


@pytest.mark.parametrize(
    ("equation", "knobs"), [("nui,io->o", {"einsum": "kernel"}), ("nvi,io->o", {"dynamic": "always"})]
)
def test_a_kernel_can_compute_the_first_call(equation: str, knobs: dict[str, str]) -> None:
    with override_knobs(**knobs):
        assert count_kernels(equation, [(torch.randn(2, 3, 4), torch.randn(4, 5))]) == 1


class ClearedAtOnce(dict[object, object]):
    """A table that another thread clears whenever it gets an entry."""

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def setdefault(self, key: object, default: object = None) -> object:
        return default


def test_another_thread_may_clear_the_table_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_calls, "_first_calls", ClearedAtOnce())
    assert count_kernels(EQUATION, [operands(5)]) == 0
