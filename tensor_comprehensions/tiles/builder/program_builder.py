"""The builder `k` of tile kernels: each call adds a node to the program that is being traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...core.dtypes import FLOAT32, DType
from ...core.errors import ArgumentError
from ...layouts.layout import IntTuple, flatten_tuple
from ...loop_ir import build
from ...loop_ir.atoms import WARP
from ...loop_ir.nodes import Space
from .. import specs
from ..lower.pointwise import broadcast_shape, reduced_tile, spread_tile, with_dtype
from ..lower.roles import every_node
from ..lower.tensor_core_products import ROUNDED, SUMS, accumulator, left_fragment, plan_product
from ..lower.warpgroup_products import (
    are_warpgroups,
    group_left_fragment,
    plan_warpgroups,
    thread_range,
    warpgroup_accumulator,
)
from ..tensors import DTYPE_SPELLING, ThreadTensor
from .barriers import Barrier
from .control_flow_builder import ControlFlowBuilder
from .indices import Index
from .tile_views import MapOperand, MemoryView, Operand, Positions, RegisterFragment
from .warp_role_builder import BLOCK_ID, check_group, tile_coordinates


class ProgramBuilder(ControlFlowBuilder):
    """Builds the program of a block; see `docs/tiles.md`."""

    # --- blocks and threads --------------------------------------------------------------------------------------

    def blocks(self, tensor: MemoryView, *, group: int = 1) -> tuple[Index, ...]:
        """Launch a block for each tile in the outermost level of `tensor`, and return the coordinates of its tile.

        Args:
            group: the number of tile rows that consecutive blocks cover together, so that concurrent blocks share
                operands; rounded down to a divisor of the number of rows.
        """
        if self._mapped:
            raise ArgumentError(
                f"cannot map blocks to {tensor}", expected="a tiled tensor, once in a kernel",
                found="blocks are mapped already",
            )  # fmt: skip
        check_group(group)
        found = tile_coordinates(BLOCK_ID, self._outer_sizes(tensor), group, self.cluster)
        self._mapped, self.num_blocks = True, tensor.count
        self.names = [(f"block_{n}", e) for n, e in enumerate(found)]
        return tuple(Index(build.var(name)) for name, _ in self.names)

    # --- memories ------------------------------------------------------------------------------------------------

    def shared(self, name: str, shape: Sequence[IntTuple], dtype: DType) -> MemoryView:
        """Allocate a tensor in the block's shared memory. Its swizzle is derived from its accesses."""
        _check_memory(name, shape, dtype)
        made = MemoryView.of(self._fresh_name(name), tuple(shape), dtype, Space.SHARED)
        self._make(made)
        return made

    def registers(
        self, name: str, shape: Sequence[IntTuple], dtype: DType, *, by: ThreadTensor, vector: int = 1
    ) -> RegisterFragment:
        """Allocate a tile in registers, distributed over the innermost level of `by` in vectors of `vector` values."""
        _check_memory(name, shape, dtype)
        group, plain = by.parts[-1].size, build.integer(by.offset) == 0
        rows, columns = (1, *shape)[-2:]
        good = plain and by.levels[-1].flat == ((group, 1),) and isinstance(rows, int) and isinstance(columns, int)
        if not good or WARP % group:
            raise ArgumentError(f"cannot spread {name}:{tuple(shape)} over {by}", expected="the lanes of warps")
        assert isinstance(rows, int)
        assert isinstance(columns, int)
        return self.allocate(spread_tile(self._fresh_name(name), (rows, columns), dtype, group, vector))

    def accumulator(
        self, name: str, shape: tuple[IntTuple, IntTuple], left: Operand, right: Operand, *, by: ThreadTensor
    ) -> RegisterFragment:
        """Allocate an accumulator for products of `left` and `right`, laid out over the warps `by` as for `mma`."""
        _check_tiles(left, right)
        if left.dtype != right.dtype:
            raise ArgumentError(
                f"{name} has factors of two types", expected="one",
                found=f"{DTYPE_SPELLING[left.dtype]} and {DTYPE_SPELLING[right.dtype]}",
            )  # fmt: skip
        _check_memory(name, shape, left.dtype)
        if len(shape) != 2:
            raise ArgumentError(f"{name} has no rows and columns", found=repr(shape))
        rows, columns = shape
        if are_warpgroups(by):
            groups = plan_warpgroups((rows, columns), by, self.target)
            total = SUMS.get(left.dtype, FLOAT32)
            return self.allocate(warpgroup_accumulator(self._fresh_name(name), (rows, columns), groups, total))
        total = SUMS.get(left.dtype, FLOAT32)
        return self.allocate(
            accumulator(self._fresh_name(name), (rows, columns), plan_product((rows, columns), by), total)
        )

    def fragment(
        self, name: str, shape: tuple[int, int], dtype: DType, operand: str, *, by: ThreadTensor
    ) -> RegisterFragment:
        """Allocate a left factor (operand "A") in registers, laid out over the warps `by` as for `mma`."""
        _check_memory(name, shape, dtype)
        if len(shape) != 2 or not all(isinstance(n, int) for n in shape):
            raise ArgumentError(f"{name} has no rows and columns", found=repr(shape))
        if operand != "A":
            raise ArgumentError(f"{name} is no fragment", expected="'A'", found=repr(operand))
        if are_warpgroups(by):
            return self.allocate(group_left_fragment(self._fresh_name(name), shape, dtype, by, self.target))
        return self.allocate(left_fragment(self._fresh_name(name), shape, dtype, by))

    # --- specs ---------------------------------------------------------------------------------------------------

    def move(
        self, to: Operand, source: Operand, *, by: ThreadTensor | None = None, done: Barrier | None = None,
        multicast: bool = False,
    ) -> Any:  # fmt: skip
        """Copy a tile, rounding if the types differ. Global to shared memory is asynchronous: see `wait_copies`.

        done: copy by TMA, started by one thread, and count the bytes on this barrier.
        multicast: each block of the cluster copies a part of the rows of the same tile to all of them.
        """
        done = self._done if done is None else done
        if done is not None:
            self._check_barrier(done)
            if not self._one:
                raise ArgumentError("all threads would begin the same copy", expected="k.move(done=) in k.one()")
        if multicast and (done is None or self.cluster == 1):
            raise ArgumentError(
                "only blocks of a cluster copy for each other", expected="k.clusters(2), and k.move(done=) in k.one()"
            )
        blocks = self.cluster if multicast else 1
        threads = self._threads(by, (to, source))
        return self._add_checked_spec(specs.Move((to,), (source,), threads, done=done, blocks=blocks))

    def matmul(
        self, total: RegisterFragment, a: Operand, b: MemoryView, *, by: ThreadTensor | None = None,
        first: bool = False, products: str = "",
    ) -> RegisterFragment:  # fmt: skip
        """Add `a @ b.T` to `total`, or overwrite it if `first`. `a` is M x K, `b` is N x K.

        products: "tf32" to round float32 factors to tf32; without it, float32 factors are refused.
        """
        if products not in ("", ROUNDED):
            raise ArgumentError("k.matmul has no such products", expected=f"'' or '{ROUNDED}'", found=repr(products))
        self._add_checked_spec(
            specs.MatMul((total,), (a, b), self._threads(by, (total,)), first=first, products=products)
        )
        return total

    def map(
        self, function: Callable[..., Any], *inputs: MapOperand, out: Operand | None = None, dtype: DType = FLOAT32
    ) -> Any:
        """Apply a pointwise function to tiles, with broadcasting; 16-bit floats are converted to float32 first."""
        if not callable(function) or not isinstance(dtype, DType):
            raise ArgumentError("a map takes a function of tiles, and gives a type", found=f"{function!r}, {dtype!r}")
        tiles = tuple(x for x in inputs if not isinstance(x, Positions))
        _check_tiles(*tiles, *(() if out is None else (out,)))
        positions = tuple((n, x) for n, x in enumerate(inputs) if isinstance(x, Positions))
        for _, x in positions:
            self._check_alive(x.tile)
        out = out if out is not None else self._result(inputs, dtype)
        threads = self._threads(None, (out, *tiles))
        return self._add_checked_spec(specs.Map((out,), tiles, threads, function=function, positions=positions))

    def reduce(self, op: str, x: RegisterFragment, *, axis: int = 1) -> RegisterFragment:
        """Reduce each row (axis 1) or column (axis 0) by `+`, `*`, `min` or `max`."""
        if op not in ("+", "*", "min", "max") or axis not in (0, 1) or not isinstance(x, RegisterFragment):
            raise ArgumentError(f"cannot reduce {x} by {op!r} along {axis}", expected="+, *, min or max along 0 or 1")
        tile = self.allocate(reduced_tile(x, axis, self._fresh_name(f"{x.name}_reduced"))[0])
        self._add_checked_spec(specs.Reduce((tile,), (x,), self._threads(None, (x,)), op=op, axis=axis))
        return tile

    def shfl(self, x: RegisterFragment, mask: int) -> RegisterFragment:
        """Butterfly shuffle: each value of the new tile is that of `x` in the lane `lane ^ mask`."""
        if not isinstance(x, RegisterFragment) or x.dtype != FLOAT32:
            raise ArgumentError("lanes exchange values of tiles in registers", expected="fp32", found=str(x))
        if type(mask) is not int or not 0 < mask < WARP:
            raise ArgumentError(f"lanes of {x} cannot exchange values", expected="a mask of 1 to 31", found=repr(mask))
        tile = self.allocate(with_dtype(x, self._fresh_name(f"{x.name}_shfl"), FLOAT32))
        self._add_checked_spec(specs.Shuffle((tile,), (x,), self._threads(None, (x,)), mask=mask))
        return tile

    @contextmanager
    def spec(
        self, name: str, outputs: Sequence[Operand], inputs: Sequence[Operand] = (), *, by: ThreadTensor | None = None
    ) -> Iterator[None]:
        """A spec with a user-written decomposition: `with k.spec("Move", [to], [source]): ...`.

        If the name is "Move" or "MatMul", `kernel.check()` proves that the body implements it. Others are only labels.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError("a spec needs a name", expected="an identifier", found=repr(name))
        sides = [tuple(x) if isinstance(x, Sequence) else (x,) for x in (outputs, inputs)]
        _check_tiles(*(x for side in sides for x in side))
        if name in _SIDES and tuple(map(len, sides)) != _SIDES[name]:
            raise ArgumentError(f"a {name} has other operands", expected=f"{_SIDES[name]} outputs and inputs")
        threads = self._threads(by, sides[0])
        for x in sides[1]:
            self._check_alive(x)
        if self._one:
            raise ArgumentError(f"{name} stands in k.one()", expected="threads that execute it together")
        made = {"Move": specs.Move, "MatMul": specs.MatMul}.get(name, partial(specs.Named, name=name))

        def close(body: tuple[specs.Node, ...]) -> specs.Node:
            for n in every_node(body):
                other = isinstance(n, specs.Spec) and thread_range(n.threads) != thread_range(threads)
                if other or isinstance(n, specs.Role) or not body:
                    raise ArgumentError(f"the body of {name} is for other threads", expected=str(threads))
            return made(sides[0], sides[1], threads, body)

        with self._collect_body("k.spec", close):
            yield

    def init(self, x: RegisterFragment, value: float) -> RegisterFragment:
        """Fill a tile in registers with a constant."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(x, RegisterFragment):
            raise ArgumentError("only tiles in registers are set to numbers", found=f"{x}, {value!r}")
        self._add_checked_spec(specs.Init((x,), (), self._threads(None, (x,)), value=float(value)))
        return x

    # --- helpers -------------------------------------------------------------------------------------------------

    def _result(self, inputs: Sequence[MapOperand], dtype: DType) -> RegisterFragment:
        """A new tile for the result of a map, distributed like an input in registers with the shape of the result."""
        shape = broadcast_shape(inputs)
        tiles = [x for x in inputs if isinstance(x, RegisterFragment)]
        fitting = [x for x in tiles if x.sizes == shape]
        if not fitting:
            raise ArgumentError(
                "a map has no tile in registers of the size of its result", expected=f"one of {shape}, or out=",
                found=", ".join(map(str, inputs)),
            )  # fmt: skip
        return self.allocate(with_dtype(fitting[0], self._fresh_name(f"{fitting[0].name}_map"), dtype))


_SIDES = {"Move": (1, 1), "MatMul": (1, 2)}
"""The number of (outputs, inputs) of the specs whose bodies `kernel.check()` proves."""


def _check_tiles(*tiles: object) -> None:
    for x in tiles:
        if not isinstance(x, MemoryView | RegisterFragment):
            raise ArgumentError("this is no tile", expected="a tensor, or a tile of this kernel", found=repr(x))


def _check_memory(name: object, shape: object, dtype: object) -> None:
    """Check the name, shape and type of a tensor. Raises ArgumentError."""
    sizes = flatten_tuple(tuple(shape)) if _is_shape(shape) else ()  # type: ignore[arg-type]
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError("a tensor needs a name", expected="an identifier", found=repr(name))
    if not sizes or min(sizes) < 1:
        raise ArgumentError(f"{name} has no such shape", expected="sizes of 1 or more", found=repr(shape))
    if not isinstance(dtype, DType):
        raise ArgumentError(f"{name} has no such type", expected="a type such as t.fp16", found=repr(dtype))


def _is_shape(x: object) -> bool:
    return isinstance(x, tuple | list) and all(type(n) is int or (isinstance(n, tuple) and _is_shape(n)) for n in x)
