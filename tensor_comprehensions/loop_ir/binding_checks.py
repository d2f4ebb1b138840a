"""A check that every name of a module has one binding. It runs on every compilation, so it is written to be fast."""

from __future__ import annotations

from ..core.errors import InternalError
from .nodes import Allocate, Binary, Block, Const, Expr, Invoke, Let, Load, Loop, Module, Stmt, Store, Var, Window
from .rewrite import children, stmt_expressions, substatements


def check_bindings(module: Module) -> None:
    """Raise InternalError if a variable or buffer is bound twice, shadows another one, or is used unbound."""
    scope = {b.name for b in (*module.arguments, *module.temporaries)}
    if len(scope) < len(module.arguments) + len(module.temporaries):
        raise InternalError(f"{module.name}: two buffers have one name")
    scope |= {p.name for p in module.parameters}
    if len({k.name for k in module.kernels}) < len(module.kernels):
        raise InternalError(f"{module.name}: two kernels have one name")
    for kernel in module.kernels:
        launched = {name for name, _ in kernel.launch.ranges()} if kernel.launch is not None else set()
        try:
            _check_names_bound(kernel.body, scope | launched, set())
        except _Fault as fault:
            raise InternalError(f"{kernel.name}: {fault}") from None


class _Fault(Exception):
    pass


def _check_names_bound(s: Stmt, scope: set[str], seen: set[int]) -> None:
    """Check `s` in `scope`. seen: ids of expressions whose names are known to be in `scope`."""
    if type(s) is Block:
        for c in s.body:
            _check_names_bound(c, scope, seen)
        return
    for e in stmt_expressions(s):
        _check_uses_bound(e, scope, seen)
    if type(s) is Store:
        if s.buffer.name not in scope:
            raise _Fault(f"{s.buffer.name} is used and not bound")
        return
    bound: tuple[str, ...] = ()
    match s:
        case Loop(name) | Let(name):
            bound = (name,)
        case Allocate(buffers):
            bound = tuple(b.name for b in buffers)
        case Window(buffer, source):
            if source.name not in scope:
                raise _Fault(f"{source.name} is used and not bound")
            bound = (buffer.name,)
        case Invoke(_, operands):
            if unbound := [b.name for b, _ in operands if b.name not in scope]:
                raise _Fault(f"{unbound[0]} is used and not bound")
    for name in bound:
        if name in scope:
            raise _Fault(f"{name} is bound twice, one inside the other")
        scope.add(name)
    for c in substatements(s):
        _check_names_bound(c, scope, seen)
    if bound:
        scope.difference_update(bound)
        seen.clear()


def _check_uses_bound(e: Expr, scope: set[str], seen: set[int]) -> None:
    stack = [e]
    while stack:
        top = stack.pop()
        kind = type(top)
        if kind is Const:
            continue
        if kind is Var:
            if top.name not in scope:  # type: ignore[union-attr]
                raise _Fault(f"{top.name} is used and not bound")  # type: ignore[union-attr]
            continue
        if id(top) in seen:
            continue
        seen.add(id(top))
        if type(top) is Binary:  # the most frequent type: tested before the pattern match, which is slower
            stack += (top.left, top.right)
            continue
        if type(top) is Load and top.buffer.name not in scope:
            raise _Fault(f"{top.buffer.name} is used and not bound")
        stack += children(top)
