"""Mode-by-mode operations on layouts. Each is exact, or raises CannotLower."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import CannotLower
from .algebra import as_layout, coalesce, compose, divide_layout, layout_product, refusal
from .layout import Layout, concatenate

Tiler = Layout | int
"""The tile of a mode: a layout of positions in it, or a number of consecutive positions."""


def coalesce_modes(layout: Layout) -> Layout:
    """The same function of one coordinate per mode, each mode with as few leaves as possible."""
    return concatenate(*map(coalesce, layout.modes))


def compose_modes(layout: Layout, tilers: Sequence[Tiler]) -> Layout:
    """Compose each mode of `layout` with its tiler.

    Raises:
        CannotLower: there are more or fewer tilers than modes, or a composition is not exact.
    """
    return concatenate(*_by_mode("compose", lambda mode, tiler: compose(mode, as_layout(tiler)), layout, tilers))


def divide_modes(layout: Layout, tilers: Sequence[Tiler]) -> Layout:
    """Two modes: the tile, which is each mode of `layout` at the positions in its tiler, and the moves of the tile.

    Raises:
        CannotLower: there are more or fewer tilers than modes, or a division is not exact.
    """
    parts = _by_mode("divide", divide_layout, layout, tilers)
    return concatenate(concatenate(*(part[0] for part in parts)), concatenate(*(part[1] for part in parts)))


def blocked_product(block: Layout, grid: Layout) -> Layout:
    """Repeat `block` over `grid`, mode by mode, so that the elements of a block are adjacent.

    Raises:
        CannotLower: the operands differ in their number of modes, or `block` cannot be repeated.
    """
    return coalesce_modes(concatenate(*(concatenate(b, g) for b, g in _repeat_modes("block", block, grid))))


def raked_product(block: Layout, grid: Layout) -> Layout:
    """Repeat `block` over `grid`, mode by mode, so that adjacent elements belong to different blocks.

    Raises:
        CannotLower: the operands differ in their number of modes, or `block` cannot be repeated.
    """
    return coalesce_modes(concatenate(*(concatenate(g, b) for b, g in _repeat_modes("rake", block, grid))))


def _by_mode(
    what: str, operation: Callable[[Layout, Tiler], Layout], layout: Layout, tilers: Sequence[Tiler]
) -> list[Layout]:
    """The results of `operation` on each mode and its tiler."""
    shown = f"({', '.join(map(str, tilers))})"
    if len(tilers) != len(layout):
        raise refusal(what, layout, shown, f"{len(tilers)} tilers for {len(layout)} modes")
    try:
        return list(map(operation, layout.modes, tilers))
    except CannotLower as reason:
        raise refusal(what, layout, shown, str(reason)) from None


def _repeat_modes(what: str, block: Layout, grid: Layout) -> list[tuple[Layout, Layout]]:
    """Pairs of a mode of `block` and the mode of its repetitions."""
    if len(block) != len(grid):
        raise refusal(what, block, grid, f"{len(block)} modes and {len(grid)}")
    blocks, repetitions = layout_product(block, grid).modes
    return list(zip(blocks.modes, repetitions.modes, strict=True))
