"""The state of a trace: the nodes so far, the names in use, the enclosing bodies, and the threads that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...core.errors import ArgumentError
from ...loop_ir.nodes import Buffer, Expr, Space
from ...target import GpuTarget
from .. import specs
from ..notation import threads as parse_threads
from ..tensors import ThreadTensor
from .barriers import Barrier
from .tile_views import MemoryView, Operand, RegisterFragment


class TraceState:
    """The state of a trace, which the methods of the builder extend."""

    def __init__(self, name: str, target: GpuTarget) -> None:
        self.name, self.target = name, target
        self.names: list[tuple[str, Expr]] = []
        self.num_blocks, self.num_threads, self.cluster = 1, 0, 1
        self._mapped = False
        self._body: list[specs.Node] = []
        self._taken: dict[str, int] = {}
        self._depth = 0
        self._used_ring = False
        self._open: list[set[str]] = [set()]
        self._closed: set[str] = set()
        self._made: dict[str, Buffer] = {}
        self._iterations: list[tuple[Expr, int | Expr]] = []
        self._endings: list[list[specs.Node]] = []
        self._role: ThreadTensor | None = None
        self._one = False
        self._done: Barrier | None = None
        self._left: str = ""

    def body(self) -> tuple[specs.Node, ...]:
        """The traced nodes. Raises ArgumentError if a loop was left before its end."""
        if self._left:
            raise ArgumentError(f"the body of {self._left} is left by break or return", expected="to run to its end")
        return tuple(self._body)

    def _add(self, node: specs.Node) -> None:
        self._body.append(node)

    @contextmanager
    def _collect_body(self, what: str, make: Callable[[tuple[specs.Node, ...]], specs.Node]) -> Iterator[None]:
        """Collect the nodes that the `with` block traces, and add `make(body)` to the program."""
        outer, self._body = self._body, []
        self._open.append(set())
        try:
            yield
        except GeneratorExit:
            self._left = what
            raise
        finally:
            body, self._body = tuple(self._body), outer
            self._closed |= self._open.pop()
        self._add(make(body))

    def _fresh_name(self, name: str) -> str:
        """A unique name for a tile."""
        number = self._taken[name] = self._taken.get(name, 0) + 1
        return name if number == 1 else self._fresh_name(f"{name}_{number}")

    # --- tiles ---------------------------------------------------------------------------------------------------

    def allocate(self, tile: RegisterFragment) -> RegisterFragment:
        """Add the allocation of a tile in registers, and return it."""
        self._taken.setdefault(tile.buffer.name, 1)
        self._make(tile)
        return tile

    def add_leaf(self, leaf: specs.Leaf) -> None:
        """Add an already decomposed spec."""
        self._add(leaf)

    def _make(self, tile: MemoryView | RegisterFragment) -> None:
        self._open[-1].add(tile.buffer.name)
        self._made[tile.buffer.name] = tile.buffer
        self._add(specs.Allocate(tile))

    def _add_checked_spec(self, spec: specs.Spec) -> Operand:
        for x in spec.inputs:
            self._check_alive(x)
        for x in spec.outputs:
            if isinstance(x, RegisterFragment) and x.buffer.name not in self._taken:  # `row` does not allocate its tile
                self._taken[x.buffer.name] = 1
                self._make(x)
            self._check_alive(x)
        self._add(spec)
        return spec.outputs[0]

    def _check_alive(self, x: object) -> None:
        """Raise ArgumentError unless `x` is a tile that is in scope."""
        if not isinstance(x, MemoryView | RegisterFragment):
            raise ArgumentError("this is no tile", expected="a tensor, or a tile of this kernel", found=repr(x))
        name = x.buffer.name
        if x.buffer.space is Space.GLOBAL:
            return
        if name in self._closed and not any(name in names for names in self._open):
            raise ArgumentError(f"{x} ended with the loop, branch or role that made it", suggestion="make it before")
        if self._made.get(name) != x.buffer:
            raise ArgumentError(
                f"nothing made {x}", expected="a tile of this kernel, of a name of its own, set before it is read"
            )

    def _threads(self, by: ThreadTensor | None, operands: Sequence[object] = ()) -> ThreadTensor:
        """The threads that execute a spec: `by` if given, else those of its tiles, of the role, or of the block."""
        if by is not None:
            if not isinstance(by, ThreadTensor):
                raise ArgumentError("by= takes threads", expected="a thread tensor, of k.threads", found=repr(by))
            return by
        if not self.num_threads:
            raise ArgumentError(f"{self.name} has no threads", suggestion="begin with k.threads(128)")
        for x in operands:
            if isinstance(x, RegisterFragment) and x.group is None and x.spread != (0, self.num_threads):
                first, count = x.spread
                return parse_threads(f"[{self.num_threads}].thread").split(
                    *(n for n in (first, count, self.num_threads - first - count) if n)
                )[1 if first else 0]
        return self._role or parse_threads(f"[{self.num_threads}].thread")
