"""Rename a module, making names distinct if they clash, to print a canonical program in the names of the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

from ..core.internal_names import SEPARATOR, internal_name
from .nodes import Allocate, Buffer, Expr, Invoke, Kernel, Launch, Let, Load, Loop, Module, Stmt, Store, Var, Window
from .rewrite import map_expr, map_stmt

Names = Mapping[str, str]
"""The names in scope, and their replacements."""


def rename(module: Module, spell: Callable[[str], str], function: str) -> Module:
    """`module` with every name mapped by `spell`, and numbered if an enclosing scope already uses the result.

    function: the new name of the module, which also prefixes the names of its kernels.
    """
    renaming = _Renaming(spell)
    outer: Names = {}
    parameters = {p.name for p in module.parameters}
    for name in parameters:
        outer = renaming.bind(name, outer)
    for b in (*module.arguments, *module.temporaries):
        for name in (b.name, *(v for v in b.stride_variables if v is not None and v not in parameters)):
            outer = renaming.bind(name, outer)

    def kernel(k: Kernel) -> Kernel:
        inner = outer if k.launch is None else {**outer, **{name: name for name, _ in k.launch.ranges()}}
        return replace(
            k,
            name=SEPARATOR.join((function, *k.name.split(SEPARATOR)[1:])),
            body=renaming.statement(k.body, inner),
            launch=None if k.launch is None else _rename_counts(k.launch, outer),
            readonly=tuple(outer.get(name, name) for name in k.readonly),
            maps=tuple(
                replace(m, name=outer.get(m.name, m.name), buffer=renaming.buffer(m.buffer, outer)) for m in k.maps
            ),
        )

    return replace(
        module,
        name=function,
        arguments=tuple(renaming.buffer(b, outer) for b in module.arguments),
        temporaries=tuple(renaming.buffer(b, outer) for b in module.temporaries),
        kernels=tuple(map(kernel, module.kernels)),
        sites=tuple(replace(s, tensor=spell(s.tensor)) for s in module.sites),
        written=tuple(outer[name] for name in module.written),
        parameters=tuple(replace(p, name=outer[p.name]) for p in module.parameters),
    )


def _rename_counts(launch: Launch, names: Names) -> Launch:
    """`launch` with its parameters renamed."""
    counts = tuple(None if c is None else replace(c, parameter=names[c.parameter]) for c in launch.counts)
    return replace(launch, counts=counts) if counts else launch


class _Renaming:
    """Renames the parts of a module. Expressions are cached by id, because unrolled code shares many.

    The cache is valid in all scopes as long as no name has two replacements; then it is dropped.
    """

    def __init__(self, spell: Callable[[str], str]) -> None:
        self._spell = spell
        self._replacements: dict[str, str] = {}
        self._expressions: dict[int, Expr] | None = {}
        self._buffers: dict[tuple[int, str, tuple[str | None, ...], tuple[str | None, ...]], Buffer] = {}

    def bind(self, name: str, names: Names) -> Names:
        """`names` extended with a free replacement for `name`."""
        wanted, taken = self._spell(name), set(names.values())
        free = (internal_name(wanted, n) if n else wanted for n in count())
        found = next(new for new in free if new not in taken)
        if self._replacements.setdefault(name, found) != found:
            self._expressions = None
        return {**names, name: found}

    def buffer(self, b: Buffer, names: Names) -> Buffer:
        """`b` with its name and variables renamed."""
        held, extents = (
            tuple(None if v is None else names[v] for v in known) for known in (b.stride_variables, b.extent_variables)
        )
        key = (id(b), names[b.name], held, extents)
        if key not in self._buffers:
            self._buffers[key] = replace(b, name=names[b.name], stride_variables=held, extent_variables=extents)
        return self._buffers[key]

    def expression(self, e: Expr, names: Names) -> Expr:
        """`e` with names replaced by `names`."""
        known = self._expressions
        if known is None:
            return self._rename(e, names)
        if id(e) not in known:
            known[id(e)] = self._rename(e, names)
        return known[id(e)]

    def _rename(self, e: Expr, names: Names) -> Expr:
        match e:
            case Var(name, type):
                return Var(names[name], type)
            case Load(buffer, indices, mask):
                where = tuple([self.expression(i, names) for i in indices])
                return Load(self.buffer(buffer, names), where, None if mask is None else self.expression(mask, names))
        return map_expr(e, lambda c: self.expression(c, names))

    def statement(self, s: Stmt, names: Names) -> Stmt:
        inner = names
        match s:
            case Loop(name):
                inner = self.bind(name, names)
                s = replace(s, var=inner[name])
            case Let(name, value, body):
                inner = names if name in names else self.bind(name, names)  # stride variables are bound in advance
                return Let(inner[name], self.expression(value, names), self.statement(body, inner))
            case Allocate(buffers):
                for b in buffers:
                    inner = self.bind(b.name, inner)
                s = replace(s, buffers=tuple(self.buffer(b, inner) for b in buffers))
            case Window(buffer, source):
                inner = self.bind(buffer.name, inner)
                s = replace(s, buffer=self.buffer(buffer, inner), source=self.buffer(source, names))
            case Store(buffer):
                s = replace(s, buffer=self.buffer(buffer, names))
            case Invoke(_, operands):
                s = replace(s, operands=tuple((self.buffer(b, names), where) for b, where in operands))
        return map_stmt(s, lambda e: self.expression(e, names), lambda c: self.statement(c, inner))
