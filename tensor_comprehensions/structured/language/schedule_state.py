"""A nest of loops around a register tile, while the primitives of a schedule transform it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...core.errors import ArgumentError
from ...core.internal_names import SEPARATOR
from ...target import CpuTarget
from ..analysis.access_strides import access_strides
from ..op import Iterator as Dimension
from ..op import StructuredOp, loads_in, variable_names
from ..plan import Side

NOWHERE = CpuTarget("cpu", "", "", 512, 32, ())
"""A target for functions that do not depend on it."""


@dataclass(frozen=True, slots=True)
class StateLoop:
    """A loop around the register tile, over tiles of `size` points.

    number: counts the tile loops of an iterator from 1, outermost first; 0 for an iterator that is not tiled.
    """

    iterator: str
    number: int
    size: int


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """The state of an op while primitives are applied.

    Attributes:
        op: the op, including iterators of extent 1, which get no loop in the plan.
        may_parallelize: whether loops may be parallel.
        loops: the loops around the register tile, outermost first.
        sums: the reduction loops inside the register tile, outermost first.
        vector: the iterator along the lanes; None until `vectorize`.
        lanes: scalars per vector; 0 chooses from the target.
        vectors_per_register: vectors of a panel that share a register.
        packs: (factor, loop inside which it is packed); None: outside of all loops.
        padded: factors whose iterators have padded remainder tiles.
        peeled: loops whose remainder tile has separate code.
        unrolled: (reduction, unroll factor); 0: completely.
        shared: the outermost loops that make up the parallel loop.
        grain: least number of its iterations per thread; 0 chooses from the work of an iteration.
        nontemporal: whether non-temporal stores write the output.
        instruction: the matrix instruction of the register tile; "" for plain vectors.
        prefetches: (factor, loop for whose next iteration it is prefetched).
        output_panel_loop: the loop inside which a panel keeps results until they are complete; None: no panel.
        notes: a line on the effect of each primitive so far.
    """

    op: StructuredOp
    target: CpuTarget
    may_parallelize: bool
    loops: tuple[StateLoop, ...]
    sums: tuple[str, ...]
    vector: str | None = None
    lanes: int = 0
    vectors_per_register: int = 1
    packs: tuple[tuple[Side, StateLoop | None], ...] = ()
    padded: tuple[Side, ...] = ()
    peeled: tuple[StateLoop, ...] = ()
    unrolled: tuple[tuple[str, int], ...] = ()
    shared: tuple[StateLoop, ...] = ()
    grain: int = 0
    nontemporal: bool = False
    instruction: str = ""
    prefetches: tuple[tuple[Side, StateLoop], ...] = ()
    output_panel_loop: StateLoop | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def remaining_points(self) -> tuple[StateLoop, ...]:
        """The loops that the plan keeps: those over iterators with more than one value."""
        return tuple(loop for loop in self.loops if self.op.extent(loop.iterator) > 1)

    # --- names ---

    def iterator_display_name(self, iterator: str) -> str:
        """The name of an iterator in schedules: that of the def's index, without the op's prefix."""
        return self.op.display_name(iterator)

    def iterator(self, name: str) -> Dimension:
        """The iterator with this display name. Raises ArgumentError that lists all names."""
        found = [i for i in self.op.iterators if self.iterator_display_name(i.name) == name]
        if found:
            return found[0]
        merged = [self.iterator_display_name(i.name) for i in self.op.iterators if name in i.name.split(SEPARATOR)[1:]]
        raise ArgumentError(
            f"{self.op.name} has no iterator {name!r}",
            expected=", ".join(self.iterator_display_name(i.name) for i in self.op.iterators),
            suggestion=f"indices that always occur together are one iterator: {merged[0]}" if merged else "",
        )

    def name(self, loop: StateLoop) -> str:
        """The name of a loop in schedules: `m`, or `m1` for a tile loop (`m.1` if an iterator is called `m1`)."""
        iterator = self.iterator_display_name(loop.iterator)
        if not loop.number:
            return iterator
        plain = f"{iterator}{loop.number}"
        return (
            f"{iterator}.{loop.number}"
            if any(self.iterator_display_name(i.name) == plain for i in self.op.iterators)
            else plain
        )

    def loop(self, name: str) -> StateLoop:
        """The loop called `name`; the name of an iterator stands for its innermost loop. Raises ArgumentError."""
        for loop in self.loops:
            if name in (self.name(loop), f"{self.iterator_display_name(loop.iterator)}.{loop.number}"):
                return loop
        own = [loop for loop in self.loops if self.iterator_display_name(loop.iterator) == name]
        if own:
            return own[-1]
        loops = ", ".join(map(self.name, self.loops)) or "none"
        sums = [self.iterator_display_name(s) for s in self.sums]
        raise ArgumentError(
            f"{self.op.name} has no loop {name!r}",
            expected=loops,
            suggestion=f"{name} is summed inside the register tile; tile({name}=...) makes a loop of it"
            if name in sums
            else "",
        )

    def side(self, name: str) -> Side:
        """The factor that reads the tensor `name`, or `left` or `right`. Raises ArgumentError."""
        read = {side: [a.buffer.name for a in loads_in(self.op.factors[side.value])] for side in Side}
        found = [side for side, tensors in read.items() if name in tensors]
        if not found:
            found = [side for side in Side if side.name.lower() == name]
        if len(found) == 1:
            return found[0]
        raise ArgumentError(
            f"{self.op.name} has {'two factors' if found else 'no factor'} called {name!r}",
            expected=", ".join(dict.fromkeys((*read[Side.LEFT], *read[Side.RIGHT], "left", "right"))),
        )

    def with_note(self, note: str) -> ScheduleState:
        return replace(self, notes=(*self.notes, note))


def start_state(op: StructuredOp, target: CpuTarget, *, may_parallelize: bool = True) -> ScheduleState:
    """The nest before the first primitive: every parallel iterator a loop, every reduction inside the register tile."""
    loops = tuple(StateLoop(i.name, 0, 1) for i in op.parallel)
    return ScheduleState(op, target, may_parallelize, loops, tuple(i.name for i in op.reductions))


def reduction_loop_name(nest: ScheduleState, iterator: str) -> tuple[str, ...]:
    """The names of the loop over a reduction inside the register tile: `k0` or `k.0`, and `k` if it is not tiled.

    The first is the preferred one.
    """
    shown = nest.iterator_display_name(iterator)
    tiled = any(loop.iterator == iterator for loop in nest.loops)
    return (f"{shown}0", f"{shown}.0") if tiled else (shown, f"{shown}0", f"{shown}.0")


def padded_iterators(nest: ScheduleState) -> list[str]:
    """The parallel iterators that only padded factors depend on."""
    others = [f for side, f in zip(Side, nest.op.factors, strict=True) if side not in nest.padded]
    mine = {n for side in nest.padded for n in variable_names(nest.op.factors[side.value])}
    elsewhere = {n for factor in others for n in variable_names(factor)}
    return [i.name for i in nest.op.parallel if i.name in mine and i.name not in elsewhere]


def contiguous_along(op: StructuredOp) -> list[Dimension]:
    """The parallel iterators of extent > 1 along which the output is contiguous."""
    written_steps = access_strides(op.output, [i.name for i in op.iterators]) or {}
    return [i for i in op.parallel if written_steps.get(i.name) == 1 and i.extent > 1]
