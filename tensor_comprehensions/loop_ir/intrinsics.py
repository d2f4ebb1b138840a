"""The intrinsics of `Invoke`. Passes and emitters know no row by name: targets spell them in their own tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..core.dtypes import BOOL, INT64, DType
from .atoms import ATOMS, FLOAT8, WARP, WARPGROUP, Atom
from .lazy_table import LazyTable
from .nodes import Invoke, Space

ALL_THREADS = 1024
"""The threads of a block: as many as one may have."""


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """One row.

    operands: the number of views, attributes: the number of constants, values: the types of the values.
    hint: it computes nothing, so its views need not exist and it may be left out; only their indices are evaluated.
    group: the number of neighboring threads that execute it together, in control flow that is uniform for them.
    registers: the views that are in registers. atom: the row of `atoms.ATOMS` that says where their elements lie; each
    view is then that of the first register of several along the last dimension.
    fragments: the views that are matrices in FRAGMENT buffers. written: the views whose memory it writes.
    barriers: the views that are in BARRIER buffers. mapped: the view whose box a tensor map moves, which the first
    attribute numbers: it may begin anywhere, inside of the buffer or not. described: the views of matrices in shared
    memory that the instruction finds by a descriptor; those that lie across, rows along K, are in `across`.
    """

    name: str
    operands: int
    attributes: int
    hint: bool = False
    group: int = 1
    registers: tuple[int, ...] = ()
    fragments: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    values: tuple[DType, ...] = ()
    atom: str = ""
    barriers: tuple[int, ...] = ()
    mapped: int | None = None
    described: tuple[int, ...] = ()
    across: tuple[int, ...] = ()


PREFETCH, PREFETCH_LATER = "prefetch", "prefetch_later"
BARRIER, WARP_BARRIER, BARRIER_PART = "barrier", "warp_barrier", "barrier_part"
SHUFFLE_XOR, SHUFFLE_DOWN, SHUFFLE_INDEX = "shuffle_xor", "shuffle_down", "shuffle_index"
COPY_ASYNC, COMMIT_ASYNC, WAIT_ASYNC = "copy_async", "commit_async", "wait_async"
COPY_ASYNC_ZERO = "copy_async_zero"
FRAGMENT_ZERO, FRAGMENT_LOAD, FRAGMENT_STORE = "fragment_zero", "fragment_load", "fragment_store"
FRAGMENT_DOT_BFLOAT16 = "fragment_dot_bfloat16"
BARRIER_INIT, BARRIER_ARRIVE, BARRIER_EXPECT = "barrier_init", "barrier_arrive", "barrier_expect"
BARRIER_WAIT = "barrier_wait"
BARRIER_ARRIVE_CLUSTER, CLUSTER_BARRIER = "barrier_arrive_cluster", "cluster_barrier"
FENCE_BARRIER_INIT, FENCE_ASYNC = "fence_barrier_init", "fence_async"
TMA_RANKS = (2, 3, 4, 5)
TMA_LOADS = {f"tma_load_{rank}": rank for rank in TMA_RANKS}
TMA_MULTICASTS = {f"{name}_multicast": rank for name, rank in TMA_LOADS.items()}
TMA_STORES = {f"tma_store_{rank}": rank for rank in TMA_RANKS}
BULK_COMMIT, BULK_WAIT = "bulk_commit", "bulk_wait"
WGMMA_FENCE, WGMMA_COMMIT, WGMMA_WAIT = "wgmma_fence", "wgmma_commit", "wgmma_wait"
REGISTERS_DEC, REGISTERS_INC, ELECT = "registers_dec", "registers_inc", "elect"
REGISTER_MOVES = (REGISTERS_DEC, REGISTERS_INC)
IN_CLUSTER = (BARRIER_ARRIVE_CLUSTER, CLUSTER_BARRIER, *TMA_MULTICASTS)
"""What blocks of a cluster do with each other."""


def _of_atom(a: Atom) -> Intrinsic:
    registers = tuple(n for n, o in enumerate(a.operands) if o.space is Space.REGISTER)
    return Intrinsic(a.name, len(a.operands), 0, group=a.group, registers=registers, written=(0,), atom=a.name)


def _is_invoked(a: Atom) -> bool:
    """Whether both machines can run the atom, which a warp or a warpgroup does."""
    return a.group > 1 and not any(o.dtype in FLOAT8 for o in a.operands)


GROUP_SUFFIXES: Mapping[str, tuple[int, ...]] = {
    "": (), "_across": (2,), "_left_across": (1,), "_both_across": (1, 2)
}  # fmt: skip
"""How names of products of warpgroups end, by the factors that lie across."""


def _of_group(a: Atom) -> Iterator[Intrinsic]:
    """The product of a warpgroup, with A in shared memory or in registers; in memory along K or, of 16 bits, across."""
    for suffix, across in GROUP_SUFFIXES.items() if a.operands[2].dtype.bits == 16 else (("", ()),):
        for middle, registers in (("", (0,)), ("_registers", (0, 1))):
            if middle and 1 in across:
                continue
            yield Intrinsic(
                f"{a.name}{middle}{suffix}", 3, 0, group=a.group, registers=registers, written=(0,), values=(BOOL,),
                atom=a.name, described=(1, 2) if len(registers) == 1 else (2,), across=across,
            )  # fmt: skip


def _rows_of(a: Atom) -> Iterator[Intrinsic]:
    return _of_group(a) if a.group == WARPGROUP else iter((_of_atom(a),))


_OWN = {
    i.name: i
    for i in (
        # Prefetch a cache line; the attribute tells whether it will be written (1) or only read (0).
        Intrinsic(PREFETCH, operands=1, attributes=1, hint=True),
        # The same, but so much later that the first cache has other things to keep until then.
        Intrinsic(PREFETCH_LATER, operands=1, attributes=1, hint=True),
        # Accesses of all threads of the block (of the warp) before it are visible to all of them after it.
        Intrinsic(BARRIER, operands=0, attributes=0, group=ALL_THREADS),
        Intrinsic(WARP_BARRIER, operands=0, attributes=0, group=WARP),
        # destination, source; (mask or offset of lanes, width): each thread gets the source of the lane whose number
        # is its own xor the mask, or plus the offset, inside its group of `width` lanes; its own beyond the group.
        Intrinsic(SHUFFLE_XOR, operands=2, attributes=2, group=WARP, registers=(0, 1)),
        Intrinsic(SHUFFLE_DOWN, operands=2, attributes=2, group=WARP, registers=(0, 1)),
        # The same from the lane with a number, which is taken inside the group. (width,) (lane,)
        Intrinsic(SHUFFLE_INDEX, operands=2, attributes=1, group=WARP, registers=(0, 1), values=(INT64,)),
        # (number from 1 to 15, threads): as the barrier of the block, for so many threads: whole warps that wait at the
        # barrier with this number.
        Intrinsic(BARRIER_PART, operands=0, attributes=2, group=WARP),
        # shared destination, global source; (bytes,), 4, 8 or 16: begin to copy contiguous elements; the destination is
        # undefined until this thread has waited for the group, and to other threads until a barrier after that.
        Intrinsic(COPY_ASYNC, operands=2, attributes=1, written=(0,)),
        # The same, but where the value is false the source, which need not exist, is not read: zeros are copied.
        Intrinsic(COPY_ASYNC_ZERO, operands=2, attributes=1, written=(0,), values=(BOOL,)),
        # Close this thread's group of copies. (groups,): wait until at most so many of the last groups are pending.
        Intrinsic(COMMIT_ASYNC, operands=0, attributes=0),
        Intrinsic(WAIT_ASYNC, operands=0, attributes=1),
        # A fragment becomes all zeros.
        Intrinsic(FRAGMENT_ZERO, operands=1, attributes=0, fragments=(0,), written=(0,)),
        # fragment, memory; (dimension,): its rows go on along that dimension of the memory, each of them contiguous
        # there. Two bfloat16 in memory are one uint32, the first in the low half.
        Intrinsic(FRAGMENT_LOAD, operands=2, attributes=1, fragments=(0,), written=(0,)),
        # memory, fragment; (dimension,): the same the other way.
        Intrinsic(FRAGMENT_STORE, operands=2, attributes=1, fragments=(1,), written=(0,)),
        # sum (m, n), left (m, k), right (k, n): add the products of the pairs of bfloat16 in left and right, as many
        # `DOT_BFLOAT16` along k as there are. Subnormal numbers may count as zero.
        Intrinsic(FRAGMENT_DOT_BFLOAT16, operands=3, attributes=0, fragments=(0, 1, 2), written=(0,)),
        # barrier; (arrivals,): so many end each of its phases. Others know of it after a fence, then a barrier of the
        # block.
        Intrinsic(BARRIER_INIT, operands=1, attributes=1, barriers=(0,)),
        Intrinsic(FENCE_BARRIER_INIT, operands=0, attributes=0),
        # barrier: arrive. (bytes,): arrive, and let the phase also wait for so many bytes of copies.
        Intrinsic(BARRIER_ARRIVE, operands=1, attributes=0, barriers=(0,)),
        Intrinsic(BARRIER_EXPECT, operands=1, attributes=1, barriers=(0,)),
        # barrier; ; (block,): arrive at the barrier that has the same place in a block of the cluster, by its number.
        Intrinsic(BARRIER_ARRIVE_CLUSTER, operands=1, attributes=0, barriers=(0,), values=(INT64,)),
        # As the barrier of the block, for all threads of all blocks of the cluster. A block may reach shared memory of
        # another one from the first of them on, and must not end before the other knows the last access to it.
        Intrinsic(CLUSTER_BARRIER, operands=0, attributes=0, group=ALL_THREADS),
        # barrier; ; (parity,): wait until the phase of this parity has ended, the one before the first having parity 1.
        Intrinsic(BARRIER_WAIT, operands=1, attributes=0, barriers=(0,), values=(INT64,)),
        # shared box, its first element in a tensor, barrier; (map,): begin to copy a box, zeros where it leaves the
        # tensor. The box is undefined until its bytes have landed and the phase of the barrier that they end has.
        *(Intrinsic(name, 3, 1, written=(0,), barriers=(2,), mapped=1) for name in TMA_LOADS),
        # The same to the same place in several blocks of the cluster, where it ends on the barrier of that place.
        # (map, blocks): a bit for each of them.
        *(Intrinsic(name, 3, 2, written=(0,), barriers=(2,), mapped=1) for name in TMA_MULTICASTS),
        # The first element of a box in a tensor, shared box; (map,): begin to copy the part of it inside the tensor.
        *(Intrinsic(name, 2, 1, written=(0,), mapped=0) for name in TMA_STORES),
        # Close this thread's group of such stores. (groups,): wait until all but so many of the last ones have read.
        Intrinsic(BULK_COMMIT, operands=0, attributes=0),
        Intrinsic(BULK_WAIT, operands=0, attributes=1),
        # Make earlier stores of this thread visible to copies of boxes and products of warpgroups after the next
        # barrier.
        Intrinsic(FENCE_ASYNC, operands=0, attributes=0),
        # Registers written before belong to the products that come; close the group of products; wait for all but so
        # many of the last groups.
        Intrinsic(WGMMA_FENCE, operands=0, attributes=0, group=WARPGROUP),
        Intrinsic(WGMMA_COMMIT, operands=0, attributes=0, group=WARPGROUP),
        Intrinsic(WGMMA_WAIT, operands=0, attributes=1, group=WARPGROUP),
        # (registers,): set the number of registers of each thread of the warpgroup.
        Intrinsic(REGISTERS_DEC, operands=0, attributes=1, group=WARPGROUP),
        Intrinsic(REGISTERS_INC, operands=0, attributes=1, group=WARPGROUP),
        # A uint32: 1 in one thread of the warp, 0 in the others.
        Intrinsic(ELECT, operands=1, attributes=0, group=WARP, registers=(0,), written=(0,)),
    )
}


def _atom_rows() -> dict[str, Intrinsic]:
    """A row for each atom, which takes registers and each lane's row of 16 bytes, registers, or sum, left and right.

    Sums start from zero if the value is false. Products of a warpgroup read their operands, and change their sums,
    until the warpgroup has waited for their group.
    """
    return {i.name: i for a in filter(_is_invoked, ATOMS.values()) for i in _rows_of(a)}


INTRINSICS: Mapping[str, Intrinsic] = LazyTable(_OWN, _atom_rows)
"""All rows by name."""


def is_hint(s: Invoke) -> bool:
    """Whether `s` computes nothing."""
    known = INTRINSICS.get(s.name)
    return known is not None and known.hint


def is_collective(s: Invoke) -> bool:
    """Whether several threads come to `s` together."""
    known = INTRINSICS.get(s.name)
    return known is not None and known.group > 1


def is_asynchronous(s: Invoke) -> bool:
    """Whether `s` starts an asynchronous operation: a copy of a box, or a product of a warpgroup."""
    known = INTRINSICS.get(s.name)
    return known is not None and (known.mapped is not None or bool(known.described))
