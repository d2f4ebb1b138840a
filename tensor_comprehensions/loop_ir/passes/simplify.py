"""Simplification of loop programs: canonical index arithmetic, constant folding, dead-code elimination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import overload

from ...core.dtypes import INT64
from .. import build, intervals, linear_forms
from ..intervals import Interval
from ..nodes import (
    Allocate,
    Binary,
    Block,
    Broadcast,
    Check,
    Const,
    Expr,
    If,
    Invoke,
    Let,
    Load,
    Loop,
    LoopKind,
    Ramp,
    Stmt,
    Store,
    Unary,
    Var,
    While,
    Window,
)
from ..rewrite import map_expr, map_stmt, map_tuple, stride_variables, used_values, walk_stmts
from .simplify_rules import RULES

_ROUNDS = 4
_STATEMENTS = (Store, Loop, While, If, Let, Allocate, Window, Check, Invoke, Block)


@overload
def simplify(program: Stmt, ranges: Mapping[str, Interval] | None = None) -> Stmt: ...
@overload
def simplify(program: Expr, ranges: Mapping[str, Interval] | None = None) -> Expr: ...
def simplify(program: Stmt | Expr, ranges: Mapping[str, Interval] | None = None) -> Stmt | Expr:
    """`program` with canonical index arithmetic and folded constants, and without dead code.

    Args:
        ranges: intervals of free variables. Those of loop variables follow from the bounds of the loops.

    Returns:
        The simplified program; the same object if nothing changes.
    """
    if isinstance(program, _STATEMENTS):
        for _ in range(_ROUNDS):
            scope = _Simplifier(dict(ranges or {}), *_used_names(program))
            program = scope.stmt(program)
            if not scope.removed:  # removed code may have contained the last use of a name
                break
        return program
    return _Simplifier(dict(ranges or {}), frozenset()).expr(program)


def _used_names(s: Stmt) -> tuple[frozenset[str], frozenset[str]]:
    """The names of variables and buffers that `s` reads (or passes to intrinsics), and those of stride variables."""
    values = list(used_values(s))
    held = stride_variables(s, values)
    names = {e.buffer.name if isinstance(e, Load) else e.name for e in values}
    names.update(b.name for c in walk_stmts(s) if type(c) is Invoke for b, _ in c.operands)
    return held.union(names), held


@dataclass(frozen=True, slots=True)
class _Simplifier:
    """Simplifies the code in one scope.

    ranges: intervals of its variables. used: names that are read in the program. held: names that hold strides, which
    are never inlined. values: the value of each inlined name.
    removed: the parts of the program that this round has removed. memo: simplified expressions, by identity.
    sums: simplified indices, by value, so that equal indices of unrolled statements become one object.
    """

    ranges: dict[str, Interval]
    used: frozenset[str]
    held: frozenset[str] = frozenset()
    values: dict[str, Expr] = field(default_factory=dict)
    removed: list[Stmt] = field(default_factory=list)
    memo: dict[int, tuple[Expr, Expr]] = field(default_factory=dict)
    sums: dict[Binary, tuple[Binary, Expr]] = field(default_factory=dict)

    def remove(self, s: Stmt) -> Stmt:
        """Record that `s` is removed; returns the empty statement."""
        self.removed.append(s)
        return build.NOTHING

    def with_range(self, name: str, where: Interval) -> _Simplifier:
        """The scope with a variable in the interval `where`."""
        return _Simplifier({**self.ranges, name: where}, self.used, self.held, self.values, self.removed)

    def with_value(self, name: str, value: Expr) -> _Simplifier:
        """The scope in which `name` is `value`, already simplified."""
        return _Simplifier(self.ranges, self.used, self.held, {**self.values, name: value}, self.removed)

    # --- statements ----------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt) -> Stmt:
        match s:
            case Store():
                return self.store(s)
            case Block(body):
                return self.block(s, body)
            case Loop():
                return self.loop(s)
            case If():
                return self.conditional(s)
            case Let(name, value, body):
                return self.let(s, name, value, body)
            case Allocate():
                return self.allocate(s)
            case While():  # kept even if its body is empty: termination is not known here
                new = map_stmt(s, self.expr, self.stmt)
                return self.remove(s) if isinstance(new, While) and build.is_false(new.condition) else new
            case Check():
                new = map_stmt(s, self.expr, self.stmt)
                return self.remove(s) if isinstance(new, Check) and build.is_true(new.condition) else new
        return map_stmt(s, self.expr, self.stmt)

    def store(self, s: Store) -> Stmt:
        new = map_stmt(s, self.expr, self.stmt)
        if not isinstance(new, Store) or new.mask is None:
            return new
        if build.is_false(new.mask):
            return self.remove(s)
        if build.is_true(new.mask):
            return Store(new.buffer, new.indices, new.value, new.op, None, new.nontemporal, new.atomic, new.origin)
        return new

    def block(self, s: Block, body: tuple[Stmt, ...]) -> Stmt:
        new = [self.stmt(c) for c in body]
        plain = len(body) != 1 and not any(type(c) is Block for c in new)
        if plain and all(a is b for a, b in zip(new, body, strict=True)):
            return s
        return build.block(*new)

    def loop(self, s: Loop) -> Stmt:
        start, stop = self.expr(s.start), self.expr(s.stop)
        trips = intervals.index_interval(linear_forms.subtract(stop, start), self.ranges)
        if trips.high is not None and trips.high <= 0:
            return self.remove(s)
        if trips.low is not None and trips.high is not None and trips.low >= 1 and trips.high <= s.step:
            return self.let(None, s.var, start, s.body)
        body = self.with_range(s.var, self.loop_range(start, stop, s.step)).stmt(s.body)
        if _is_empty(body):
            return self.remove(s)
        if start is s.start and stop is s.stop and body is s.body:
            return s
        return Loop(s.var, start, stop, body, s.kind, s.step, s.grain, s.vector_factors)

    def loop_range(self, start: Expr, stop: Expr, step: int) -> Interval:
        """The interval of a loop's variable in its body."""
        first, last = (
            intervals.index_interval(start, self.ranges),
            intervals.index_interval(stop, self.ranges),
        )
        high = None if last.high is None else last.high - 1
        if high is not None and first.low is not None and first.low == first.high:
            high = first.low + (high - first.low) // step * step
        return Interval(first.low, high)

    def allocate(self, s: Allocate) -> Stmt:
        inner = self.stmt(s.body)
        read = tuple(b for b in s.buffers if b.name in self.used)
        if len(read) < len(s.buffers):
            self.remove(s)
            return build.allocate(read, _without_stores(inner, {b.name for b in s.buffers} - self.used))
        lengths = map_tuple(s.lengths, self.expr)
        if inner is s.body and lengths is s.lengths:
            return s
        return build.NOTHING if _is_empty(inner) else Allocate(s.buffers, inner, lengths)

    def conditional(self, s: If) -> Stmt:
        condition = self.expr(s.condition)
        if type(condition) is Const:
            self.remove(s)
            chosen = s.then if condition.value else s.otherwise
            return self.stmt(chosen) if chosen is not None else build.NOTHING
        then = self.stmt(s.then)
        otherwise = self.stmt(s.otherwise) if s.otherwise is not None else None
        if otherwise is not None and _is_empty(otherwise):
            otherwise = None
        if _is_empty(then):
            if otherwise is None:
                return self.remove(s)
            return If(self.expr(build.unary("not", condition)), otherwise)
        same = condition is s.condition and then is s.then and otherwise is s.otherwise
        return s if same else If(condition, then, otherwise)

    def let(self, s: Let | None, name: str, value: Expr, body: Stmt) -> Stmt:
        if name not in self.used:
            self.remove(body)
            return self.stmt(body)
        new = self.expr(value)
        if _is_cheap(new) and name not in self.held:
            return self.with_value(name, new).stmt(body)
        known = new.type.dtype == INT64
        inner = (self.with_range(name, intervals.index_interval(new, self.ranges)) if known else self).stmt(body)
        if _is_empty(inner):
            return self.remove(inner)
        return s if s is not None and new is value and inner is body else Let(name, new, inner)

    # --- expressions ---------------------------------------------------------------------------------------------

    def expr(self, e: Expr) -> Expr:
        if type(e) is Const:
            return e
        if type(e) is Var:
            return self.values.get(e.name, e)
        held = self.memo.get(id(e))
        if held is not None:
            return held[1]
        new = self.equal_index(e) if type(e) is Binary and _is_index(e) else self.rewrite(e)
        self.memo[id(e)] = (e, new)
        return new

    def equal_index(self, e: Binary) -> Expr:
        """Simplify the index `e`, or return the result of an equal one that was simplified before."""
        known = self.sums.get(e)
        if known is not None:
            return e if known[1] is known[0] else known[1]
        new = self.index(e) if e.op in _SUMS else self.rewrite(e)
        self.sums[e] = e, new
        return new

    def rewrite(self, e: Expr) -> Expr:
        """Simplify the children of `e`, then apply the rules of its kind until none applies."""
        new = map_expr(e, self.expr)
        key = new.op if type(new) is Binary or type(new) is Unary else type(new).__name__
        for rule in RULES.get(key, ()):
            replacement = rule(new, self.ranges)
            if replacement is not None:
                return self.expr(replacement)
        return new

    def index(self, e: Binary) -> Expr:
        """The scalar int64 sum `e` in canonical form: atoms simplified, like terms combined, the constant last."""
        if _is_canonical(e, self.values):
            return e
        terms, constant = linear_forms.linear_terms(e)
        total: linear_forms.Terms = {}
        for atom, c in terms.items():
            inner = self.rewrite(atom) if type(atom) is Binary and atom.op == "mul" else self.expr(atom)
            parts, extra = linear_forms.linear_terms(inner)
            constant += c * extra
            for part, k in parts.items():
                total[part] = total.get(part, 0) + c * k
        linear_forms.join_divisions(total)
        new = linear_forms.terms_to_expr({a: c for a, c in total.items() if c != 0}, constant)
        return e if new == e else new


_SUMS = ("add", "sub", "mul")
_INDICES = (*_SUMS, "div", "mod", "min", "max")


def _is_index(e: Binary) -> bool:
    if e.op not in _INDICES:
        return False
    t = e.left.type
    return t.lanes == 1 and t.dtype == INT64


def _is_canonical(e: Binary, values: Mapping[str, Expr]) -> bool:
    """Whether `e` is the usual index: a sum of distinct variables or positive multiples of them, and a constant last.

    This is only a shortcut: other expressions may be canonical, too.
    """
    names: list[str] = []
    rest: Expr = e
    if e.op == "add" and type(e.right) is Const:
        if e.right.value == 0:
            return False
        rest = e.left
    while type(rest) is Binary and rest.op == "add":
        if not _is_term(rest.right, names):
            return False
        rest = rest.left
    return _is_term(rest, names) and len(set(names)) == len(names) and values.keys().isdisjoint(names)


def _is_term(e: Expr, names: list[str]) -> bool:
    """Whether `e` is a variable or a multiple of one; if so, its name is added to `names`."""
    if type(e) is Binary and e.op == "mul" and type(e.right) is Const and e.right.value > 1:
        e = e.left
    if type(e) is not Var:
        return False
    names.append(e.name)
    return True


def _is_cheap(e: Expr) -> bool:
    """Whether repeating `e` costs no more than a variable."""
    match e:
        case Const() | Var():
            return True
        case Ramp(base, _, _) | Broadcast(base, _) | Binary("add" | "sub", base, Const()):
            return type(base) is Var or type(base) is Const
    return False


def _is_empty(s: Stmt) -> bool:
    return type(s) is Block and not s.body


def _without_stores(s: Stmt, names: set[str]) -> Stmt:
    """`s` without the stores to the buffers `names`, which are never read."""
    if isinstance(s, Store):
        return build.NOTHING if s.buffer.name in names else s
    new = map_stmt(s, lambda e: e, lambda c: _without_stores(c, names))
    match new:
        case Block(body) if new is not s:
            return build.block(*[c for c in body if not _is_empty(c)])
        case Loop(body=body, kind=kind) if new is not s and _is_empty(body) and kind is not LoopKind.PARALLEL:
            return build.NOTHING
    return new
