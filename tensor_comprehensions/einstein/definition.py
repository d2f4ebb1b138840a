"""The def that computes an equation: one statement for every contraction of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..dtypes import DTYPES
from .equation import Equation
from .order import Labels, best_order

NAME = "einsum"


@dataclass(frozen=True, slots=True)
class Factor:
    """A tensor of the def: an operand, or the result of a statement. None stands for a dimension read at 0.

    counts: its elements are integers or bools; a sum of them alone is int64, as `torch.sum` has it.
    """

    name: str
    subscripts: tuple[str | None, ...]
    counts: bool = False

    @property
    def labels(self) -> Labels:
        return frozenset(s for s in self.subscripts if s is not None)

    @property
    def text(self) -> str:
        return _element(self.name, ["0" if s is None else s for s in self.subscripts])


def definition(equation: Equation, types: Sequence[str]) -> str:
    """The text of the def, whose parameters are operands of these types in order."""
    factors = [
        Factor(f"X{n}", subscripts, not DTYPES[dtype].is_float)
        for n, (subscripts, dtype) in enumerate(zip(equation.operands, types, strict=True))
    ]
    parameters = ", ".join(_parameter(f, dtype) for f, dtype in zip(factors, types, strict=True))
    statements = "".join(f"  {s}\n" for s in _statements(equation, factors))
    return f"def {NAME}({parameters}) -> (out) {{\n{statements}}}\n"


def _parameter(factor: Factor, dtype: str) -> str:
    sizes = ["1" if s is None else f"N_{s}" for s in factor.subscripts]
    return f"{_element(dtype, sizes, separator=',')} {factor.name}"


def _statements(equation: Equation, factors: list[Factor]) -> list[str]:
    """Operands are first summed over what only they have; then pairs, in the best order."""
    if len(factors) == 1:
        return [_statement(Factor("out", equation.output), factors)]
    found: list[str] = []
    output = frozenset(equation.output)
    for n, factor in enumerate(factors):
        others = output.union(*(f.labels for f in factors if f is not factor))
        if factor.labels - others:
            factors[n] = _result(f"S{n}", [factor], equation, others)
            found.append(_statement(factors[n], [factor]))
    order = best_order([f.labels for f in factors], output, equation.sizes)
    together = frozenset().union(*(f.labels for f in factors))
    if (len(factors) - 1) * prod(equation.sizes[label] for label in together) <= order.operations:
        return [*found, _statement(Factor("out", equation.output), factors)]
    return [*found, *_pairs(equation, factors, order.steps)]


def _pairs(equation: Equation, factors: list[Factor], steps: Sequence[tuple[int, int]]) -> list[str]:
    """One statement per step; the last one defines the output."""
    found: list[str] = []
    results = list(factors)
    alive = set(range(len(factors)))
    for one, other in steps:
        alive -= {one, other}
        pair = [results[one], results[other]]
        needed = frozenset(equation.output).union(*(results[n].labels for n in sorted(alive)))
        result = _result(f"T{len(found)}", pair, equation, needed) if alive else Factor("out", equation.output)
        alive.add(len(results))
        results.append(result)
        found.append(_statement(result, pair))
    return found


def _result(name: str, factors: Sequence[Factor], equation: Equation, needed: Labels) -> Factor:
    """What is `needed` of a product: the output's labels in its order, then the others as they come."""
    present = dict.fromkeys(s for f in factors for s in f.subscripts if s in needed)
    kept = [label for label in equation.output if label in present]
    return Factor(name, (*kept, *(label for label in present if label not in kept)))


def _statement(target: Factor, factors: Sequence[Factor]) -> str:
    summed = frozenset().union(*(f.labels for f in factors)) - target.labels
    value = " * ".join(f.text for f in factors)
    if summed and len(factors) == 1 and factors[0].counts:
        value = f"int64({value})"
    return f"{target.text} {'+=!' if summed else '='} {value}"


def _element(name: str, parts: Sequence[str], separator: str = ", ") -> str:
    return f"{name}({separator.join(parts)})" if parts else name
