"""Range inference: the values that every index takes, and from them the shape of every tensor.

The algorithm works on numbers and on formulas. With formulas, it assumes that coefficients that depend on sizes
(strides that are scalar parameters) are positive, and leaves the checks that need numbers to `bind`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...core.errors import RangeError, Span
from ..affine import Affine, Opaque, Quotient, Remainder, Variable, affine_variables, reads_tensors, to_affine
from ..ir import Access, Function, Index, Role, Statement, Symbol, walk_expr
from ..size_polynomial import SizePolynomial, Value, constant_value, max_of, min_of

Bounds = tuple[Value, Value]
"""A half-open range of index values."""


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition that one subscript of one access is in bounds: `lower <= form < upper`."""

    form: Affine
    lower: Value
    upper: Value
    span: Span | None

    def __str__(self) -> str:
        return f"{self.lower} <= {self.form} < {self.upper}"


@dataclass(frozen=True, slots=True)
class Ranges:
    """The result of range inference: bounds of each dimension of each tensor, and of each index of each statement."""

    tensors: Mapping[str, tuple[Bounds, ...]]
    statements: tuple[Mapping[str, Bounds], ...]
    sizes: Mapping[str, Value]

    def shape(self, tensor: str) -> tuple[Value, ...]:
        """The extents of a tensor."""
        return tuple(upper - lower for lower, upper in self.tensors[tensor])


def infer_ranges(function: Function, sizes: Mapping[str, Value]) -> Ranges:
    """Infer the ranges of all indices and tensors; `sizes` maps each size name and specialized scalar to its value.

    Raises RangeError if an index has no range, if a return has another size than declared, or (with numbers) if a
    range has a negative extent.
    """
    inference = _Inference(function, dict(sizes))
    for tensor in function.tensors:
        if tensor.role is Role.INPUT or is_updatable_in_part(tensor):
            inference.declare(tensor)
    statements = tuple(inference.statement(n) for n in range(len(function.statements)))
    return Ranges(inference.bounds, statements, inference.sizes)


def infer_statement(function: Function, sizes: Mapping[str, Value], known: Ranges, n: int) -> Mapping[str, Bounds]:
    """Infer the ranges of the indices of only the n-th statement, with the bounds of tensors from `known`.

    Raises RangeError as `infer_ranges` does.
    """
    before = {s.target for s in function.statements[:n]}
    before |= {t.name for t in function.tensors if t.role is Role.INPUT}
    bounds = {name: b for name, b in known.tensors.items() if name in before}
    return _Inference(function, {**known.sizes, **sizes}, bounds).statement(n)


def symbolic_ranges(function: Function) -> Ranges:
    """The ranges as formulas in the sizes and specialized scalars of the signature."""
    return infer_ranges(function, {name: SizePolynomial.name(name) for name in (*function.sizes, *function.scalars)})


def output_shapes(
    function: Function, sizes: Mapping[str, int], scalars: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """The shape of every return for given sizes and specialized scalars."""
    ranges = infer_ranges(function, {**sizes, **scalars})
    return {name: tuple(constant_value(x) or 0 for x in ranges.shape(name)) for name in function.returns}


def is_updatable_in_part(tensor: Symbol) -> bool:
    """Whether a definition with a `where` may cover a part of the tensor. The rest keeps the caller's values."""
    return tensor.role is Role.INOUT and tensor.extents is not None


def statement_accesses(s: Statement) -> Iterator[Access]:
    """The reads of a statement, in order, including those in subscripts."""
    for e in (*s.subscripts, s.value):
        yield from (x for x in walk_expr(e) if isinstance(x, Access))


@dataclass(slots=True)
class _Inference:
    function: Function
    sizes: dict[str, Value]
    bounds: dict[str, tuple[Bounds, ...]] = field(default_factory=dict)

    def declare(self, tensor: Symbol) -> None:
        """Set the bounds of a tensor that the caller passes to its declared extents."""
        self._set(tensor.name, tuple((0, to_affine(e, self.sizes).constant) for e in tensor.extents or ()))

    def _set(self, name: str, bounds: tuple[Bounds, ...]) -> None:
        self.bounds[name] = bounds
        for d, (lower, upper) in enumerate(bounds):
            self.sizes[f"{name}.{d}"] = upper - lower

    def statement(self, n: int) -> dict[str, Bounds]:
        """Infer the ranges of the indices of the n-th statement, and set the bounds of its target if it has none."""
        s = self.function.statements[n]
        conditions = list(self._conditions(s))
        solved = self._solve(s, conditions, self._given_ranges(s))
        missing = [i for i in s.indices if i not in solved]
        if missing:
            self._take_ranges_from_target(n, s, conditions, solved)
            missing = [i for i in s.indices if i not in solved]
        if missing:
            raise self._unsolved_error(s, missing, conditions)
        self._check_extents(s, solved, conditions)
        if is_updatable_in_part(self.function.tensor(s.target)):
            self._check_part(s, solved)
        if s.target not in self.bounds:
            self._set(s.target, self._target_bounds(s, solved))
            self._check_declared(self.function.tensor(s.target))
        return {i: solved[i] for i in s.indices}

    # --- conditions ------------------------------------------------------------------------------------------------

    def _given_ranges(self, s: Statement) -> dict[str, Bounds]:
        return {
            r.index: (to_affine(r.lower, self.sizes).constant, to_affine(r.upper, self.sizes).constant)
            for r in s.ranges
        }

    def _conditions(self, s: Statement) -> Iterator[Condition]:
        for access in (*statement_accesses(s), *s.exists):
            yield from self._access_conditions(access.tensor, access.subscripts, access.span)
        if s.reduction is not None and not s.initialize:
            yield from self._access_conditions(s.target, s.subscripts, s.span)

    def _access_conditions(self, tensor: str, subscripts: tuple[object, ...], span: Span | None) -> Iterator[Condition]:
        for e, (lower, upper) in zip(subscripts, self._known_bounds(tensor), strict=False):
            yield Condition(to_affine(e, self.sizes), lower, upper, span)  # type: ignore[arg-type]

    def _known_bounds(self, tensor: str) -> tuple[Bounds, ...]:
        return self.bounds.get(tensor, ())

    # --- solving ---------------------------------------------------------------------------------------------------

    def _solve(self, s: Statement, conditions: list[Condition], solved: dict[str, Bounds]) -> dict[str, Bounds]:
        """Solve in rounds: each condition with exactly one unsolved index narrows it.

        The indices of a round count as solved from the next round on.
        """
        solved = dict(solved)
        while True:
            found: dict[str, Bounds] = {}
            for c in conditions:
                open_ = set(affine_variables(c.form)) - solved.keys()
                if len(open_) != 1:
                    continue
                name = open_.pop()
                range_ = _solve_for_index(c.form, c.lower, c.upper, name, solved)
                if range_ is not None:
                    found[name] = _intersect(found[name], range_) if name in found else range_
            if not found:
                return solved
            solved.update(found)

    def _take_ranges_from_target(
        self, n: int, s: Statement, conditions: list[Condition], solved: dict[str, Bounds]
    ) -> None:
        """Take ranges of indices on the left from earlier definitions, then later ones, then the declaration."""
        for mine, bounds in zip(s.subscripts, self.bounds.get(s.target, ()), strict=False):
            if isinstance(mine, Index):
                solved.setdefault(mine.name, bounds)
        solved.update(self._solve(s, conditions, solved))
        for later in self.function.statements[n + 1 :]:
            if later.target == s.target:
                ranges = self._solve(later, list(self._conditions(later)), self._given_ranges(later))
                for mine, theirs in zip(s.subscripts, later.subscripts, strict=True):
                    if isinstance(mine, Index) and isinstance(theirs, Index) and theirs.name in ranges:
                        solved.setdefault(mine.name, ranges[theirs.name])
                solved.update(self._solve(s, conditions, solved))
        symbol = self.function.tensor(s.target)
        for mine, extent in zip(s.subscripts, symbol.extents or (), strict=False):
            if isinstance(mine, Index):
                solved.setdefault(mine.name, (0, to_affine(extent, self.sizes).constant))
        solved.update(self._solve(s, conditions, solved))

    # --- targets ---------------------------------------------------------------------------------------------------

    def _target_bounds(self, s: Statement, solved: Mapping[str, Bounds]) -> tuple[Bounds, ...]:
        declared = self.function.tensor(s.target).extents
        bounds: list[Bounds] = []
        for d, e in enumerate(s.subscripts):
            if isinstance(e, Index):
                bounds.append(solved[e.name])
            elif declared is not None:
                bounds.append((0, to_affine(declared[d], self.sizes).constant))
            elif reads_tensors(e):
                raise RangeError(
                    f"the size of dimension {d} of '{s.target}' depends on data",
                    source=self.function.source,
                    span=s.span,
                    expected=f"a declared size: `-> (float(...) {s.target})`",
                )
            else:
                bounds.append(_find_subscript_range(to_affine(e, self.sizes), solved))
        return tuple(bounds)

    def _check_declared(self, tensor: Symbol) -> None:
        """Check that a returned tensor has its declared size, as far as the sizes are known."""
        for d, (extent, (lower, upper)) in enumerate(zip(tensor.extents or (), self.bounds[tensor.name], strict=False)):
            declared, found = to_affine(extent, self.sizes).constant, upper - lower
            if constant_value(declared - found) not in (None, 0):
                raise RangeError(
                    f"dimension {d} of '{tensor.name}' has another size than declared",
                    source=self.function.source,
                    span=tensor.span,
                    expected=str(declared),
                    found=str(found),
                    suggestion=f"leave the size to its definitions: `-> ({tensor.name})`",
                )

    def _check_part(self, s: Statement, solved: Mapping[str, Bounds]) -> None:
        """Check that a definition of an in/out tensor covers its declared size, or the part that its clauses name."""
        given = {r.index for r in s.ranges}
        parts = {}
        for d, (e, (least, most)) in enumerate(zip(s.subscripts, self.bounds[s.target], strict=True)):
            if isinstance(e, Index):
                lower, upper = solved[e.name]
                before, after = constant_value(lower - least), constant_value(most - upper)
                if (before or 0) < 0 or (after or 0) < 0:
                    raise self._outside_error(s, d, solved[e.name], (least, most))
                if before or after:
                    parts[e.name] = d
        if any(name not in given for name in parts):
            raise self._unnamed_part(s, parts, given, solved)
        if parts and s.initialize:
            raise RangeError(
                f"'{s.reduction}=!' initializes all of '{s.target}', and this definition covers a part of it",
                source=self.function.source,
                span=s.span,
                suggestion=f"give the part its first value by '=' before, and reduce with '{s.reduction}='",
            )

    # --- errors ----------------------------------------------------------------------------------------------------

    def _unsolved_error(self, s: Statement, missing: list[str], conditions: list[Condition]) -> RangeError:
        names = ", ".join(f"'{i}'" for i in missing)
        related = [str(c) for c in conditions if set(affine_variables(c.form)) & set(missing)]
        return RangeError(
            f"the range of {names} does not follow from the accesses of this statement",
            source=self.function.source,
            span=s.span,
            expected="a subscript in which each index stands alone, or with indices whose ranges are known",
            found="; ".join(dict.fromkeys(related)) or "no condition on it",
            suggestion=f"give it a range: `where {missing[0]} in 0:...`",
        )

    def _outside_error(self, s: Statement, d: int, found: Bounds, declared: Bounds) -> RangeError:
        return RangeError(
            f"this statement writes beyond the {declared[1]} elements of dimension {d} of '{s.target}'",
            source=self.function.source,
            span=s.span,
            expected=f"a part of {declared[0]}:{declared[1]}",
            found=f"{found[0]}:{found[1]}",
        )

    def _unnamed_part(
        self, s: Statement, parts: Mapping[str, int], given: set[str], solved: Mapping[str, Bounds]
    ) -> RangeError:
        name, d = next((name, d) for name, d in parts.items() if name not in given)
        clauses = [f"{i} in {solved[i][0]}:{solved[i][1]}" for i in s.indices[: s.num_free] if i in parts or i in given]
        return RangeError(
            f"'{s.target}' is declared with {self.bounds[s.target][d][1]} elements in dimension {d}, "
            f"and what '{name}' reads allows fewer",
            source=self.function.source,
            span=s.span,
            expected=f"{self.bounds[s.target][d][0]}:{self.bounds[s.target][d][1]}",
            found=f"{solved[name][0]}:{solved[name][1]}",
            suggestion=f"update that part, the rest keeps its values: `where {', '.join(clauses)}`",
        )

    def _check_extents(self, s: Statement, solved: Mapping[str, Bounds], conditions: list[Condition]) -> None:
        for name in s.indices:
            lower, upper = (constant_value(x) for x in solved[name])
            if lower is None or upper is None or lower <= upper:
                continue
            related = [str(c) for c in conditions if name in affine_variables(c.form)]
            related += [f"given {lower} <= {name} < {upper}" for r in s.ranges if r.index == name]
            raise RangeError(
                f"the range of '{name}' is [{lower}, {upper}), which has a negative extent",
                source=self.function.source,
                span=s.span,
                found="; ".join(dict.fromkeys(related)),
            )


def _intersect(a: Bounds, b: Bounds) -> Bounds:
    return max_of(a[0], b[0]), min_of(a[1], b[1])


def _solve_for_index(
    form: Affine, lower: Value, upper: Value, name: str, solved: Mapping[str, Bounds]
) -> Bounds | None:
    """The largest range of `name` for which `lower <= form < upper`, for all values of the solved indices.

    None if the form cannot be solved for `name`.
    """
    mine = [(atom, c) for atom, c in form.terms if name in affine_variables(Affine(0, ((atom, 1),)))]
    rest = _find_form_extremes(form - Affine(0, tuple(mine)), solved)
    if len(mine) != 1 or rest is None:
        return None
    atom, c = mine[0]
    low, high = lower - rest[0], upper - 1 - rest[1]
    n = constant_value(c)
    if n is not None and n < 0:
        low, high, c = -high, -low, -n
    range_ = (_ceil_div(low, c), high // c + 1)
    match atom:
        case Variable():
            return range_
        case Quotient(inner=inner, divisor=d):
            return _solve_for_index(inner, range_[0] * d, range_[1] * d, name, solved)
    return None


def _ceil_div(a: Value, b: Value) -> Value:
    return a if b == 1 else -((-a) // b)


def _find_form_extremes(form: Affine, solved: Mapping[str, Bounds]) -> Bounds | None:
    """The least and the greatest value of a form over the ranges of its indices; None if it has opaque atoms."""
    low = high = form.constant
    for atom, c in form.terms:
        ends = _atom_extremes(atom, solved)
        if ends is None:
            return None
        n = constant_value(c)
        first, last = (ends[1], ends[0]) if n is not None and n < 0 else ends
        low, high = low + first * c, high + last * c
    return low, high


def _atom_extremes(atom: Variable | Quotient | Remainder | Opaque, solved: Mapping[str, Bounds]) -> Bounds | None:
    match atom:
        case Variable(name=name):
            return (solved[name][0], solved[name][1] - 1) if name in solved else None
        case Quotient(inner=inner, divisor=d):
            ends = _find_form_extremes(inner, solved)
            return None if ends is None else (ends[0] // d, ends[1] // d)
        case Remainder(divisor=d):
            n = constant_value(d)
            return (0, d - 1) if n is None or n > 0 else (d + 1, 0)
    return None


def _find_subscript_range(form: Affine, solved: Mapping[str, Bounds]) -> Bounds:
    """The range of a subscript on the left; empty if one of its indices has an empty range."""
    ends = _find_form_extremes(form, solved)
    if ends is None:
        return 0, 0
    empty = any(constant_value(solved[v][1] - solved[v][0]) == 0 for v in affine_variables(form))
    return (ends[0], ends[0]) if empty else (ends[0], ends[1] + 1)
