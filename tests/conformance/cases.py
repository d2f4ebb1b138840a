"""The conformance programs, for every test that runs them.

`cases.json` holds one record per program: `tc` the text, `fn` the def to call (the first when absent), `inputs` in
the order of the parameters as "<type> d0 d1 … [: lo hi]", `initial` the in/out outputs, `out` the names of the
returns, `ref` a NumPy expression for their values (helpers in `refs.py`, the initial values in `pre`), `or_ref` a
second acceptable value, `starts` the smallest index of each dimension of an output, `error` the kind of error that
is expected, `may_reject` where refusing is as good as the value.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import refs

from tensor_comprehensions.core.errors import ArgumentError, CheckError, ParseError, RangeError

ERRORS = {"parse": ParseError, "check": CheckError, "range": RangeError, "arguments": ArgumentError}
TYPES = {
    "f": "float32", "d": "float64", "i": "int32", "l": "int64", "h": "int16", "b": "int8", "u": "uint8",
    "w": "uint16", "z": "bool", "e": "float16", "U": "uint32", "L": "uint64",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One program with arrays to call it with."""

    id: str
    record: dict[str, Any]

    @property
    def source(self) -> str:
        return str(self.record["tc"])

    @property
    def error(self) -> type[Exception] | None:
        return ERRORS[self.record["error"]] if "error" in self.record else None

    @property
    def returns(self) -> list[str]:
        return str(self.record.get("out", "")).split()

    def arrays(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The inputs and the initial values of in/out outputs, the same in every process."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        inputs = {name: _array(spec, rng) for name, spec in self.record.get("inputs", {}).items()}
        initial = {name: _array(spec, rng) for name, spec in self.record.get("initial", {}).items()}
        return inputs, initial

    def expected(self, inputs: dict[str, Any], initial: dict[str, Any]) -> list[list[Any]]:
        """The acceptable values: alternatives, each with one array per return."""
        names = {("in_" if name == "in" else name): a for name, a in inputs.items()}
        scope = {**vars(refs), "np": np, "pre": initial, **initial, **names}
        alternatives = []
        for key in ("ref", "or_ref"):
            if key in self.record:
                value = eval(self.record[key], scope)
                alternatives.append([np.asarray(v) for v in (value if isinstance(value, tuple) else (value,))])
        return alternatives


def _array(spec: str, rng: np.random.Generator) -> Any:
    shape_text, _, range_text = spec.partition(":")
    letter, *dims = shape_text.split()
    shape = tuple(int(d) for d in dims)
    limits = range_text.split()
    dtype = np.dtype(TYPES[letter])
    if limits == ["cum"]:
        return np.concatenate([[0], np.cumsum(rng.integers(1, 4, shape[0] - 1))]).astype(dtype)
    if dtype.kind == "f":
        low, high = (float(x) for x in limits) if limits else (-1.0, 1.0)
        return np.asarray(rng.uniform(low, high, shape)).astype(dtype)
    low, high = (int(x) for x in limits) if limits else (0, 2)
    return np.asarray(rng.integers(low, high, shape)).astype(dtype)


def load() -> list[Case]:
    """All conformance programs: the given ones and the project's own."""
    folder = Path(__file__).parent
    records = [r for name in ("cases.json", "own_cases.json") for r in json.loads((folder / name).read_text())]
    return [Case(r["id"], r) for r in records]


CASES = load()


def agrees(results: list[Any], alternatives: list[list[Any]]) -> bool:
    """Whether the results have the shapes, types and values of one alternative; floats to 1e-4."""
    return any(
        len(results) == len(expected) and all(_close(r, e) for r, e in zip(results, expected, strict=True))
        for expected in alternatives
    )


def _close(result: Any, expected: Any) -> bool:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if result.dtype.kind != "f":
        return bool(np.array_equal(result, expected))
    tolerance = 2e-3 if result.dtype == np.float16 else 1e-4
    return bool(np.allclose(result.astype("f8"), expected.astype("f8"), rtol=tolerance, atol=1e-5, equal_nan=True))
