"""Parse tensors and the headers of tile kernels; their printed form can be parsed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, TypeVar

from ..core.dtypes import DType
from ..core.errors import ArgumentError
from ..layouts import Layout, Swizzle
from ..layouts.layout import IntTuple, format_tuple
from ..layouts.layout_notation import LayoutBuilder, NotationError, checked_layout, make_layout_parser, parse_text
from ..layouts.swizzle import MAX_OFFSET_BITS
from .tensor_levels import TensorLevel, row_major
from .tensors import DTYPE_NAMES, DTYPE_SPELLING, KINDS, MEMORY_NAMES, DataTensor, ThreadTensor


def tensor(text: str) -> DataTensor:
    """Parse a data tensor, e.g. `[(2,2):(2,16)].[(2,4):(1,4)].fp32.GL`.

    A level without strides is row-major over its dimensions, and counts tiles of the inner levels.

    Raises:
        ArgumentError: the text is none; with the place of the mistake.
    """
    found: DataTensor = parse_text(_make_parser(), "data_tensor", text)
    return found


def threads(text: str) -> ThreadTensor:
    """Parse a thread tensor, e.g. `[2,2].[32].thread`, or `block` instead of `thread` for a tensor of blocks.

    Raises:
        ArgumentError: the text is none; with the place of the mistake.
    """
    found: ThreadTensor = parse_text(_make_parser(), "thread_tensor", text)
    return found


def header(text: str) -> Header:
    """Parse the header of a tile kernel, e.g. `C:[M,N].fp16 <- A:[M,K].fp16, B:[N,K].fp16`.

    Raises:
        ArgumentError: the text is none; with the place of the mistake.
    """
    found: Header = parse_text(_make_parser(), "header", text)
    return found


@dataclass(frozen=True, slots=True)
class Parameter:
    """An input or output tensor of a tile kernel; each size is an integer or a symbol."""

    name: str
    shape: tuple[int | str, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.name}:[{','.join(map(str, self.shape))}].{DTYPE_SPELLING[self.dtype]}"


@dataclass(frozen=True, slots=True)
class Header:
    """The outputs and inputs of a tile kernel; `str` gives its notation."""

    outputs: tuple[Parameter, ...]
    inputs: tuple[Parameter, ...]

    def __str__(self) -> str:
        return " <- ".join(", ".join(map(str, side)) for side in (self.outputs, self.inputs))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbolic sizes, in the order in which they occur in the inputs."""
        return tuple(dict.fromkeys(n for p in self.inputs for n in p.shape if isinstance(n, str)))

    def match_sizes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The value of every symbol, given the shape of each input by name.

        Raises:
            ArgumentError: the rank or a size of an input contradicts the header or another input.
        """
        known: dict[str, tuple[int, str]] = {}
        for p in self.inputs:
            shape = tuple(shapes[p.name])
            found = f"{p.name}:[{','.join(map(str, shape))}]"
            if len(shape) != len(p.shape):
                raise ArgumentError(f"{p.name} has {len(shape)} dimensions", expected=str(p), found=found)
            for size, n in zip(p.shape, shape, strict=True):
                expected, origin = (size, "") if isinstance(size, int) else known.setdefault(size, (n, p.name))
                if n != expected:
                    said = f", and {size} is {expected} in {origin}" if origin else ""
                    raise ArgumentError(f"sizes of {p.name} disagree", expected=f"{p}{said}", found=found)
        return {name: value for name, (value, _) in known.items()}


@dataclass(frozen=True, slots=True)
class _Level:
    """A parsed level: its dimensions, its layout if strides are given, and the token to mark in errors."""

    shape: tuple[IntTuple, ...]
    layout: Layout | None
    token: Any


class _Builder(LayoutBuilder):
    """Builds headers and tensors from the rules of `notation.lark`."""

    def compact_level(self, children: list[Any]) -> _Level:
        token, *dimensions = children
        checked_layout(tuple(dimensions), tuple(dimensions), token)
        one = len(dimensions) == 1 and isinstance(dimensions[0], tuple)
        return _Level(dimensions[0] if one else tuple(dimensions), None, token)

    def strided_level(self, children: list[Any]) -> _Level:
        _, shape, colon, stride = children
        layout = checked_layout(shape, stride, colon)
        layout = layout if isinstance(layout.shape, tuple) else Layout((shape,), (stride,))
        return _Level(tuple(mode.shape for mode in layout.modes), layout, colon)

    def swizzle(self, children: list[Any]) -> Swizzle:
        name, *numbers = children
        if name != "Sw":
            raise NotationError(f"'{name}' is no swizzle", name, expected="Sw<bits,base,shift>")
        try:
            return Swizzle(*(self.integer([number]) for number in numbers))
        except ArgumentError as e:
            raise NotationError(e.message, name, expected=e.expected, found=e.found) from None

    def data_tensor(self, children: list[Any]) -> DataTensor:
        levels = [c for c in children if isinstance(c, _Level)]
        dtype, memory, *swizzle = children[len(levels) :]
        space = _look_up(MEMORY_NAMES, "memory", memory)
        found = DataTensor(_make_tensor_levels(levels), dtype=_look_up(DTYPE_NAMES, "type", dtype), memory=space)
        try:
            return found.swizzled(swizzle[0]) if swizzle else found
        except ArgumentError as e:
            raise NotationError(e.message, memory, expected=e.expected, found=e.found) from None

    def thread_tensor(self, children: list[Any]) -> ThreadTensor:
        *levels, kind = children
        known = {k: k for k in KINDS}
        try:
            return ThreadTensor(_make_tensor_levels(levels), kind=_look_up(known, "kind of threads", kind))
        except ArgumentError as e:
            raise NotationError(e.message, levels[0].token, expected=e.expected, found=e.found) from None

    def parameter(self, children: list[Any]) -> list[Any]:
        return children

    def header(self, children: list[Any]) -> Header:
        arrow = next(n for n, c in enumerate(children) if not isinstance(c, list))
        outputs, inputs = children[:arrow], children[arrow + 1 :]
        known = {str(size) for _, *shape, _ in inputs for size in shape}
        names = [name for name, *_ in outputs + inputs]
        for n, name in enumerate(names):
            if name in names[:n]:
                raise NotationError(f"'{name}' is there twice", name, expected="a name of its own for every tensor")
        for size in (size for _, *shape, _ in outputs for size in shape):
            if size.type == "NAME" and size not in known:
                found = ", ".join(sorted(n for n in known if not n.isdigit())) or "none"
                raise NotationError(
                    f"no input has the size '{size}'", size, expected="a size of an input, or a number", found=found
                )
        return Header(tuple(map(_parse_parameter, outputs)), tuple(map(_parse_parameter, inputs)))


_V = TypeVar("_V")


def _parse_parameter(tokens: list[Any]) -> Parameter:
    name, *shape, dtype = tokens
    return Parameter(str(name), tuple(map(_parse_size, shape)), _look_up(DTYPE_NAMES, "type", dtype))


def _parse_size(token: Any) -> int | str:
    if token.type == "NAME":
        return str(token)
    number = LayoutBuilder().integer([token])
    if number < 1:
        raise NotationError("a size is below 1", token, expected="sizes of 1 or more", found=str(number))
    return number


def _look_up(table: Mapping[str, _V], what: str, token: Any) -> _V:
    if token not in table:
        raise NotationError(f"'{token}' is no {what}", token, expected=", ".join(table), found=f"'{token}'")
    return table[token]


def _make_tensor_levels(levels: Sequence[_Level]) -> tuple[TensorLevel, ...]:
    """Tensor levels; one without strides is row-major, with the elements of the inner levels as its unit.

    Raises:
        NotationError: a level lacks strides around inner levels with gaps, or the tensor is too large.
    """
    found: list[Layout] = []
    for level in reversed(levels):
        size, reach = prod(x.size for x in found), 1 + sum(x.cosize - 1 for x in found)
        if level.layout is None and reach != size:
            raise NotationError(
                "this level needs strides: there are gaps inside", level.token,
                expected=f"[{format_tuple(level.shape)}:strides]", found=f"[{format_tuple(level.shape)}]",
            )  # fmt: skip
        found.append(level.layout or row_major(level.shape, size))
    if sum(x.cosize for x in found) >> MAX_OFFSET_BITS:
        raise NotationError("this tensor is too large", levels[0].token, expected=f"up to 2^{MAX_OFFSET_BITS} elements")
    return tuple(TensorLevel.of(layout) for layout in reversed(found) if layout.modes)


@cache
def _make_parser() -> Any:
    package = __package__ or ""
    grammars = (package.replace("tiles", "layouts"), "layout.lark"), (package, "notation.lark")
    return make_layout_parser(_Builder(), ["data_tensor", "thread_tensor", "header"], *grammars)
