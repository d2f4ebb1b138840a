"""Which tiles in registers a program reads before it sets them."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import ArgumentError
from .. import specs
from ..builder.tile_views import RegisterFragment


def check_defined(nodes: Sequence[specs.Node], known: set[str] | None = None) -> None:
    """Refuse a program that reads a tile in registers before anything sets it. A branch counts as taken.

    Raises:
        ArgumentError: naming the tile.
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
