"""Match specs with atoms: find the instruction that implements a spec, and prove it lane by lane.

Equal shapes are not enough. The elements that each lane holds, or points at, must agree with the (thread, value) layout
of the atom. The matching is that of "Graphene: An IR for Optimized Tensor Computations on GPUs" (ASPLOS 2023),
section 4, but by enumeration. Atoms that move or multiply more are tried first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ...core.dtypes import DType
from ...core.errors import ArgumentError
from ...loop_ir.atoms import ATOMS, HOPPER, MATMUL, MOVE, WARPGROUP, Atom, AtomOperand
from ...loop_ir.nodes import Space
from ..builder.tile_views import enumerate_tv
from ..tensors import DTYPE_SPELLING

Elements = np.ndarray[Any, Any]
"""A table of the element of a tile that each lane (rows) holds, or points at, for each value (columns)."""
NEAREST = 3
"""The number of atoms that an error message names."""


def find_move(text: str, to: Elements, source: Elements, space: Space, architecture: str) -> Atom:
    """The widest move from `space` to registers that brings every element to its specified lane and value.

    Raises:
        ArgumentError: there is none; the message has the nearest atoms and the first lane that differs.
    """
    rows = [a for a in _list_atoms(MOVE, architecture) if a.operands[1].space is space and a.group > 1]
    return _first_match(text, ((a, _move_difference(a, to, source)) for a in rows))


def find_product(text: str, views: Sequence[Elements], dtypes: Sequence[DType], architecture: str) -> Atom:
    """The widest product whose sums, A and B are distributed over lanes as in `views`.

    Raises:
        ArgumentError: there is none; the message has the nearest atoms and the first lane that differs.
    """
    rows = [a for a in _list_atoms(MATMUL, architecture) if all(o.layout is not None for o in a.operands)]
    return _first_match(text, ((a, _product_difference(a, views, dtypes)) for a in rows))


def find_group_product(text: str, sums: Elements, left: Elements | None, dtypes: tuple[DType, DType, DType]) -> Atom:
    """The warpgroup product whose sums, and left factor if in registers, are distributed over threads as given.

    Raises:
        ArgumentError: there is none; the message has the nearest atoms and the first lane that differs.
    """
    near = sorted(_list_group_products(dtypes), key=lambda a: abs(a.operands[0].values - sums.shape[1]))[:NEAREST]
    return _first_match(text, ((a, _product_difference(a, (sums, left, None), dtypes)) for a in near))


@cache
def _list_atoms(kind: str, architecture: str) -> list[Atom]:
    return [a for a in ATOMS.values() if a.kind == kind and architecture in a.architectures]


@cache
def _list_group_products(dtypes: tuple[DType, DType, DType]) -> list[Atom]:
    known = _list_atoms(MATMUL, HOPPER[0])
    return [a for a in known if a.group == WARPGROUP and tuple(o.dtype for o in a.operands) == dtypes]


def _first_match(text: str, differences: Iterable[tuple[Atom, tuple[int, str]]]) -> Atom:
    """The first atom without a difference; `differences` is consumed lazily. Raises ArgumentError if there is none."""
    tried: list[tuple[Atom, tuple[int, str]]] = []
    for atom, difference in differences:
        if not difference[1]:
            return atom
        tried.append((atom, difference))
    nearest = sorted(tried, key=lambda t: -t[1][0])[:NEAREST]
    raise ArgumentError(
        f"no instruction does {text}",
        expected="a tile that one of these takes, or a decomposition",
        found="; ".join(f"{atom.name}: {why}" for atom, (_, why) in nearest) or "no atoms for this target",
    )


def _move_difference(atom: Atom, to: Elements, source: Elements) -> tuple[int, str]:
    """A score of how well an atom fits, and the first difference, "" if it fits."""
    out, into = _own_elements(atom.operands[0]), _own_elements(atom.operands[1])
    for name, mine, own in (("source", source, into), ("destination", to, out)):
        if mine.shape != own.shape:
            return 0, f"a lane's {name} has {own.shape[1]} elements, not {mine.shape[1]}"
    places, first = np.unique(into, return_index=True)
    got = source.ravel()[first][np.searchsorted(places, out)]
    if np.array_equal(got, to):
        return 1 + out.shape[0], ""
    lane, value = (int(x) for x in np.argwhere(got != to)[0])
    return 1 + lane, f"lane {lane}, value {value} gets the element {got[lane, value]}, not {to[lane, value]}"


def _product_difference(atom: Atom, views: Sequence[Elements | None], dtypes: Sequence[DType]) -> tuple[int, str]:
    """As `_move_difference`, for products. A view of None stands for an operand in shared memory."""
    for name, dtype, operand in zip(("sums", "A", "B"), dtypes, atom.operands, strict=True):
        if dtype != operand.dtype:
            known = DTYPE_SPELLING.get(operand.dtype, operand.dtype.name)
            return 0, f"{name} is {known}, not {DTYPE_SPELLING.get(dtype, dtype.name)}"
    for n, (name, mine, operand) in enumerate(zip(("sums", "A", "B"), views, atom.operands, strict=True)):
        if mine is None:
            continue
        own = _own_elements(operand)
        if mine.shape != own.shape:
            return 1 + n, f"a lane has {own.shape[1]} elements of {name}, not {mine.shape[1]}"
        if not np.array_equal(mine, own):
            lane, value = (int(x) for x in np.argwhere(mine != own)[0])
            return (
                4 + n,
                f"{name}: lane {lane}, value {value} holds the element {own[lane, value]}, not {mine[lane, value]}",
            )
    return 8, ""


def _own_elements(operand: AtomOperand) -> Elements:
    assert operand.layout is not None
    return enumerate_tv(operand.layout)
