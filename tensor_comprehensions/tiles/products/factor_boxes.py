"""View a factor of a product with other dimensions, so that its tiles are boxes, which TMA can copy.

A tensor map has up to five dimensions, with strides that are multiples of 16 bytes. Whatever the subscripts are, each
index of a product gets its own dimension, so that a box has zeros exactly where an index is out of range. If there are
too many, an index with a single value in each tile shares the dimension of another one whose stride divides its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...loop_ir.nodes import Buffer
from ...tc_lang.ir import BoundIndex
from .affine_element import AffineElement

MOST_DIMENSIONS = 5
UNIT_BYTES = 16
"""The strides of all dimensions but the first are multiples of this."""


@dataclass(slots=True)
class _Dimension:
    """A dimension of a tensor map.

    Attributes:
        whole: whether tiles never extend beyond it. single: whether tiles have size 1 along it.
        names: the coefficient of each of its indices.
    """

    stride: int
    extent: int
    whole: bool
    names: dict[str, int] = field(default_factory=dict)
    constant: int = 0
    single: bool = False

    def absorb(self, other: _Dimension) -> None:
        """Add the indices of `other`, whose stride is a multiple of this one's."""
        steps = other.stride // self.stride
        self.extent += (other.extent - 1) * steps
        self.constant += other.constant * steps
        self.names |= {name: n * steps for name, n in other.names.items()}


def box_element(
    element: AffineElement, down: Sequence[BoundIndex], across: Sequence[BoundIndex], fixed: Sequence[BoundIndex],
    boxes: Mapping[str, int],
) -> AffineElement | str:  # fmt: skip
    """The element as one of a view of its buffer, in which tiles are boxes; or the reason why there is no such view.

    Args:
        down, across: the indices of the rows, and of the columns, of a tile, the fastest first.
        fixed: other indices, which have a single value in each tile.
        boxes: the size of a tile along each index.
    """
    b = element.buffer
    unit = UNIT_BYTES // b.type.dtype.size
    if element.stride(across[0].name) != 1:
        return f"neighbors along {across[0].name} are no neighbors in {b.name}"
    found = [_Dimension(1, across[0].extent, across[0].extent % boxes[across[0].name] == 0, {across[0].name: 1})]
    rest: list[BoundIndex] = []
    for i in down:
        if boxes[i.name] == 1:
            rest.append(i)
            continue
        stride = element.stride(i.name)
        if not stride and i.extent > 1:
            return f"{b.name} does not depend on {i.name}"
        found.append(_Dimension(stride or unit, i.extent, i.extent % boxes[i.name] == 0, {i.name: 1}))
    for i in (*across[1:], *rest, *fixed):
        stride = element.stride(i.name)
        if not stride and boxes[i.name] > 1:
            return f"{b.name} does not depend on {i.name}"
        if stride:
            _add_index(found, i, stride, whole=boxes[i.name] == 1)
    for constant, stride in zip(element.constants, b.strides, strict=True):
        if constant and stride:
            _add_constant(found, constant, stride)
    if len(found) == 1:
        found.append(_Dimension(unit, 1, whole=True))
    while len(found) > MOST_DIMENSIONS and _join_dimensions(found):
        pass
    if len(found) > MOST_DIMENSIONS:
        return f"a map of {b.name} has {len(found)} dimensions, more than {MOST_DIMENSIONS}"
    if any(d.stride % unit for d in found[1:]):
        return f"a stride of {b.name} is no multiple of {UNIT_BYTES} bytes"
    found.reverse()
    view = Buffer(b.name, b.type, tuple(d.extent for d in found), tuple(d.stride for d in found), b.space)
    return AffineElement(view, tuple(d.names for d in found), tuple(d.constant for d in found))


def _add_index(found: list[_Dimension], i: BoundIndex, stride: int, *, whole: bool) -> None:
    """Add an index: to a dimension with the same stride if both are `whole`, or else as a new dimension."""
    same = next((d for d in found if d.stride == stride and d.whole and whole), None)
    if same is None:
        found.append(_Dimension(stride, i.extent, whole, {i.name: 1}, single=whole))
    else:
        same.absorb(_Dimension(stride, i.extent, whole, {i.name: 1}))


def _join_dimensions(found: list[_Dimension]) -> bool:
    """Merge a `single` dimension into another one, and return whether that was possible."""
    for d in found:
        host = next((e for e in found if e is not d and e.whole and d.stride % e.stride == 0), None)
        if d.single and host is not None:
            host.absorb(d)
            found.remove(d)
            return True
    return False


def _add_constant(found: list[_Dimension], constant: int, stride: int) -> None:
    same = next((d for d in found if d.stride == stride), None)
    if same is None:
        same = _Dimension(stride, 1, whole=True)
        found.append(same)
    same.extent += constant
    same.constant += constant
