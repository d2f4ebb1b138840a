"""The nodes of a tile program, frozen: specs say what a group of threads computes, from which tiles to which.

As in "Graphene: An IR for Optimized Tensor Computations on GPUs" (ASPLOS 2023), section 3: a spec has outputs, inputs,
the threads that execute it and, once it is decomposed, a body of specs on smaller tiles; a leaf is an instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..loop_ir import nodes as ir
from .tensors import ThreadTensor
from .tile_views import MemoryView, Operand, RegisterFragment


@dataclass(frozen=True, slots=True)
class Spec:
    """What all specs have.

    Attributes:
        outputs, inputs: the tiles.
        threads: those of the block, or of the group that computes it together.
        body: its decomposition; empty: it is none, or not decomposed yet.
    """

    outputs: tuple[Operand, ...]
    inputs: tuple[Operand, ...]
    threads: ThreadTensor
    body: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Move(Spec):
    """The output gets what is in the input, rounded if its type asks for that."""


@dataclass(frozen=True, slots=True)
class MatMul(Spec):
    """The output gets `A @ B.T` added, or `first` set, for inputs A: M x K and B: N x K."""

    first: bool = False


@dataclass(frozen=True, slots=True)
class Map(Spec):
    """A pointwise function of the inputs, which are broadcast."""

    function: Callable[..., Any] = field(default=lambda x: x)


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
class Leaf(Spec):
    """A spec that one atom, or plain loads and stores of each thread, computes.

    Attributes:
        kind: of the spec.
        atom: its name in `loop_ir.atoms`, or another name of the instruction.
        statement: what a thread does.
    """

    kind: str = "Move"
    atom: str = ""
    statement: ir.Stmt = field(default=ir.Block(()))


@dataclass(frozen=True, slots=True)
class Sync:
    """All threads of the block meet, and see what each of them wrote."""


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
    stop: int
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class When:
    """The body where a condition holds that all threads of the block agree on."""

    condition: ir.Expr
    body: tuple[Node, ...]


Node = Spec | Sync | Commit | WaitCopies | Allocate | Loop | When


@dataclass(frozen=True, slots=True)
class Program:
    """A tile kernel for given sizes and a target.

    Attributes:
        name: of the kernel.
        arguments: the buffers of outputs, then of inputs. outputs: how many there are.
        blocks, threads: of the launch. names: what blocks are called, and the expression of each.
        body: what every block does.
    """

    name: str
    arguments: tuple[ir.Buffer, ...]
    outputs: int
    blocks: int
    threads: int
    names: tuple[tuple[str, ir.Expr], ...]
    body: tuple[Node, ...]
