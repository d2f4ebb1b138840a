"""The table of the intrinsics of `Invoke`. Passes use its facts, not names; targets spell them in their own tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..core.dtypes import BOOL, INT64, DType
from .atoms import ATOMS, FLOAT8, WARP, WARPGROUP, Atom
from .lazy_table import LazyTable
from .nodes import Invoke, Space

ALL_THREADS = 1024
"""The value of `Intrinsic.group` for all threads of a block: the largest number that a block may have."""


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """An intrinsic and the facts about its operands, each a view `(buffer, indices of its first element)`.

    operands: the number of views. attributes: the number of constants. values: the types of the values.
    hint: whether it computes nothing and may be dropped; its views need not exist, only their indices are evaluated.
    group: the number of consecutive threads that execute it together, in control flow that is uniform for them.
    registers: positions of the views in registers. atom: the key in `atoms.ATOMS` of their layouts; each view then
    names the first of several registers along the last dimension.
    fragments: positions of the views in FRAGMENT buffers. written: positions of the views that it writes.
    barriers: positions of the views in BARRIER buffers. mapped: the position of the view in a tensor that is accessed
    by a tensor map, whose number is the first attribute; the box may begin outside of the buffer.
    described: positions of the views of matrices in shared memory that a descriptor addresses. across: those that are
    not K-major, with rows along K.
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
"""The intrinsics that involve several blocks of a cluster."""


def _of_atom(a: Atom) -> Intrinsic:
    registers = tuple(n for n, o in enumerate(a.operands) if o.space is Space.REGISTER)
    return Intrinsic(a.name, len(a.operands), 0, group=a.group, registers=registers, written=(0,), atom=a.name)


def _is_invoked(a: Atom) -> bool:
    """Whether the atom becomes an intrinsic: warps or warpgroups execute it, and the interpreter supports its types."""
    return a.group > 1 and not any(o.dtype in FLOAT8 for o in a.operands)


GROUP_SUFFIXES: Mapping[str, tuple[int, ...]] = {
    "": (), "_across": (2,), "_left_across": (1,), "_both_across": (1, 2)
}  # fmt: skip
"""Suffixes of names of `wgmma` intrinsics, each with the positions of the factors that are not K-major (`across`)."""


def _of_group(a: Atom) -> Iterator[Intrinsic]:
    """The `wgmma` variants: A in shared memory or registers; 16-bit factors in memory may be K-major or not."""
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
        # Prefetch a cache line; the attribute says whether it will be written (1) or only read (0).
        Intrinsic(PREFETCH, operands=1, attributes=1, hint=True),
        # The same for data that is used later: prefetch to L2, without displacing L1.
        Intrinsic(PREFETCH_LATER, operands=1, attributes=1, hint=True),
        # Barrier of the block (of the warp): earlier accesses of its threads are visible to all of them afterwards.
        Intrinsic(BARRIER, operands=0, attributes=0, group=ALL_THREADS),
        Intrinsic(WARP_BARRIER, operands=0, attributes=0, group=WARP),
        # destination, source; (lane mask or offset, width): each thread gets the source of the lane with its own index
        # XOR the mask, or plus the offset, in its group of `width` lanes; its own value if that is outside the group.
        Intrinsic(SHUFFLE_XOR, operands=2, attributes=2, group=WARP, registers=(0, 1)),
        Intrinsic(SHUFFLE_DOWN, operands=2, attributes=2, group=WARP, registers=(0, 1)),
        # destination, source; (width,); (lane,): the same from the lane with this index, modulo the width.
        Intrinsic(SHUFFLE_INDEX, operands=2, attributes=1, group=WARP, registers=(0, 1), values=(INT64,)),
        # (number from 1 to 15, threads): a barrier of so many threads, in whole warps, that use the same number.
        Intrinsic(BARRIER_PART, operands=0, attributes=2, group=WARP),
        # shared destination, global source; (bytes,), 4, 8 or 16: start copying contiguous elements. The destination is
        # undefined until this thread has waited for the group; for other threads, until a barrier after that.
        Intrinsic(COPY_ASYNC, operands=2, attributes=1, written=(0,)),
        # The same, but if the value is false, copy zeros; the source is not read and need not exist.
        Intrinsic(COPY_ASYNC_ZERO, operands=2, attributes=1, written=(0,), values=(BOOL,)),
        # Close this thread's group of copies. (groups,): wait until at most this many of the latest groups are pending.
        Intrinsic(COMMIT_ASYNC, operands=0, attributes=0),
        Intrinsic(WAIT_ASYNC, operands=0, attributes=1),
        # Set a fragment to zeros.
        Intrinsic(FRAGMENT_ZERO, operands=1, attributes=0, fragments=(0,), written=(0,)),
        # fragment, memory; (dimension,): load a fragment whose rows lie along that dimension of the memory, each of
        # them contiguous. Two bfloat16 in memory make one uint32, the first in the low half.
        Intrinsic(FRAGMENT_LOAD, operands=2, attributes=1, fragments=(0,), written=(0,)),
        # memory, fragment; (dimension,): store a fragment in the same way.
        Intrinsic(FRAGMENT_STORE, operands=2, attributes=1, fragments=(1,), written=(0,)),
        # sum (m, n), left (m, k), right (k, n): multiply pairs of bfloat16: one `DOT_BFLOAT16` for each k, in order.
        # Subnormal numbers may count as zero.
        Intrinsic(FRAGMENT_DOT_BFLOAT16, operands=3, attributes=0, fragments=(0, 1, 2), written=(0,)),
        # barrier; (arrivals,): initialize an mbarrier whose phases end after so many arrivals. Other threads may use it
        # after a fence (the second intrinsic) followed by a barrier of the block.
        Intrinsic(BARRIER_INIT, operands=1, attributes=1, barriers=(0,)),
        Intrinsic(FENCE_BARRIER_INIT, operands=0, attributes=0),
        # barrier: arrive. barrier; (bytes,): arrive, and make the phase also wait for so many bytes of copies.
        Intrinsic(BARRIER_ARRIVE, operands=1, attributes=0, barriers=(0,)),
        Intrinsic(BARRIER_EXPECT, operands=1, attributes=1, barriers=(0,)),
        # barrier; ; (block,): arrive at the same barrier of the block with this rank in the cluster.
        Intrinsic(BARRIER_ARRIVE_CLUSTER, operands=1, attributes=0, barriers=(0,), values=(INT64,)),
        # A barrier of all threads of the cluster. A block may access shared memory of another block after the first
        # such barrier; a block must not end before it has synchronized with the last access to its own.
        Intrinsic(CLUSTER_BARRIER, operands=0, attributes=0, group=ALL_THREADS),
        # barrier; ; (parity,): wait until the phase of this parity has ended; the phase before the first has parity 1.
        Intrinsic(BARRIER_WAIT, operands=1, attributes=0, barriers=(0,), values=(INT64,)),
        # shared box, its first element in a tensor, barrier; (map,): start a TMA load of a box, with zeros outside of
        # the tensor. The box is undefined until the phase of the barrier that counts its bytes has ended.
        *(Intrinsic(name, 3, 1, written=(0,), barriers=(2,), mapped=1) for name in TMA_LOADS),
        # The same into the same shared memory of several blocks of the cluster, signaling the same barrier of each.
        # (map, blocks): a bit for each block.
        *(Intrinsic(name, 3, 2, written=(0,), barriers=(2,), mapped=1) for name in TMA_MULTICASTS),
        # first element of a box in a tensor, shared box; (map,): start a TMA store of the part inside the tensor.
        *(Intrinsic(name, 2, 1, written=(0,), mapped=0) for name in TMA_STORES),
        # Close this thread's group of TMA stores. (groups,): wait until all but the latest ones have read.
        Intrinsic(BULK_COMMIT, operands=0, attributes=0),
        Intrinsic(BULK_WAIT, operands=0, attributes=1),
        # Make earlier stores of this thread visible to TMA copies and `wgmma` after the next barrier.
        Intrinsic(FENCE_ASYNC, operands=0, attributes=0),
        # Order earlier writes of registers before later products; close the group of products; (groups,): wait for all
        # but this many of the latest groups.
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
    """The intrinsics of the atoms. Moves take registers and each lane's row of 16 bytes; products sum, left and right.

    `wgmma` starts from zero sums if its value is false. It reads its operands, and changes its sums, until the
    warpgroup has waited for its group.
    """
    return {i.name: i for a in filter(_is_invoked, ATOMS.values()) for i in _rows_of(a)}


INTRINSICS: Mapping[str, Intrinsic] = LazyTable(_OWN, _atom_rows)
"""All intrinsics by name."""


def is_hint(s: Invoke) -> bool:
    """Whether `s` is a hint, such as a prefetch: it computes nothing."""
    known = INTRINSICS.get(s.name)
    return known is not None and known.hint


def is_collective(s: Invoke) -> bool:
    """Whether several threads must execute `s` together."""
    known = INTRINSICS.get(s.name)
    return known is not None and known.group > 1


def is_asynchronous(s: Invoke) -> bool:
    """Whether `s` starts a TMA copy or a `wgmma`."""
    known = INTRINSICS.get(s.name)
    return known is not None and (known.mapped is not None or bool(known.described))
