"""Bounds of index expressions inside loops whose bounds depend on outer variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.dtypes import INT64
from . import build, intervals, linear_forms
from .intervals import Ranges
from .linear_forms import Terms
from .nodes import Binary, Broadcast, Const, Expr, Loop, Ramp, Var

_DEPTH = 64  # nested substitutions before giving up: each minimum may double the work


@dataclass(frozen=True, slots=True)
class BoundsContext:
    """Facts about the variables at a point of a program.

    loops: enclosing loops by variable. lets: values of bound names. ranges: the interval of each variable and name.
    order: a number for each name, larger for names bound further inside. found: cached upper bounds of sums by terms.
    """

    loops: dict[str, Loop]
    lets: dict[str, Expr]
    ranges: dict[str, intervals.Interval]
    order: dict[str, int]
    found: dict[tuple[tuple[Expr, int], ...], int | None] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def empty() -> BoundsContext:
        return BoundsContext({}, {}, {}, {})

    def in_loop(self, loop: Loop) -> BoundsContext:
        first, last = (intervals.index_interval(e, self.ranges) for e in (loop.start, loop.stop))
        where = intervals.Interval(first.low, None if last.high is None else last.high - 1)
        return BoundsContext(
            {**self.loops, loop.var: loop}, self.lets, {**self.ranges, loop.var: where}, self.order_with_name(loop.var)
        )

    def in_let(self, name: str, value: Expr) -> BoundsContext:
        t = value.type.dtype
        if not (t == INT64 or t.is_bool or name in self.order):
            return self  # neither an index nor a condition on one
        where = intervals.index_interval(value, self.ranges) if t == INT64 else intervals.ANYTHING
        ranges = {**self.ranges, name: where}
        return BoundsContext(self.loops, {**self.lets, name: value}, ranges, self.order_with_name(name))

    def order_with_name(self, name: str) -> dict[str, int]:
        return {**self.order, name: len(self.order)}


def upper_bound(e: Expr, scope: BoundsContext) -> int | None:
    """The least upper bound of the scalar integer `e` that substituting bounds of variables finds, or None."""
    return _find_cached_upper_bound(*linear_forms.linear_terms(e), scope)


def lower_bound(e: Expr, scope: BoundsContext) -> int | None:
    """The greatest lower bound of the scalar integer `e` that substituting bounds of variables finds, or None."""
    terms, constant = linear_forms.linear_terms(e)
    high = _find_cached_upper_bound({a: -c for a, c in terms.items()}, -constant, scope)
    return None if high is None else -high


def _find_cached_upper_bound(terms: Terms, constant: int, scope: BoundsContext) -> int | None:
    """An upper bound of `terms + constant`, cached by `terms`, because unrolled copies differ only in the constant."""
    key = tuple(terms.items())
    if key not in scope.found:
        scope.found[key] = _compute_upper_bound(terms, 0, scope, _DEPTH)
    high = scope.found[key]
    return None if high is None else high + constant


def lane_bounds(index: Expr, scope: BoundsContext, facts: Sequence[Fact] = ()) -> tuple[int | None, int | None]:
    """Bounds (low, high) on the lanes of `index` in which all `facts` hold; None for a bound that is not found."""
    plain = _first_and_step(index)
    if plain is None:
        return None, None
    own = _Progression.of(*plain)
    slacks = [_NONE, *(s for a, b in facts if (s := _make_slack_progression(a, b)) is not None)]
    low = [_lanes_bound(own, slack, -1, index.type.lanes, scope) for slack in slacks]
    high = [_lanes_bound(own, slack, 1, index.type.lanes, scope) for slack in slacks]
    return max((-x for x in low if x is not None), default=None), min((x for x in high if x is not None), default=None)


def runs_at_least_once(loop: Loop, scope: BoundsContext) -> bool:
    """Whether the loop is known to run at least once for all values of the enclosing variables."""
    least = lower_bound(linear_forms.subtract(loop.stop, loop.start), scope)
    return least is not None and least > 0


Fact = tuple[Expr, Expr]
"""A pair (a, b) for which `a < b` is known in every active lane."""


@dataclass(frozen=True, slots=True)
class _Progression:
    """`terms + constant` in the first lane, and the step between lanes."""

    terms: Terms
    constant: int
    step: int

    @staticmethod
    def of(first: Expr, step: int) -> _Progression:
        return _Progression(*linear_forms.linear_terms(first), step)


_NONE = _Progression({}, 0, 0)


def _make_slack_progression(a: Expr, b: Expr) -> _Progression | None:
    """`b - a - 1`, which is nonnegative where `a < b`; None if a side is not a progression over lanes."""
    first, second = _first_and_step(a), _first_and_step(b)
    if first is None or second is None:
        return None
    return _Progression.of(build.sub(linear_forms.subtract(second[0], first[0]), 1), second[1] - first[1])


def _lanes_bound(own: _Progression, slack: _Progression, sign: int, lanes: int, scope: BoundsContext) -> int | None:
    """An upper bound of `sign * own` over all lanes, found by adding multiples of the nonnegative `slack`."""
    step = sign * own.step
    terms = {a: sign * c for a, c in own.terms.items()}
    found = []
    for times in _list_slack_factors(terms, step, slack):
        summed = dict(terms)
        for a, c in slack.terms.items():
            summed[a] = summed.get(a, 0) + times * c
        summed = {a: c for a, c in summed.items() if c != 0}
        high = _find_cached_upper_bound(summed, sign * own.constant + times * slack.constant, scope)
        if high is not None:
            found.append(high + max(0, (step + times * slack.step) * (lanes - 1)))
    return min(found, default=None)


def _list_slack_factors(terms: Terms, step: int, slack: _Progression) -> list[int]:
    """The multiples of `slack` to try: those that cancel the lane step, or a variable; and one."""
    if slack.step:
        return [-(step // slack.step) if step % slack.step == 0 and step // slack.step < 0 else 1]
    cancelling = (-(terms[a] // c) for a, c in slack.terms.items() if terms.get(a, 0) % c == 0 and a in terms)
    return list(dict.fromkeys((1, *(n for n in cancelling if n > 0))))


def _first_and_step(e: Expr) -> tuple[Expr, int] | None:
    """The first lane and the step between lanes of a ramp, broadcast or scalar; None for other vectors."""
    match e:
        case Ramp(base, stride):
            return base, stride
        case Broadcast(operand):
            return operand, 0
        case Const(value, t) if t.lanes > 1:
            return build.const(value), 0
    return (e, 0) if e.type.lanes == 1 else None


def condition_facts(condition: Expr | None, scope: BoundsContext) -> tuple[list[Fact], bool]:
    """The facts about indices that `condition` implies, and whether together they are equivalent to it."""
    match condition:
        case None:
            return [], True
        case Var(name) if name in scope.lets:
            return condition_facts(scope.lets[name], scope)
        case Broadcast(operand):
            return condition_facts(operand, scope)
        case Binary("and", a, b):
            (left, whole), (right, also) = condition_facts(a, scope), condition_facts(b, scope)
            return left + right, whole and also
        case Binary("lt", a, b) if a.type.dtype == INT64:
            return [(a, b)], True
        case Binary("gt", a, b) if a.type.dtype == INT64:
            return [(b, a)], True
        case Binary("le", a, b) if a.type.dtype == INT64:
            return [(a, build.add(b, 1))], True
        case Binary("ge", a, b) if a.type.dtype == INT64:
            return [(b, build.add(a, 1))], True
    return [], False


def _compute_upper_bound(terms: Terms, constant: int, scope: BoundsContext, depth: int) -> int | None:
    """An upper bound of `terms + constant`, by repeatedly replacing the innermost variable with its bounds."""
    linear_forms.join_divisions(terms)
    plain = _interval_bound(terms, constant, scope.ranges)
    if depth == 0 or not terms:
        return plain
    # Of two atoms at the same depth, expand the larger one first: its parts may cancel the other.
    atom = max(terms, key=lambda a: (_depth_of(a, scope), _count_operators(a)))
    if _depth_of(atom, scope) < 0:
        return plain
    c = terms[atom]
    rest = {a: k for a, k in terms.items() if a is not atom}
    best = plain
    for replacement in _list_atom_replacements(atom, c, scope):
        bound = _worst_bound(replacement, rest, c, constant, scope, depth)
        if bound is not None and (best is None or bound < best):
            best = bound
    return best


Sum = tuple[Terms, int, int]
"""(terms, constant, divisor) for (terms + constant) / divisor; multiplying by the atom's coefficient is exact."""


def _worst_bound(
    choices: list[Sum], rest: Terms, c: int, constant: int, scope: BoundsContext, depth: int
) -> int | None:
    """The largest of the upper bounds with the atom replaced by each of `choices`; None if one has no bound."""
    worst: int | None = None
    for terms, offset, divisor in choices:
        merged = dict(rest)
        for a, k in terms.items():
            merged[a] = merged.get(a, 0) + k * c // divisor
        merged = {a: k for a, k in merged.items() if k != 0}
        bound = _compute_upper_bound(merged, constant + offset * c // divisor, scope, depth - 1)
        if bound is None:
            return None
        worst = bound if worst is None else max(worst, bound)
    return worst


def _list_atom_replacements(atom: Expr, c: int, scope: BoundsContext) -> list[list[Sum]]:
    """Alternative upper bounds of `c * atom`: in each, it is at most `c` times one of the listed sums."""
    match atom:
        case Var(name) if name in scope.lets:
            return [[(*linear_forms.linear_terms(scope.lets[name]), 1)]]
        case Var(name) if name in scope.loops:
            loop = scope.loops[name]
            return [[_last_value(loop, scope) if c > 0 else (*linear_forms.linear_terms(loop.start), 1)]]
        case Binary("min" | "max" as op, a, b):
            sides: list[Sum] = [(*linear_forms.linear_terms(a), 1), (*linear_forms.linear_terms(b), 1)]
            return [[sides[0]], [sides[1]]] if (op == "min") == (c > 0) else [sides]
        case Binary("div", x, Const(d)) if int(d) > 0 and c % int(d) == 0:
            terms, constant = linear_forms.linear_terms(x)
            return [[(terms, constant if c > 0 else constant - int(d) + 1, int(d))]]
    return []


def _last_value(loop: Loop, scope: BoundsContext) -> Sum:
    """The last value of a loop's variable, or an upper bound of it."""
    terms, constant = linear_forms.linear_terms(loop.stop)
    apart, distance = linear_forms.linear_terms(_expand_lets(linear_forms.subtract(loop.stop, loop.start), scope))
    if all(k % loop.step == 0 for k in apart.values()):
        start_terms, start = linear_forms.linear_terms(loop.start)
        if not apart:
            return start_terms, start + (distance - 1) // loop.step * loop.step, 1
        if distance % loop.step == 0:
            return terms, constant - loop.step, 1
    return terms, constant - 1, 1


def _expand_lets(e: Expr, scope: BoundsContext) -> Expr:
    """The sum `e` with bound names replaced by their values."""
    terms, constant = linear_forms.linear_terms(e)
    total: Terms = {}
    for atom, c in terms.items():
        value = scope.lets.get(atom.name) if isinstance(atom, Var) else None
        parts, extra = linear_forms.linear_terms(_expand_lets(value, scope)) if value is not None else ({atom: 1}, 0)
        constant += c * extra
        for a, k in parts.items():
            total[a] = total.get(a, 0) + c * k
    return linear_forms.terms_to_expr({a: k for a, k in total.items() if k != 0}, constant)


def _count_operators(e: Expr) -> int:
    """The number of operators in nested binary expressions."""
    return 1 + _count_operators(e.left) + _count_operators(e.right) if isinstance(e, Binary) else 0


def _depth_of(e: Expr, scope: BoundsContext) -> int:
    """The binding depth of the innermost variable of `e`; -1 for an atom that cannot be replaced by bounds."""
    match e:
        case Var(name):
            return scope.order.get(name, -1)
        case Binary("min" | "max" | "add" | "sub", a, b):
            return max(_depth_of(a, scope), _depth_of(b, scope))
        case Binary("div" | "mul", a, Const()) | Binary("mul", Const(), a):
            return _depth_of(a, scope)
    return -1


def _interval_bound(terms: Terms, constant: int, ranges: Ranges) -> int | None:
    total = intervals.Interval(constant, constant)
    for atom, c in terms.items():
        total = total + intervals.index_interval(atom, ranges).scale(c)
    return total.high
