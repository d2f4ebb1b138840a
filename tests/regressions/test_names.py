"""Names that once made two values of the emitted text one."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc


@pytest.mark.parametrize("length", [201, 2000, 100_000])
def test_a_name_that_is_too_long(length: int) -> None:
    name = "x" * length
    with pytest.raises(tc.ParseError, match="this name is too long") as caught:
        tc.define(f"def f(float(N) {name}) -> (y) {{ y(i) = {name}(i) }}")
    assert caught.value.span.start == 15


def test_the_longest_names_stay_apart() -> None:
    a, b = "x" * 199 + "a", "x" * 199 + "b"
    op = tc.define(f"def f(float(N) {a}, float(N) {b}) -> (y) {{ y(i) = {a}(i) - {b}(i) }}").f
    assert op(torch.ones(3), torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]
