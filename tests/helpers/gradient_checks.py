"""What the gradients of a def must agree with: differences in double precision, through the reference evaluator.

`python -m tests.helpers.gradient_checks --programs 5000 --seed 7` checks that many random programs in one process,
and prints each that fails with the seed that draws it. `--compiled 100` runs that many of them through torch and
compiled kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensor_comprehensions.core.dtypes import FLOAT64, INT64
from tensor_comprehensions.core.errors import CheckError, RangeError
from tensor_comprehensions.tc_lang import BoundFunction, Function, bind, compile_source
from tensor_comprehensions.tc_lang.gradients import (
    Gradient,
    Key,
    differentiable_inputs,
    differentiate,
    emit,
    with_saved_outputs,
)
from tensor_comprehensions.tc_lang.ir import Size
from tensor_comprehensions.tc_lang.reference.evaluator import evaluate_def
from tensor_comprehensions.tc_lang.transforms.add_batch_dim import add_batch_dim
from tests.helpers.gradient_programs import GradientProgram, draw_program

Arrays = Mapping[str, Any]
Values = dict[Key, Any]
STEPS = (2e-5, 0.7e-5)
"""Of differences. Where two of them disagree there is a kink, or a jump, nearby."""
ATTEMPTS = 4


class Rejected(Exception):
    """A program that breaks a rule of the language, overflows, or has a kink wherever it is tried."""


@dataclass(frozen=True)
class Mismatch(Exception):
    """A derivative that is wrong. what: which one."""

    what: str
    found: Any
    wanted: Any

    def __str__(self) -> str:
        return f"{self.what}: found {self.found}, wanted {self.wanted}"


_BOUND: dict[int, tuple[Function, dict[str, int], BoundFunction]] = {}
"""What was bound last, by the def: differences evaluate one often."""


def run(function: Function, arrays: Arrays) -> dict[str, Any]:
    """The returns of a def by the reference evaluator; sizes come from the arrays."""
    sizes: dict[str, int] = {}
    for symbol in (*function.parameters, *function.inouts):
        for extent, n in zip(symbol.extents or (), arrays[symbol.name].shape, strict=True):
            if isinstance(extent, Size):
                sizes[extent.name] = n
    known = _BOUND.get(id(function))
    if known is None or known[1] != sizes:
        known = function, sizes, bind(function, {name: sizes[name] for name in function.sizes})
        _BOUND[id(function)] = known
    return evaluate_def(known[2], arrays)


def arguments(gradient: Gradient, values: Values) -> dict[str, Any]:
    """What a gradient takes, by the names of its parameters."""
    return {p.name: values[key] for p, key in zip(gradient.function.parameters, gradient.inputs, strict=True)}


def apply_gradient(gradient: Gradient, values: Values) -> Values:
    """What a gradient gives, by what it is the gradient of."""
    results = run(gradient.function, arguments(gradient, values))
    return dict(zip(gradient.outputs, (results[r] for r in gradient.function.returns), strict=True))


def check_close(what: str, found: Any, wanted: Any, scale: float = 1.0, tolerance: float = 2e-6) -> None:
    """Raise Mismatch unless two arrays agree."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape or not np.all(np.abs(found - wanted) <= tolerance * (scale + np.abs(wanted))):
        raise Mismatch(what, found, wanted)


def difference(f: Callable[[float], Any]) -> Any:
    """The derivative of `f` at 0. Raises Rejected where it has none."""
    a, b = ((f(h) - f(-h)) / (2 * h) for h in STEPS)
    if not np.all(np.isfinite(b)) or np.any(np.abs(a - b) > 1e-6 * (1 + np.abs(b))):
        raise Rejected("a kink")
    return b


def dot(a: Values, b: Values, keys: Sequence[Key]) -> float:
    return float(sum(np.sum(a[k] * b[k]) for k in keys))


@dataclass
class Checker:
    """One def at one point. base: the values of its arguments and outputs."""

    function: Function
    values: Values
    random: np.random.Generator

    def __post_init__(self) -> None:
        f = self.function
        self.keys = differentiable_inputs(f)
        self.outputs: tuple[Key, ...] = tuple(("output", r) for r in f.returns if f.tensor(r).dtype.is_float)
        self.values = {**self.values, **self.outputs_of(self.values)}
        if not all(np.all(np.isfinite(x)) and np.all(np.abs(x) < 1e4) for x in self.values.values()):
            raise Rejected("large values")

    def outputs_of(self, values: Values) -> Values:
        results = run(self.function, {name: x for (kind, name), x in values.items() if kind in ("input", "initial")})
        return {("output", r): x for r, x in results.items()}

    def moved(self, along: Values, h: float) -> Values:
        """The values with the arguments moved by `h`, and the outputs there."""
        arguments = {k: x + h * along[k] if k in along else x for k, x in self.values.items() if k[0] != "output"}
        return {**arguments, **self.outputs_of(arguments)}

    def like(self, keys: Sequence[Key], kind: str | None = None) -> Values:
        """Random values of the shapes of some arguments or outputs."""
        return {(kind or k[0], k[1]): self.random.uniform(-1, 1, np.shape(self.values[k])) for k in keys}

    # --- what is checked ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise Mismatch for a wrong derivative, Rejected where there is none."""
        along = self.like(self.keys)
        upstream = self.like(self.outputs, "gradient")
        self.tangents = difference(lambda h: self._flat(self.moved(along, h)))
        gradient = differentiate(self.function)
        first = self._first(gradient, along, upstream)
        self._forward(gradient, along)
        self._second(gradient, along, upstream)
        match self.random.integers(3):  # they cost as much as all before
            case 0:
                self._kept(upstream, first)
            case 1:
                self._batches(gradient, upstream)

    def _flat(self, values: Values) -> Any:
        return np.concatenate([np.ravel(values[k]) for k in self.outputs])

    def _first(self, gradient: Gradient, along: Values, upstream: Values) -> Values:
        found = apply_gradient(gradient, {**self.values, **upstream})
        flat = np.concatenate([np.ravel(upstream["gradient", r]) for _, r in self.outputs])
        terms = sum(float(np.sum(np.abs(found[k] * along[k]))) for k in self.keys)
        check_close("gradient", dot(found, along, self.keys), float(flat @ self.tangents), 1.0 + terms)
        return found

    def _kept(self, upstream: Values, first: Values) -> None:
        """The gradient that takes temporaries, and that by one argument."""
        key = self.keys[self.random.integers(len(self.keys))]
        for what, wanted in (("gradient with temporaries", None), ("gradient by one argument", [key])):
            gradient = differentiate(self.function, wanted, keep=True)
            values = {**self.values, **upstream}
            if gradient.saved_names:
                arrays = {name: x for (kind, name), x in self.values.items() if kind in ("input", "initial")}
                results = run(with_saved_outputs(self.function, gradient.saved_names), arrays)
                values |= {("temporary", name): results[name] for name in gradient.saved_names}
            for k, found in apply_gradient(gradient, values).items():
                check_close(f"{what} by {k[1]}", found, first[k])

    def _forward(self, gradient: Gradient, along: Values) -> None:
        """The derivative along a direction: what the gradient of the gradient by its own upstream is."""
        wanted: list[Key] = [
            ("input", p.name)
            for p, key in zip(gradient.function.parameters, gradient.inputs, strict=True)
            if key[0] == "gradient"
        ]
        transposed = differentiate(gradient.function, wanted)
        zeros: Values = {("gradient", r): np.zeros_like(self.values["output", r]) for _, r in self.outputs}
        inner = self._of_gradient(gradient, {**self.values, **zeros})
        inner |= {("gradient", r): along[k] for r, k in zip(gradient.function.returns, gradient.outputs, strict=True)}
        found = apply_gradient(transposed, inner)
        names = {p.name: key[1] for p, key in zip(gradient.function.parameters, gradient.inputs, strict=True)}
        by_output = {names[name]: x for (_, name), x in found.items()}
        at = 0
        for _, r in self.outputs:
            size = np.size(self.values["output", r])
            wanted_part = self.tangents[at : at + size].reshape(np.shape(self.values["output", r]))
            found_part = by_output.get(r, np.zeros_like(wanted_part))
            check_close(f"jvp of {r}", found_part, wanted_part)
            at += size

    def _of_gradient(self, gradient: Gradient, values: Values) -> Values:
        """The arguments and results of a gradient as those of a def."""
        taken = arguments(gradient, values)
        results = run(gradient.function, taken)
        return {**{("input", n): x for n, x in taken.items()}, **{("output", n): x for n, x in results.items()}}

    def _second(self, gradient: Gradient, along: Values, upstream: Values) -> None:
        """The gradient of `<gradient, weights>`, through the outputs that the gradient reads as well."""
        weights = self.like(self.keys)

        def inner_product(h: float) -> float:
            return dot(apply_gradient(gradient, {**self.moved(along, h), **upstream}), weights, self.keys)

        wanted = difference(inner_product)
        second = differentiate(gradient.function)
        inner = self._of_gradient(gradient, {**self.values, **upstream})
        inner |= {("gradient", r): weights[k] for r, k in zip(gradient.function.returns, gradient.outputs, strict=True)}
        found = apply_gradient(second, inner)
        total, size = 0.0, 1.0
        through = {("gradient", r): np.zeros_like(self.values["output", r]) for _, r in self.outputs}
        for p, key in zip(gradient.function.parameters, gradient.inputs, strict=True):
            part = found.get(("input", p.name))
            if part is not None and key in along:
                total, size = total + float(np.sum(part * along[key])), size + float(np.sum(np.abs(part * along[key])))
            elif part is not None and key[0] == "output":
                through["gradient", key[1]] = part
        for k, part in apply_gradient(gradient, {**self.values, **through}).items():
            total, size = total + float(np.sum(part * along[k])), size + float(np.sum(np.abs(part * along[k])))
        check_close("second derivative", total, wanted, size, 1e-5)

    def _batches(self, gradient: Gradient, upstream: Values) -> None:
        """Batches over some of the arguments, against the points of the batch one by one."""
        over = [k for k in self.keys if self.random.random() < 0.6] or [self.keys[0]]
        points: list[Values] = []
        for shift in (0.1, 0.0):
            given = {k: x + shift if k in over else x for k, x in self.values.items() if k[0] != "output"}
            points.append({**given, **self.outputs_of(given), **upstream})
        gradients = [apply_gradient(gradient, x) for x in points]
        self._batched_gradient(gradient, over, points, gradients)
        function, outputs = add_batch_dim(self.function, [name for _, name in over])
        together: Values = {}
        for k in points[0]:
            wide = k in over or k[1] in outputs
            together[k] = np.stack([x[k] for x in points]) if wide else points[0][k]
        results = run(function, {name: x for (kind, name), x in together.items() if kind in ("input", "initial")})
        for r in self.function.returns:
            check_close(f"vmap of {r}", results[r], together["output", r])
        if not all(r in outputs for _, r in self.outputs):
            return
        for k, found in apply_gradient(differentiate(function), together).items():
            wide = np.ndim(found) > np.ndim(self.values[k])
            parts = np.stack([g[k] for g in gradients])
            check_close(f"gradient of the vmap by {k[1]}", found, parts if wide else parts.sum(0))

    def _batched_gradient(
        self, gradient: Gradient, over: Sequence[Key], points: Sequence[Values], gradients: Sequence[Values]
    ) -> None:
        """The vmap of the gradient. over: the arguments in which the points differ."""
        keys = {p.name: key for p, key in zip(gradient.function.parameters, gradient.inputs, strict=True)}
        moving = [n for n, k in keys.items() if k in over or k[0] in ("output", "gradient")]
        function, wide = add_batch_dim(gradient.function, moving)
        taken = {n: np.stack([x[k] for x in points]) if n in moving else points[0][k] for n, k in keys.items()}
        results = run(function, taken)
        for r, k in zip(gradient.function.returns, gradient.outputs, strict=True):
            wanted = np.stack([g[k] for g in gradients]) if r in wide else gradients[0][k]
            check_close(f"vmap of the gradient by {k[1]}", results[r], wanted)


@contextmanager
def refusals_rejected() -> Iterator[None]:
    """Turn the refusal of a def whose derivative the language cannot say into Rejected."""
    try:
        yield
    except CheckError as error:
        if "cannot be differentiated" in error.message:
            raise Rejected(f"refused: {error.message.rpartition(':')[2]}") from error
        raise


def check_program(program: GradientProgram, seed: int) -> None:
    """Raise Mismatch, or whatever else goes wrong; Rejected where the program says nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = compile_source(program.source)[-1]
            run(function, program.arrays)
    except (CheckError, RangeError) as error:
        raise Rejected(f"{type(error).__name__}") from error
    if any(t.dtype not in (FLOAT64, INT64) for t in function.tensors) or not any(
        function.tensor(r).dtype.is_float for r in function.returns
    ):
        raise Rejected("a tensor of literals")
    random = np.random.default_rng(seed)
    kinds = {**{p.name: "input" for p in function.parameters}, **{p.name: "initial" for p in function.inouts}}
    reason: Exception = Rejected("?")
    _BOUND.clear()
    for _ in range(ATTEMPTS):
        values: Values = {(kinds[n], n): np.asarray(x) for n, x in program.arrays.items()}
        for key in differentiable_inputs(function):
            values[key] = random.uniform(-1.5, 1.5, np.shape(values[key]))
        try:
            with refusals_rejected():
                Checker(function, values, random).check()
        except Rejected as error:
            reason = error
            if "refused" in str(error):
                break
            continue
        return
    raise reason


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--statements", type=int, default=3)
    parser.add_argument("--compiled", type=int, default=0, help="of them as operators of torch, in compiled kernels")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    counts: Counter[str] = Counter()
    most = emit.MOST
    for n in range(options.programs):
        name = f"{options.seed}:{n}"
        program = draw_program(name, options.statements)
        emit.MOST = most if n % 5 == 0 else 0  # to leave ranges out takes as long as all the rest
        try:
            if n < options.compiled:
                from tests.helpers.gradient_operators import check_operator

                check_operator(program, n)
            else:
                check_program(program, n)
            counts["right"] += 1
        except Rejected as reason:
            counts[f"rejected, {reason}"] += 1
        except Exception as error:
            counts["wrong"] += 1
            print(f"--- {name}: {type(error).__name__}: {str(error)[:1500]}\n{program.source}", flush=True)
            print({k: v.shape for k, v in program.arrays.items()}, flush=True)
        if n % 50 == 49:
            print(n + 1, dict(counts), flush=True)
    print(dict(counts))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    from tests.helpers import gradient_checks  # whose classes are those that the other modules raise

    sys.exit(gradient_checks.main())
