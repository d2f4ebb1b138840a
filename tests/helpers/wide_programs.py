"""Random programs over the whole language, with the bounds of everything known, for tests against the reference.

Where `programs.py` lets ranges be inferred, here every index has a `where`, so that any subscript may be written that
stays in bounds. Values are exact by construction (small multiples of a power of two), so that results must be equal
bit by bit in whatever order they are computed; `smooth` programs use the elementary functions and need a tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from random import Random
from re import findall

from tensor_comprehensions.core.dtypes import (
    BFLOAT16,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT32,
    DType,
)

from .wide_expressions import LIMIT, MOST_POINTS, SIZE_NAMES, SIZES, Env, ExpressionWriter, Known, Value

HELPERS = """
def twice(float(P) x) -> (y) { y(i) = 2 * x(i) }
def rows(float(P,Q) x) -> (s, m) { s(i) +=! x(i,j)  m(i) max=! x(i,j) }
"""


@dataclass(frozen=True)
class WideProgram:
    """A program whose def `f` is to be called.

    inputs: name, type, shape and whether it holds indices, of each parameter in order. inout: the same for in/out.
    scalars: the values of the specialized parameters.
    """

    source: str
    inputs: tuple[tuple[str, DType, tuple[int, ...], bool], ...]
    inout: tuple[tuple[str, DType, tuple[int, ...], bool], ...]
    scalars: tuple[tuple[str, int], ...]
    smooth: bool
    special: bool


class ProgramWriter(ExpressionWriter):
    """Writes the statements of one program."""

    def space(self, rank: int, points: int = MOST_POINTS) -> Env:
        env: Env = {}
        for name in self.r.sample(["i", "j", "k", "l", "m2"], rank):
            n = self.r.choice(list(self.sizes.values()) if self.chance(0.8) else SIZES)
            lo = 0 if self.chance(0.75) else self.r.choice((1, 2, 3, -1, -4))
            if self.chance(0.02):
                n = 0
            while n > 1 and n * prod(max(1, b - a) for a, b in env.values()) > points:
                n //= 2
            env[name] = (lo, lo + n)
        return env

    def add(self, statement: str, env: Env, lets: Sequence[str] = ()) -> None:
        """`statement`, with the ranges of the indices it uses."""
        words = set(findall(r"[A-Za-z_]\w*", " ".join((statement, *lets))))
        clauses = [f"{n} in {self.number(a)}:{self.number(b)}" for n, (a, b) in env.items() if n in words] + list(lets)
        self.statements.append(statement + (f" where {', '.join(clauses)}" if clauses else ""))

    def finish(self, v: Value, dtype: DType) -> Value:
        """`v` as a value to store in a tensor of `dtype`."""
        if v.dtype == dtype and self.chance(0.7):
            return v
        if dtype.is_float and not v.is_float:
            v = self.arithmetic(v)
        return self.cast(self.clamp(v), dtype)

    def define(self, t: Known) -> None:
        self.known[t.name] = t

    def lets(self, env: Env) -> list[str]:
        """A let, which the rest of the statement may read as if it were a 0-D tensor."""
        if not self.chance(0.12):
            return []
        v = self.clamp(self.value(env, 1))
        if v.dtype is None or v.is_bool:
            return []
        self.known["v"] = Known("v", v.dtype, (), v.size, v.unit)
        return [f"v = {v.text}"]

    def pointwise(self) -> None:
        env = self.space(self.r.choice([0, 1, 1, 2, 2, 2, 3, 4]))
        dtype = self.dtype()
        lets = self.lets(env)
        v = self.finish(self.value(env, self.r.randint(1, 3)), dtype)
        self.known.pop("v", None)
        name = self.fresh("T")
        subscripts = f"({', '.join(env)})" if env else ""
        self.add(f"{name}{subscripts} = {dtype}({v.text})", env, lets)
        self.define(Known(name, dtype, tuple(env.values()), v.size, v.unit, written=True))

    def reduction(self) -> None:
        env = self.space(self.r.randint(1, 4))
        keep = self.r.randint(0, len(env) - 1)
        free, reduced = dict(list(env.items())[:keep]), list(env.items())[keep:]
        op = self.r.choice(("+", "+", "+", "max", "min", "*"))
        dtype = self.dtype()
        if dtype.is_bool:
            op = self.r.choice(("max", "min"))
        v = self.finish(self.value(env, self.r.randint(0, 2)), dtype)
        if op == "*" and dtype.is_float:
            v = Value(f"{dtype}(min(max(floor({v.text}), 1), 1))", dtype, 1)  # a product that stays exact
        trips = prod(b - a for _, (a, b) in reduced)
        size, unit = (v.size * max(1, trips), v.unit) if op == "+" else (v.size, v.unit)
        if dtype.is_float and not self.smooth and size >= LIMIT * unit:
            v = Value(f"{dtype}(min(max(floor({v.text}), -1), 1))", dtype, 1)
            size, unit = max(1, trips), 1.0
        if self.smooth and op == "+":
            v = Value(f"{dtype}(({v.text}) / {max(1, trips)})", dtype, v.size)
            size = v.size
        size = inf if not dtype.is_float and op in "+*" else size
        name = self.fresh("R")
        order = list(env)
        self.r.shuffle(order)
        ordered = {n: env[n] for n in order}
        subscripts = f"({', '.join(free)})" if free else ""
        if self.chance(0.2) and not (dtype.is_float and (trips == 0 or op in ("max", "min"))):
            self._start(name, dtype, free, subscripts)
            self.add(f"{name}{subscripts} {op}= {dtype}({v.text})", ordered)
            size = size + 3
        elif self.chance(0.1):
            self.inout.append(Known(name, dtype, tuple(free.values())))
            self.add(f"{name}{subscripts} {op}= {dtype}({v.text})", ordered)
            size = size + 3 if dtype.is_float else inf  # what a caller passes may be the greatest integer
        else:
            self.add(f"{name}{subscripts} {op}=! {dtype}({v.text})", ordered)
            if trips == 0 and op in ("max", "min"):
                size = inf
        self.define(Known(name, dtype, tuple(free.values()), size, unit, written=True, fixed=size == inf))

    def siblings(self) -> None:
        """Statements that read the same elements, each with an order and a choice of its own of what it sums over."""
        env = {n: (0, self.sizes[s]) for n, s in zip("ijk", self.r.sample(SIZE_NAMES[:3], 3), strict=True)}
        env = dict(list(env.items())[: self.r.choice((2, 3, 3))])
        dtype = self.r.choice((FLOAT32, FLOAT32, FLOAT64, INT32))
        x = Known(self.fresh("V"), dtype, tuple(env.values()), 3 if dtype.is_float else 2.0**dtype.bits)
        if prod(b for _, b in env.values()) > MOST_POINTS:
            return
        self.known[x.name] = x
        self.dims[x.name] = tuple(str(b) for _, b in env.values())
        self.inputs.append(x)
        for _ in range(self.r.choice((2, 2, 3))):
            element = f"{x.name}({', '.join(env)})"
            order = self.r.sample(list(env), len(env))
            free = order[: self.r.randint(0, len(env))]
            op = self.r.choice(("+=!", "+=!", "max=!", "min=!")) if len(free) < len(env) else "="
            value = self.r.choice(("{}", "(-{})", "({} * 2)", "({0} + {0})")).format(element)
            name, bounds = self.fresh("R"), tuple(env[n] for n in free)
            self.add(f"{name}({', '.join(free)}) {op} {value}".replace("()", ""), env)
            empty = any(b == 0 for _, b in env.values())
            trips = prod(b for n, (_, b) in env.items() if n not in free)
            size = inf if empty or not dtype.is_float else 6.0 * max(1, trips)
            self.define(Known(name, dtype, bounds, size, 1.0, written=True, fixed=size == inf))

    def _start(self, name: str, dtype: DType, free: Env, subscripts: str) -> None:
        value = self.finish(self.read(free), dtype)
        if dtype.is_float and not self.smooth:
            value = Value(f"{dtype}(min(max(floor({value.text}), -3), 3))", dtype, 3)
        self.add(f"{name}{subscripts} = {dtype}({value.text})", free)

    def contraction(self) -> None:
        """A product of two or three factors, with a prologue and an epilogue at times."""
        dtype = self.r.choice([FLOAT32] * 5 + [FLOAT64, FLOAT16, BFLOAT16, INT32, DTYPES["int8"], DTYPES["int64"]])
        if self.smooth and not dtype.is_float:
            dtype = FLOAT32
        env = dict(zip(("m", "n", "k", "b"), [(0, self.r.choice(SIZES)) for _ in range(4)], strict=True))
        env = dict(self.r.sample(list(env.items()), self.r.randint(2, 4)))
        while prod(b for _, b in env.values()) > 40000:
            env = {n: (0, max(1, b // 2)) for n, (_, b) in env.items()}
        keep = self.r.randint(0, len(env) - 1)
        free = dict(list(env.items())[:keep])
        count = 2 if self.special else self.r.choice((2, 2, 2, 3))  # regrouping a product moves its NaN
        factors = [self._factor(env, dtype) for _ in range(count)]
        name, subscripts = self.fresh("C"), f"({', '.join(free)})" if free else ""
        trips = prod(b for _, b in list(env.items())[keep:] for b in b[1:])
        size = trips * prod(f.size for f in factors) if dtype.is_float else inf
        text = " * ".join(f.text for f in factors)
        if self.smooth or size > LIMIT / 8:
            text, size = f"{text} * {1 / 2**30 if not self.smooth else round(1 / trips, 4)}", 3.0**3
            if not self.smooth:
                return
        if prologue := self.chance(0.3):
            self._start(name, dtype, free, subscripts)
        order = self.r.sample(list(env), len(env))
        op = "+=" if prologue else "+=!"
        ordered = {n: env[n] for n in order}
        body = text if dtype.accumulator == dtype and not self.smooth else f"{dtype}({text})"
        self.add(f"{name}{subscripts} {op} {body}", ordered)
        self.define(Known(name, dtype, tuple(free.values()), size + 3, 1.0, written=True))
        if self.chance(0.4):
            self.update(name)

    def _factor(self, env: Env, dtype: DType) -> Value:
        """A read of a fresh input by some of the indices, perhaps with a window or a stride."""
        names = self.r.sample(list(env), self.r.randint(1, len(env)))
        subscripts, shape = [], []
        while names:
            n = names.pop()
            if names and self.chance(0.15):
                m = names.pop()
                s = self.r.choice((1, 1, 2))
                subscripts.append(f"{n} + {m}" if s == 1 else f"{s}*{n} + {m}")
                shape.append(s * (env[n][1] - 1) + env[m][1])
            else:
                subscripts.append(n)
                shape.append(env[n][1])
        existing = [
            t.name
            for t in self.known.values()
            if t.dtype == dtype and len(t.bounds) == len(shape) and t.size <= 4 and t.unit == 1
            and all(lo == 0 and hi >= n for (lo, hi), n in zip(t.bounds, shape, strict=True))
        ]  # fmt: skip
        if existing and self.chance(0.5):
            return Value(f"{self.r.choice(existing)}({', '.join(subscripts)})", dtype, 4)
        name = self.fresh("W")
        bounds = tuple((0, n) for n in shape)
        t = Known(name, dtype, bounds, 3 if dtype.is_float else 2.0**dtype.bits)
        self.known[name] = t
        self.dims[name] = tuple(map(str, shape))
        self.inputs.append(t)
        return Value(f"{name}({', '.join(subscripts)})", dtype, 3)

    def update(self, name: str | None = None) -> None:
        """A new value of a written tensor from its old one, or from other tensors, or more of a reduction."""
        fitting = [t for t in self.known.values() if t.written and not t.fixed and t.size < LIMIT / 64]
        if not fitting:
            return self.pointwise()
        t = self.known[name] if name else self.r.choice(fitting)
        if t.size >= LIMIT / 64:
            return None
        env = dict(zip(("x", "y", "z", "w", "u"), t.bounds, strict=False))
        if self.chance(0.3):
            env = dict(zip(self.r.sample(["i", "j", "k", "l"], len(t.bounds)), t.bounds, strict=True))
        element = f"{t.name}({', '.join(env)})" if env else t.name
        other = self.read(env, [n for n in self.known if n != t.name])
        kind = self.r.random()
        old = Value(element, t.dtype, t.size, t.unit)
        if kind < 0.5 or t.dtype.is_bool:
            v = self.finish(self.binary(old, other) if not t.dtype.is_bool else self.unary(old), t.dtype)
            self.add(f"{element} = {t.dtype}({v.text})", env)
        elif kind < 0.7:
            v = self.finish(other, t.dtype)
            self.add(f"{element} = {t.dtype}({v.text})", env)
        elif kind < 0.85:
            v = self.finish(self.clamp(other), t.dtype)
            op = self.r.choice(("+", "max", "min"))
            self.add(f"{element} {op}= {t.dtype}({v.text})", env)
            v = Value("", t.dtype, v.size + t.size, min(v.unit, t.unit))
        else:
            v = self.finish(self.clamp(other), t.dtype)
            op = self.r.choice(("+", "max", "min"))
            self.add(f"{element} {op}=! {t.dtype}({v.text})", env)
        size = v.size if t.dtype.is_float else inf
        self.known[t.name] = Known(t.name, t.dtype, t.bounds, size, v.unit, written=True)
        return None

    def scatter(self) -> None:
        """Writes through other subscripts than plain indices, to a tensor that is all defined before."""
        n, m = self.r.choice(SIZES), self.r.choice(SIZES)
        dtype = self.r.choice((FLOAT32, FLOAT32, FLOAT64, INT32, DTYPES["uint8"], FLOAT16))
        if self.smooth and not dtype.is_float:
            dtype = FLOAT32
        name = self.fresh("H")
        kind = self.r.choice(("stride", "sum", "data", "reverse", "column", "in/out", "fill", "convolution"))
        table = [t for t in self.known.values() if t.indexes]
        if kind in ("data", "in/out", "fill") and not table:
            kind = "sum"
        value = Value(f"{dtype}(2)", dtype, 2)
        size, bounds = 4.0, ((0, 2 * n + 1),)
        start = f"{name}(o) = {dtype}(1) where o in 0:{2 * n + 1}"
        if kind == "stride":
            value = self._small(dtype, {"i": (0, n)})
            line = f"{name}(2*i + 1) {self.r.choice(('=', '+=', 'max='))} {value.text} where i in 0:{n}"
        elif kind == "reverse":
            value = self._small(dtype, {"i": (0, n)})
            line = f"{name}({2 * n} - i) {self.r.choice(('=', '+='))} {value.text} where i in 0:{n}"
        elif kind == "sum":
            bounds = ((0, n + m - 1),)
            start = f"{name}(o) = {dtype}(1) where o in 0:{n + m - 1}"
            value = self._small(dtype, {"i": (0, n), "j": (0, m)})
            line = f"{name}(i + j) += {value.text} where i in 0:{n}, j in 0:{m}"
            size = 4.0 * n * m
        elif kind == "convolution":
            bounds = ((0, n + m - 1),)
            start = ""
            value = self._small(dtype, {"i": (0, n), "j": (0, m)})
            self.typed[name] = f"{dtype}({n + m - 1}) {name}"
            line = f"{name}(i + j) +=! {value.text} where i in 0:{n}, j in 0:{m}"
            size = 4.0 * n * m
        elif kind == "column":
            bounds = ((0, n), (0, 3))
            start = f"{name}(o, q) = {dtype}(1) where o in 0:{n}, q in 0:3"
            value = self._small(dtype, {"i": (0, n)})
            line = f"{name}(i, 1) {self.r.choice(('=', '+='))} {value.text} where i in 0:{n}"
        else:
            t = self.r.choice(table)
            env = {f"i{d}": b for d, b in enumerate(t.bounds)}
            bounds, size = ((0, 4),), 4.0 + 4 * prod(b for _, b in t.bounds)
            start = "" if kind != "data" else f"{name}(o) = {dtype}(1) where o in 0:4"
            value = self._small(dtype, env)
            op = {"data": self.r.choice(("+=", "max=")), "in/out": "+=", "fill": self.r.choice(("+=!", "max=!"))}[kind]
            if kind != "data":
                self.typed[name] = f"{dtype}(4) {name}"
            if kind == "in/out":
                self.inout.append(Known(name, dtype, bounds))
                size = size if dtype.is_float else inf
            line = f"{name}({t.name}({', '.join(env)})) {op} {value.text}"
            fixed = op == "max=!"
            self.statements += [start, line] if start else [line]
            self.define(Known(name, dtype, bounds, inf if fixed else size, value.unit, written=True, fixed=fixed))
            return
        self.statements += [start, line] if start else [line]
        self.define(Known(name, dtype, bounds, size, value.unit, written=True))

    def _small(self, dtype: DType, env: Env) -> Value:
        v = self.finish(self.clamp(self.value(env, 1)), dtype)
        if dtype.is_float and not self.smooth:
            return Value(f"{dtype}(min(max(floor({v.text}), -4), 4))", dtype, 4)
        return Value(f"{dtype}({v.text})", dtype, v.size)

    def call(self) -> None:
        fitting = [t for t in self.known.values() if t.dtype == FLOAT32 and t.size < 1000 and t.bounds]
        fitting = [t for t in fitting if all(lo == 0 and hi > 0 for lo, hi in t.bounds) and len(t.bounds) < 3]
        if not fitting:
            return
        t = self.r.choice(fitting)
        a, b = self.fresh("D"), self.fresh("E")
        if len(t.bounds) == 1:
            self.statements.append(f"{a} = twice({t.name})")
            self.define(Known(a, FLOAT32, t.bounds, 2 * t.size, t.unit, written=True))
        else:
            self.statements.append(f"({a}, {b}) = rows({t.name})")
            size = t.size * t.bounds[1][1]
            self.define(Known(a, FLOAT32, t.bounds[:1], size, t.unit, written=True))
            self.define(Known(b, FLOAT32, t.bounds[:1], t.size, t.unit, written=True))

    # --- the program -------------------------------------------------------------------------------------------

    def program(self, statements: int) -> WideProgram:
        self.add_inputs()
        kinds = (
            self.pointwise, self.reduction, self.contraction, self.update, self.siblings, self.scatter, self.call
        )  # fmt: skip
        weights = (5, 4, 2, 4, 2, 1.5, 0.5)
        while len(self.statements) < statements:
            self.r.choices(kinds, weights)[0]()
        written = [t.name for t in self.known.values() if t.written]
        needed = {t.name for t in self.inout} | set(self.typed)
        last = written[-1]
        returns = [n for n in written if n in needed or n == last or self.chance(0.4)]
        parameters = [f"{t.dtype}({','.join(self.dims[t.name])}) {t.name}".replace("()", "") for t in self.inputs]
        parameters += [f"int {name}" for name in self.scalars]
        body = "\n    ".join(self.statements)
        listed = ", ".join(self.typed.get(n, n) for n in returns)
        source = f"{HELPERS if 'twice(' in body or 'rows(' in body else ''}"
        source += f"def f({', '.join(parameters)}) -> ({listed}) {{\n    {body}\n}}"
        inputs = tuple((t.name, t.dtype, _shape(t), t.indexes) for t in self.inputs)
        inout = tuple((t.name, t.dtype, _shape(t), False) for t in self.inout)
        return WideProgram(source, inputs, inout, tuple(self.scalars.items()), self.smooth, self.special)


def _shape(t: Known) -> tuple[int, ...]:
    return tuple(hi - lo for lo, hi in t.bounds)


def wide_program(r: Random) -> WideProgram:
    """A program drawn from `r`."""
    sizes = {n: r.choice(SIZES) for n in SIZE_NAMES[:3]}
    if r.random() < 0.05:
        sizes[r.choice(SIZE_NAMES[:3])] = 0
    if r.random() < 0.15:
        sizes = {n: min(s, 9) for n, s in sizes.items()} | {"N": r.choice((64, 100, 130, 257))}
    smooth = r.random() < 0.25
    writer = ProgramWriter(r, smooth, not smooth and r.random() < 0.1, sizes)
    count = r.choice((1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 12))
    return writer.program(count)
