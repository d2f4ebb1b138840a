"""Random expressions whose subscripts stay in bounds and whose values are exact: the expressions of `wide_programs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, prod
from random import Random

from tensor_comprehensions.core.dtypes import (
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT32,
    DType,
    promote_dtypes,
)

Range = tuple[int, int]
Env = dict[str, Range]

SIZE_NAMES = ("N", "M", "K", "P")
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 31, 33, 40)
MOST_POINTS = 6000
LIMIT = 2.0**20
"""Float values stay below this, and their last bit above its inverse over 8: sums are then exact in float32."""


@dataclass(frozen=True)
class Known:
    """A tensor of the program: each dimension's half-open range, and a bound of its values' size."""

    name: str
    dtype: DType
    bounds: tuple[Range, ...]
    size: float = 3.0
    unit: float = 1.0  # every value is a multiple of it
    written: bool = False
    indexes: bool = False  # holds whole numbers from 0 to 3
    fixed: bool = False  # its type is not known for sure: no second definition


@dataclass(frozen=True)
class Value:
    """An expression: its text, what it is (float, integer, bool), a bound of its size, and its last bit."""

    text: str
    dtype: DType | None  # None: a weak literal
    size: float
    unit: float = 1.0

    @property
    def is_float(self) -> bool:
        return self.dtype is not None and self.dtype.is_float

    @property
    def is_bool(self) -> bool:
        return self.dtype == BOOL


@dataclass
class ExpressionWriter:
    """Writes the inputs and the expressions of one program, drawing from `r`."""

    r: Random
    smooth: bool
    special: bool
    sizes: dict[str, int]
    known: dict[str, Known] = field(default_factory=dict)
    inputs: list[Known] = field(default_factory=list)
    dims: dict[str, tuple[str, ...]] = field(default_factory=dict)
    inout: list[Known] = field(default_factory=list)
    typed: dict[str, str] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)
    scalars: dict[str, int] = field(default_factory=dict)
    counter: int = 0

    # --- choices -----------------------------------------------------------------------------------------------

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def dtype(self) -> DType:
        if self.smooth:
            return self.r.choice([FLOAT32] * 6 + [FLOAT64, FLOAT64, FLOAT16, BFLOAT16])
        if self.chance(0.6):
            return FLOAT32
        return self.r.choice(list(DTYPES.values()))

    def number(self, n: int) -> str:
        """`n`, sometimes by the name of a size that has this value."""
        if self.chance(0.4):
            for name, value in self.sizes.items():
                if value == n:
                    return name
                if value == n + 1 and self.chance(0.5):
                    return f"({name} - 1)"
        return str(n) if n >= 0 else f"(-{-n})"

    def fresh(self, prefix: str) -> str:
        self.counter += 1
        return f"{prefix}{self.counter}"

    # --- inputs ------------------------------------------------------------------------------------------------

    def add_inputs(self) -> None:
        for n in SIZE_NAMES[:3]:
            self._input(f"Z{n}", FLOAT32, (n,))
        for k in range(self.r.randint(1, 4)):
            dims = tuple(self.r.choice(SIZE_NAMES[:3]) for _ in range(self.r.choice([0, 1, 1, 2, 2, 2, 3])))
            if prod(self.sizes[d] for d in dims) > MOST_POINTS:
                dims = dims[:1]
            self._input(f"X{k}", self.dtype(), dims)
        if self.chance(0.5):
            dims = tuple(self.r.choice(SIZE_NAMES[:3]) for _ in range(self.r.choice([1, 1, 2])))
            name, kind = "I", DTYPES[self.r.choice(("int32", "int64", "uint8", "int8", "int16", "uint32", "uint64"))]
            self._input(name, kind, dims, indexes=True)
        if self.chance(0.3):
            self.scalars["s"] = self.r.randint(1, 3)

    def _input(self, name: str, dtype: DType, dims: tuple[str, ...], indexes: bool = False) -> None:
        bounds = tuple((0, self.sizes[d]) for d in dims)
        size = 1.0 if dtype.is_bool else 3.0 if dtype.is_float or indexes else 2.0**dtype.bits
        t = Known(name, dtype, bounds, size, indexes=indexes)
        self.known[name] = t
        self.dims[name] = dims
        self.inputs.append(t)

    # --- subscripts --------------------------------------------------------------------------------------------

    def subscript(self, env: Env, lo: int, hi: int) -> str | None:
        """An expression over `env` whose values all lie in [lo, hi)."""
        if hi <= lo:
            return None
        found: list[str] = []
        for name, (a, b) in env.items():
            if b <= a:
                continue
            if a >= lo and b <= hi:
                found += [name] * 6
            found += self._shift_subscript(name, lo - a, hi - b)
            found += self._shift_subscript(f"-{name}", lo + b - 1, hi - 1 + a)
            s = self.r.choice((2, 3))
            found += self._shift_subscript(f"{s}*{name}", lo - s * a, hi - 1 - s * (b - 1))
            d = self.r.choice((2, 3, 4))
            found += self._shift_subscript(f"{name}/{d}", lo - a // d, hi - 1 - (b - 1) // d)
            found += self._shift_subscript(f"{name}%{d}", lo, hi - d)
            if "s" in self.scalars:
                v = self.scalars["s"]
                found += self._shift_subscript(f"s*{name}", lo - v * a, hi - 1 - v * (b - 1))
        names = [n for n, (a, b) in env.items() if b > a]
        if len(names) > 1:
            n, m = self.r.sample(names, 2)
            (a, b), (c, d) = env[n], env[m]
            found += self._shift_subscript(f"{n} + {m}", lo - a - c, hi + 1 - b - d)
            found += self._shift_subscript(f"{n} - {m}", lo - a + d - 1, hi - b + c)
            found += self._shift_subscript(f"2*{n} + {m}", lo - 2 * a - c, hi + 2 - 2 * b - d)
        if not found or self.chance(0.06):
            found = [self.number(self.r.randint(lo, hi - 1))]
        if self.chance(0.1) and (gathered := self._gather(env, lo, hi)):
            return gathered
        return self.r.choice(found)

    def _shift_subscript(self, text: str, least: int, most: int) -> list[str]:
        if least > most:
            return []
        c = 0 if least <= 0 <= most and self.chance(0.5) else self.r.randint(least, most)
        return [text if c == 0 else f"{text} + {self.number(c)}" if c > 0 else f"{text} - {self.number(-c)}"]

    def _gather(self, env: Env, lo: int, hi: int) -> str | None:
        tables = [t for t in self.known.values() if t.indexes and t.name in self.known]
        if not tables:
            return None
        read = self.plain_read(self.r.choice(tables), env)
        if read is None:
            return None
        if hi - lo >= 4 and lo == 0 and self.chance(0.6):
            return read  # holds 0 to 3
        if self.chance(0.03):
            return f"{read} + {lo + max(0, hi - lo - 2)}"  # may leave the tensor
        return f"min({read}, {hi - lo - 1}) + {self.number(lo)}" if self.chance(0.5) else f"{read} % {hi - lo} + ({lo})"

    # --- values ------------------------------------------------------------------------------------------------

    def plain_read(self, t: Known, env: Env) -> str | None:
        subscripts = [self.subscript(env, lo, hi) for lo, hi in t.bounds]
        if any(s is None for s in subscripts):
            return None
        return f"{t.name}({', '.join(map(str, subscripts))})" if subscripts else t.name

    def read(self, env: Env, names: Sequence[str] | None = None) -> Value:
        tensors = [self.known[n] for n in names] if names else list(self.known.values())
        t = self.r.choice(tensors)
        if env and t.bounds and self.chance(0.15) and (guarded := self._guard_read(t, env)):
            return guarded
        text = self.plain_read(t, env)
        if text is None:
            return Value("2", None, 2)
        return Value(text, t.dtype, t.size, t.unit)

    def _guard_read(self, t: Known, env: Env) -> Value | None:
        conditions, subscripts = [], []
        for lo, hi in t.bounds:
            name = self.r.choice(list(env))
            c = self.r.randint(-3, 3)
            e = self.r.choice((f"{name} + ({c})", f"{c} - {name}", f"2*{name} - {abs(c)}", f"{name}"))
            subscripts.append(e)
            conditions += [f"{e} >= {self.number(lo)}", f"{e} < {self.number(hi)}"]
        read = f"{t.name}({', '.join(subscripts)})"
        if t.dtype.is_bool:
            return Value(f"({' && '.join(conditions)} ? {read} : 1 < 0)", BOOL, 1)
        if self.chance(0.3):
            return Value(f"(!({' && '.join(conditions)}) ? 0 : {read})", t.dtype, t.size, t.unit)
        return Value(f"({' && '.join(conditions)} ? {read} : 0)", t.dtype, t.size, t.unit)

    def value(self, env: Env, depth: int) -> Value:
        """Any expression over `env`."""
        if depth <= 0:
            return self.leaf(env)
        a = self.value(env, depth - 1)
        kind = self.r.random()
        if kind < 0.2:
            return self.clamp(self.unary(a))
        if kind < 0.35:
            condition = self.condition(env, depth - 1)
            return self.select(condition, a, self.value(env, depth - 1))
        if kind < 0.42:
            return self.cast(a, self.dtype())
        return self.clamp(self.binary(a, self.value(env, depth - 1)))

    def leaf(self, env: Env) -> Value:
        if self.chance(0.75):
            return self.read(env)
        if env and self.chance(0.4):
            name = self.r.choice(list(env))
            size = max(map(abs, env[name])) + 1.0
            return self.cast(Value(name, INT32, size), FLOAT32) if self.smooth else Value(name, INT32, size)
        return self.r.choice((Value("2", None, 2), Value("1.5", FLOAT32, 1.5, 0.5), Value(".25", FLOAT32, 0.25, 0.25)))

    def arithmetic(self, v: Value) -> Value:
        """`v` as a number."""
        return Value(f"int32({v.text})", INT32, 1) if v.is_bool else v

    def unary(self, a: Value) -> Value:
        if a.is_bool:
            return Value(f"(!{a.text})", BOOL, 1)
        if not a.is_float:
            return Value(f"(-{a.text})", a.dtype, inf if _is_unsigned(a) else a.size)
        if self.smooth:
            f = self.r.choice(("tanh", "sigmoid", "sin", "cos", "erf", "atan", "relu", "abs", "-"))
            return Value(f"({f}{a.text})" if f == "-" else f"{f}({a.text})", a.dtype, a.size)
        f = self.r.choice(("-{}", "relu({})", "abs({})", "fabs({})", "floor({})", "ceil({})", "{} * 0.5", "{} / 2"))
        half = f[-1] in "25"
        dtype = promote_dtypes(a.dtype or FLOAT32, FLOAT32) if f.endswith(".5") else a.dtype
        return Value(f"({f.format(a.text)})", dtype, a.size + 1, a.unit / (2 if half else 1))

    def binary(self, a: Value, b: Value) -> Value:
        if a.is_bool and b.is_bool and self.chance(0.6):
            return Value(f"({a.text} {self.r.choice(('&&', '||', '==', '!='))} {b.text})", BOOL, 1)
        a, b = self.arithmetic(a), self.arithmetic(b)
        if a.is_float or b.is_float:
            a, b = (self.cast(v, FLOAT32) if not v.is_float and v.size > 2**12 else v for v in (a, b))
        dtype = a.dtype if b.dtype is None else b.dtype if a.dtype is None else promote_dtypes(a.dtype, b.dtype)
        unit = min(a.unit, b.unit)
        integer = dtype is None or dtype.is_integer
        op = self.r.choice("+-*+-*m" + ("/%" if integer and dtype is not None else ""))
        if op == "m":
            f = self.r.choice(("min", "max") if integer else ("min", "max", "fmin", "fmax"))
            size = inf if integer and (_is_unsigned(a) or _is_unsigned(b)) else max(a.size, b.size)
            return Value(f"{f}({a.text}, {b.text})", dtype, size, unit)
        text = f"({a.text} {op} {b.text})"
        if integer and (op == "-" or a.size == inf or b.size == inf):
            return Value(text, dtype, inf)
        if op == "*":
            return Value(text, dtype, a.size * b.size, a.unit * b.unit)
        return Value(text, dtype, a.size + b.size, unit)

    def condition(self, env: Env, depth: int) -> Value:
        a, b = self.arithmetic(self.leaf(env)), self.arithmetic(self.leaf(env))
        if self.smooth and (a.is_float or b.is_float or a.size > 100):
            if not env:
                return Value("(1 < 2)", BOOL, 1)
            return Value(f"({self.r.choice(list(env))} % 2 == 0)", BOOL, 1)
        op = self.r.choice(("<", "<=", ">", ">=", "==", "!="))
        first = Value(f"({a.text} {op} {b.text})", BOOL, 1)
        if depth > 0 and self.chance(0.2):
            second = self.condition(env, depth - 1)
            return Value(f"({first.text} {self.r.choice(('&&', '||'))} {second.text})", BOOL, 1)
        return first

    def select(self, c: Value, a: Value, b: Value) -> Value:
        if a.is_bool != b.is_bool:
            a, b = self.arithmetic(a), self.arithmetic(b)
        if a.is_float or b.is_float:
            a, b = (self.cast(v, FLOAT32) if not v.is_float and v.size > 2**12 else v for v in (a, b))
        dtype = a.dtype if b.dtype is None else b.dtype if a.dtype is None else promote_dtypes(a.dtype, b.dtype)
        size = max(a.size, b.size)
        if dtype is not None and dtype.is_integer and dtype.kind.value == "unsigned":
            size = inf
        return Value(f"({c.text} ? {a.text} : {b.text})", dtype, size, min(a.unit, b.unit))

    def cast(self, v: Value, to: DType) -> Value:
        """`v` in the type `to`, exact where `to` is a float."""
        if self.smooth and not to.is_float:
            to = FLOAT32
        if to.is_float and not v.is_float and v.size > 2**12:
            v = Value(f"({v.text} % 5)", v.dtype, 4)
        if to.is_bool:
            return Value(f"bool({v.text})", BOOL, 1)
        if to.is_integer:
            fits = not v.is_float and v.size < 2 ** (to.bits - 1) and to.is_signed and not _is_unsigned(v)
            return Value(f"{to}({v.text})", to, v.size if fits else inf)
        unit = v.unit if v.is_float else 1.0
        return Value(f"{to}({v.text})", to, v.size, unit)

    def clamp(self, v: Value) -> Value:
        """`v`, clamped where its sums might not be exact any more."""
        if not v.is_float:
            return v
        if self.smooth:
            return v if v.size < 30 else Value(f"tanh({v.text})", v.dtype, 1)
        if v.size < 256 and v.unit >= 1 / 64:
            return v
        if v.unit < 1 / 64:
            v = Value(f"floor({v.text})", v.dtype, v.size + 1, 1.0)
        return Value(f"min(max({v.text}, -4), 4)", v.dtype, 4, v.unit)


def _is_unsigned(v: Value) -> bool:
    return v.dtype is not None and v.dtype.kind.value == "unsigned"
