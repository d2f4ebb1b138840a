"""The def that computes an equation: one statement for every contraction of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..core.dtypes import DTYPES
from ..structured.contraction_path import Labels, best_path, is_single_loop_cheaper
from .equation import Equation

NAME, RESULT = "einsum", "out"


@dataclass(frozen=True, slots=True)
class EinsumOperand:
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
        return _format_element(self.name, ["0" if s is None else s for s in self.subscripts])


def equation_to_def(equation: Equation, types: Sequence[str], densities: Sequence[float] = ()) -> str:
    """The text of the def, whose parameters are operands of these types in order.

    densities: the part of each operand that is stored, if some are sparse.
    """
    factors = [
        EinsumOperand(f"X{n}", subscripts, not DTYPES[dtype].is_float)
        for n, (subscripts, dtype) in enumerate(zip(equation.operands, types, strict=True))
    ]
    parameters = ", ".join(_format_parameter(f, dtype) for f, dtype in zip(factors, types, strict=True))
    statements = "".join(f"  {s}\n" for s in _emit_statements(equation, factors, densities))
    return f"def {NAME}({parameters}) -> ({RESULT}) {{\n{statements}}}\n"


def _format_parameter(factor: EinsumOperand, dtype: str) -> str:
    sizes = ["1" if s is None else f"N_{s}" for s in factor.subscripts]
    return f"{_format_element(dtype, sizes, separator=',')} {factor.name}"


def _emit_statements(equation: Equation, factors: list[EinsumOperand], densities: Sequence[float]) -> list[str]:
    """The statements: sums over labels of a single operand first, then pairs, in the best order."""
    if len(factors) == 1:
        return [_emit_statement(EinsumOperand(RESULT, equation.output), factors)]
    found: list[str] = []
    stored = [*densities]
    output = frozenset(equation.output)
    for n, factor in enumerate(factors):
        others = output.union(*(f.labels for f in factors if f is not factor))
        if factor.labels - others:
            factors[n] = _make_result_operand(f"S{n}", [factor], equation, others)
            found.append(_emit_statement(factors[n], [factor]))
            stored[n : n + 1] = [1.0] if stored else []
    labels = [f.labels for f in factors]
    order = best_path(labels, output, equation.sizes)
    if stored:
        at_once = is_single_loop_cheaper(labels, output, equation.sizes, stored, order.steps)
    else:
        together = frozenset().union(*labels)
        at_once = (len(factors) - 1) * prod(equation.sizes[label] for label in together) <= order.operations
    if at_once:
        return [*found, _emit_statement(EinsumOperand(RESULT, equation.output), factors)]
    return [*found, *_emit_pair_statements(equation, factors, order.steps, output_first=not stored)]


def _emit_pair_statements(
    equation: Equation, factors: list[EinsumOperand], steps: Sequence[tuple[int, int]], *, output_first: bool
) -> list[str]:
    """One statement per step; the last one defines the output."""
    found: list[str] = []
    results = list(factors)
    alive = set(range(len(factors)))
    for one, other in steps:
        alive -= {one, other}
        pair = [results[one], results[other]]
        needed = frozenset(equation.output).union(*(results[n].labels for n in sorted(alive)))
        result = EinsumOperand(RESULT, equation.output)
        if alive:
            result = _make_result_operand(f"T{len(found)}", pair, equation, needed, output_first=output_first)
        alive.add(len(results))
        results.append(result)
        found.append(_emit_statement(result, pair))
    return found


def _make_result_operand(
    name: str, factors: Sequence[EinsumOperand], equation: Equation, needed: Labels, *, output_first: bool = True
) -> EinsumOperand:
    """The result of a product with the labels `needed`: the output's labels in its order, then the others.

    output_first: otherwise the output's labels come last, so that a sparse operand selects whole rows.
    """
    present = dict.fromkeys(s for f in factors for s in f.subscripts if s in needed)
    kept = [label for label in equation.output if label in present]
    others = [label for label in present if label not in kept]
    return EinsumOperand(name, tuple(kept + others if output_first else others + kept))


def _emit_statement(target: EinsumOperand, factors: Sequence[EinsumOperand]) -> str:
    summed = frozenset().union(*(f.labels for f in factors)) - target.labels
    value = " * ".join(f.text for f in factors)
    if summed and len(factors) == 1 and factors[0].counts:
        value = f"int64({value})"
    return f"{target.text} {'+=!' if summed else '='} {value}"


def _format_element(name: str, parts: Sequence[str], separator: str = ", ") -> str:
    return f"{name}({separator.join(parts)})" if parts else name
