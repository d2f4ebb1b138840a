"""What a person sees of a mistake: the frames of their own code, and none of this package."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core import error_boundary, knobs

MM = tc.define("def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }")
A = torch.ones(2, 3)


def wrong_gradient(inputs: object, outputs: object, gradients: object) -> torch.Tensor:
    raise KeyError("of the user")


def calls_another(inputs: object, outputs: object, gradients: object) -> torch.Tensor:
    return MM.mm(A, A)  # type: ignore[no-any-return]


TWICE = "def f(float(N) x) -> (y) { y(i) = 2 * x(i) }"
NESTED = tc.define(TWICE, {"f": calls_another}).f


def backward(op: tc.Op) -> None:
    op(torch.ones(3, requires_grad=True)).sum().backward()


def with_warnings_as_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tc.define("def f(float(N) x) -> (y) { y(i) = 1/2 * x(i) }")


@tc.op
def scale(x, a):  # type: ignore[no-untyped-def]
    """def scale(float(N) x, float a) -> (y) { y(i) = a * x(i) }"""


MISTAKES: dict[str, Callable[[], object]] = {
    "define": lambda: tc.define("def f(float(N) a) -> (b) { b(i) = c(i) }"),
    "call": lambda: MM.mm(A, A),
    "recorded call": lambda: MM.mm(A.clone().requires_grad_(), A),
    "infer": lambda: MM.mm.infer((3,), (4, 5)),
    "compile": lambda: MM.mm.compile(A, A),
    "unknown def": lambda: MM.mn,
    "unknown key": lambda: MM["mn"],
    "a call of a program": lambda: MM(A),
    "einsum": lambda: tc.einsum("ij,jk->ik", A, A),
    "expression": lambda: tc.from_expression("y(i) = z(j)"),
    "decorated": lambda: tc.op(lambda x: x),
    "interpreted": lambda: interpreted(),
    "a warning": with_warnings_as_errors,
    "numpy": lambda: MM.mm(A.numpy(), A.numpy()),
    "no memory": lambda: tc.define("def f(float(N) x) -> (y) { y(i,j,k,l) = x(i)*x(j)*x(k)*x(l) }").f(torch.ones(9999)),
}


def interpreted() -> None:
    with knobs.override_knobs(interpret=True):
        MM.mm(A, A)


def frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    seen: BaseException | None = error
    while seen is not None:
        yield from traceback.extract_tb(seen.__traceback__)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def ours(error: BaseException) -> list[str]:
    return [f"{f.filename}:{f.lineno}" for f in frames(error) if "/tensor_comprehensions/" in f.filename]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows_the_users_frames_alone(mistake: str) -> None:
    with pytest.raises((tc.TCError, Warning)) as caught:
        MISTAKES[mistake]()
    assert len(ours(caught.value)) <= (sys.version_info < (3, 11))
    assert any(f.filename == __file__ for f in frames(caught.value))
    with knobs.override_knobs(tracebacks="full"), pytest.raises((tc.TCError, Warning)) as caught:
        MISTAKES[mistake]()
    assert ours(caught.value)


@pytest.mark.parametrize("record", [False, True])
def test_an_operator_of_torch_shows_none_of_ours(record: bool) -> None:
    with pytest.raises(tc.ArgumentError) as caught:
        MM.mm.overload(A.clone().requires_grad_(record), A)
    assert len(ours(caught.value)) <= (sys.version_info < (3, 11))


def test_a_mistake_in_a_users_gradient_shows_that_gradient() -> None:
    with pytest.raises(tc.ArgumentError) as caught:
        backward(NESTED)
    names = [f.name for f in frames(caught.value)]
    assert "calls_another" in names
    assert "backward" in names
    assert len(ours(caught.value)) <= 2 * (sys.version_info < (3, 11))


def test_what_a_users_function_raises_keeps_everything() -> None:
    with pytest.raises(KeyError) as caught:
        backward(tc.define(TWICE.replace("2", "3"), {"f": wrong_gradient}).f)
    assert ours(caught.value)


def test_a_mistake_as_a_cause_and_while_another_is_handled() -> None:
    with pytest.raises(ValueError, match="mine") as caught:
        try:
            MM.mm(A, A)
        except tc.TCError as error:
            raise ValueError("mine") from error
    assert not ours(caught.value) or sys.version_info < (3, 11)
    with pytest.raises(tc.TCError) as caught:
        try:
            raise KeyError("first")
        except KeyError:
            MM.mm(A, A)
    assert isinstance(caught.value.__context__, KeyError)
    assert not caught.value.__suppress_context__
    assert caught.value.__context__.__traceback__ is not None


def test_our_own_bug_shows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tc.api.checked_defs, "load_checked_defs", lambda source: 1 // 0)
    with pytest.raises(tc.InternalError) as caught:
        tc.define(TWICE)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(ours(caught.value)) > 1


def test_the_end_of_the_stack_shows_no_thousand_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(source: object) -> object:
        return deep(source)

    deep.__globals__["__name__"], name = error_boundary.__name__, __name__
    try:
        monkeypatch.setattr(tc.api.checked_defs, "load_checked_defs", deep)
        with pytest.raises(tc.ArgumentError, match="the stack is too small") as caught:
            tc.define(TWICE)
    finally:
        deep.__globals__["__name__"] = name
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 60
