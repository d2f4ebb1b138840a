"""The conformance programs with sparse tensors, for every test that runs them.

`sparse_cases.json` holds one record per program. `tc`: the text; or `notation`, with the formats in `formats`.
`inputs`, in the order of the parameters: a text is a dense tensor as in the dense conformance programs, a list a vector
of these numbers, an object a sparse tensor, whose stored places `make` chooses. `ref`: NumPy expressions for the
returns, in which `A_` is the Boolean array of the stored places of A. `formats` and `stored`: the format and the stored
places of sparse results, before blocks and dense tails are completed. `error`, `says`: what is wrong, and words of the
message.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensor_comprehensions.core.errors import ArgumentError, CheckError, ParseError, RangeError
from tensor_comprehensions.dispatch.sparse.sparse_tensor import split_format
from tensor_comprehensions.tc_lang.formats import Format, parse_format

ERRORS = {"parse": ParseError, "check": CheckError, "range": RangeError, "arguments": ArgumentError}
TYPES = {
    "f": "float32", "d": "float64", "i": "int32", "l": "int64", "h": "int16", "b": "int8", "u": "uint8",
    "z": "bool", "e": "float16", "g": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """A tensor of a case: its elements, and for a sparse one the stored places and the format."""

    values: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any] | None = None
    format: Format | None = None


@dataclass(frozen=True)
class Case:
    """One program with operands to call it with."""

    id: str
    record: dict[str, Any]

    @property
    def returns(self) -> list[str]:
        return str(self.record.get("out", "")).split()

    def operands(self) -> dict[str, Operand]:
        """The inputs, the same in every process."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        made: dict[str, Operand] = {}
        for name, spec in self.record.get("inputs", {}).items():
            made[name] = _sparse(spec, rng, made) if isinstance(spec, dict) else Operand(_dense(spec, rng))
        return made

    def initial(self) -> dict[str, Operand]:
        """The initial values of in/out results."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()) + 1)
        return {name: Operand(_dense(spec, rng)) for name, spec in self.record.get("initial", {}).items()}

    def expected(self, operands: dict[str, Operand]) -> list[Any]:
        """The values of the returns."""
        texts = self.record["ref"]
        scope = self._scope(operands)
        return [np.asarray(eval(text, scope)) for text in (texts if isinstance(texts, list) else [texts])]

    def stored(self, operands: dict[str, Operand]) -> dict[str, Any]:
        """The stored places of sparse results, before blocks and dense tails are completed."""
        scope = self._scope(operands)
        return {name: np.asarray(eval(text, scope), bool) for name, text in self.record.get("stored", {}).items()}

    def _scope(self, operands: dict[str, Operand]) -> dict[str, Any]:
        scope: dict[str, Any] = {"np": np, "pre": {n: x.values for n, x in self.initial().items()}}
        for name, x in operands.items():
            scope[name] = x.values
            scope[f"{name}_"] = np.ones(x.values.shape, bool) if x.places is None else x.places
        return scope


def cases() -> list[Case]:
    records = json.loads(Path(__file__).with_name("sparse_cases.json").read_text())
    return [Case(r["id"], r) for r in records]


def format_of(text: str, rank: int) -> Format:
    return parse_format(*split_format(text), rank)


def complete(places: np.ndarray[Any, Any], format: Format) -> np.ndarray[Any, Any]:
    """`places` with whole blocks and dense tails where one of their elements is stored."""
    done = places
    if format.blocks:
        (a, b), (n, m) = format.blocks, places.shape
        blocks = places.reshape(n // a, a, m // b, b).any((1, 3))
        return np.repeat(np.repeat(blocks, a, 0), b, 1)
    for level in range(format.depth, format.rank):
        d = format.order[level]
        done = np.broadcast_to(done.any(d, keepdims=True), done.shape)
    return np.array(done)


def _dense(spec: Any, rng: np.random.Generator) -> Any:
    if isinstance(spec, list):
        return np.array([float(x) for x in spec])
    shape_text, _, range_text = spec.partition(":")
    letter, *dims = shape_text.split()
    return _values(rng, letter, tuple(int(d) for d in dims), [float(x) for x in range_text.split()])


def _values(rng: np.random.Generator, letter: str, shape: tuple[int, ...], limits: list[float]) -> Any:
    dtype = np.dtype(TYPES[letter])
    if dtype.kind == "f":
        low, high = limits or (0.1, 1.1)
        return np.asarray(rng.uniform(low, high, shape)).astype(dtype)
    low, high = limits or (1, 5)
    return np.asarray(rng.integers(int(low), int(high), shape)).astype(dtype)


def _sparse(spec: dict[str, Any], rng: np.random.Generator, others: dict[str, Operand]) -> Operand:
    shape = tuple(spec["shape"])
    format = format_of(spec["format"], len(shape))
    if "make" not in spec:
        return Operand(np.zeros(shape if math.prod(shape) < 1 << 20 else (0,)), None, format)
    places = complete(_places(spec["make"].split(), shape, rng, others), format)
    limits = [1, 2] if spec["type"] == "z" else []
    values = _values(rng, spec["type"], shape, limits)
    if spec["make"].startswith("cancel"):
        values = -others[spec["make"].split()[1]].values
    return Operand(np.where(places, values, np.zeros((), values.dtype)), places, format)


def _places(make: list[str], shape: tuple[int, ...], rng: np.random.Generator, others: dict[str, Operand]) -> Any:
    kind, *rest = make
    match kind:
        case "uniform" | "dup":
            return rng.random(shape) < float(rest[0])
        case "empty" | "full":
            return np.full(shape, kind == "full")
        case "diag":
            return np.eye(*shape, dtype=bool)
        case "band":
            rows, columns = np.indices(shape)
            return abs(rows - columns) <= int(rest[0])
        case "stencil":
            side = math.isqrt(shape[0])
            (a, b), (c, d) = (np.divmod(x, side) for x in np.indices(shape))
            return abs(a - c) + abs(b - d) <= 1
        case "rows":
            lead = rng.random(shape[:-1] if len(shape) == 2 else shape[:2]) < float(rest[0])
            return np.broadcast_to(lead.reshape(lead.shape + (1,) * (len(shape) - lead.ndim)), shape)
        case "blocks":
            a, b = int(rest[0]), int(rest[1])
            lead = rng.random((shape[0] // a, shape[1] // b)) < float(rest[2])
            return np.repeat(np.repeat(lead, a, 0), b, 1)
        case "power":
            weights = 1 / np.arange(1, shape[0] + 1)
            chance = np.minimum(1, weights * float(rest[0]) / weights.mean() / (shape[1] if float(rest[0]) > 1 else 1))
            return rng.random(shape) < chance[:, None]
        case "rmat":
            return _rmat(rng, shape, float(rest[0]))
        case "last":
            places = rng.random(shape) < float(rest[0])
            places.reshape(-1)[-1:] = True
            return places
        case "count":
            places = np.zeros(shape, bool)
            places[rng.permutation(shape[0])[: int(rest[0])]] = True
            return places
        case "same" | "cancel":
            return others[rest[0]].places
        case "disjoint":
            return (rng.random(shape) < 0.2) & ~np.asarray(others[rest[0]].places)
    raise AssertionError(f"unknown way to make places: {make}")


def _rmat(rng: np.random.Generator, shape: tuple[int, ...], density: float) -> Any:
    places = np.zeros(shape, bool)
    bits = max(1, math.ceil(math.log2(max(shape))))
    for _ in range(int(density * math.prod(shape))):
        quadrants = rng.choice(4, bits, p=(0.57, 0.19, 0.19, 0.05))
        row, column = (int("".join(map(str, q)), 2) for q in (quadrants // 2, quadrants % 2))
        if row < shape[0] and column < shape[1]:
            places[row, column] = True
    return places
