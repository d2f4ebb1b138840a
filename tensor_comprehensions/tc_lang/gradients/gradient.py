"""A gradient: a def, and the relation of its parameters and returns to the original def."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...core.errors import CheckError
from ..ir import Access, Function, walk_expr
from ..semantics.check import compile_source

Key = tuple[str, str]
"""A part of a def: ("input" | "initial" | "output" | "temporary", name), or ("gradient", name of an output)."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a def with respect to some of its inputs and initial values.

    source: its text. function: the checked def, which takes `inputs` and returns the gradients of `outputs`.
    """

    source: str
    function: Function
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]

    @property
    def saved_names(self) -> tuple[str, ...]:
        """The temporaries of the original def that the gradient takes as inputs."""
        return tuple(name for kind, name in self.inputs if kind == "temporary")

    @property
    def reads(self) -> frozenset[Key]:
        """The `inputs` whose values are read, not only their sizes."""
        f = self.function
        expressions = [e for s in f.statements for e in (s.value, *s.subscripts)]
        read = {x.tensor for e in expressions for x in walk_expr(e) if isinstance(x, Access)}
        return frozenset(key for key, p in zip(self.inputs, f.parameters, strict=True) if p.name in read)


def parse_given_gradient(function: Function, source: str) -> Gradient:
    """Parse a user's gradient of `function`, and match its parameters and returns by name.

    It takes inputs and outputs under their names, the initial value of an in/out output `C` as `C_0`, and the gradient
    of an output `C` as `d_C`; it returns `d_A` for an input `A` and `d_C_0` for an initial value. Raises CheckError.
    """
    defs = compile_source(source)
    if not defs:
        raise CheckError(f"the gradient of '{function.name}' has no def")
    gradient = defs[-1]
    if gradient.inouts:
        raise _make_check_error(
            gradient, gradient.inouts[0].name, "needs an initial value", "a tensor that it starts itself"
        )
    parts: dict[str, Key] = {f"d_{r}": ("gradient", r) for r in function.returns}
    parts |= {r: ("output", r) for r in function.returns}
    parts |= {f"{p.name}_0": ("initial", p.name) for p in function.inouts}
    parts |= {p.name: ("input", p.name) for p in function.parameters}
    results: dict[str, Key] = {f"d_{p.name}_0": ("initial", p.name) for p in function.inouts}
    results |= {f"d_{p.name}": ("input", p.name) for p in function.parameters}
    takes = tuple(_look_up_part(parts, gradient, p.name, "takes") for p in gradient.parameters)
    gives = tuple(_look_up_part(results, gradient, r, "returns") for r in gradient.returns)
    return Gradient(source, gradient, takes, gives)


def _look_up_part(parts: Mapping[str, Key], gradient: Function, name: str, verb: str) -> Key:
    if name not in parts:
        raise _make_check_error(
            gradient, name, f"is not a tensor that a gradient {verb} here", "one of " + ", ".join(parts)
        )
    return parts[name]


def _make_check_error(gradient: Function, name: str, problem: str, expected: str) -> CheckError:
    span = gradient.tensor(name).span
    return CheckError(f"'{name}' {problem}", source=gradient.source, span=span, expected=expected)
