"""Random defs over rows: norms, layers, chains, lookups, updates of what was computed before, and sums over rows."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

INPUTS = {"X": "nd", "Z": "ne", "S": "n", "W": "ed", "L": "vd", "G": "d", "H": "e"}
KINDS = ("pointwise", "reduction", "layer", "lookup", "update", "sum", "products", "mean")
UNARY = ("{}", "-{}", "tanh({})", "fmaxf({}, 0.25)", "{} * 0.5", "abs({})", "exp(0.1 * {})")
BINARY = ("{} + {}", "{} - {}", "{} * {}", "min({}, {})", "{} < {} ? 1.0 : {}")
POSITIONS = ("({i} % 3 < 1 ? {} : {})", "{} + 0.01 * {i}", "({i} >= 4 ? {} : 0.5)")
REDUCTIONS = ("+=!", "max=!", "min=!")


@dataclass(frozen=True)
class RowProgram:
    """A def over `N` rows, and the values of its other sizes."""

    source: str
    sizes: tuple[tuple[str, int], ...]


@st.composite
def row_programs(draw: st.DrawFn, most_statements: int = 4) -> RowProgram:
    """A def of up to `most_statements` statements, of which each computes a row from the same row, or sums rows."""
    known = dict(INPUTS)
    statements, defined = [], []
    for number in range(draw(st.integers(1, most_statements))):
        kind = draw(st.sampled_from(KINDS))
        name, dims = f"T{number}", draw(st.sampled_from(("n", "nd", "ne")))
        if kind == "update" and defined:
            name = draw(st.sampled_from(defined))
            dims = known[name]
            text = f"{_element(name, dims)} = {draw(_value(known, dims))}"
        elif kind == "reduction":
            text = f"{_element(name, 'n')} {draw(st.sampled_from(REDUCTIONS))} {draw(_value(known, 'nd', must='X'))}"
            dims = "n"
        elif kind == "layer":
            dims, inner = draw(st.sampled_from((("nd", "ne"), ("ne", "nd"))))
            read = draw(st.sampled_from(sorted(t for t, d in known.items() if d == inner)))
            text = f"{_element(name, dims)} +=! {_element(read, inner)} * W(e, d)"
        elif kind == "sum":
            dims, inner, must = draw(st.sampled_from((("d", "nd", "X"), ("e", "ne", "Z"), ("", "nd", "X"))))
            text = f"{_element(name, dims)} {draw(st.sampled_from(REDUCTIONS))} {draw(_value(known, inner, must=must))}"
        elif kind == "products":
            left, right = (draw(st.sampled_from(sorted(t for t, d in known.items() if d == x))) for x in ("ne", "nd"))
            dims, text = "ed", f"{name}(e, d) +=! {_element(left, 'ne')} * {_element(right, 'nd')}"
        elif kind == "mean":
            dims = "d"
            text = f"{name}(d) +=! {draw(_value(known, 'nd', must='X'))}\n    {name}(d) = {name}(d) / N"
        elif kind == "lookup":
            dims = "nd"
            text = f"{name}(n, d) = L(K(n), d) + {draw(_value(known, 'nd', must='X'))}"
        else:
            must = {"n": "S", "nd": "X", "ne": "Z"}[dims]
            text = f"{_element(name, dims)} = {draw(_value(known, dims, must=must))}"
        statements.append(text)
        known[name] = dims
        defined += [name] * (name not in defined)
    returns = sorted(draw(st.sets(st.sampled_from(defined), min_size=1)) | {defined[-1]})
    declared = ", ".join(f"float({','.join(d.upper() for d in dims)}) {t}" for t, dims in INPUTS.items())
    lines = "\n    ".join(statements)
    source = f"def f({declared}, int32(N) K) -> ({', '.join(returns)}) {{\n    {lines}\n}}"
    sizes = tuple((s, draw(st.sampled_from((1, 2, 3, 5, 8, 17, 33)))) for s in "DEV")
    return RowProgram(source, sizes)


@st.composite
def _value(draw: st.DrawFn, known: dict[str, str], dims: str, must: str = "") -> str:
    """An expression in the elements of known tensors at the indices `dims`, one of which is `must`."""
    fitting = sorted(t for t, d in known.items() if set(d) <= set(dims) and t not in ("W", "L"))
    first = must or draw(st.sampled_from(fitting))
    x = draw(st.sampled_from(UNARY)).format(_element(first, known[first]))
    other = draw(st.sampled_from(fitting))
    template = draw(st.sampled_from(BINARY + POSITIONS * bool(dims)))
    index = draw(st.sampled_from(dims)) if "{i}" in template else ""
    template = template.replace("{i}", index)
    return template.format(*(x, _element(other, known[other]), x)[: template.count("{}")])


def _element(name: str, dims: str) -> str:
    return f"{name}({', '.join(dims)})" if dims else name


@st.composite
def window_programs(draw: st.DrawFn, most_statements: int = 3) -> RowProgram:
    """A def whose rows are computed from windows of `X` and `Y`, all of one step and reach."""
    step, reach = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    offset = draw(st.integers(-1, 1))
    lines, defined = [], dict[str, str]()

    def element(name: str, dims: str, taps: str = "") -> str:
        at = taps or str(draw(st.integers(0, reach - 1)) + offset)
        return _element(name, dims).replace("n", f"{step}*n+{at}" if step > 1 else f"n+{at}")

    for number in range(draw(st.integers(1, most_statements))):
        name, dims = f"T{number}", draw(st.sampled_from(("nd", "dn", "n", "d", "")))
        inner = dims if set(dims) == set("nd") else "n" if dims == "n" else "nd"
        operand = "Y" if inner == "n" else "X"
        ends = [element(operand, "".join(sorted(inner, reverse=True)), str(at + offset)) for at in (0, reach - 1)]
        terms = [*ends, element("Y", "n"), *(_element(t, d) for t, d in defined.items() if set(d) <= set(inner))]
        terms += [element("X", "nd")] * (inner != "n")
        text = draw(st.sampled_from(BINARY)).replace("{}", "{0}", 1).replace("{}", "{1}")
        text = (
            f"{ends[0]} - 0.5 * {ends[1]} + {text.format(draw(st.sampled_from(terms)), draw(st.sampled_from(terms)))}"
        )
        if set(dims) >= {"n"} and draw(st.booleans()):
            taps = element(operand, "".join(sorted(inner, reverse=True)), f"k+{offset}")
            text = f"({text}) * 0.1 + {taps} * V(k)"
            lines.append(f"{_element(name, dims)} +=! {text} where k in 0:{reach}")
        elif set(dims) >= {"n"}:
            lines.append(f"{_element(name, dims)} = {text}{draw(st.sampled_from(('', ' + 0.01 * n')))}")
        else:
            lines.append(f"{_element(name, dims)} {draw(st.sampled_from(REDUCTIONS))} {text}")
        defined[name] = dims
    declared = f"float(N,D) X, float(N) Y, float({reach}) V"
    body = "\n    ".join(lines)
    return RowProgram(f"def f({declared}) -> ({', '.join(defined)}) {{\n    {body}\n}}", (("reach", reach),))


def row_arguments(program: RowProgram, n: int, dynamic: Iterable[str] = ("N",)) -> list[Any]:
    """Arguments of a program of `row_programs` whose sizes `dynamic` are about `n`."""
    rng = np.random.default_rng(zlib.crc32(repr((program, n)).encode()))
    sizes = {"N": 6, **dict(program.sizes)} | {name: n + 2 * k for k, name in enumerate(sorted(dynamic, reverse=True))}
    shapes = ([sizes[d.upper()] for d in dims] for dims in INPUTS.values())
    tensors = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
    return [*tensors, rng.integers(0, sizes["V"], sizes["N"]).astype(np.int32)]
