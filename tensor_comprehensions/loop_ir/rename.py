"""A module with other names, made distinct if they clash: prints a canonical program in the names of the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

from ..core.internal_names import SEPARATOR, internal_name
from .nodes import Allocate, Buffer, Expr, Invoke, Kernel, Let, Load, Loop, Module, Stmt, Store, Var, Window
from .rewrite import map_expr, map_stmt

Names = Mapping[str, str]
"""The names in scope, and their replacements."""


def rename(module: Module, spell: Callable[[str], str], function: str) -> Module:
    """`module` with every name as `print_expr` gives it, numbered where something around has it already.

    function: the name of the module, with which those of its kernels begin.
    """
    renaming = _Renaming(spell)
    outer: Names = {}
    for b in (*module.arguments, *module.temporaries):
        for name in (b.name, *(v for v in b.stride_variables if v is not None)):
            outer = renaming.bind(name, outer)

    def kernel(k: Kernel) -> Kernel:
        inner = outer if k.launch is None else {**outer, **{name: name for name, _ in k.launch.ranges()}}
        return replace(
            k,
            name=SEPARATOR.join((function, *k.name.split(SEPARATOR)[1:])),
            body=renaming.statement(k.body, inner),
            readonly=tuple(outer.get(name, name) for name in k.readonly),
            maps=tuple(replace(m, name=outer.get(m.name, m.name), buffer=_buffer(m.buffer, outer)) for m in k.maps),
        )

    return replace(
        module,
        name=function,
        arguments=tuple(_buffer(b, outer) for b in module.arguments),
        temporaries=tuple(_buffer(b, outer) for b in module.temporaries),
        kernels=tuple(map(kernel, module.kernels)),
        sites=tuple(replace(s, tensor=spell(s.tensor)) for s in module.sites),
        written=tuple(outer[name] for name in module.written),
    )


def _buffer(b: Buffer, names: Names) -> Buffer:
    held = tuple(None if v is None else names[v] for v in b.stride_variables)
    return replace(b, name=names[b.name], stride_variables=held)


class _Renaming:
    def __init__(self, spell: Callable[[str], str]) -> None:
        self._spell = spell

    def bind(self, name: str, names: Names) -> Names:
        """`names` with another that is free."""
        wanted, taken = self._spell(name), set(names.values())
        free = (internal_name(wanted, n) if n else wanted for n in count())
        return {**names, name: next(new for new in free if new not in taken)}

    def expression(self, e: Expr, names: Names) -> Expr:
        match e:
            case Var(name, type):
                return Var(names[name], type)
            case Load(buffer):
                e = replace(e, buffer=_buffer(buffer, names))
        return map_expr(e, lambda c: self.expression(c, names))

    def statement(self, s: Stmt, names: Names) -> Stmt:
        inner = names
        match s:
            case Loop(name):
                inner = self.bind(name, names)
                s = replace(s, var=inner[name])
            case Let(name):
                inner = names if name in names else self.bind(name, names)  # that of a stride is known before
                s = replace(s, name=inner[name])
            case Allocate(buffers):
                for b in buffers:
                    inner = self.bind(b.name, inner)
                s = replace(s, buffers=tuple(_buffer(b, inner) for b in buffers))
            case Window(buffer, source):
                inner = self.bind(buffer.name, inner)
                s = replace(s, buffer=_buffer(buffer, inner), source=_buffer(source, names))
            case Store(buffer):
                s = replace(s, buffer=_buffer(buffer, names))
            case Invoke(_, operands):
                s = replace(s, operands=tuple((_buffer(b, names), where) for b, where in operands))
        return map_stmt(s, lambda e: self.expression(e, names), lambda c: self.statement(c, inner))
