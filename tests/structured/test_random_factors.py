"""Random contractions: each subscript of a factor may be mirrored, strided, shifted, repeated or a sum of two indices.

Factors may have any strides, 0 among them. All values are small integers, so that sums are exact in any order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc

EXTENTS = (2, 3, 5, 8, 13, 16, 17, 24, 33)
MOST_POINTS = 1_000_000


@dataclass(frozen=True)
class Subscript:
    """`scale * index + other + offset`: other is a second index, or none."""

    index: str
    scale: int = 1
    offset: int = 0
    other: str = ""

    def __str__(self) -> str:
        factor = {1: "", -1: "-"}.get(self.scale, f"{self.scale}*")
        return f"{factor}{self.index}{f' + {self.other}' * bool(self.other)} + {self.offset}"

    def extent(self, sizes: Mapping[str, int]) -> int:
        other = sizes[self.other] - 1 if self.other else 0
        return max(0, self.scale) * (sizes[self.index] - 1) + other + self.offset + 1

    def values(self, sizes: Mapping[str, int], names: Sequence[str]) -> Tensor:
        def along(name: str) -> Tensor:
            return torch.arange(sizes[name]).reshape([-1 if n == name else 1 for n in names])

        return self.scale * along(self.index) + (along(self.other) if self.other else 0) + self.offset


def factor(choose: random.Random, indices: Sequence[str], sizes: Mapping[str, int]) -> list[Subscript]:
    found = []
    for i in indices:
        match choose.choice(("plain", "plain", "mirrored", "strided", "shifted", "sum")):
            case "mirrored":
                found.append(Subscript(i, -1, sizes[i] - 1))
            case "strided":
                found.append(Subscript(i, 2))
            case "shifted":
                found.append(Subscript(i, 1, 1))
            case "sum":
                other = choose.choice(indices)
                found.append(Subscript(i, 1, 0, other) if other != i else Subscript(i, 2))
            case _:
                found.append(Subscript(i))
    if choose.random() < 0.25:  # a diagonal
        found.insert(choose.randrange(len(found) + 1), Subscript(choose.choice(indices)))
    return found


def tensor(choose: random.Random, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Contiguous, expanded along a dimension, every second element of another tensor, or permuted."""

    def integers(shape: Sequence[int]) -> Tensor:
        return torch.randint(-3, 4, list(shape), generator=generator).float()

    match choose.choice(("dense", "dense", "dense", "expanded", "strided", "permuted")):
        case "expanded":
            return integers(shape).narrow(choose.randrange(len(shape)), 0, 1).expand(*shape)
        case "strided":
            return integers([2 * n for n in shape])[tuple(slice(None, None, 2) for _ in shape)]
        case "permuted":
            order = choose.sample(range(len(shape)), len(shape))
            stored = integers([shape[d] for d in order])
            return stored.permute([order.index(d) for d in range(len(shape))])
    return integers(shape)


@pytest.mark.parametrize("seed", range(40))
def test_random_factors(seed: int) -> None:
    choose = random.Random(seed)
    names = "abcdef"[: choose.randint(3, 6)]
    sizes = {i: choose.choice(EXTENTS) for i in names}
    while math.prod(sizes.values()) > MOST_POINTS:
        sizes[choose.choice(names)] = 2
    absent = [0, 1, 2, *(choose.randrange(4) for _ in names[3:])]  # the output, a factor, or no tensor lacks an index
    choose.shuffle(absent)
    owners = [[i for i, missing in zip(names, absent, strict=True) if missing != t] for t in range(3)]
    for own in owners:
        choose.shuffle(own)
    out, *own = owners
    factors = [factor(choose, indices, sizes) for indices in own]
    generator = torch.Generator().manual_seed(seed)
    shapes = [[s.extent(sizes) for s in subscripts] for subscripts in factors]
    inputs = [tensor(choose, shape, generator) for shape in shapes]
    x, y = (", ".join(map(str, subscripts)) for subscripts in factors)
    p, q = (", ".join(map(str, shape)) for shape in shapes)
    ranges = ", ".join(f"{i} in 0:{n}" for i, n in sizes.items())
    source = f"def f(float({p}) x, float({q}) y) -> (o) {{ o({', '.join(out)}) +=! x({x}) * y({y}) where {ranges} }}"
    left, right = (t[tuple(s.values(sizes, names) for s in f)] for t, f in zip(inputs, factors, strict=True))
    product = left.broadcast_to([*sizes.values()]) * right
    expected = product.permute([*(names.index(i) for i in out), *(names.index(i) for i in names if i not in out)])
    expected = expected.reshape([*(sizes[i] for i in out), -1]).sum(-1)
    assert torch.equal(tc.define(source).f(*inputs), expected), source


def test_a_factor_without_a_unit_stride_but_a_mirrored_one() -> None:
    source = "def f(float(P,Q) A, float(P,N) B) -> (C) { C(l,k) +=! A(i,l) * B(i,N-1-k) where k in 0:N }"
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    torch.testing.assert_close(tc.define(source).f(a, b), a.T @ b.flip(1), rtol=1e-4, atol=1e-4)
