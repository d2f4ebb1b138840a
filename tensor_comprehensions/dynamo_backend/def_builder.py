"""Builds the def of a region while its nodes are translated: its parameters, statements and outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..core.dtypes import DType
from .index_views import Texts, Value, align_values, of_shape, permute_loops, permute_value
from .literals import cast_text, compute_dtype, format_literal

NAME = "region"


NAME_IN_TEXT = re.compile(r"[A-Za-z_]\w*")
SELECTED_CONSTANTS = re.compile(r"\(!?\w+(\([^()]*\))? \? (\(-?\w+\)|-?[\w.]+) : (\(-?\w+\)|-?[\w.]+)\)")
DEEPEST = 40
"""The maximum nesting of parentheses in a statement; deeper values become tensors. The language takes 150 levels."""


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement that writes `tensor` at `subscripts`. rest: its operator, its term and its ranges, as text."""

    tensor: str
    subscripts: tuple[str, ...]
    rest: str

    @property
    def text(self) -> str:
        return f"{_format_access(self.tensor, self.subscripts)} {self.rest}"

    def count(self, tensor: str) -> int:
        """How often the statement reads or writes `tensor`."""
        return NAME_IN_TEXT.findall(self.text).count(tensor)


class DefBuilder:
    """Builds the text of a def. Sizes are numbers, so that one text is one kernel.

    A tensor of the def has one dimension for each loop of the value that it holds.
    """

    def __init__(self) -> None:
        self._parameters: list[str] = []
        self._statements: list[_Statement] = []
        self._returns: list[str] = []
        self._rounded: dict[tuple[str, tuple[int, ...]], str] = {}
        """Tensors of rounded elements, by the text of an element and the loops."""

    @property
    def text(self) -> str:
        lines = "\n".join(f"    {s.text}" for s in self._statements)
        return f"def {NAME}({', '.join(self._parameters)}) -> ({', '.join(self._returns)}) {{\n{lines}\n}}\n"

    def parameter(self, shape: Sequence[int], dtype: DType) -> Value:
        """Add a parameter."""
        name = f"x{len(self._parameters)}"
        sizes = ", ".join(map(str, shape))
        self._parameters.append(f"{dtype.name}({sizes}) {name}" if shape else f"{dtype.name} {name}")

        def element_text(i: Texts) -> str:
            rest = iter(i)
            subscripts = [next(rest) if n != 1 else "0" for n in shape]
            return cast_text(_format_access(name, subscripts), dtype, compute_dtype(dtype))

        return of_shape(shape, element_text, dtype, access=True)

    def materialize(self, x: Value) -> Value:
        """`x` stored in a tensor, by a new statement if it is not yet."""
        return (
            x
            if x.tensor
            else self._add_statement(
                x,
                _make_index_names(x),
                "=",
                x.at(_make_index_names(x)),
                _format_index_ranges(_make_index_names(x), x.loops),
            )
        )

    def materialize_rounded(self, x: Value) -> Value:
        """`x` stored in a tensor of its own type, by a new statement unless it only reads a parameter or such a tensor.

        `materialize` stores elements of 16 bits in float32.
        """
        wide = compute_dtype(x.dtype)
        if reads_own_type(x):
            return x
        if wide == x.dtype:
            return self.materialize(x)
        tensor = self._round(x)
        return replace(x, at=lambda i: cast_text(_format_access(tensor, i), x.dtype, wide), access=True, tensor="")

    def materialize_merged(self, x: Value) -> Value:
        """`x` stored in a tensor of its own type, with one loop for each dimension where `x` has several."""
        names, wide, tensor = _make_index_names(x), compute_dtype(x.dtype), f"t{len(self._statements)}"
        rest = iter(names)
        subscripts = tuple(_format_flat_index([next(rest) for _ in g], g) for g in x.groups if g)
        clause = _format_where(_format_index_ranges(names, x.loops))
        self._statements.append(_Statement(tensor, subscripts, f"= {cast_text(x.at(names), wide, x.dtype)}{clause}"))

        def element_text(i: Texts) -> str:
            return cast_text(_format_access(tensor, i), x.dtype, wide)

        return Value(tuple((math.prod(g),) if g else () for g in x.groups), element_text, x.dtype, access=True)

    def _round(self, x: Value) -> str:
        """The tensor that holds `x` in its own type, in this order, by a new statement for new elements."""
        names, wide = _make_index_names(x), compute_dtype(x.dtype)
        text = cast_text(x.at(names), wide, x.dtype)
        if (text, x.loops) not in self._rounded:
            made = self._add_statement(x, names, "=", text, _format_index_ranges(names, x.loops))
            again = cast_text(cast_text(made.at(names), x.dtype, wide), wide, x.dtype)
            self._rounded |= dict.fromkeys(((text, x.loops), (again, x.loops)), made.tensor)
        return self._rounded[text, x.loops]

    def add_outputs(self, outputs: Sequence[tuple[Value, Sequence[int]]]) -> None:
        """Make values the next outputs, rounded to their types, each with its dimensions in an order of its own."""
        names: list[str] = []
        for x, order in outputs:
            is_own = compute_dtype(x.dtype) == x.dtype and x.tensor and x.tensor not in names
            names.append(x.tensor if is_own else self._copy_output(x, order, names))
        # Only now is it known which tensors other outputs read; these keep the order of their dimensions.
        for place, (x, order) in enumerate(outputs):
            if names[place] == x.tensor and not self._reorder_dims(x, permute_loops(x, order)):
                names[place] = self._copy_output(x, order, names)
        for name, (x, _) in zip(names, outputs, strict=True):
            if name != x.tensor:
                self._join_sum(x.tensor, name)
        self._returns += names

    def _copy_output(self, x: Value, order: Sequence[int], taken: Sequence[str]) -> str:
        """A tensor that holds `x`, rounded to its type, with its dimensions in `order`; a new one if it is `taken`."""
        x = permute_value(x, order)
        names = _make_index_names(x)
        text = cast_text(x.at(names), compute_dtype(x.dtype), x.dtype)
        known = self._rounded.get((text, x.loops))
        if known is not None and known not in (*taken, *self._returns):
            return known
        copy = self._add_statement(x, names, "=", text, _format_index_ranges(names, x.loops)).tensor
        if not {s.tensor for s in self._statements} & {*NAME_IN_TEXT.findall(text)}:
            self._statements.insert(0, self._statements.pop())  # not between statements that may share a kernel
        return copy

    def _join_sum(self, tensor: str, copy: str) -> None:
        """Place the statement that makes `copy` behind the sum `tensor`, with the same order of dimensions.

        If nothing else reads the sum, a kernel can then store rounded sums at once, and never stores exact ones.
        """
        places = {s.tensor: k for k, s in enumerate(self._statements)}
        if tensor not in places or sum(s.count(tensor) for s in self._statements) != 2:
            return
        made, copied = self._statements[places[tensor]], self._statements[places[copy]]
        read = re.search(rf"\b{tensor}\(([^()]*)\)", copied.rest)
        subscripts = read.group(1).split(", ") if read else []
        if not read or not made.rest.startswith("+=!") or sorted(subscripts) != sorted(copied.subscripts):
            return
        order = [subscripts.index(name) for name in copied.subscripts]
        rest = copied.rest.replace(read.group(), _format_access(tensor, copied.subscripts))
        self._statements[places[tensor]] = replace(made, subscripts=tuple(made.subscripts[k] for k in order))
        del self._statements[places[copy]]
        self._statements.insert(places[tensor] + 1, replace(copied, rest=rest))

    def _reorder_dims(self, x: Value, order: Sequence[int]) -> bool:
        """Give the tensor of `x` the loops of `x` in `order`; False if that is impossible.

        It is if the loops are not the dimensions of the tensor, or another statement accesses that, too.
        """
        if list(order) == sorted(order):
            return True
        tensor, names = x.tensor, _make_index_names(x)
        if x.at(names) != _format_access(tensor, names) or sum(s.count(tensor) for s in self._statements) > 1:
            return False
        place = next(k for k, s in enumerate(self._statements) if s.tensor == tensor)
        made = self._statements[place]
        self._statements[place] = replace(made, subscripts=tuple(made.subscripts[k] for k in order))
        return True

    def add_reduction(self, x: Value, dimensions: Sequence[int], op: str) -> Value:
        """Reduce `x` by `op` over `dimensions`, which remain with one element each."""
        order = [d for d in range(len(x.groups)) if d not in dimensions]
        turned = permute_value(x, [*order, *dimensions])
        names = _make_index_names(turned)
        groups = tuple(() if d in dimensions else g for d, g in enumerate(x.groups))
        result = replace(x, groups=groups)
        if not any(x.groups[d] for d in dimensions):
            return replace(x, groups=groups)
        kept = names[: len(result.loops)]
        return self._add_statement(result, kept, f"{op}=!", turned.at(names), _format_index_ranges(names, turned.loops))

    def add_contraction(self, a: Value, b: Value, equation: str, triangle: str = "") -> Value:
        """The sum of products of two values that `equation` describes: `"bmk,bkn->bmn"`.

        triangle: two letters, such as `"mk"`: only the terms are added in which the second index is at most the first.
        """
        left, right, out = equation.replace("->", ",").split(",")
        for letter in sorted(set(left) & set(right)):
            a, b = _align_loops(a, left.index(letter), b, right.index(letter))
        loops = {c: g for letters, x in ((left, a), (right, b)) for c, g in zip(letters, x.groups, strict=True)}
        names = {c: [f"{c}{k}" for k in range(len(g))] for c, g in loops.items()}
        term = f"{a.at(_declare_names(names, left))} * {b.at(_declare_names(names, right))}"
        if triangle:
            first, second = (_format_flat_index(names[c], loops[c]) for c in triangle)
            term = f"({second} <= {first} ? {term} : 0.0)"
        ranges = [r for c in sorted(loops) for r in _format_index_ranges(names[c], loops[c])]
        return self.add_sum(
            Value(tuple(loops[c] for c in out), a.at, a.dtype), _declare_names(names, out), term, ranges
        )

    def add_sum(
        self, like: Value, names: Sequence[str], term: str, ranges: Sequence[str], operator: str = "+=!"
    ) -> Value:
        """Reduce `term` over the indices in `ranges` that are not in `names`; loops and type are those of `like`."""
        return self._add_statement(like, names, operator, term, ranges)

    def add_scattered(self, x: Value, term: Value, subscripts: Callable[[Texts], Texts]) -> Value:
        """`x` plus each element of `term`, added at what `subscripts` returns for the indices of the element."""
        made = self._add_statement(
            x,
            _make_index_names(x),
            "=",
            x.at(_make_index_names(x)),
            _format_index_ranges(_make_index_names(x), x.loops),
        )
        names = _make_index_names(term)
        clause = _format_where(_format_index_ranges(names, term.loops))
        self._statements.append(_Statement(made.tensor, tuple(subscripts(names)), f"+= {term.at(names)}{clause}"))
        return made

    def is_deep(self, x: Value) -> bool:
        """Whether the formula of `x` is nested so deep that it should be stored in a tensor."""
        depth = deepest = 0
        for sign in x.at(_make_index_names(x)):
            depth += (sign == "(") - (sign == ")")
            deepest = max(depth, deepest)
        return deepest > DEEPEST

    def is_selection(self, x: Value) -> bool:
        """Whether a condition selects each element of `x`. Such a copy is not transposed in registers."""
        made = next((s.rest for s in self._statements if s.tensor == x.tensor), "")
        return "?" in (made or x.at(_make_index_names(x)))

    def _add_statement(
        self, like: Value, names: Sequence[str], operator: str, text: str, ranges: Sequence[str]
    ) -> Value:
        text, ranges = _without_repeats(like, names, operator, text, ranges)
        tensor = f"t{len(self._statements)}"
        self._statements.append(_Statement(tensor, tuple(names), f"{operator} {text}{_format_where(ranges)}"))
        return Value(like.groups, lambda i: _format_access(tensor, i), like.dtype, access=True, tensor=tensor)


def reads_own_type(x: Value) -> bool:
    """Whether `x` only reads a tensor of its own type, not one of 16 bits in float32."""
    wide = compute_dtype(x.dtype)
    return x.access and (wide == x.dtype or x.at(_make_index_names(x)).startswith(f"{wide.name}("))


def selects_constants(x: Value) -> bool:
    """Whether each element of `x` is one of two constants that one element of a tensor selects."""
    return SELECTED_CONSTANTS.fullmatch(x.at(_make_index_names(x))) is not None


def _without_repeats(
    like: Value, names: Sequence[str], operator: str, text: str, ranges: Sequence[str]
) -> tuple[str, list[str]]:
    """A reduction without the indices that its term does not depend on: a sum of n equal terms is a product by n."""
    used = {*NAME_IN_TEXT.findall(text), *names}
    repeated = [r for r in ranges if r.split()[0] not in used]
    count = math.prod(int(r.rpartition(":")[2]) for r in repeated)
    if operator.startswith("+") and count > 1:
        text = f"({text} * {format_literal(count, like.dtype)})"
    return text, [r for r in ranges if r not in repeated]


def _format_access(tensor: str, subscripts: Sequence[str]) -> str:
    return f"{tensor}({', '.join(subscripts)})" if subscripts else tensor


def _make_index_names(x: Value) -> list[str]:
    return [f"i{k}" for k in range(len(x.loops))]


def _format_index_ranges(names: Sequence[str], extents: Sequence[int]) -> list[str]:
    return [f"{name} in 0:{n}" for name, n in zip(names, extents, strict=True)]


def _format_where(ranges: Sequence[str]) -> str:
    """The clause with these ranges at the end of a statement; "" if there are none."""
    return f" where {', '.join(ranges)}" if ranges else ""


def _format_flat_index(names: Sequence[str], extents: Sequence[int]) -> str:
    """The index of a dimension whose loops, outermost first, have these names and extents."""
    distances = (math.prod(extents[k + 1 :]) for k in range(len(extents)))
    return " + ".join(f"{name} * {d}" if d > 1 else name for name, d in zip(names, distances, strict=True)) or "0"


def _declare_names(names: dict[str, list[str]], letters: str) -> list[str]:
    return [name for c in letters for name in names[c]]


def _align_loops(a: Value, d: int, b: Value, e: int) -> tuple[Value, Value]:
    """`a` and `b`, split so that dimension `d` of `a` has the same loops as dimension `e` of `b`."""
    if a.groups[d] == b.groups[e]:
        return a, b
    rank_a, rank_b = len(a.groups), len(b.groups)
    first_a = permute_value(a, [d, *(k for k in range(rank_a) if k != d)])
    first_b = permute_value(b, [e, *(k for k in range(rank_b) if k != e)])
    first_a, first_b = align_values([first_a, first_b], 1)
    back_a = [1 + k if k < d else 0 if k == d else k for k in range(rank_a)]
    back_b = [1 + k if k < e else 0 if k == e else k for k in range(rank_b)]
    return permute_value(first_a, back_a), permute_value(first_b, back_b)
