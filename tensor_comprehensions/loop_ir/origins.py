"""The statements of a def that a store belongs to, annotated on stores while decisions are recorded.

Lowerings call `with_origin` on the statements that they emit; passes keep origins. Origins affect no value and no text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ..core.decisions import is_recording
from .nodes import Invoke, Origin, Stmt, Store
from .rewrite import map_stmt, walk_stmts


def origin_of(statements: tuple[str, ...], role: str = "", tensor: str = "") -> Origin | None:
    """The origin of code emitted for `statements`; None unless decisions are recorded."""
    return Origin(statements, role, tensor) if is_recording() else None


def with_origin(s: Stmt, statements: tuple[str, ...], role: str = "", tensor: str = "") -> Stmt:
    """`s` with this origin on stores that have none; origins that have only a role get these `statements`.

    Returns `s` itself unless decisions are recorded.
    """
    return _fill_in(s, Origin(statements, role, tensor)) if is_recording() else s


def _fill_in(s: Stmt, origin: Origin) -> Stmt:
    if isinstance(s, Store | Invoke):
        if s.origin is None:
            return replace(s, origin=origin)
        if not s.origin.statements and origin.statements:
            return replace(s, origin=replace(s.origin, statements=origin.statements))
        return s
    return map_stmt(s, lambda e: e, lambda c: _fill_in(c, origin))


def origins_in(s: Stmt) -> Iterator[tuple[Store | Invoke, Origin | None]]:
    """The stores and intrinsics of `s` with their origins."""
    return ((c, c.origin) for c in walk_stmts(s) if isinstance(c, Store | Invoke))


def statement_of(name: str) -> str:
    """The statement of the def, such as `S2`, that a statement of the lowering, such as `S2_init`, is derived from."""
    found = re.match(r"S\d+", name)
    return found[0] if found else name
