"""The gradient of a def, as a def: reverse-mode differentiation from text to text.

Statements are processed from last to first. Each propagates the gradient of its target to the elements that it reads:
if the subscripts can be solved for indices, the gradient of the read tensor *gathers* its parts; otherwise they are
scattered with `+=`. Values of the def that the derivatives need are recomputed, except for outputs, which are passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from ...core.dtypes import BOOL, INT64, DType
from ...core.errors import InternalError
from ..binding.ranges import Bounds, symbolic_ranges
from ..ir import Access, Binary, Cast, Const, Expr, Function, Index, Select, Unary
from ..semantics.to_syntax import polynomial_to_expr
from ..shared_pattern import SharedPattern
from ..size_polynomial import SizePolynomial, Value, constant_value, min_of
from .adjoint_access import GatherForm, range_guards, solve_gather, substitute_access, substitute_indices, uses_index
from .conv_adjoint import pad_gradient, transposed_order
from .derivatives import (
    NoDerivative,
    compare_exprs,
    convert_expr,
    derivatives_of,
    divide_exprs,
    guard_expr,
    list_chosen_elements,
    replace_expr,
    strip_casts,
    sum_terms,
    times,
)
from .emit import GradStatement, write_gradient
from .gradient import Gradient, Key
from .read_conditions import ALWAYS, drop_implied_conditions, read_condition
from .simplify import simplify_gradient
from .ssa import SsaProgram, SsaStatement, as_partial_write_subscript, no_gradient_error, range_extent
from .stored_patterns import find_patterns, gather_by_equality, has_computed_sparse_subscript, pattern_exists_clauses
from .window_phases import MOST_PHASES, count_phases, solve_phases


def differentiate(function: Function, wanted: Iterable[Key] | None = None, keep: bool = False) -> Gradient:
    """The gradient of `function` with respect to its floating-point inputs and initial values, or those in `wanted`.

    keep: whether the gradient may take temporaries as inputs instead of recomputing them (see `saved_tensors.py`).

    Raises CheckError if the gradient of a statement cannot be derived.
    """
    possible = differentiable_inputs(function)
    chosen = possible if wanted is None else tuple(x for x in possible if x in set(wanted))
    if not chosen:
        raise no_gradient_error(function, None, "none of its inputs is a floating tensor")
    if not any(function.tensor(r).dtype.is_float for r in function.returns):
        raise no_gradient_error(function, None, "none of its outputs is a floating tensor")
    steps = SsaProgram.of(function, symbolic_ranges(function))
    reverse = _Reverse(function, steps, find_patterns(steps))
    reverse.run()
    targets = {key: reverse.finish_gradient(key) for key in chosen}
    kept = simplify_gradient(reverse.steps, reverse.written, set(targets.values()), reverse.sizes)
    return write_gradient(reverse.steps, kept, {key: targets[key] for key in chosen}, keep, reverse.patterns)


def differentiable_inputs(function: Function) -> tuple[Key, ...]:
    """The differentiable values of a def: the floating-point inputs, then the floating-point initial values."""
    inputs = [("input", p.name) for p in function.parameters if p.dtype.is_float]
    return (*inputs, *(("initial", p.name) for p in function.inouts if p.dtype.is_float))


@dataclass(slots=True)
class _Adjoint:
    """The tensor `name` that holds the gradient of a version. shared: whether it belongs to another version, too."""

    name: str
    shared: bool = False


@dataclass(slots=True)
class _Reverse:
    """The reverse pass over the steps. Gradients of versions are called `d T@n`; those of outputs are parameters.

    patterns: for each version that is 0 wherever a sparse input stores nothing, the pattern of that input.
    """

    function: Function
    steps: SsaProgram
    patterns: Mapping[str, SharedPattern]
    written: list[GradStatement] = field(default_factory=list)
    adjoints: dict[str, _Adjoint] = field(default_factory=dict)
    sizes: dict[str, Value] = field(default_factory=dict)

    def run(self) -> None:
        names = (*self.function.sizes, *self.function.scalars)
        self.sizes = {name: SizePolynomial.name(name) for name in names}
        for r in self.function.returns:
            if self.function.tensor(r).dtype.is_float:
                self.adjoints[self.steps.last[r]] = _Adjoint(f"d {r}", shared=True)
        for step in reversed(self.steps.steps):
            if step.target in self.adjoints:
                try:
                    self._differentiate_step(step)
                except NoDerivative as reason:
                    raise no_gradient_error(self.function, step.source, str(reason)) from None

    def finish_gradient(self, key: Key) -> str:
        """Make the complete gradient of an input or initial value a separate tensor of its type; return its name."""
        kind, name = key
        version = name if kind == "input" else f"{name}@0"
        dtype = self.steps.versions[version].dtype
        mine = self._writable_gradient(version)
        if dtype.accumulator == dtype:
            return mine
        rounded = f"{mine} rounded"
        left, box = self._all_elements(version)
        subscripts = tuple(left)
        value = Cast(self._load(mine, version, subscripts), dtype)
        self._write(version, GradStatement(rounded, subscripts, "=", value, box))
        return rounded

    def _is_sparse_input(self, version: str) -> bool:
        pattern = self.patterns.get(version)
        return pattern is not None and pattern.source == version

    def _write(self, version: str, w: GradStatement) -> None:
        """Add a statement that defines or updates the gradient of a version, restricted to stored elements."""
        pattern = self.patterns.get(version)
        if pattern is not None and all(isinstance(e, Index) for e in w.subscripts):
            own = pattern.access(w.subscripts, self.function.tensor(pattern.source))
            others = tuple(a for a in w.exists if a != own)
            # The gradient of an input has all of its stored elements, though not all get a contribution.
            if self._is_sparse_input(version) and others and w.op != "+=":
                box = {e.name: w.ranges[e.name] for e in w.subscripts if isinstance(e, Index)}
                zero = Const(0.0, w.value.dtype)
                self.written.append(GradStatement(w.target, w.subscripts, "=", zero, box, (own,)))
                w = replace(w, op="+=")
            w = replace(w, exists=(own, *others))
        self.written.append(w)

    # --- gradients of versions ---------------------------------------------------------------------------------------

    def _all_elements(self, version: str) -> tuple[tuple[Expr, ...], dict[str, Bounds]]:
        """Indices for all elements of a version, counted from 0, and their ranges."""
        bounds = self.steps.versions[version].bounds
        box: dict[str, Bounds] = {f"i{d}": (0, range_extent(b)) for d, b in enumerate(bounds)}
        return tuple(Index(name, INT64) for name in box), box

    def _load(self, adjoint: str, version: str, subscripts: tuple[Expr, ...]) -> Expr:
        """An element of a gradient, in the accumulator type; gradients that are passed have the type of the output."""
        dtype = self.steps.versions[version].dtype
        wide = dtype.accumulator
        if "@" not in adjoint and wide != dtype:
            return Cast(Access(adjoint, subscripts, dtype), wide)
        return Access(adjoint, subscripts, wide)

    def _writable_gradient(self, version: str) -> str:
        """The name of a gradient of a version that may be added to: a copy if it is shared, zeros if there is none."""
        adjoint = self.adjoints.get(version)
        if adjoint is not None and not adjoint.shared:
            return adjoint.name
        name = self._name(version)
        subscripts, box = self._all_elements(version)
        zero = Const(0.0, self.steps.versions[version].dtype.accumulator)
        value = zero if adjoint is None else self._load(adjoint.name, version, subscripts)
        self._write(version, GradStatement(name, subscripts, "=", value, box))
        self.adjoints[version] = _Adjoint(name)
        return name

    def _name(self, version: str) -> str:
        return f"d {version}" if "@" in version else f"d {version}@"

    def _at_target(self, step: SsaStatement) -> Expr:
        """The gradient of the element that a step writes."""
        start = [lower for lower, _ in self.steps.versions[step.target].bounds]
        subscripts = tuple(_subtract_start(e, s) for e, s in zip(step.subscripts, start, strict=True))
        return self._load(self.adjoints[step.target].name, step.target, subscripts)

    # --- one step ----------------------------------------------------------------------------------------------------

    def _differentiate_step(self, step: SsaStatement) -> None:
        seed = self._at_target(step)
        if step.before is not None:
            self._propagate_unchanged(step)
        match step.op:
            case "min=!" | "max=!":
                self._differentiate_extremum(step, seed)
            case "*=!":
                self._differentiate_product(step, seed)
            case _:
                seed = convert_expr(seed, step.value.dtype.accumulator)
                for access, value in derivatives_of(step.value, seed, self._result(step)).items():
                    self._accumulate_read_gradient(step, access, value)

    def _result(self, step: SsaStatement) -> Access | None:
        """The element that stores the value of a step; None if recomputing is better or the type differs."""
        dtype = self.steps.versions[step.target].dtype
        if step.op != "=" or dtype != step.value.dtype or isinstance(step.value, Access | Const | Unary):
            return None
        return Access(step.target, step.subscripts, dtype)

    def _propagate_unchanged(self, step: SsaStatement) -> None:
        """Propagate the gradient of the later version to elements of the earlier one that a step leaves unchanged."""
        assert step.before is not None
        self.adjoints[step.before] = _Adjoint(self.adjoints[step.target].name, shared=True)
        if step.op == "+=":
            return
        name = self._writable_gradient(step.before)
        start = [lower for lower, _ in self.steps.versions[step.target].bounds]
        subscripts = tuple(_subtract_start(e, s) for e, s in zip(step.subscripts, start, strict=True))
        zero = Const(0.0, self.steps.versions[step.target].dtype.accumulator)
        ranges = {i: step.ranges[i] for i in step.left}
        self._write(
            step.before, GradStatement(name, subscripts, "=", zero, ranges, pattern_exists_clauses(step, self.patterns))
        )

    def _differentiate_extremum(self, step: SsaStatement, seed: Expr) -> None:
        """Share the gradient of a minimum or maximum among the elements that equal the result."""
        result = Access(step.target, step.subscripts, self.steps.versions[step.target].dtype)
        elements = list_chosen_elements(step.value)
        if not elements:
            return
        chosen = compare_exprs("==", _round_like(strip_casts(step.value), result), _round_like(result, result))
        wide = seed.dtype
        count = f"count {step.target}"
        one, zero = Const(1.0, wide), Const(0.0, wide)
        place = tuple(_subtract_start(e, step.ranges[i][0]) for e, i in zip(step.subscripts, step.left, strict=True))
        equal = Select(chosen, one, zero, wide)
        term_count, box, exists = self._shift_ranges_to_zero(
            equal, step.ranges, step.left, pattern_exists_clauses(step, self.patterns)
        )
        self.written.append(GradStatement(count, step.subscripts, "+=!", term_count, box, exists))
        share = divide_exprs(seed, Access(count, place, wide))
        for term, conditions in elements.items():
            equals = [compare_exprs("==", _round_like(term, result), _round_like(result, result))]
            parts = [
                guard_expr((*guards, *equals), convert_expr(share, term.dtype.accumulator)) for guards in conditions
            ]
            self._accumulate_read_gradient(step, term, sum_terms(parts))

    def _differentiate_product(self, step: SsaStatement, seed: Expr) -> None:
        """Differentiate a product: each factor gets the product of the others, which is correct for zeros, too."""
        term = strip_casts(step.value)
        if not isinstance(term, Access) or not term.dtype.is_float:
            return
        reduced = [i for i in step.ranges if i not in step.left]
        twin = {i: f"{i}_other" for i in reduced}
        same: Expr | None = None
        for i in reduced:
            equal = Binary("==", Index(twin[i], INT64), Index(i, INT64), BOOL)
            same = equal if same is None else Binary("&&", same, equal, BOOL)
        others = f"others {step.target}"
        box = {**step.ranges, **{twin[i]: step.ranges[i] for i in reduced}}
        factor = substitute_indices(step.value, {i: Index(twin[i], INT64) for i in reduced}, self.sizes)
        place = tuple(_subtract_start(Index(i, INT64), step.ranges[i][0]) for i in step.ranges)
        if same is not None:
            factor = Select(same, Const(1.0, factor.dtype), factor, factor.dtype)
            exists = pattern_exists_clauses(step, self.patterns)
            twins = tuple(substitute_access(a, {i: Index(twin[i], INT64) for i in reduced}, self.sizes) for a in exists)
            factor, box, exists = self._shift_ranges_to_zero(
                factor, box, tuple(box), tuple(dict.fromkeys((*exists, *twins)))
            )
            place_from_zero = tuple(Index(i, INT64) for i in step.ranges)
            self.written.append(GradStatement(others, place_from_zero, "*=!", factor, box, exists))
            seed = times(seed, Access(others, place, seed.dtype))
        self._accumulate_read_gradient(step, term, convert_expr(seed, term.dtype.accumulator))

    def _shift_ranges_to_zero(
        self, value: Expr, ranges: Mapping[str, Bounds], names: Sequence[str], exists: Sequence[Access]
    ) -> tuple[Expr, dict[str, Bounds], tuple[Access, ...]]:
        """Shift the indices `names` to start at 0. Return the new `value`, ranges and `exists`."""
        moved = [i for i in names if constant_value(ranges[i][0]) != 0]
        shifted = {i: Binary("+", Index(i, INT64), polynomial_to_expr(ranges[i][0]), INT64) for i in moved}
        box = {i: (0, range_extent(b)) if i in shifted else b for i, b in ranges.items()}
        return (
            substitute_indices(value, shifted, self.sizes),
            box,
            tuple(substitute_access(a, shifted, self.sizes) for a in exists),
        )

    # --- propagation to reads ----------------------------------------------------------------------------------------

    def _accumulate_read_gradient(self, step: SsaStatement, access: Access, value: Expr) -> None:
        """Add `value`, at every point of the step, to the gradient of the element that `access` reads there."""
        version = self.steps.versions[access.tensor]
        inside = drop_implied_conditions(value, access, version.bounds, self.sizes)
        phased = None if self.patterns else self._sum_by_phase(step, access, inside)
        if phased is not None:
            self._add_gradient(step, access, *phased)
            return
        found = solve_gather(access.subscripts, version.bounds, step.ranges, step.left, self.sizes)
        if found is None and self._is_sparse_input(access.tensor):
            found = gather_by_equality(access.subscripts, version.bounds, step.ranges, self.sizes)
        if found is None:
            self._scatter(step, access, value)
            return
        scattered, value = value, inside
        summed = found.free_ranges(step.ranges)
        if found.has_disjoint_windows and not self.patterns:
            value, summed = self._sum_by_window(step, access.tensor, found, value)
        exists = tuple(
            substitute_access(a, found.substitute_in, self.sizes) for a in pattern_exists_clauses(step, self.patterns)
        )
        gathered = guard_expr(found.guards, substitute_indices(value, found.substitute_in, self.sizes))
        if has_computed_sparse_subscript(exists, gathered, self.patterns):
            self._scatter(step, access, scattered)
            return
        value = (None if self.patterns else self._gather_padded(step, found, value)) or gathered
        subscripts = tuple(Index(i, INT64) for i in found.unsolved)
        value, rest = _fold_unused_indices(value, subscripts, summed, exists)
        if rest and not self.patterns and not set(list(found.unsolved)[-1:]) <= set(step.left):
            value, rest = self._transpose_sum(access.tensor, value, found.unsolved, rest)
        self._add_gradient(step, access, found.unsolved, value, rest, exists)

    def _add_gradient(
        self, step: SsaStatement, access: Access, left: Mapping[str, Bounds], value: Expr, rest: Mapping[str, Bounds],
        exists: tuple[Access, ...] = (),
    ) -> None:  # fmt: skip
        """Add `value`, summed over the indices of `rest`, to the gradient of the tensor that `access` reads."""
        subscripts = tuple(Index(i, INT64) for i in left)
        box = {**left, **rest}
        adjoint = self.adjoints.get(access.tensor)
        copies = adjoint is None and not (rest or exists)
        if copies and self._is_copy(step, value, subscripts, self.steps.versions[access.tensor].dtype):
            self.adjoints[access.tensor] = _Adjoint(self.adjoints[step.target].name, shared=True)
        elif adjoint is None:
            name = self._name(access.tensor)
            self.adjoints[access.tensor] = _Adjoint(name)
            self._write(access.tensor, GradStatement(name, subscripts, "+=!" if rest else "=", value, box, exists))
        else:
            self._write(
                access.tensor,
                GradStatement(self._writable_gradient(access.tensor), subscripts, "+=", value, box, exists),
            )

    def _sum_by_phase(
        self, step: SsaStatement, access: Access, value: Expr
    ) -> tuple[dict[str, Bounds], Expr, dict[str, Bounds]] | None:
        """The gradient of a read whose windows are longer than their stride: indices, value, indices to sum over.

        None if there are no such windows, or if a sum over taps of a padded gradient is as good. Phases cost a copy, so
        only sums of products are split into phases in all dimensions, other values in the contiguous one.
        """
        bounds = self.steps.versions[access.tensor].bounds
        gather = solve_phases(access.subscripts, bounds, step.ranges, step.left, self.sizes)
        if gather is None or count_phases(gather.split) > MOST_PHASES:
            return None
        padded = self._gather_padded(step, gather.phases[0].form, value) is not None
        if padded and not gather.sums_products:
            return None
        if not padded:
            gather = replace(gather, split=tuple(w for w in gather.windows if w.dim == len(bounds) - 1))
        reads, rest = list[Expr](), dict[str, Bounds]()
        for phase in gather.phases:
            term = self._gather_padded(step, phase.form, value) if padded else None
            guards = (*gather.element_guards(phase), *phase.form.guards)
            term = term or guard_expr(guards, substitute_indices(value, phase.form.substitute_in, self.sizes))
            subscripts = tuple(Index(i, INT64) for i in phase.form.unsolved)
            term, rest = _fold_unused_indices(term, subscripts, phase.form.free_ranges(step.ranges))
            if not gather.split:
                return phase.form.unsolved, term, rest
            op = "+=!" if rest else "="
            name = self._add_helper_tensor(
                "phase", access.tensor, subscripts, op, term, {**phase.form.unsolved, **rest}
            )
            reads.append(Access(name, gather.phase_subscripts, term.dtype))
        return gather.unsolved, gather.select_phase(reads), {}

    def _sum_by_window(
        self, step: SsaStatement, version: str, found: GatherForm, value: Expr
    ) -> tuple[Expr, dict[str, Bounds]]:
        """`value` and the indices to sum it over; none if a helper tensor of windows and taps holds the sum.

        The sum is then still a sum of products whose subscripts have no quotients.
        """
        rest = found.free_ranges(step.ranges)
        left = {i: step.ranges[i] for i in found.solutions if i in step.ranges}
        places = (*found.substitute_in.values(), *found.guards)
        if any(uses_index(i, *places) for i in rest) or any(constant_value(b[0]) != 0 for b in left.values()):
            return value, rest
        subscripts = tuple(Index(i, INT64) for i in left)
        value, rest = _fold_unused_indices(value, subscripts, rest)
        if not rest:
            return value, {}
        name = self._add_helper_tensor("windows", version, subscripts, "+=!", value, {**left, **rest})
        return Access(name, subscripts, value.dtype), {}

    def _gather_padded(self, step: SsaStatement, found: GatherForm, value: Expr) -> Expr | None:
        """`value` as a gather without guards from a gradient padded with zeros; None if that is impossible."""
        seed = self._at_target(step)
        bounds = self.steps.versions[step.target].bounds
        wider = pad_gradient(value, seed, bounds, found, step.ranges, self.sizes)
        if wider is None:
            return None
        name = self._add_helper_tensor("padded", step.target, wider.subscripts, "=", wider.value, wider.ranges)
        places = {f"@{d}": e for d, e in enumerate(wider.reads)}
        read = Access(name, tuple(Index(p, INT64) for p in places), seed.dtype)
        return substitute_indices(
            substitute_indices(replace_expr(value, seed, read), found.substitute_in, self.sizes), places, self.sizes
        )

    def _transpose_sum(
        self, version: str, value: Expr, left: Mapping[str, Bounds], rest: dict[str, Bounds]
    ) -> tuple[Expr, dict[str, Bounds]]:
        """`value` and the indices to sum it over; if its last index is short, a read of a transposed sum instead."""
        order = transposed_order(value, tuple(left))
        if order is None:
            return value, rest
        subscripts = tuple(Index(i, INT64) for i in order)
        box = {**{i: left[i] for i in order}, **rest}
        return Access(
            self._add_helper_tensor("turned", version, subscripts, "+=!", value, box), subscripts, value.dtype
        ), {}

    def _add_helper_tensor(
        self, kind: str, version: str, subscripts: tuple[Expr, ...], op: str, value: Expr, box: Mapping[str, Bounds]
    ) -> str:
        """Define a helper tensor for the gradient of a version by one statement, unless it exists; return its name."""
        for n in count():
            name = f"{kind}{n or ''} {version}" + ("" if "@" in version else "@")
            earlier = next((w for w in self.written if w.target == name), None)
            made = GradStatement(name, subscripts, op, value, box)
            if earlier is None:
                self.written.append(made)
            if earlier is None or earlier == made:
                return name
        raise InternalError("there are finitely many names")

    def _is_copy(self, step: SsaStatement, value: Expr, subscripts: tuple[Expr, ...], dtype: DType) -> bool:
        """Whether a gradient equals that of the step's target, element for element."""
        name = self.adjoints[step.target].name
        return value == Access(name, subscripts, dtype) and dtype == dtype.accumulator

    def _scatter(self, step: SsaStatement, access: Access, value: Expr) -> None:
        bounds = self.steps.versions[access.tensor].bounds
        read = read_condition(access, step.value)
        subscripts = tuple(self._place(e, b, step, read) for e, b in zip(access.subscripts, bounds, strict=True))
        exists = pattern_exists_clauses(step, self.patterns)
        value, box = _fold_unused_indices(value, subscripts, dict(step.ranges), exists)
        guarded_sizes = [range_extent(b) for e, b in zip(subscripts, bounds, strict=True) if isinstance(e, Select)]
        if any((constant_value(x) or 0) <= 0 for x in guarded_sizes):
            subscripts, box = _guard_scatter_into_empty(guarded_sizes, subscripts, box)
        self._write(
            access.tensor, GradStatement(self._writable_gradient(access.tensor), subscripts, "+=", value, box, exists)
        )

    def _place(self, e: Expr, bounds: Bounds, step: SsaStatement, read: Expr) -> Expr:
        """A subscript of a scatter; 0 where the step does not read the element, since it may be out of bounds there."""
        place = _subtract_start(e, bounds[0])
        if read != ALWAYS and range_guards(e, bounds, step.ranges, self.sizes):
            return Select(read, place, Const(0, INT64), INT64)
        return as_partial_write_subscript(place, step.ranges, range_extent(bounds))


def _guard_scatter_into_empty(
    extents: Sequence[Value], subscripts: tuple[Expr, ...], box: dict[str, Bounds]
) -> tuple[tuple[Expr, ...], dict[str, Bounds]]:
    """Give a scatter an empty range if one of `extents` is 0, because element 0 does not exist then."""
    if not box:
        box = {"i": (0, 1)}
        subscripts = (Binary("+", subscripts[0], Index("i", INT64), INT64), *subscripts[1:])
    (name, (lower, upper)), *_ = box.items()
    points = upper - lower
    for x in extents:
        points = points * x
    return subscripts, {**box, name: (lower, min_of(upper, lower + points))}


def _fold_unused_indices(
    value: Expr, subscripts: Sequence[Expr], ranges: Mapping[str, Bounds], exists: Sequence[Access] = ()
) -> tuple[Expr, dict[str, Bounds]]:
    """Replace sums over indices that no term depends on by multiplications. Return the value and the other ranges."""
    kept = {}
    for name, bounds in ranges.items():
        if uses_index(name, value, *subscripts, *exists):
            kept[name] = bounds
            continue
        n = constant_value(range_extent(bounds))
        factor = (
            Const(float(n), value.dtype)
            if n is not None
            else Cast(polynomial_to_expr(range_extent(bounds)), value.dtype)
        )
        value = times(value, factor)
    return value, kept


def _subtract_start(e: Expr, start: Value) -> Expr:
    """A subscript relative to `start`."""
    return e if constant_value(start) == 0 else Binary("-", e, polynomial_to_expr(start), INT64)


def _round_like(e: Expr, like: Expr) -> Expr:
    """`e` rounded to the type in which `like` is stored, as an operand of a comparison."""
    rounded = e if e.dtype == like.dtype else Cast(e, like.dtype)
    wide = like.dtype.accumulator
    return rounded if wide == like.dtype else Cast(rounded, wide)
