"""Formats and tensors for tests: every format of a rank, and random tensors that a format can hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

import numpy as np
import torch

from tensor_comprehensions.dispatch.sparse.sparse_tensor import SparseTensor
from tensor_comprehensions.tc_lang.formats import Format, Level, LevelKind, parse_format
from tensor_comprehensions.tc_lang.unlocated_error import UnlocatedTypeError


def formats(rank: int, *, orders: bool = True) -> Iterator[Format]:
    """Every format of a rank that may hold any tensor: all but those with a single coordinate per parent."""
    for letters in product("dsuqc", repeat=rank):
        for order in permutations(range(rank)) if orders else [tuple(range(rank))]:
            try:
                format = parse_format("".join(letters), order, rank)
            except UnlocatedTypeError:
                continue
            if not any(
                _holds_one(above, below) for above, below in zip(format.levels, format.levels[1:], strict=False)
            ):
                yield format


def _holds_one(above: Level, below: Level) -> bool:
    return below.kind is LevelKind.SINGLETON and above.unique


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], density: float) -> torch.Tensor:
    """Whole numbers from 1 to 9 at some places, 0 elsewhere."""
    return torch.from_numpy(np.where(rng.random(shape) < density, rng.integers(1, 10, shape), 0).astype(np.float64))


def store(x: torch.Tensor, format: Format | str, index_dtype: torch.dtype | None = None) -> SparseTensor:
    """`x` in a format, its elements given in an order that means nothing."""
    where = x.nonzero().T if x.ndim else torch.zeros((0, 1), dtype=torch.int64)
    mixed = torch.randperm(where.shape[1])
    values = x[tuple(where)] if x.ndim else x.reshape(1)
    return SparseTensor.from_coordinates(where[:, mixed], values[mixed], x.shape, format, index_dtype)
