"""Random defs in double precision whose gradients are hard to derive, with values for their arguments.

They read by tables, mirrored, along diagonals, by quotients and remainders, and out of range behind guards whose other
side is not zero; conditions look at indices and at data; a tensor is written by several statements, whole or in part,
in place, by scatters and by reductions that go on. Every function is smooth or has kinks that random values miss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

SIZES = ("N", "M", "K")
INDICES = ("i", "j", "k", "l")
UNARY = (
    "tanh({})", "sin({})", "exp(0.3 * {})", "fabs({})", "relu({})", "sigmoid({})", "sqrt(1.5 + {0} * {0})",
    "-{}", "log(2 + {0} * {0})", "pow({}, 2.0)", "{0} * {0}", "erf({})", "atan({})",
)  # fmt: skip
BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / (1.5 + {1} * {1})", "min({0}, {1})", "max({0}, {1})",
    "fmin({0}, {1})", "fmax({0}, {1})", "hypot({0}, 1 + fabs({1}))", "fma({0}, {1}, 0.5)",
    "atan2({0}, 2 + {1} * {1})", "fdim({0}, {1})",
)  # fmt: skip


@dataclass(frozen=True)
class GradientProgram:
    """A def, the values of its sizes, and of its inputs and initial values by name."""

    source: str
    sizes: Mapping[str, int]
    arrays: Mapping[str, Any]


@dataclass(frozen=True)
class End:
    """An end of a range: its value and how a text says it."""

    value: int
    text: str

    def __add__(self, n: int) -> End:
        if n == 0:
            return self
        if not any(c.isalpha() for c in self.text):
            return End(self.value + n, str(self.value + n))
        return End(self.value + n, f"{self.text} {'+' if n > 0 else '-'} {abs(n)}")


Range = tuple[End, End]
Scope = dict[str, Range]


@dataclass(frozen=True)
class Known:
    """A tensor that can be read. limit: what its values stay below, of a table."""

    name: str
    ranges: tuple[Range, ...]
    limit: int = 0


@dataclass
class Drawing:
    """A def in the making."""

    random: Random
    sizes: dict[str, End] = field(default_factory=dict)
    floats: list[Known] = field(default_factory=list)
    tables: list[Known] = field(default_factory=list)
    written: dict[str, Known] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)
    declared: dict[str, str] = field(default_factory=dict)

    # --- small choices -----------------------------------------------------------------------------------------------

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def size(self) -> End:
        return self.sizes[self.random.choice(SIZES)]

    def range(self) -> Range:
        """A range that is not empty: often that of a size."""
        n = self.size()
        kind = self.random.choice(("size", "size", "size", "later", "sooner", "number", "negative", "beyond"))
        if kind == "later" and n.value > 1:
            return End(1, "1"), n
        if kind == "sooner" and n.value > 1:
            return End(0, "0"), n + -1
        if kind == "number":
            upper = self.random.randint(2, 6)
            return End(0, "0"), End(upper, str(upper))
        if kind == "negative":
            return End(-1, "-1"), n
        if kind == "beyond":
            return End(0, "0"), n + 2
        return End(0, "0"), n

    # --- subscripts --------------------------------------------------------------------------------------------------

    def subscript(self, scope: Scope, range_: Range) -> tuple[str, str | None]:
        """A subscript for a dimension, and the guard that it needs."""
        if scope and self.chance(0.12):
            return self._guarded_subscript(scope, range_)
        for _ in range(8):
            text, (low, high) = self._form(scope, range_)
            if range_[0].value <= low and high < range_[1].value:
                return text, None
        if self.tables and self.chance(0.5):
            return self._looked_up(scope, range_), None
        if scope and self.chance(0.7):
            return self._forced(scope, range_), None
        return (range_[0] + self.random.randrange(range_[1].value - range_[0].value)).text, None

    def _form(self, scope: Scope, range_: Range) -> tuple[str, tuple[int, int]]:
        """Some expression of the indices, and the ends of its values."""
        random = self.random
        if not scope:
            x = random.randint(range_[0].value, range_[1].value - 1)
            return str(x), (x, x)
        i, j = random.choice(list(scope)), random.choice(list(scope))
        low, high = scope[i][0].value, scope[i][1].value - 1
        match random.choice(("plain", "plain", "plain", "shifted", "mirrored", "scaled", "sum", "difference", "half")):
            case "plain":
                return i, (low, high)
            case "shifted":
                n = range_[0].value - low if self.chance(0.5) else random.randint(-2, 2)
                return _plus(i, n), (low + n, high + n)
            case "mirrored":
                end = scope[i][1] + (range_[0].value - 1 if self.chance(0.5) else random.randint(-2, 2))
                return f"{end.text} - {i}", (end.value - high, end.value - low)
            case "scaled":
                n, factor = random.randint(-1, 2), random.choice((2, 3))
                return _plus(f"{factor} * {i}", n), (factor * low + n, factor * high + n)
            case "sum" if i != j:
                other = scope[j]
                return f"{i} + {j}", (low + other[0].value, high + other[1].value - 1)
            case "difference" if i != j:
                other, n = scope[j], random.randint(0, 2)
                return _plus(f"{i} - {j}", n), (low - other[1].value + 1 + n, high - other[0].value + n)
        n = random.randint(0, 2)
        return f"({_plus(i, n)}) / 2", ((low + n) // 2, (high + n) // 2)

    def _looked_up(self, scope: Scope, range_: Range) -> str:
        """A subscript from a table, whose values are brought into the range where they may leave it."""
        table = self.random.choice(self.tables)
        subscripts = [self._forced(scope, r) for r in table.ranges]
        read = f"{table.name}({', '.join(subscripts)})"
        extent = range_[1].value - range_[0].value
        if table.limit > extent:
            read = f"{read} % {extent}"
        return _plus(read, range_[0].value)

    def _forced(self, scope: Scope, range_: Range) -> str:
        """A subscript that stays in the range by a minimum and a maximum, or a remainder."""
        for _ in range(3):
            text, (low, high) = self._form(scope, range_)
            if range_[0].value <= low and high < range_[1].value:
                return text
        if self.chance(0.5):
            return f"min(max({text}, {range_[0].text}), {(range_[1] + -1).text})"
        return _plus(f"({text}) % {range_[1].value - range_[0].value}", range_[0].value)

    def _guarded_subscript(self, scope: Scope, range_: Range) -> tuple[str, str]:
        text, _ = self._form(scope, range_)
        if self.tables and self.chance(0.4):
            table = self.random.choice(self.tables)
            text = _plus(f"{table.name}({', '.join(self._forced(scope, r) for r in table.ranges)})", -1)
        return text, f"{text} >= {range_[0].text} && {text} < {range_[1].text}"

    # --- expressions -------------------------------------------------------------------------------------------------

    def access(self, scope: Scope, tensor: Known | None = None) -> str:
        """A read of a floating tensor, with its guard around it where it needs one."""
        tensor = tensor or self.random.choice(self.floats)
        if not tensor.ranges:
            return tensor.name
        subscripts, guards = [], []
        if len(tensor.ranges) == 2 and scope and self.chance(0.15):  # a diagonal
            i = self.random.choice(list(scope))
            pairs = [(i, f"{i} >= {r[0].text} && {i} < {r[1].text}") for r in tensor.ranges]
            inside = all(r[0].value <= scope[i][0].value and scope[i][1].value <= r[1].value for r in tensor.ranges)
            drawn: Sequence[tuple[str, str | None]] = [(i, None)] * 2 if inside else pairs
        else:
            drawn = [self.subscript(scope, r) for r in tensor.ranges]
        for text, guard in drawn:
            subscripts.append(text)
            guards += [guard] if guard else []
        read = f"{tensor.name}({', '.join(subscripts)})"
        if not guards:
            return read
        other = "0.0" if self.chance(0.4) else self.expression(scope, 0)
        value = read if self.chance(0.7) else self.random.choice(UNARY).format(read)
        return f"({' && '.join(guards)} ? {value} : {other})"

    def expression(self, scope: Scope, depth: int) -> str:
        """A floating expression of the indices in `scope`, in brackets where it needs them."""
        draw = self.random.random()
        if depth <= 0 or draw < 0.12:
            return self._leaf(scope)
        if draw < 0.4:
            form = self.random.choice(UNARY)
            return f"({form.format(self.expression(scope, 0 if form.count('{') > 1 else depth - 1))})"
        if draw < 0.78:
            form = self.random.choice(BINARY)
            a = self.expression(scope, depth - 1)
            b = self.expression(scope, 0 if form.count("{1}") > 1 else depth - 1)
            return f"({form.format(a, b)})"
        a, b = self.expression(scope, depth - 1), self.expression(scope, 0)
        b = "0.0" if self.chance(0.2) else b
        if self.chance(0.3):
            a, b = b, a
        return f"({self.condition(scope)} ? {a} : {b})"

    def _leaf(self, scope: Scope) -> str:
        if self.chance(0.08):
            return self.random.choice(("0.5", "1.25", "2", "-0.75"))
        if scope and self.chance(0.05):
            return f"(0.25 * {self.random.choice(list(scope))})"
        return self.access(scope)

    def condition(self, scope: Scope, depth: int = 1) -> str:
        """A condition on indices, on tables or on data."""
        if depth and self.chance(0.2):
            a, b = self.condition(scope, 0), self.condition(scope, 0)
            return self.random.choice((f"({a} && {b})", f"({a} || {b})", f"!({a})"))
        draw = self.random.random()
        if draw < 0.3 or not scope:
            other = self.random.choice(("0.1", "-0.3", self.access(scope)))
            return f"{self.access(scope)} {self.random.choice('<>')} {other}"
        if draw < 0.45 and self.tables:
            table = self.random.choice(self.tables)
            read = f"{table.name}({', '.join(self._forced(scope, r) for r in table.ranges)})"
            return f"{read} {self.random.choice(('>', '<=', '=='))} 1"
        i, j = self.random.choice(list(scope)), self.random.choice(list(scope))
        n = self.random.randint(0, 3)
        return self.random.choice((f"{i} > {n}", f"{i} < {n}", f"{i} + {j} < {n + 2}", f"{i} % 2 == 0", f"{i} >= {j}"))

    # --- statements --------------------------------------------------------------------------------------------------

    def statement(self, n: int) -> None:
        kinds = ["new", "new", "reduction", "reduction", "mirror", "scatter"]
        if self.written:
            kinds += ["update", "update", "go on", "part", "scatter on"]
        kind = self.random.choice(kinds)
        if kind in ("new", "reduction", "mirror"):
            self._define(f"T{n}", kind)
        elif kind == "scatter":
            self._scatter(f"T{n}")
        else:
            self._change(self.random.choice(list(self.written.values())), kind)

    def _scope(self, count: int, first: Scope | None = None) -> Scope:
        scope = dict(first or {})
        free = [i for i in INDICES if i not in scope]
        for i in free[:count]:
            scope[i] = self.range()
        return scope

    def _define(self, name: str, kind: str) -> None:
        left = self._scope(self.random.randint(0 if kind == "reduction" else 1, 2))
        scope, op = left, "="
        if kind == "reduction":
            scope = self._scope(self.random.randint(1, 2), left)
            op = self.random.choice(("+=!", "+=!", "+=!", "max=!", "min=!", "*=!"))
        value = self._term(scope, op)
        ranges = list(left.values())
        subscripts = list(left)
        if kind == "mirror":  # the elements are written in another order, or stored from another place
            i = subscripts[0]
            lower, upper = left[i]
            if self.chance(0.5):
                subscripts[0] = f"{(upper + -1).text} - {i}"
                ranges[0] = (End(0, "0"), End(upper.value - lower.value, str(upper.value - lower.value)))
            else:
                subscripts[0] = f"{i} + 1"
                ranges[0] = (lower + 1, upper + 1)
        self._write(Known(name, tuple(ranges)), subscripts, op, value, scope)

    def _term(self, scope: Scope, op: str) -> str:
        value = self.expression(scope, self.random.choice((1, 1, 2, 2, 3)))
        return f"1 + 0.3 * tanh({value})" if op.startswith("*") else value

    def _scatter(self, name: str) -> None:
        """A new output whose elements data choose."""
        extent = self.random.randint(2, 5)
        target = Known(name, ((End(0, "0"), End(extent, str(extent))),))
        scope = self._scope(self.random.randint(1, 2))
        place = self._looked_up(scope, target.ranges[0]) if self.tables else self._forced(scope, target.ranges[0])
        if place in scope:
            place = f"{place} % {extent}"
        self.declared[name] = f"double({extent}) {name}"
        self._write(target, [place], "+=!", self._term(scope, "+"), scope)

    def _change(self, target: Known, kind: str) -> None:
        left = dict(zip(INDICES, target.ranges, strict=False))
        if kind == "update":
            others = self.access(left, target)
            value = self.random.choice(BINARY[:9]).format(f"{_element(target, left)}", self.expression(left, 2))
            value = value if self.chance(0.5) else f"{value} + 0.5 * {others}"
            self._write(target, list(left), "=", value, left)
        elif kind == "go on":
            scope = self._scope(self.random.randint(0, 1), left)
            op = self.random.choice(("+=", "+=", "max=", "min=", "*="))
            self._write(target, list(left), op, self._term(scope, op), scope)
        elif kind == "scatter on":
            scope = self._scope(self.random.randint(1, 2))
            subscripts = [self._forced(scope, r) for r in target.ranges]
            subscripts = [f"{s} + 0" if s in scope else s for s in subscripts]
            self._write(target, subscripts, "+=", self._term(scope, "+"), scope)
        elif target.ranges:
            self._write_part(target, left)

    def _write_part(self, target: Known, left: Scope) -> None:
        """Some of the elements of the first dimension, and all of the others."""
        lower, upper = target.ranges[0]
        extent = upper.value - lower.value
        i, factor = "i", self.random.choice((1, 1, 2, -1))
        count = self.random.randint(1, max(1, extent // abs(factor)))
        start = lower + self.random.randint(0, extent - 1 - abs(factor) * (count - 1))
        scope = {**left, i: (End(0, "0"), End(count, str(count)))}
        match factor:
            case 1:
                place = f"{i} + ({start.text})"
            case 2:
                place = f"2 * {i} + ({start.text})"
            case _:
                place = f"{(start + (count - 1)).text} - {i}"
        rest = [j for j in left if j != i]
        value = self.expression(scope, 2)
        if self.chance(0.5):
            value = f"{value} + {self.random.choice(('0.5', '-1'))} * {target.name}({', '.join([place, *rest])})"
        self._write(target, [place, *rest], self.random.choice(("=", "=", "+=")), value, scope)

    def _write(self, target: Known, subscripts: Sequence[str], op: str, value: str, scope: Scope) -> None:
        place = f"({', '.join(subscripts)})" if subscripts else ""
        used = set(re.findall(r"\b[ijkl]\b", f"{place} {value}"))
        clauses = ", ".join(f"{i} in {low.text}:{high.text}" for i, (low, high) in scope.items() if i in used)
        self.statements.append(f"{target.name}{place} {op} {value}" + (f" where {clauses}" if clauses else ""))
        self.written[target.name] = target
        if target.name not in [t.name for t in self.floats]:
            self.floats.append(target)


def _plus(text: str, n: int) -> str:
    return text if n == 0 else f"{text} {'+' if n > 0 else '-'} {abs(n)}"


def _element(target: Known, left: Mapping[str, Range]) -> str:
    return f"{target.name}({', '.join(left)})" if left else target.name


def draw_program(seed: int | str, statements: int = 4) -> GradientProgram:
    """The program of a seed, of at most so many statements. It may break a rule of the language."""
    random = Random(seed)
    drawing = Drawing(random)
    drawing.sizes = {name: End(random.randint(1, 5), name) for name in SIZES}
    sizes = {name: end.value for name, end in drawing.sizes.items()}
    whole = {name: (End(0, "0"), end) for name, end in drawing.sizes.items()}
    values = np.random.default_rng(random.getrandbits(32))
    arrays: dict[str, Any] = {}
    parameters = []
    for n in range(random.randint(1, 3)):
        dims = random.choices(SIZES, k=random.choice((0, 1, 1, 1, 2, 2)))
        drawing.floats.append(Known(f"X{n}", tuple(whole[d] for d in dims)))
        parameters.append(f"double({', '.join(dims)}) X{n}" if dims else f"double X{n}")
        arrays[f"X{n}"] = values.uniform(-1.5, 1.5, [sizes[d] for d in dims])
    for n in range(random.randint(0, 2)):
        dim, limit = random.choice(SIZES), random.randint(1, 5)
        drawing.tables.append(Known(f"I{n}", (whole[dim],), limit))
        parameters.append(f"long({dim}) I{n}")
        arrays[f"I{n}"] = values.integers(0, limit, sizes[dim])
    parameters.append(f"double({', '.join(SIZES)}) Z")  # it gives every size a value
    arrays["Z"] = values.uniform(-1.5, 1.5, [sizes[d] for d in SIZES])
    if random.random() < 0.3:
        drawing.floats.append(Known("Z", tuple(whole[d] for d in SIZES)))
    if random.random() < 0.25:  # an in/out output
        dims = random.choices(SIZES, k=random.choice((1, 2)))
        drawing.written["C"] = Known("C", tuple(whole[d] for d in dims))
        drawing.floats.append(drawing.written["C"])
        drawing.declared["C"] = f"double({', '.join(dims)}) C"
        arrays["C"] = values.uniform(-1.5, 1.5, [sizes[d] for d in dims])
        left = dict(zip(INDICES, drawing.written["C"].ranges, strict=False))
        drawing.statements.append(f"C({', '.join(left)}) = 0.5 * C({', '.join(left)})")
    for n in range(random.randint(1, statements)):
        drawing.statement(n)
    last = drawing.statements[-1].split("(")[0].split(" ")[0]
    names = [n for n in drawing.written if n == last or n in drawing.declared or random.random() < 0.3]
    returns = ", ".join(drawing.declared.get(name, name) for name in names)
    body = "\n    ".join(drawing.statements)
    source = f"def f({', '.join(parameters)}) -> ({returns}) {{\n    {body}\n}}"
    return GradientProgram(source, sizes, arrays)
