"""The canonical form of a def: a text that is equal for defs that differ only in names, formatting and comments.

Tensors and sizes are numbered in order of first appearance in their def, index variables and lets in their statement,
defs in order of first call. The text is itself a TC program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..builtins import CONSTANTS, canonical_name, is_builtin
from ..syntax import tree as s
from ..syntax.printer import to_text


def canonical_text_of_def(d: s.Def, program: Mapping[str, s.Def]) -> str:
    """The canonical text of `d` and of the defs it calls."""
    order: dict[str, str] = {d.name: "f0"}
    texts: list[str] = []
    while len(texts) < len(order):
        name = list(order)[len(texts)]
        texts.append(to_text(_Renaming(program, order).definition(program[name])))
    return "\n".join(texts)


@dataclass(slots=True)
class _Renaming:
    """The new names in one def. defs: the new names of all called defs, which renaming collects."""

    program: Mapping[str, s.Def]
    defs: dict[str, str]
    tensors: dict[str, str] = field(default_factory=dict)
    locals: dict[str, str] = field(default_factory=dict)

    def definition(self, d: s.Def) -> s.Def:
        parameters = tuple(self._declaration(p) for p in d.parameters)
        returns = tuple(self._declaration(r) for r in d.returns)
        body = tuple(self._statement(x) for x in d.body)
        return s.Def(self.defs[d.name], parameters, returns, body)

    def _tensor(self, name: str) -> str:
        return self.tensors.setdefault(name, f"x{len(self.tensors)}")

    def _local_name(self, name: str) -> str:
        return self.locals.setdefault(name, f"i{len(self.locals)}")

    def _callee(self, name: str) -> str:
        return self.defs.setdefault(name, f"f{len(self.defs)}")

    def _declaration(self, d: s.Declaration) -> s.Declaration:
        if d.type is None or d.type.dimensions is None:
            return s.Declaration(self._tensor(d.name), d.type, d.format)
        sizes = (x.size if isinstance(x.size, int) else self._tensor(x.size) for x in d.type.dimensions)
        type_ = s.Type(d.type.dtype, tuple(s.Dimension(x) for x in sizes))
        return s.Declaration(self._tensor(d.name), type_, d.format)

    def _statement(self, x: s.Statement | s.TupleCall) -> s.Statement | s.TupleCall:
        self.locals = {}
        if isinstance(x, s.TupleCall):
            targets = tuple(s.Name(self._tensor(t.name)) for t in x.targets)
            return s.TupleCall(targets, self._callee(x.callee), self._all(x.arguments))
        for c in x.clauses:
            if not isinstance(c, s.Exists):
                self._local_name(c.index if isinstance(c, s.Range) else c.name)
        target = self._tensor(x.target)
        subscripts = None if x.subscripts is None else self._all(x.subscripts)
        value = self._expression(x.value)
        return s.Statement(target, subscripts, x.operator, value, tuple(self._clause(c) for c in x.clauses))

    def _clause(self, c: s.Clause) -> s.Clause:
        match c:
            case s.Range(index=index, lower=lower, upper=upper):
                return s.Range(self._local_name(index), self._expression(lower), self._expression(upper))
            case s.Let(name=name, value=value):
                return s.Let(self._local_name(name), self._expression(value))
            case s.Exists(access=access):
                return s.Exists(self._expression(access))

    def _all(self, xs: tuple[s.Expression, ...]) -> tuple[s.Expression, ...]:
        return tuple(self._expression(x) for x in xs)

    def _expression(self, e: s.Expression) -> s.Expression:
        match e:
            case s.Name(name=name):
                return s.Name(self._name(name))
            case s.Extent(tensor=tensor, dimension=dimension):
                return s.Extent(self._tensor(tensor), dimension)
            case s.Apply(name=name, arguments=arguments):
                return s.Apply(self._applied_name(name), self._all(arguments))
            case s.Unary(operand=operand) | s.Cast(operand=operand):
                return replace(e, operand=self._expression(operand))
            case s.Binary(left=left, right=right):
                return replace(e, left=self._expression(left), right=self._expression(right))
            case s.Conditional(condition=condition, then=then, otherwise=otherwise):
                condition, then, otherwise = self._all((condition, then, otherwise))
                return s.Conditional(condition, then, otherwise)
        return e

    def _name(self, name: str) -> str:
        if name in self.locals:
            return self.locals[name]
        if name in self.tensors:
            return self.tensors[name]
        return name if name in CONSTANTS else self._local_name(name)

    def _applied_name(self, name: str) -> str:
        if name in self.tensors:
            return self.tensors[name]
        if name in self.program:
            return self._callee(name)
        return canonical_name(name) or name if is_builtin(name) else self._tensor(name)
