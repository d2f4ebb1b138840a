"""Select among variants of a module at run time: for blocks that a mask keeps whole, drops, or cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from . import build
from .nodes import Expr, If, Kernel, Load, Module, Space, Stmt
from .redirection import Redirect
from .uses import used_buffers


@dataclass(frozen=True, slots=True)
class ScalarBound:
    """A condition on scalar arguments: the sum of `terms` (name, factor) is at most `most`, each at most `limit`."""

    terms: tuple[tuple[str, int], ...]
    most: int
    limit: int


def choose_module(general: Module, cases: Sequence[tuple[Expr, Module | None]]) -> Module:
    """A module that runs the first of `cases` whose condition holds (None: nothing), else `general`.

    Returns `general` itself if a module contains checks, or has another shape for an argument.
    """
    modules = [m for _, m in cases if m is not None]
    if general.sites or any(m.sites or not _has_forms_of(m, general) for m in modules):
        return general
    body = _body_of(general)
    for condition, m in reversed(cases):
        body = If(condition, build.NOTHING if m is None else _body_of(m), body)
    kernel = Kernel(general.kernels[0].name, body)
    partial = general.partial.union(*(m.partial for m in modules))
    return replace(general, kernels=(kernel,), temporaries=(), partial=partial)


def compare_scalars(module: Module, bound: ScalarBound) -> Expr:
    """`bound` as an expression on the arguments of `module`."""
    buffers = {b.name: b for b in module.arguments}
    values = [(Load(buffers[name], ()), factor) for name, factor in bound.terms]
    total: Expr = build.const(0)
    for value, factor in values:
        total = build.add(total, build.mul(value, factor))
    limits = [build.le(value, bound.limit) for value, _ in values]
    return reduce(build.logical_and, limits, build.le(total, bound.most))


def _has_forms_of(module: Module, general: Module) -> bool:
    """Whether the arguments that `module` uses have the same shapes as in `general`."""
    used = set().union(*(used_buffers(k.body) for k in module.kernels))
    return all(b == other for b, other in zip(module.arguments, general.arguments, strict=True) if b.name in used)


def _body_of(module: Module) -> Stmt:
    """The bodies of all kernels, with the module's temporaries as scratch buffers."""
    memory = {b.name: replace(b, space=Space.SCRATCH) for b in module.temporaries}
    body = Redirect(memory, {}).stmt(build.block(*(k.body for k in module.kernels)))
    return build.allocate(memory.values(), body)
