"""The immutable nodes of a tile program: specs of computations by a group of threads on tiles.

As in "Graphene: An IR for Optimized Tensor Computations on GPUs" (ASPLOS 2023), section 3: a spec has outputs, inputs,
the threads that execute it and, once it is decomposed, a body of specs on smaller tiles; a leaf is an instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..loop_ir import nodes as ir
from .builder.barriers import Barrier, BarrierArray
from .builder.tile_views import MemoryView, Operand, Positions, RegisterFragment
from .tensors import ThreadTensor


@dataclass(frozen=True, slots=True)
class Spec:
    """The common fields of specs.

    Attributes:
        outputs, inputs: the operands.
        threads: the threads that execute the spec together: the block, or a group of it.
        body: its decomposition; empty for a leaf, or if not decomposed yet.
    """

    outputs: tuple[Operand, ...]
    inputs: tuple[Operand, ...]
    threads: ThreadTensor
    body: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Move(Spec):
    """Copies the input to the output, and rounds if the types differ.

    done: the barrier whose phase waits for the bytes of the asynchronous copy.
    blocks: the blocks of the cluster that share the copy (multicast): each copies a part of the rows to all of them.
    """

    done: Barrier | None = None
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class MatMul(Spec):
    """Adds `A @ B.T` to the output, or overwrites it if `first`, for inputs A: M x K and B: N x K.

    products: "tf32" to round float32 factors to tf32.
    """

    first: bool = False
    products: str = ""


@dataclass(frozen=True, slots=True)
class Map(Spec):
    """A pointwise function of the inputs, which are broadcast.

    positions: arguments of `function` that are row or column indices, each with its argument number.
    """

    function: Callable[..., Any] = field(default=lambda x: x)
    positions: tuple[tuple[int, Positions], ...] = ()


@dataclass(frozen=True, slots=True)
class Reduce(Spec):
    """Reduces the input along an axis by `op`: `+`, `*`, `min` or `max`."""

    op: str = "+"
    axis: int = 1


@dataclass(frozen=True, slots=True)
class Init(Spec):
    """Fills the output with a constant."""

    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Shuffle(Spec):
    """Butterfly shuffle: each value of the output comes from the lane `lane ^ mask`."""

    mask: int = 1


@dataclass(frozen=True, slots=True)
class Named(Spec):
    """A spec with a user's name and body."""

    name: str = ""


@dataclass(frozen=True, slots=True)
class Leaf(Spec):
    """A spec that one atom, or plain loads and stores of each thread, computes.

    Attributes:
        kind: the kind of the spec.
        atom: the name of the atom in `loop_ir.atoms`, or another name of the instruction.
        statement: the code that each thread runs.
    """

    kind: str = "Move"
    atom: str = ""
    statement: ir.Stmt = field(default=ir.Block(()))


@dataclass(frozen=True, slots=True)
class Sync:
    """A barrier of all threads of the block, after which they see each other's stores."""


@dataclass(frozen=True, slots=True)
class SyncCluster:
    """A barrier of all threads of all blocks of a cluster."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Makes the asynchronous copies that this thread has started a group (`cp.async.commit_group`)."""


@dataclass(frozen=True, slots=True)
class WaitCopies:
    """Waits until at most `groups` groups of copies are pending."""

    groups: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """Allocates a tile, which lives until the end of the enclosing body."""

    tile: MemoryView | RegisterFragment


@dataclass(frozen=True, slots=True)
class Loop:
    """Runs the body for each value of `var` from 0 to `stop - 1`."""

    var: str
    stop: int | ir.Expr
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class When:
    """Runs the body if `condition` holds, which must be uniform over the block or role."""

    condition: ir.Expr
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Let:
    """Runs the body with names bound to values."""

    names: tuple[tuple[str, ir.Expr], ...]
    body: tuple[Node, ...]


# --- roles and barriers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Role:
    """A body that only some warpgroups run; registers: per thread from here on, 0 for no change."""

    threads: ThreadTensor
    registers: int
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class SetRegisterCount:
    """Sets the number of registers of each thread of the role (`setmaxnreg`); `grows` if that is an increase."""

    count: int
    grows: bool


@dataclass(frozen=True, slots=True)
class One:
    """A body that only one of `threads` runs."""

    threads: ThreadTensor
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class SyncPart:
    """A barrier of some threads of the block, given as (first, count); number: 1 to 15, or 0 if not assigned yet."""

    threads: tuple[int, int]
    number: int = 0


@dataclass(frozen=True, slots=True)
class MakeBarriers:
    """Allocates and initializes barriers in shared memory."""

    barriers: BarrierArray


@dataclass(frozen=True, slots=True)
class Expect:
    """Arrives, and makes the phase wait for `bytes` bytes of copies, too."""

    barrier: Barrier
    bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits until the phase with parity `phase` has completed."""

    barrier: Barrier
    phase: ir.Expr


@dataclass(frozen=True, slots=True)
class Arrive:
    """Arrives once for every warpgroup of `threads`, or, in a `One`, once."""

    barrier: Barrier
    threads: ThreadTensor | None


@dataclass(frozen=True, slots=True)
class Fence:
    """Makes earlier stores of this thread visible to TMA copies and warpgroup products after the next barrier."""


@dataclass(frozen=True, slots=True)
class WaitProducts:
    """Waits until at most `groups` groups of warpgroup products are pending."""

    groups: int


Node = (
    Spec | Sync | Commit | WaitCopies | Allocate | Loop | When | Let | Role | One | SyncPart | MakeBarriers | Expect
    | Wait | SyncCluster | Arrive | Fence | WaitProducts | SetRegisterCount
)  # fmt: skip
BODIES = (Loop, When, Let, Role, One)
"""The nodes with a body, except specs."""


@dataclass(frozen=True, slots=True)
class Program:
    """A traced tile kernel, for given sizes and a target.

    Attributes:
        name: the name of the kernel.
        arguments: the buffers of the outputs, then of the inputs. outputs: the number of outputs.
        blocks, threads: the launch configuration. names: each coordinate of a block, with its expression.
        body: the code of a block.
        maps: the tensor maps, to which statements refer by index.
        boxed: shared buffers that TMA or warpgroup products access: they consist of panels of 128 bytes.
        cluster: the number of neighboring blocks in a cluster.
    """

    name: str
    arguments: tuple[ir.Buffer, ...]
    outputs: int
    blocks: int
    threads: int
    names: tuple[tuple[str, ir.Expr], ...]
    body: tuple[Node, ...]
    maps: tuple[ir.TensorMap, ...] = ()
    boxed: frozenset[str] = frozenset()
    cluster: int = 1
