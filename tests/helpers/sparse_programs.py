"""Random defs over sparse and dense tensors, with operands to call them with.

Values are small multiples of a power of two, so that sums are the same bits in every order; a statement whose value is
rounded is marked, is compared with a tolerance, and nothing is computed from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, prod
from random import Random

import numpy as np
import torch

from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.dispatch.sparse.sparse_tensor import SparseTensor
from tensor_comprehensions.tc_lang import compile_source
from tensor_comprehensions.tc_lang.formats import Format, parse_format
from tensor_comprehensions.tc_lang.ir import Size, Symbol
from tensor_comprehensions.tc_lang.unlocated_error import UnlocatedTypeError

INDICES = {"i": "N", "h": "N", "j": "M", "m": "M", "k": "K", "l": "P"}
"""The indices that statements may have, each with the size that it runs over."""
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 9, 17)
MAX_POINTS = 3000
"""Instances of a statement: the reference evaluates all of them."""
LIMIT = 2.0**20
"""The largest value over its last bit: sums of these are exact in float32."""
TYPES = {"float32": "float", "float64": "double", "int32": "int32", "int64": "int64", "int8": "int8", "bool": "bool"}
WIDE = ("float32", "float64", "int32", "int64")
"""The types in which no value of a program wraps around."""
MAX_OPERANDS = 6
WEAK_INT, WEAK_FLOAT = "weak int", "weak float"
"""The types of literals, which give way to those of what they meet."""


class Unusable(Exception):
    """No tensor of the sizes has the format: there is no coordinate where one has to be."""


@dataclass(frozen=True)
class RandomOperand:
    """A parameter. dims: its sizes by name. repeats: whether its format keeps elements that are stored twice."""

    name: str
    dtype: str
    dims: tuple[str, ...]
    format: Format | None = None
    index: str = "int32"
    repeats: bool = False


@dataclass(frozen=True)
class RandomDef:
    """A def `f`.

    Attributes:
        source: its text, in which the results have their formats.
        operands: in the order of the parameters. initial: the dense in/out results.
        formats: of operands whose declaration leaves them open, by name.
        sizes: of the first call. resizable: whether others fit the text, too.
        rounded: returns that are compared with a tolerance.
        special: whether operands hold infinities and NaN.
        blocks: the extents of blocks, by size.
    """

    source: str
    operands: tuple[RandomOperand, ...]
    initial: tuple[RandomOperand, ...]
    formats: dict[str, Format]
    sizes: dict[str, int]
    resizable: bool
    rounded: frozenset[str]
    special: bool
    blocks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Value:
    """An expression: its text, its type, a bound of its size in units of its last bit. rounded: it is no such."""

    text: str
    dtype: str
    bound: float = 4.0
    rounded: bool = False

    @property
    def is_bool(self) -> bool:
        return self.dtype == "bool"


@dataclass(frozen=True)
class Known:
    """A tensor that statements may read: an operand, or what an earlier statement has defined."""

    name: str
    dtype: str
    dims: tuple[str, ...]
    format: Format | None
    bound: float
    rounded: bool = False

    @property
    def is_sparse(self) -> bool:
        return self.format is not None


def random_def(r: Random) -> RandomDef:
    """A def with up to four statements."""
    return _Writer(r).program()


def program_of(source: str, sizes: dict[str, int]) -> RandomDef:
    """A def that somebody wrote, with the sizes of its first call."""
    function = compile_source(source)[-1]

    def operand(t: Symbol) -> RandomOperand:
        dims = tuple(e.name for e in t.extents or () if isinstance(e, Size))
        repeats = t.format is not None and not t.format.is_unique
        return RandomOperand(t.name, t.dtype.name, dims, t.format if t.is_sparse else None, "int32", repeats)

    operands, initial = (tuple(map(operand, x)) for x in (function.parameters, function.inouts))
    return RandomDef(source, operands, initial, {}, sizes, False, frozenset(), False)


@dataclass
class _Writer:
    r: Random
    operands: list[RandomOperand] = field(default_factory=list)
    initial: list[RandomOperand] = field(default_factory=list)
    known: dict[str, Known] = field(default_factory=dict)
    defined: dict[str, Known] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)
    formats: dict[str, Format] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    resizable: bool = True

    def program(self) -> RandomDef:
        r = self.r
        self.special = r.random() < 0.1
        self.base = r.choice((*WIDE, *WIDE, "float64", "int8", "bool"))
        if r.random() < 0.08:
            self.blocks = {n: r.choice((1, 2, 3, 4)) for n in "NMKP"}
        self.sizes = {n: self.blocks.get(n, 1) * r.choice(SIZES[:6] if self.blocks else SIZES) for n in "NMKP"}
        for _ in range(r.choice((1, 1, 1, 2, 2, 3, 4))):
            self.statement()
        returned = [n for n in self.defined if r.random() < 0.7 or n == list(self.defined)[-1]]
        returned += [x.name for x in self.initial if x.name not in returned]
        source = self.text(returned)
        rounded = frozenset(n for n in returned if self.defined[n].rounded)
        return RandomDef(
            source, tuple(self.operands), tuple(self.initial), self.formats, self.sizes, self.resizable, rounded,
            self.special, self.blocks,
        )  # fmt: skip

    def text(self, returned: Sequence[str]) -> str:
        """The def, with a vector for each size so that ranges may name it."""
        used = [n for n in "NMKP" if any(f"{n}" in s for s in self.statements)]
        for n in used:
            self.operands.append(RandomOperand(f"Z{n}", "float32", (n,)))
        parameters = ", ".join(self._declared(x) for x in self.operands)
        results = ", ".join(n + self._format_of(self.defined[n]) for n in returned)
        body = "\n    ".join(self.statements)
        return f"def f({parameters}) -> ({results}) {{\n    {body}\n}}"

    def _declared(self, x: RandomOperand) -> str:
        dims = f"({','.join(x.dims)})" if x.dims else ""
        format = "" if x.format is None or x.name in self.formats else f": {x.format}"
        return f"{TYPES[x.dtype]}{dims} {x.name}{format}"

    @staticmethod
    def _format_of(t: Known) -> str:
        return "" if t.format is None else f": {t.format}"

    # --- statements ----------------------------------------------------------------------------------------------

    def statement(self) -> None:
        """One more statement: a new tensor, or an update of one that there is."""
        r = self.r
        indices = self._indices()
        updated = [t for t in self.defined.values() if not t.rounded and self._fits(t, indices)]
        if updated and r.random() < 0.3:
            self._update(r.choice(updated), indices)
            return
        count = r.choice([n for n in range(len(indices) + 1) if n < 5])
        count = max(count, min(len(indices), 1)) if r.random() < 0.85 else count
        free = r.sample(indices, count)
        reduced = [i for i in indices if i not in free]
        operator = self._operator(reduced)
        value, clauses = self._value(indices, reduced, operator)
        name = f"T{len(self.defined)}"
        is_sparse = bool(free) and r.random() < 0.5
        if self.blocks and len(free) != 2:
            is_sparse = False
        dims = tuple(INDICES[i] for i in free)
        windowed = {c.split()[0] for c in clauses if " in " in c}
        if windowed & set(free):
            is_sparse = is_sparse and not self.blocks
        format = self._format(dims, holds_all=True) if is_sparse else None
        dtype = {WEAK_INT: "int32", WEAK_FLOAT: "float32"}.get(value.dtype, value.dtype)
        if operator == "+=" and not self.initial and not is_sparse and not windowed & set(free):
            self.initial.append(RandomOperand(name, dtype, dims))
        elif operator == "+=":
            operator = "+=!"
        self._add(name, free, operator, value, clauses)
        known = Known(name, dtype, dims, format, value.bound, value.rounded)
        self.defined[name] = known
        if not value.rounded and not windowed & set(free):
            self.known[name] = known

    def _update(self, t: Known, indices: list[str]) -> None:
        """A second statement of a target: more terms, or for a dense one any expression of it."""
        r = self.r
        free = self._subscripts(t, indices, distinct=True)
        if free is None or (t.is_sparse and t.dtype == "bool"):
            return
        reduced = [i for i in indices if i not in free]
        if t.is_sparse or reduced or r.random() < 0.6:
            operator = "+=" if t.dtype != "bool" else "max="
            if not t.is_sparse:
                operator = r.choice((operator, operator, "max=", "min="))
            value, clauses = self._value(indices, reduced, operator)
            if not self._goes_into(value, t):
                return
            bound = t.bound + value.bound
        else:
            value, clauses = self._value(free, [], "=")
            own = f"{t.name}({', '.join(free)})" if free else t.name
            if not self._goes_into(value, t) or value.is_bool:
                return
            value = Value(f"{r.choice(('min', 'max'))}({own}, {value.text})", value.dtype, value.bound)
            operator, bound = "=", max(t.bound, value.bound)
        if bound > LIMIT or any(" in " in c for c in clauses):
            return
        self._add(t.name, free, operator, value, clauses)
        held = Known(t.name, t.dtype, t.dims, t.format, bound, t.rounded)
        self.defined[t.name] = held
        if t.name in self.known:
            self.known[t.name] = held

    @staticmethod
    def _goes_into(value: Value, t: Known) -> bool:
        """Whether a value is of the type of a target, and exact."""
        return value.dtype == t.dtype and not value.rounded

    def _add(self, name: str, free: Sequence[str], operator: str, value: Value, clauses: Sequence[str]) -> None:
        target = f"{name}({','.join(free)})" if free else name
        where = f" where {', '.join(clauses)}" if clauses else ""
        self.statements.append(f"{target} {operator} {value.text}{where}")

    def _indices(self) -> list[str]:
        r = self.r
        while True:
            found = r.sample(list(INDICES), r.choice((1, 2, 2, 2, 3, 3, 4)))
            if prod(max(1, self.sizes[INDICES[i]]) for i in found) <= MAX_POINTS:
                return found

    def _operator(self, reduced: Sequence[str]) -> str:
        r = self.r
        if self.base == "bool":
            return r.choice(("max=!", "min=!")) if reduced else r.choice(("=", "max=!"))
        if not reduced:
            return r.choice(("=",) * 8 + ("+=!", "max=!", "+="))
        return r.choice(("+=!",) * 8 + ("max=!", "min=!", "*=!", "+=", "max=!"))

    # --- values --------------------------------------------------------------------------------------------------

    def _value(self, indices: Sequence[str], reduced: Sequence[str], operator: str) -> tuple[Value, list[str]]:
        """A value over the indices and its `where`, whose reduction stays exact."""
        r = self.r
        points = prod(max(1, self.sizes[INDICES[i]]) for i in reduced)
        for attempt in range(40):
            self.used: list[tuple[Known, tuple[str, ...]]] = []
            mark = len(self.operands)
            may_round = operator == "=" and r.random() < 0.15
            value = self._expression(indices, r.choice((1, 1, 2, 2, 3)) if attempt < 20 else 0, may_round)
            bound = value.bound
            if operator.startswith("+"):
                bound = value.bound * points
            elif operator.startswith("*"):
                bound = max(1.0, value.bound) ** points if points < 40 else inf
            too_large = bound > LIMIT and not value.rounded
            if too_large or (value.rounded and operator != "=") or (operator[0] in "+*" and value.is_bool):
                for x in self.operands[mark:]:
                    del self.known[x.name]
                    self.formats.pop(x.name, None)
                del self.operands[mark:]
                continue
            clauses = self._clauses(indices, reduced)
            return Value(value.text, value.dtype, bound, value.rounded), clauses
        self.used = []
        one = Value("(1 < 2)", "bool", 1.0) if self.base == "bool" else Value("1", WEAK_INT, 1.0)
        return one, self._clauses(indices, reduced)

    def _clauses(self, indices: Sequence[str], reduced: Sequence[str]) -> list[str]:
        r, clauses = self.r, []
        for i in indices:
            seen = any(i in subscripts for _, subscripts in self.used)
            n = INDICES[i]
            if r.random() < 0.06 and not self.blocks and (seen or i not in reduced):
                a = r.randint(0, self.sizes[n])
                clauses.append(f"{i} in {a}:{r.randint(a, self.sizes[n])}")
                self.resizable = False
            elif not seen and i not in reduced:
                clauses.append(f"{i} in 0:{n}")
        if r.random() < 0.25:
            sparse = [(t, s) for t, s in self.used if t.is_sparse]
            if sparse and r.random() < 0.7:
                t, subscripts = r.choice(sparse)
            else:
                found = self._access(indices, sparse=True)
                if found is None:
                    return clauses
                t, subscripts = found
            clauses.append(f"exists {_call(t.name, subscripts)}")
        return clauses

    def _expression(self, indices: Sequence[str], depth: int, may_round: bool) -> Value:
        r = self.r
        if depth == 0 or r.random() < 0.1:
            return self._leaf(indices)
        a = self._expression(indices, depth - 1, may_round)
        if r.random() < 0.12:
            return self._unary(a, may_round)
        b = self._expression(indices, depth - 1, may_round)
        if a.is_bool and b.is_bool:
            return Value(f"({a.text} {r.choice(('&&', '||'))} {b.text})", "bool", 1.0)
        a, b = _number(a), _number(b)
        dtype = _promote_types(a.dtype, b.dtype)
        rounded = a.rounded or b.rounded
        kind = r.choice(("*",) * 8 + ("+",) * 7 + ("-",) * 3 + ("min", "max", "?", "/"))
        match kind:
            case "*":
                return Value(f"({a.text} * {b.text})", dtype, a.bound * b.bound, rounded)
            case "+" | "-":
                return Value(f"({a.text} {kind} {b.text})", dtype, a.bound + b.bound, rounded)
            case "?":
                c = self._condition(indices, a, b)
                return Value(f"({c} ? {a.text} : {b.text})", dtype, max(a.bound, b.bound), rounded)
            case "/" if may_round and dtype in ("float32", "float64"):
                return Value(f"({a.text} / {b.text})", dtype, 1.0, True)
        kind = kind if kind in ("min", "max") else "max"
        return Value(f"{kind}({a.text}, {b.text})", dtype, max(a.bound, b.bound), rounded)

    def _condition(self, indices: Sequence[str], a: Value, b: Value) -> str:
        c = self._leaf(indices)
        if c.is_bool:
            return c.text
        return f"{_number(c).text} {self.r.choice(('<', '<=', '>', '==', '!='))} {self.r.choice((a.text, b.text, '1'))}"

    def _unary(self, a: Value, may_round: bool) -> Value:
        r = self.r
        if a.is_bool:
            return Value(f"!{a.text}", "bool", 1.0)
        if may_round and a.dtype in ("float32", "float64") and a.bound < 50:
            return Value(f"{r.choice(('exp', 'tanh', 'cos', 'sqrt'))}({a.text})", a.dtype, 1.0, True)
        if a.dtype in ("float32", "float64") and r.random() < 0.5:
            return Value(f"abs({a.text})", a.dtype, a.bound, a.rounded)
        return Value(f"(-{a.text})", a.dtype, a.bound, a.rounded)

    def _leaf(self, indices: Sequence[str]) -> Value:
        r = self.r
        if r.random() < 0.08:
            if self.base == "bool":
                return Value("(1 < 2)" if r.random() < 0.5 else "(2 < 1)", "bool", 1.0)
            n = r.choice((0, 1, 2, 3))
            is_float = self.base.startswith("float")
            return Value(f"{n}.0" if is_float else str(n), WEAK_FLOAT if is_float else WEAK_INT, float(n))
        found = self._access(indices, sparse=r.random() < 0.75)
        if found is None:
            return Value("(1 < 2)", "bool", 1.0) if self.base == "bool" else Value("1", WEAK_INT, 1.0)
        t, subscripts = found
        return Value(_call(t.name, subscripts), t.dtype, t.bound)

    # --- reads ---------------------------------------------------------------------------------------------------

    def _access(self, indices: Sequence[str], sparse: bool) -> tuple[Known, tuple[str, ...]] | None:
        """A tensor to read, a known one or a new operand, and its subscripts."""
        r = self.r
        fitting = [t for t in self.known.values() if t.is_sparse == sparse and self._fits(t, indices)]
        if fitting and (r.random() < 0.4 or len(self.operands) >= MAX_OPERANDS):
            t = r.choice(fitting)
            found = self._subscripts(t, indices, distinct=False)
            if found is not None:
                self.used.append((t, tuple(found)))
                return t, tuple(found)
        if len(self.operands) >= MAX_OPERANDS:
            return None
        count = 2 if self.blocks and sparse else r.choice((0, 1, 1, 2, 2, 2, 3, 4))
        chosen = r.sample(list(indices), min(count, len(indices)))
        if (self.blocks and sparse and len(chosen) < 2) or (sparse and not chosen):
            return None
        t = self._operand(tuple(INDICES[i] for i in chosen), sparse)
        subscripts = self._written(chosen, t)
        self.used.append((t, subscripts))
        return t, subscripts

    def _written(self, chosen: Sequence[str], t: Known) -> tuple[str, ...]:
        """Subscripts of an access by these indices: sometimes one comes twice, is a number, or runs backwards."""
        r, found = self.r, list(chosen)
        if self.blocks:
            return tuple(found)
        for d, n in enumerate(t.dims):
            if r.random() < 0.04 and self.sizes[n]:
                found[d], self.resizable = str(r.randrange(self.sizes[n])), False
            elif not t.is_sparse and r.random() < 0.08:
                found[d] = f"{n} - 1 - {found[d]}"
        return tuple(found)

    def _operand(self, dims: tuple[str, ...], sparse: bool) -> Known:
        r = self.r
        name = f"{'A' if sparse else 'D'}{len(self.operands)}"
        dtype = self.base if r.random() < 0.85 or self.base == "bool" else r.choice(WIDE)
        format = self._format(dims, holds_all=False) if sparse else None
        repeats = format is not None and not format.is_unique and r.random() < 0.7
        index = r.choice(("int32", "int32", "int64"))
        self.operands.append(RandomOperand(name, dtype, dims, format, index, repeats))
        if format is not None and r.random() < 0.2:
            self.formats[name] = format
        bound = 1.0 if dtype == "bool" else 9.0 if repeats else 3.0
        self.known[name] = Known(name, dtype, dims, format, bound)
        return self.known[name]

    def _format(self, dims: tuple[str, ...], *, holds_all: bool) -> Format:
        r = self.r
        if self.blocks:
            return parse_format(r.choice(("bsr", "bsc")), tuple(self.blocks[d] for d in dims), 2)
        common = {1: ("s",), 2: ("csr", "csr", "csc", "dcsr", "coo"), 3: ("csf", "coo", "dss"), 4: ("csf", "coo")}
        if r.random() < 0.4:
            return parse_format(r.choice(common[len(dims)]), (), len(dims))
        while True:
            order = r.sample(range(len(dims)), len(dims)) if r.random() < 0.5 else ()
            letters = "".join(r.choice("ddsssuqc") for _ in dims)
            try:
                format = parse_format(letters, order, len(dims))
            except UnlocatedTypeError:
                continue
            narrow = any(b in "qc" and a in "dsq" for a, b in pairwise(letters))
            if not format.is_dense and not (narrow and (holds_all or r.random() < 0.7)):
                return format

    def _fits(self, t: Known, indices: Sequence[str]) -> bool:
        sizes = [INDICES[i] for i in indices]
        return all(n in sizes for n in t.dims)

    def _subscripts(self, t: Known, indices: Sequence[str], *, distinct: bool) -> list[str] | None:
        """An index for each dimension of `t`."""
        found: list[str] = []
        for n in t.dims:
            left = [i for i in indices if INDICES[i] == n and not ((distinct or self.blocks) and i in found)]
            if not left:
                return None
            found.append(self.r.choice(left))
        return found


def _call(name: str, subscripts: Sequence[str]) -> str:
    return f"{name}({', '.join(subscripts)})" if subscripts else name


def _number(x: Value) -> Value:
    """A Boolean as a number."""
    return Value(f"int32({x.text})", "int32", 1.0) if x.is_bool else x


def _promote_types(a: str, b: str) -> str:
    if WEAK_FLOAT in (a, b):
        other = b if a == WEAK_FLOAT else a
        return other if other.startswith("float") else WEAK_FLOAT if other.startswith("weak") else "float32"
    ranks = (WEAK_INT, "bool", "int8", "int32", "int64", "float32", "float64")
    return max(a, b, key=ranks.index)


# --- operands ----------------------------------------------------------------------------------------------------


def random_sizes(r: Random, program: RandomDef) -> dict[str, int]:
    """Other sizes for a program that takes any."""
    return {n: program.blocks.get(n, 1) * r.choice(SIZES[:7]) for n in program.sizes}


def operand_value(r: Random, x: RandomOperand, sizes: dict[str, int], special: bool) -> torch.Tensor | SparseTensor:
    """A tensor for a parameter: with empty rows, with nothing, with zeros that are stored, with all."""
    shape = tuple(sizes[n] for n in x.dims)
    rng = np.random.default_rng(r.randrange(2**32))
    if x.format is None:
        return _numbers(rng, x.dtype, shape, special)
    for _ in range(20):
        places = _places(rng, shape, r.choice((0.0, 0.1, 0.3, 0.3, 0.6, 1.0)))
        copies = rng.integers(1, 4 if x.repeats else 2, places.shape[1])
        if special:
            # Repeats may be multiplied one by one, and (0 + 1) * inf is not 0 * inf + 1 * inf: copies have one value.
            values = _numbers(rng, x.dtype, copies.shape, special).repeat_interleave(torch.from_numpy(copies))
        else:
            values = _numbers(rng, x.dtype, (int(copies.sum()),), special)
        places = np.repeat(places, copies, 1)
        order = rng.permutation(places.shape[1])
        places, values = places[:, order], values[torch.from_numpy(order)]
        index = torch.int64 if x.index == "int64" else torch.int32
        try:
            return SparseTensor.from_coordinates(places, values, shape, x.format, index).check()
        except ArgumentError:  # more than one coordinate where the format has room for one
            continue
    raise Unusable


def _places(rng: np.random.Generator, shape: tuple[int, ...], density: float) -> np.ndarray:
    stored = rng.random(shape) < density
    for d, n in enumerate(shape):
        if n and rng.random() < 0.3:  # some rows have nothing
            empty = rng.random(n) < 0.5
            stored &= ~empty.reshape([-1 if e == d else 1 for e in range(len(shape))])
    return np.stack(np.nonzero(stored))


def _numbers(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], special: bool) -> torch.Tensor:
    """Whole numbers from -3 to 3."""
    if dtype == "bool":
        return torch.from_numpy(np.asarray(rng.integers(0, 2, shape)).astype(bool))
    x = np.asarray(rng.integers(-3, 4, shape)).astype(dtype)
    if special and dtype.startswith("float") and x.size:
        x = np.where(rng.random(shape) < 0.1, rng.choice([np.nan, np.inf, -np.inf, -0.0], shape), x).astype(dtype)
    return torch.from_numpy(np.array(x))


def laid_out(r: Random, x: SparseTensor) -> SparseTensor:
    """`x` with parts that are every second element of something larger, or of two types."""
    kind = r.choice(("as it is",) * 6 + ("gaps", "types"))
    if kind == "as it is":
        return x

    def moved(part: torch.Tensor) -> torch.Tensor:
        if kind == "types":
            return part.long() if r.random() < 0.5 else part
        wide = torch.full((2 * len(part), *part.shape[1:]), 3, dtype=part.dtype)
        wide[::2] = part
        return wide[::2]

    levels = [
        level if level is None else (None if level[0] is None else moved(level[0]), moved(level[1]))
        for level in x.levels
    ]  # fmt: skip
    values = moved(x.values) if kind == "gaps" and x.values.ndim else x.values
    return SparseTensor(x.format, x.shape, levels, values)


def every_array(x: SparseTensor) -> Iterator[torch.Tensor]:
    """All pos and crd, then the values."""
    for level in x.levels:
        if level is not None:
            yield from (a for a in level if a is not None)
    yield x.values
