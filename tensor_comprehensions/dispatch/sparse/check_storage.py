"""Check that the arrays of a sparse tensor obey its format, before a kernel trusts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ArgumentError
from ...tc_lang.formats import Format, LevelKind
from ...tc_lang.formats import Level as LevelFormat

INDEX_TYPES = (torch.int32, torch.int64)


def check_parts(
    format: Format, shape: Sequence[int], levels: Sequence[object], values: Tensor, name: str = "the sparse tensor"
) -> None:
    """Check types, lengths, order and range of every array; error messages call the tensor `name`.

    Raises:
        ArgumentError: an array violates the format; the message has the level, the position and the value.
    """
    _check_shape(format, shape, levels, name)
    extents, positions = format.extents(shape), 1
    same: Any = None
    for n, (level, arrays) in enumerate(zip(format.levels[: format.depth], levels, strict=False)):
        where = _Where(name, n)
        if level.is_dense:
            if arrays is not None:
                raise where.error("is dense, but has arrays", expected="None", found=type(arrays).__name__)
            positions, same = positions * extents[n], None
            continue
        if not isinstance(arrays, tuple) or len(arrays) != 2:
            raise where.error("is not dense, but has no arrays", expected="(pos, crd)", found=repr(arrays))
        pos, crd = arrays
        coordinates = _check_array(crd, "crd", extents[n], where)
        if level.kind is LevelKind.COMPRESSED:
            same = _check_positions(pos, len(coordinates), positions, where)
        elif len(coordinates) != positions:
            raise where.error(f"has {len(coordinates)} coordinates", expected=f"one for each of {positions} parents")
        _check_coordinates(level, coordinates, extents[n], same, where)
        if same is not None and n + 1 < format.depth:
            same = same & (coordinates[1:] == coordinates[:-1])
        positions = len(coordinates)
    check_values(format, shape, positions, values, name)


@dataclass(frozen=True, slots=True)
class _Where:
    """A level of a tensor, for error messages."""

    name: str
    level: int

    def error(self, problem: str, *, expected: str = "", found: str = "", suggestion: str = "") -> ArgumentError:
        return ArgumentError(
            f"level {self.level} of {self.name} {problem}", expected=expected, found=found, suggestion=suggestion
        )


def _check_shape(format: Format, shape: Sequence[int], levels: Sequence[object], name: str) -> None:
    if len(shape) != format.rank:
        raise ArgumentError(f"{name} has {len(shape)} dimensions, its format '{format}' is for {format.rank}")
    for n, block in zip(shape, format.blocks, strict=False):
        if n % block:
            raise ArgumentError(
                f"blocks of {block} do not divide a dimension of {n} of {name}",
                expected=f"a multiple of {block}", suggestion="pad the tensor",
            )  # fmt: skip
    if any(n < 0 for n in shape):
        raise ArgumentError(f"{name} has a negative extent", found=str(tuple(shape)))
    if len(levels) != len(format.levels):
        raise ArgumentError(f"{name} has {len(levels)} levels, its format '{format}' has {len(format.levels)}")


def _check_array(x: object, what: str, extent: int, where: _Where) -> Any:
    """Check the type and the shape of an array. Returns the array for the checks of its content.

    A plain CPU tensor becomes a NumPy array, on which operations take a fifth of the time if it is short.
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.ndim != 1:
        raise where.error(f"needs {what} as a tensor of one dimension", found=_describe(x))
    if x.is_meta:
        raise where.error(f"has {what} without memory", found="a meta tensor")
    if x.dtype not in INDEX_TYPES:
        found = str(x.dtype).removeprefix("torch.")
        raise where.error(f"has {what} of the type {found}", expected="int32 or int64", found=found)
    if x.dtype is torch.int32 and extent > 2**31 - 1:
        raise where.error(f"has int32 coordinates for an extent of {extent}", expected="int64", found="int32")
    return x.numpy() if type(x) is Tensor and x.is_cpu else x


def _describe(x: object) -> str:
    return f"{x.ndim} dimensions" if isinstance(x, Tensor) else type(x).__name__


def _check_positions(x: object, count: int, parents: int, where: _Where) -> Any:
    """Check pos. Returns for each coordinate but the first whether it has the same parent as the one before it."""
    pos = _check_array(x, "pos", 0, where)
    if len(pos) != parents + 1:
        raise where.error(
            f"has pos of length {len(pos)}", expected=f"length {parents + 1}, one more than its {parents} parents",
            found=f"length {len(pos)}",
        )  # fmt: skip
    if pos[0] != 0:
        raise where.error(f"has pos[0] = {int(pos[0])}", expected="pos[0] = 0")
    if (n := _find_first(pos[1:] < pos[:-1])) is not None:
        raise where.error(
            f"has pos that goes back: pos[{n + 1}] = {int(pos[n + 1])} after {int(pos[n])}",
            expected="positions that never go back",
        )
    if pos[-1] != count:
        raise where.error(
            f"has pos that ends at {int(pos[-1])}, but {count} coordinates",
            expected=f"pos[{len(pos) - 1}] = {count}", found=str(int(pos[-1])),
        )  # fmt: skip
    continues: Any
    if isinstance(pos, Tensor):
        continues, pos = torch.ones(count + 1, dtype=torch.bool, device=pos.device), pos.long()
    else:
        continues = np.ones(count + 1, bool)
    continues[pos] = False
    return continues[1:count]


def _check_coordinates(level: LevelFormat, crd: Any, extent: int, same: Any, where: _Where) -> None:
    """Check that coordinates are in range, and sorted below each parent. same: from `_check_positions`."""
    if (n := _find_first((crd < 0) | (crd >= extent))) is not None:
        raise where.error(
            f"has the coordinate crd[{n}] = {int(crd[n])}", expected=f"0 to {extent - 1}", found=str(int(crd[n]))
        )
    if same is None:
        return
    wrong = _find_first(same & ((crd[1:] <= crd[:-1]) if level.unique else (crd[1:] < crd[:-1])))
    if wrong is None:
        return
    # A wrong order also causes repetitions, so it is reported first.
    if (n := _find_first(same & (crd[1:] < crd[:-1]))) is not None:
        raise where.error(
            f"is not sorted: crd[{n + 1}] = {int(crd[n + 1])} after {int(crd[n])}",
            expected="sorted coordinates below each parent",
            suggestion="SparseTensor.from_coordinates takes any order",
        )
    raise where.error(
        f"has the coordinate {int(crd[wrong])} twice below one parent: crd[{wrong}] and crd[{wrong + 1}]",
        expected="each coordinate once",
        suggestion="SparseTensor.from_coordinates adds up duplicates",
    )


def check_values(format: Format, shape: Sequence[int], positions: int, values: Tensor, name: str) -> None:
    """Check the shape of the values: `positions` of the last level that is not dense, and the dense tail."""
    if not isinstance(values, Tensor) or values.layout is not torch.strided:
        raise ArgumentError(f"the values of {name} are not a plain tensor", found=type(values).__name__)
    tail = format.tail(shape)
    expected = (positions, *tail) if format.depth else tail
    if tuple(values.shape) != expected:
        raise ArgumentError(
            f"{name} has values of the shape {tuple(values.shape)} for {positions} stored positions",
            expected=f"a shape of {expected}",
            found=f"a shape of {tuple(values.shape)}",
        )


def _find_first(wrong: Any) -> int | None:
    """The index of the first true element of a NumPy array or a tensor; None if all are false."""
    return int((wrong * 1).argmax()) if bool(wrong.any()) else None
