"""The nodes of a tile program, frozen: specs of computations by a group of threads on tiles.

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
        outputs, inputs: the tiles.
        threads: those of the block, or of the group that computes it together.
        body: its decomposition; empty for a leaf, or if not decomposed yet.
    """

    outputs: tuple[Operand, ...]
    inputs: tuple[Operand, ...]
    threads: ThreadTensor
    body: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Move(Spec):
    """Copies the input to the output, rounded if the types differ.

    done: the barrier whose phase ends with the bytes of the asynchronous copy.
    blocks: of the cluster, each of which copies a part of the rows to all of them.
    """

    done: Barrier | None = None
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class MatMul(Spec):
    """The output gets `A @ B.T` added, or `first` set, for inputs A: M x K and B: N x K.

    products: "tf32": factors of float32 are rounded to it.
    """

    first: bool = False
    products: str = ""


@dataclass(frozen=True, slots=True)
class Map(Spec):
    """A pointwise function of the inputs, which are broadcast.

    positions: further arguments, each with its position.
    """

    function: Callable[..., Any] = field(default=lambda x: x)
    positions: tuple[tuple[int, Positions], ...] = ()


@dataclass(frozen=True, slots=True)
class Reduce(Spec):
    """The input combined along an axis by `op`: `+`, `*`, `min` or `max`."""

    op: str = "+"
    axis: int = 1


@dataclass(frozen=True, slots=True)
class Init(Spec):
    """The output becomes a number."""

    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Shuffle(Spec):
    """Exchanges values: each value of the output is that of the lane whose number differs in the bits of a mask."""

    mask: int = 1


@dataclass(frozen=True, slots=True)
class Named(Spec):
    """A spec with a user's name and body."""

    name: str = ""


@dataclass(frozen=True, slots=True)
class Leaf(Spec):
    """A spec that one atom, or plain loads and stores of each thread, computes.

    Attributes:
        kind: of the spec.
        atom: its name in `loop_ir.atoms`, or another name of the instruction.
        statement: the code of a thread.
    """

    kind: str = "Move"
    atom: str = ""
    statement: ir.Stmt = field(default=ir.Block(()))


@dataclass(frozen=True, slots=True)
class Sync:
    """A barrier: all threads of the block meet, and see each other's stores."""


@dataclass(frozen=True, slots=True)
class SyncCluster:
    """A barrier of all threads of all blocks of a cluster."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The copies that this thread has begun become a group."""


@dataclass(frozen=True, slots=True)
class WaitCopies:
    """Wait until at most `groups` groups of copies are not done."""

    groups: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """A tile exists from here to the end of the body that this is in."""

    tile: MemoryView | RegisterFragment


@dataclass(frozen=True, slots=True)
class Loop:
    """The body for each number from 0 to `stop`."""

    var: str
    stop: int | ir.Expr
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class When:
    """The body where a condition holds that all threads of the block, or of the role, agree on."""

    condition: ir.Expr
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Let:
    """The body with names for values."""

    names: tuple[tuple[str, ir.Expr], ...]
    body: tuple[Node, ...]


# --- roles and barriers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Role:
    """A body for some warpgroups of the block; registers: of each thread from there on, 0 for no change."""

    threads: ThreadTensor
    registers: int
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class MoveRegisters:
    """Sets the number of registers of each thread of the role, more or fewer than before."""

    count: int
    grows: bool


@dataclass(frozen=True, slots=True)
class One:
    """A body for one of the threads that come here."""

    threads: ThreadTensor
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class SyncPart:
    """Threads of the block, the first and how many, meet at the barrier with a number from 1 to 15; 0: not chosen."""

    threads: tuple[int, int]
    number: int = 0


@dataclass(frozen=True, slots=True)
class MakeBarriers:
    """Barriers in shared memory exist from here on."""

    barriers: BarrierArray


@dataclass(frozen=True, slots=True)
class Expect:
    """Arrive, and let the phase wait for this many bytes of copies, too."""

    barrier: Barrier
    bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the phase of a parity has ended."""

    barrier: Barrier
    phase: ir.Expr


@dataclass(frozen=True, slots=True)
class Arrive:
    """Arrive once for every warpgroup that comes here, or, in a `One`, once."""

    barrier: Barrier
    threads: ThreadTensor | None


@dataclass(frozen=True, slots=True)
class Fence:
    """Makes earlier stores of this thread visible to boxes and products of warpgroups after the next barrier."""


@dataclass(frozen=True, slots=True)
class WaitProducts:
    """Waits for all but this many of the last groups of products."""

    groups: int


Node = (
    Spec | Sync | Commit | WaitCopies | Allocate | Loop | When | Let | Role | One | SyncPart | MakeBarriers | Expect
    | Wait | SyncCluster | Arrive | Fence | WaitProducts | MoveRegisters
)  # fmt: skip
BODIES = (Loop, When, Let, Role, One)
"""The nodes that hold others."""


@dataclass(frozen=True, slots=True)
class Program:
    """A tile kernel for given sizes and a target.

    Attributes:
        name: of the kernel.
        arguments: the buffers of outputs, then of inputs. outputs: the number of outputs.
        blocks, threads: of the launch. names: the coordinates of a block, and the expression of each.
        body: the code of a block.
        maps: the tensor maps, which statements name by their position.
        boxed: shared buffers that boxes, or products of warpgroups, access: they consist of panels of 128 bytes.
        cluster: so many neighboring blocks form a cluster.
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
