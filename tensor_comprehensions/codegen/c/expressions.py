"""Expressions of the loop program as text of the C family, with only the parentheses that readers need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from ...core.dtypes import BFLOAT16, BOOL, FLOAT16, FLOAT32, FLOAT64, INT32, INT64, DType
from ...core.errors import InternalError
from ...core.internal_names import SEPARATOR
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.instructions import INSTRUCTIONS
from ...loop_ir.intervals import Interval
from ...loop_ir.linear_forms import linear_terms, terms_to_expr
from ...loop_ir.show import LineNumbers
from ...loop_ir.swizzled_buffer import ColumnKey, column_key
from .dialect import CDialect
from .int32_narrowing import LIMIT, KnownIntervals, int32_interval

TERNARY, OR, AND, EQUALITY, RELATION, SUM, PRODUCT, UNARY, ATOM = 2, 3, 4, 8, 9, 11, 12, 14, 15

_INFIX = {
    "add": ("+", SUM), "sub": ("-", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT), "mod": ("%", PRODUCT),
    "and": ("&&", AND), "or": ("||", OR), "eq": ("==", EQUALITY), "ne": ("!=", EQUALITY),
    "lt": ("<", RELATION), "le": ("<=", RELATION), "gt": (">", RELATION), "ge": (">=", RELATION),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """A printed expression and how tightly its outermost operator binds."""

    text: str
    level: int = ATOM

    def as_operand(self, level: int) -> str:
        """The text as an operand where only operators of `level` and tighter need no parentheses."""
        return self.text if self.level >= level else f"({self.text})"


@dataclass(frozen=True)
class PrintScope:
    """The scope in which an expression is printed.

    names: the identifier of a variable by its name, of a buffer by `@` and its name.
    lane: which lane of vectors to print: an identifier, a number, or None outside of vectors.
    sums: the identifiers of reductions over lanes and of shuffled vectors, computed before the statement.
    wholes: the text of each lane of vectors that one access loaded before the statement.
    given: conditions that hold wherever the expression is evaluated.
    small: intervals of the variables that are declared with the dialect's small type.
    intervals: cached intervals of expressions in these variables.
    texts: cached texts by the id of a scalar expression; by (id of a row, key), those of the XOR term of its swizzle.
    multiples: for variables, a power of two greater than 1 that is known to divide them.
    aligned: whether the memory of arguments is aligned for vectors.
    relying: names of the buffers whose alignment the text relies on; one set, shared by all scopes of a text.
    dynamic: byte offsets of shared buffers in dynamic shared memory.
    cached: the buffers that are read through the read-only cache.
    parallel, simd: whether the scope is inside a parallel loop, or inside a loop with a simd pragma.
    marks: the line numbers of the loop text with which lines are marked (see `text_lines.split_marks`), or None.
    """

    dialect: CDialect
    names: Mapping[str, str]
    lane: str | None = None
    sums: Mapping[ir.ReduceLanes | ir.Shuffle, str] = field(default_factory=dict)
    wholes: Mapping[ir.Load, tuple[str, ...]] = field(default_factory=dict)
    given: tuple[ir.Expr, ...] = ()
    small: Mapping[str, Interval] = field(default_factory=dict)
    intervals: KnownIntervals = field(default_factory=dict)
    texts: dict[tuple[int, ColumnKey | None], tuple[ir.Expr, Text]] = field(default_factory=dict)
    multiples: Mapping[str, int] = field(default_factory=dict)
    aligned: bool = True
    relying: set[str] = field(default_factory=set)
    dynamic: Mapping[str, int] = field(default_factory=dict)
    cached: frozenset[str] = frozenset()
    parallel: bool = False
    simd: bool = False
    marks: LineNumbers | None = None

    def with_values(self, **values: Any) -> PrintScope:
        """A copy with some fields changed; like `dataclasses.replace`, but three times as fast."""
        other = object.__new__(PrintScope)
        other.__dict__.update(self.__dict__, **values)
        return other

    def bind(self, name: str, wanted: str = "") -> tuple[str, PrintScope]:
        """An identifier for `name` that no enclosing scope uses, like `wanted` if given, and the scope with it."""
        identifier = self.fresh(wanted or name)
        return identifier, self.with_values(names={**self.names, name: identifier})

    def bind_integer(self, name: str, where: Interval | None, wanted: str = "") -> tuple[str, PrintScope]:
        """`bind` for an int64 variable; `where` is its interval if that fits into 32 bits, else None."""
        identifier = self.fresh(wanted or name)
        inner = self.with_values(names={**self.names, name: identifier})
        if not self.dialect.small:
            return identifier, inner
        kept = {n: i for n, i in self.small.items() if n != name}
        small = kept if where is None else {**kept, name: where}
        return identifier, inner.with_values(small=small, intervals={}, texts={})

    def fits(self, e: ir.Expr) -> Interval | None:
        """The interval of an int64 expression if it can have the dialect's small type, else None."""
        return int32_interval(e, self.small, self.intervals)

    def integer(self, where: Interval | None) -> str:
        """The C type of an int64 variable: the small type if there is one and `where` is not None."""
        return self.dialect.small if self.dialect.small and where is not None else self.dialect.type(INT64)

    def bind_sum(self, e: ir.ReduceLanes | ir.Shuffle) -> tuple[str, PrintScope]:
        """An identifier for the value of `e`, and the scope in which `e` prints as that identifier."""
        identifier = self.fresh("reduced" if isinstance(e, ir.ReduceLanes) else "shuffled")
        return identifier, replace(
            self, sums={**self.sums, e: identifier}, names={**self.names, f"%{identifier}": identifier}
        )

    def with_guard(self, condition: ir.Expr) -> PrintScope:
        """The scope of code that runs only if `condition` holds."""
        return self.with_values(given=(*self.given, *_split_conjuncts(condition)))

    def fresh(self, wanted: str) -> str:
        base = _to_identifier(wanted)
        taken = set(self.names.values())
        return next(n for n in _generate_candidate_names(base) if n not in taken and n not in self.dialect.reserved)


@cache
def _to_identifier(name: str) -> str:
    base = re.sub(r"\W", "_", name.lstrip(f"@%{SEPARATOR}"), flags=re.ASCII)
    return f"_{base}" if base[:1].isdigit() or not base else base


def _generate_candidate_names(base: str) -> Iterator[str]:
    yield base
    count = 1
    while True:
        yield f"{base}_{count}"
        count += 1


def _split_conjuncts(condition: ir.Expr) -> list[ir.Expr]:
    match condition:
        case ir.Binary("and", left, right):
            return [*_split_conjuncts(left), *_split_conjuncts(right)]
    return [condition]


def print_expr(e: ir.Expr, scope: PrintScope) -> Text:
    """`e` as text; for a vector, the text of the lane that `scope` names."""
    match e:
        case ir.Const(value, type):
            return print_literal(value, type.dtype, scope.dialect)
        case ir.Var(name, type):
            return _print_variable(name, type.lanes, scope)
        case ir.Load():
            return _print_load(e, scope)
        case ir.Unary():
            return _print_unary_expr(e, scope)
        case ir.Binary():
            return _print_binary_expr(e, scope)
        case ir.Select(condition, then, otherwise):
            chosen = print_expr(then, scope.with_guard(condition)).as_operand(OR)
            test = print_expr(condition, scope).as_operand(OR)
            return Text(f"{test} ? {chosen} : {print_expr(otherwise, scope).as_operand(TERNARY)}", TERNARY)
        case ir.Cast(operand, dtype):
            return print_cast(print_expr(operand, scope), operand.type.dtype, dtype, scope.dialect)
        case ir.Call():
            return _print_call(e, scope)
        case ir.Ramp(base, stride):
            return _print_ramp(print_expr(base, scope), stride, scope)
        case ir.Broadcast(operand):
            return print_expr(operand, scope)
        case ir.ReduceLanes():
            return Text(scope.sums[e])
        case ir.Shuffle(left, right, lanes):
            lane = _get_lane_index(scope)
            if not lane.isdigit():
                return Text(f"{scope.sums[e]}[{lane}]")
            place, width = lanes[int(lane)], left.type.lanes
            return print_expr(left if place < width else right, scope.with_values(lane=str(place % width)))
    raise InternalError(f"not an expression: {e!r}")


def print_element(buffer: ir.Buffer, indices: tuple[ir.Expr, ...], scope: PrintScope) -> Text:
    """The lvalue `buffer[indices]`."""
    name = scope.names.get(f"@{buffer.name}")
    if name is None:
        raise InternalError(f"buffer {buffer.name} is used outside its allocation")
    if is_scalar(buffer, scope.dialect):
        return Text(name)
    if buffer.swizzle is not None:
        subscripts = _swizzle_subscripts(buffer, indices, scope)
    elif array_shape(buffer) is not None:
        subscripts = [print_expr(i, scope).text for i in indices] or ["0"]
    else:
        subscripts = [_print_element_offset(buffer, indices, scope)]
    if buffer.type.lanes > 1:
        subscripts.append(_get_lane_index(scope))
    return Text(name + "".join(f"[{s}]" for s in subscripts))


def _swizzle_subscripts(buffer: ir.Buffer, indices: tuple[ir.Expr, ...], scope: PrintScope) -> list[str]:
    """The subscripts of an element whose column depends on its row."""
    *outer, column = indices
    moved = _print_column_move(column_key(buffer), outer[-1], scope)
    place = print_expr(column, scope)
    last = place.text if moved.text == "0" else f"{place.as_operand(SUM)} ^ {moved.as_operand(SUM)}"
    if array_shape(buffer) is None:
        raise InternalError(f"{buffer.name} is swizzled, but no array")
    return [*(print_expr(i, scope).text for i in outer), last]


def _print_column_move(key: ColumnKey, row: ir.Expr, scope: PrintScope) -> Text:
    """The text of the number with which a swizzle XORs the columns of `row`."""
    known = scope.texts.get((id(row), key))
    if known is not None:
        return known[1]
    rest = _terms_not_divisible(row, key.divisor * key.count)
    moved = print_expr(build.mul(build.mod(build.div(rest, key.divisor), key.count), key.factor), scope)
    if _has_lasting_text(row, scope):
        scope.texts[id(row), key] = row, moved
    return moved


def _terms_not_divisible(e: ir.Expr, divisor: int) -> ir.Expr:
    """The sum `e` without the terms that `divisor` divides; it has the same remainder."""
    terms, constant = linear_terms(e)
    return terms_to_expr({atom: c for atom, c in terms.items() if c % divisor}, constant % divisor)


def print_read(buffer: ir.Buffer, place: Text, scope: PrintScope, type: str = "") -> Text:
    """The value of the lvalue `place` in `buffer`. type: the C type of the value, if not that of the elements."""
    type = type or scope.dialect.type(buffer.type.dtype)
    if buffer.name not in scope.cached or not scope.dialect.cached or type in scope.dialect.uncached:
        return place
    address = place.text[1:] if place.text.startswith("*") else f"&{place.text}"
    return Text(scope.dialect.cached.format(address))


def is_scalar(buffer: ir.Buffer, dialect: CDialect) -> bool:
    """Whether `buffer` is declared as a variable."""
    return dialect.scalars and buffer.space is ir.Space.REGISTER and not buffer.shape and buffer.type.lanes == 1


def array_shape(buffer: ir.Buffer) -> tuple[int, ...] | None:
    """The extents of a C array that has the strides of `buffer`, or None; rows may be padded."""
    if buffer.dynamic or any(buffer.stride_variables):
        return None
    step, widths = 1, []
    for position in reversed(range(len(buffer.shape))):
        extent = buffer.shape[position]
        outer = buffer.strides[position - 1] if position and buffer.shape[position - 1] > 1 else step * extent
        if extent == 0 or (extent > 1 and buffer.strides[position] != step):
            return None
        if outer % step or outer < step * extent:
            return None
        widths.append(outer // step)
        step = outer
    return tuple(reversed(widths))


def _print_element_offset(buffer: ir.Buffer, indices: tuple[ir.Expr, ...], scope: PrintScope) -> str:
    terms: list[str] = []
    constant = 0
    far = scope.dialect.small and (
        buffer.dynamic or any(buffer.stride_variables) or buffer.span * buffer.type.lanes >= LIMIT
    )  # the offset may exceed 32 bits, so products must not be computed in the small type
    for dimension, (index, stride) in enumerate(zip(indices, buffer.strides, strict=True)):
        if (held := buffer.stride_variable(dimension)) is not None:
            if isinstance(index, ir.Const) and not index.value:
                continue
            terms.append(f"{print_expr(index, scope).as_operand(PRODUCT)} * {scope.names[held]}")
        elif isinstance(index, ir.Const):
            constant += int(index.value) * stride
        elif stride:
            text = print_expr(index, scope)
            if far:
                text = Text(f"({scope.dialect.type(INT64)}){text.as_operand(UNARY)}", UNARY)
            terms.append(text.as_operand(SUM) if stride == 1 else f"{text.as_operand(PRODUCT)} * {stride}")
    if constant or not terms:
        terms.append(str(constant))
    return " + ".join(terms)


def print_literal(value: float | bool, dtype: DType, dialect: CDialect) -> Text:
    """A literal of exactly `value` as rounded to `dtype`."""
    if dtype == BOOL:
        return Text("true" if value else "false")
    if dtype.is_integer:
        return _print_integer_literal(int(value), dtype, dialect)
    if dialect.is_storage_only(dtype):
        exact = float(value) if dtype == BFLOAT16 else float(np.float16(value))
        return print_cast(_print_float_literal(exact, dtype.accumulator, dialect), dtype.accumulator, dtype, dialect)
    if dtype == FLOAT16:
        return Text(
            f"({dialect.type(dtype)}){_print_float_literal(float(value), dtype, dialect).as_operand(UNARY)}", UNARY
        )
    return _print_float_literal(float(value), dtype, dialect)


def _print_integer_literal(value: int, dtype: DType, dialect: CDialect) -> Text:
    if dtype.is_signed and value == -(1 << (dtype.bits - 1)) and dtype.bits >= 32:
        return Text(f"{_print_integer_literal(value + 1, dtype, dialect).text} - 1", SUM)  # C has no negative literals
    suffix = dialect.suffixes.get(dtype.name, "") or (dialect.wide if abs(value) >= LIMIT else "")
    return Text(f"{value}{suffix}", UNARY if value < 0 else ATOM)


_NUMPY: dict[DType, Callable[[float], np.floating[Any]]] = {
    FLOAT16: np.float16,
    FLOAT32: np.float32,
    FLOAT64: np.float64,
}


def _print_float_literal(value: float, dtype: DType, dialect: CDialect) -> Text:
    with np.errstate(over="ignore"):
        rounded = _NUMPY[dtype](value)
    if np.isnan(rounded):
        return Text(dialect.nan)
    if np.isinf(rounded):
        return Text(dialect.infinity) if rounded > 0 else Text(f"-{dialect.infinity}", UNARY)
    digits = str(rounded)  # the shortest that reads back as the same number
    return Text(digits + dialect.suffixes.get(dtype.name, ""), UNARY if digits.startswith("-") else ATOM)


def print_cast(x: Text, source: DType, target: DType, dialect: CDialect) -> Text:
    """`x` of type `source`, converted to `target`."""
    if source == target:
        return x
    if dialect.is_storage_only(source):
        return print_cast(Text(dialect.widening[source.name].format(x.text)), source.accumulator, target, dialect)
    if dialect.is_storage_only(target):
        wide = target.accumulator
        direct = dialect.narrowing.get((source.name, target.name))
        return Text(
            direct.format(x.text)
            if direct is not None
            else dialect.narrowing[wide.name, target.name].format(print_cast(x, source, wide, dialect).text)
        )
    if source.is_float and target.is_integer:
        return Text(f"{target.name}_from_float({x.text})")
    if target.is_bool:
        return Text(f"{x.as_operand(EQUALITY + 1)} != 0", EQUALITY)  # a plain cast of a product to bool draws warnings
    return Text(f"({dialect.type(target)}){x.as_operand(UNARY)}", UNARY)


def print_binary(op: str, left: Text, right: Text, dtype: DType, dialect: CDialect) -> Text:
    """`left op right` for operands of type `dtype`, where `op` is an operator of `Binary`."""
    if dialect.is_storage_only(dtype):
        wide = dtype.accumulator
        left, right = (print_cast(x, dtype, wide, dialect) for x in (left, right))
        result = print_binary(op, left, right, wide, dialect)
        return result if op in ir.COMPARISONS else print_cast(result, wide, dtype, dialect)
    if op in ("min", "max"):
        name = op if dtype.name in dialect.extrema else f"{op}_{dtype.name}"
        return Text(f"{name}({left.text}, {right.text})")
    if op in ("div", "mod") and dtype.is_integer:
        return Text(f"floor_{op}_{dtype.name}({left.text}, {right.text})")
    if op == "mod":
        return print_cast(_print_fmod(left, right, dtype, dialect), dtype.accumulator, dtype, dialect)
    sign, level = _INFIX[op]
    text = Text(f"{left.as_operand(_left_level(level))} {sign} {right.as_operand(level + 1)}", level)
    if op in ir.ARITHMETIC and _is_promoted_to_int(dtype):
        return Text(f"({dialect.type(dtype)})({text.text})", UNARY)  # C computed it in int
    return text


def _left_level(level: int) -> int:
    """The level for left operands: chained comparisons are legal without parentheses, but compilers warn of them."""
    return level + 1 if level in (EQUALITY, RELATION) else level


def _is_promoted_to_int(dtype: DType) -> bool:
    return dtype.is_integer and dtype.bits < 32


def _print_fmod(left: Text, right: Text, dtype: DType, dialect: CDialect) -> Text:
    wide = dtype.accumulator
    arguments = ", ".join(print_cast(x, dtype, wide, dialect).text for x in (left, right))
    return Text(f"{dialect.math[wide.name]['fmod']}({arguments})")


def _print_variable(name: str, lanes: int, scope: PrintScope) -> Text:
    identifier = scope.names.get(name)
    if identifier is None:
        raise InternalError(f"variable {name} is not bound here")
    return Text(identifier if lanes == 1 else f"{identifier}[{_get_lane_index(scope)}]")


def _get_lane_index(scope: PrintScope) -> str:
    if scope.lane is None:
        raise InternalError("a vector where a scalar is expected")
    return scope.lane


def _print_load(e: ir.Load, scope: PrintScope) -> Text:
    if scope.wholes and e in scope.wholes and _get_lane_index(scope).isdigit():
        return Text(scope.wholes[e][int(_get_lane_index(scope))])
    mask = e.mask
    if mask is None or all(c in scope.given for c in _split_conjuncts(mask)):
        return print_read(e.buffer, print_element(e.buffer, e.indices, scope), scope)
    place = print_read(e.buffer, print_element(e.buffer, e.indices, scope.with_guard(mask)), scope)
    zero = print_literal(0, e.type.dtype, scope.dialect) if scope.dialect.is_storage_only(e.type.dtype) else Text("0")
    return Text(f"{print_expr(mask, scope).as_operand(OR)} ? {place.text} : {zero.text}", TERNARY)


def _print_unary_expr(e: ir.Unary, scope: PrintScope) -> Text:
    operand, dtype = print_expr(e.operand, scope), e.type.dtype
    if e.op == "not":
        return Text(f"!{operand.as_operand(UNARY)}", UNARY)
    if scope.dialect.is_storage_only(dtype):
        wide = Text(f"-{print_cast(operand, dtype, dtype.accumulator, scope.dialect).as_operand(ATOM)}", UNARY)
        return print_cast(wide, dtype.accumulator, dtype, scope.dialect)
    text = Text(f"-{operand.as_operand(ATOM)}", UNARY)
    return Text(f"({scope.dialect.type(dtype)})({text.text})", UNARY) if _is_promoted_to_int(dtype) else text


def _print_binary_expr(e: ir.Binary, scope: PrintScope) -> Text:
    if e.op not in ir.ARITHMETIC or not _has_lasting_text(e, scope):
        return _print_binary_operands(e, scope)
    known = scope.texts.get((id(e), None))
    if known is None:
        known = scope.texts[id(e), None] = e, _print_binary_operands(e, scope)
    return known[1]


def _has_lasting_text(e: ir.Expr, scope: PrintScope) -> bool:
    """Whether the text of `e` may be cached: it uses only variables of the small type; binding one clears the cache."""
    return bool(scope.dialect.small) and e.type == build.INDEX and scope.fits(e) is not None


def _print_binary_operands(e: ir.Binary, scope: PrintScope) -> Text:
    match e:
        case ir.Binary("add", x, ir.Const(int(value), type)) if value < 0 and type.dtype == INT64:
            e = ir.Binary("sub", x, ir.Const(-value, type))
    left, right = print_expr(e.left, scope), print_expr(e.right, scope)
    dtype = e.left.type.dtype
    if dtype == INT64 and isinstance(e.left, ir.Const) and isinstance(e.right, ir.Const):
        left = Text(f"({scope.dialect.type(dtype)}){left.as_operand(UNARY)}", UNARY)
    if e.op == "or":  # C needs no parentheses in `a && b || c`, but readers do
        left, right = (Text(f"({x.text})") if x.level == AND else x for x in (left, right))
    if scope.dialect.small and dtype == INT64 and e.op in ir.ARITHMETIC:
        return _print_index_arithmetic(e, left, right, scope)
    return print_binary(e.op, left, right, dtype, scope.dialect)


def _print_index_arithmetic(e: ir.Binary, left: Text, right: Text, scope: PrintScope) -> Text:
    """Index arithmetic in the small type if operands and result fit, else in 64 bits."""
    low, high = scope.fits(e.left), scope.fits(e.right)
    if low is None or high is None:
        if e.op in ("min", "max"):  # calls do not convert operands to a common type
            wide = scope.dialect.type(INT64)
            left, right = (
                x if r is None else Text(f"({wide}){x.as_operand(UNARY)}", UNARY)
                for x, r in ((left, low), (right, high))
            )
        return print_binary(e.op, left, right, INT64, scope.dialect)
    if scope.fits(e) is None:
        left = Text(f"({scope.dialect.type(INT64)}){left.as_operand(UNARY)}", UNARY)
        return print_binary(e.op, left, right, INT64, scope.dialect)
    if e.op in ("div", "mod") and (low.low or 0) >= 0 and low.low is not None and (high.low or 0) > 0:
        sign, level = _INFIX[e.op]  # rounds down as required, because both are non-negative
        return Text(f"{left.as_operand(level)} {sign} {right.as_operand(level + 1)}", level)
    return print_binary(e.op, left, right, INT32, scope.dialect)


def _print_call(e: ir.Call, scope: PrintScope) -> Text:
    dtype = e.type.dtype
    if e.function in INSTRUCTIONS:
        return Text(f"{e.function}({', '.join(print_expr(a, scope).text for a in e.arguments)})")
    wide = dtype.accumulator
    arguments = (print_cast(print_expr(a, scope), dtype, wide, scope.dialect).text for a in e.arguments)
    called = Text(f"{scope.dialect.math[wide.name][e.function]}({', '.join(arguments)})")
    return print_cast(called, wide, dtype, scope.dialect)


def _print_ramp(base: Text, stride: int, scope: PrintScope) -> Text:
    lane = _get_lane_index(scope)
    if lane == "0":
        return base
    if base.text == "0":
        return Text(lane) if stride == 1 else Text(f"{stride} * {lane}", PRODUCT if stride > 0 else UNARY)
    if stride < 0:
        return Text(f"{base.as_operand(SUM)} - {lane if stride == -1 else f'{-stride} * {lane}'}", SUM)
    return Text(f"{base.as_operand(SUM)} + {lane if stride == 1 else f'{stride} * {lane}'}", SUM)
