"""Random programs over the whole language, with the bounds of everything known, for tests against the reference.

Where `programs.py` lets ranges be inferred, here every index has a `where`, so that any subscript may be written that
stays in bounds. Values are exact by construction (small multiples of a power of two), so that results must be equal
bit by bit in whatever order they are computed; `smooth` programs use the elementary functions and need a tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, prod
from random import Random
from re import findall

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
HELPERS = """
def twice(float(P) x) -> (y) { y(i) = 2 * x(i) }
def rows(float(P,Q) x) -> (s, m) { s(i) +=! x(i,j)  m(i) max=! x(i,j) }
"""


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


@dataclass
class Writer:
    """Writes one program, drawing from `r`."""

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
            found += self._shifted(name, lo - a, hi - b)
            found += self._shifted(f"-{name}", lo + b - 1, hi - 1 + a)
            s = self.r.choice((2, 3))
            found += self._shifted(f"{s}*{name}", lo - s * a, hi - 1 - s * (b - 1))
            d = self.r.choice((2, 3, 4))
            found += self._shifted(f"{name}/{d}", lo - a // d, hi - 1 - (b - 1) // d)
            found += self._shifted(f"{name}%{d}", lo, hi - d)
            if "s" in self.scalars:
                v = self.scalars["s"]
                found += self._shifted(f"s*{name}", lo - v * a, hi - 1 - v * (b - 1))
        names = [n for n, (a, b) in env.items() if b > a]
        if len(names) > 1:
            n, m = self.r.sample(names, 2)
            (a, b), (c, d) = env[n], env[m]
            found += self._shifted(f"{n} + {m}", lo - a - c, hi + 1 - b - d)
            found += self._shifted(f"{n} - {m}", lo - a + d - 1, hi - b + c)
            found += self._shifted(f"2*{n} + {m}", lo - 2 * a - c, hi + 2 - 2 * b - d)
        if not found or self.chance(0.06):
            found = [self.number(self.r.randint(lo, hi - 1))]
        if self.chance(0.1) and (gathered := self._gather(env, lo, hi)):
            return gathered
        return self.r.choice(found)

    def _shifted(self, text: str, least: int, most: int) -> list[str]:
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
        if env and t.bounds and self.chance(0.15) and (guarded := self._guarded(t, env)):
            return guarded
        text = self.plain_read(t, env)
        if text is None:
            return Value("2", None, 2)
        return Value(text, t.dtype, t.size, t.unit)

    def _guarded(self, t: Known, env: Env) -> Value | None:
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
            return self.bounded(self.unary(a))
        if kind < 0.35:
            condition = self.condition(env, depth - 1)
            return self.select(condition, a, self.value(env, depth - 1))
        if kind < 0.42:
            return self.cast(a, self.dtype())
        return self.bounded(self.binary(a, self.value(env, depth - 1)))

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
            return Value(f"(-{a.text})", a.dtype, inf if _unsigned(a) else a.size)
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
            size = inf if integer and (_unsigned(a) or _unsigned(b)) else max(a.size, b.size)
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
            fits = not v.is_float and v.size < 2 ** (to.bits - 1) and to.is_signed and not _unsigned(v)
            return Value(f"{to}({v.text})", to, v.size if fits else inf)
        unit = v.unit if v.is_float else 1.0
        return Value(f"{to}({v.text})", to, v.size, unit)

    def bounded(self, v: Value) -> Value:
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

    # --- statements --------------------------------------------------------------------------------------------

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
        return self.cast(self.bounded(v), dtype)

    def define(self, t: Known) -> None:
        self.known[t.name] = t

    def lets(self, env: Env) -> list[str]:
        """A let, which the rest of the statement may read as if it were a 0-D tensor."""
        if not self.chance(0.12):
            return []
        v = self.bounded(self.value(env, 1))
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
            v = self.finish(self.bounded(other), t.dtype)
            op = self.r.choice(("+", "max", "min"))
            self.add(f"{element} {op}= {t.dtype}({v.text})", env)
            v = Value("", t.dtype, v.size + t.size, min(v.unit, t.unit))
        else:
            v = self.finish(self.bounded(other), t.dtype)
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
        v = self.finish(self.bounded(self.value(env, 1)), dtype)
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


def _unsigned(v: Value) -> bool:
    return v.dtype is not None and v.dtype.kind.value == "unsigned"


def wide_program(r: Random) -> WideProgram:
    """A program drawn from `r`."""
    sizes = {n: r.choice(SIZES) for n in SIZE_NAMES[:3]}
    if r.random() < 0.05:
        sizes[r.choice(SIZE_NAMES[:3])] = 0
    if r.random() < 0.15:
        sizes = {n: min(s, 9) for n, s in sizes.items()} | {"N": r.choice((64, 100, 130, 257))}
    smooth = r.random() < 0.25
    writer = Writer(r, smooth, not smooth and r.random() < 0.1, sizes)
    count = r.choice((1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 12))
    return writer.program(count)
