"""Detect tiles in registers that are read before they are set."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import ArgumentError
from .. import specs
from ..builder.tile_views import RegisterFragment


def check_defined(nodes: Sequence[specs.Node], known: set[str] | None = None) -> None:
    """Raise an error if a tile in registers is read before it is set. Branches count as taken.

    Raises:
        ArgumentError: a tile is read too early; the message names it.
    """
    known = set() if known is None else known
    for n in nodes:
        match n:
            case specs.Allocate(RegisterFragment() as tile):
                known.discard(tile.buffer.name)
            case specs.Loop() | specs.When() | specs.Let() | specs.Role() | specs.One():
                check_defined(n.body, known)
            case specs.Spec():
                read = [*n.inputs, *(n.outputs if isinstance(n, specs.MatMul) and not n.first else ())]
                check_defined(n.body, known)
                for x in read:
                    if isinstance(x, RegisterFragment) and x.buffer.name not in known:
                        raise ArgumentError(
                            f"{x} is read before it is set", suggestion="k.init(tile, 0), or first=True"
                        )
                known |= {x.buffer.name for x in n.outputs if isinstance(x, RegisterFragment)}
