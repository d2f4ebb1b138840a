"""The nodes of the loop program, which every lowering produces and every emitter prints.

Values are scalars or explicit vectors (a lane count on the type). Loops are structured. Memory is accessed only
by `Load`, `Store` and intrinsics on buffers, whose shapes and strides are static except for dynamic dimensions. Nodes
are immutable, compare by value, and their `repr` evaluates back to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod

from ..core.dtypes import BOOL, INT64, DType
from ..core.errors import InternalError
from ..core.memory_layout import storage_extent
from .instructions import INSTRUCTIONS


@dataclass(frozen=True, slots=True)
class Type:
    """A scalar (`lanes == 1`) or a vector of `lanes` scalars."""

    dtype: DType
    lanes: int = 1

    def __str__(self) -> str:
        return self.dtype.name if self.lanes == 1 else f"{self.dtype.name}x{self.lanes}"


class Space(Enum):
    """Where a buffer lives."""

    GLOBAL = "global"  # an argument of the module or one of its temporaries: visible to every thread
    SCRATCH = "scratch"  # memory private to the thread that allocates it: packed panels, contracted temporaries
    REGISTER = "register"  # elements are registers: every index is constant after unrolling
    SHARED = "shared"  # one copy for all threads of a block: only in kernels with a launch
    BARRIER = "barrier"  # mbarriers in shared memory, 64 bits each: only intrinsics access them
    FRAGMENT = "fragment"  # matrices in tile registers, numbered by the first index: only intrinsics access them


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named array. `type` is that of one element (a vector type only in registers); strides count elements.

    dynamic: the dimensions whose extents the caller's array, or the `Allocate`, determines. They are 0 in `shape`.
    extent_variables: for each dimension, the parameter of the module that holds the extent, or None; () if all are
    None, as where the array or the `Allocate` tells it. Only dynamic dimensions have one.
    stride_variables: for each dimension, the int64 variable that holds the stride, or None; () if all are None. The
    number in `strides` is then only typical.
    swizzle: (bits, base, shift) of a SHARED buffer: the element at offset x by the strides is stored at
    `x ^ ((x & mask) >> shift)`, where mask is the `bits` bits from `base + shift` on. Indices are not affected.
    """

    name: str
    type: Type
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    space: Space = Space.GLOBAL
    dynamic: tuple[int, ...] = ()
    swizzle: tuple[int, int, int] | None = None
    stride_variables: tuple[str | None, ...] = ()
    extent_variables: tuple[str | None, ...] = ()

    @property
    def span(self) -> int:
        """The number of elements from the first to the last, including gaps.

        Raises:
            InternalError: the buffer is dynamic, so its size is known only at run time.
        """
        if self.dynamic:
            raise InternalError(f"{self.name} is dynamic: its size is not known before it runs")
        return storage_extent(self.shape, self.strides)

    @property
    def static_elements(self) -> int:
        """The number of elements per index of the dynamic dimensions."""
        return prod(n for d, n in enumerate(self.shape) if d not in self.dynamic)

    def stride_variable(self, dimension: int) -> str | None:
        """The variable that holds the stride of a dimension, or None if the stride is a number."""
        return self.stride_variables[dimension] if self.stride_variables else None

    def extent_variable(self, dimension: int) -> str | None:
        """The parameter that holds the extent of a dimension, or None if it is a number or the caller's."""
        return self.extent_variables[dimension] if self.extent_variables else None

    def bind_parameters(self, values: Mapping[str, int]) -> Buffer:
        """The buffer with numbers in place of the parameters whose `values` are given by name."""
        held = (*self.extent_variables, *self.stride_variables)
        if not any(name in values for name in held if name is not None):
            return self
        extents = {d: values[name] for d, name in enumerate(self.extent_variables) if name is not None}
        strides = {d: values[name] for d, name in enumerate(self.stride_variables) if name is not None}
        return replace(
            self,
            shape=tuple(extents.get(d, n) for d, n in enumerate(self.shape)),
            strides=tuple(strides.get(d, n) for d, n in enumerate(self.strides)),
            dynamic=tuple(d for d in self.dynamic if d not in extents),
            stride_variables=(),
            extent_variables=(),
        )

    @property
    def bytes(self) -> int:
        """The number of bytes from the first element to the end of the last."""
        return self.span * self.type.dtype.size * self.type.lanes


# --- expressions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Const:
    """A literal, the same in every lane."""

    value: int | float | bool
    type: Type


@dataclass(frozen=True, slots=True)
class Var:
    """A loop variable (int64) or the name bound by a `Let`."""

    name: str
    type: Type = Type(INT64)


@dataclass(frozen=True, slots=True)
class Load:
    """`buffer[indices]`.

    Indices are int64. If an index is a vector (a `Ramp`, or data), the result has as many lanes: lane l reads the
    element at the l-th value of each index, and at the scalar ones. Scalar indices on a buffer of vectors give the
    vector. Where `mask` (bool, same lanes) is false, nothing is read and the value is 0.
    """

    buffer: Buffer
    indices: tuple[Expr, ...]
    mask: Expr | None = None

    @property
    def type(self) -> Type:
        element = self.buffer.type
        lanes = max([element.lanes, *[i.type.lanes for i in self.indices]])
        return element if lanes == element.lanes else Type(element.dtype, lanes)


@dataclass(frozen=True, slots=True)
class Unary:
    """`neg` or `not`."""

    op: str
    operand: Expr

    @property
    def type(self) -> Type:
        return self.operand.type


ARITHMETIC = ("add", "sub", "mul", "div", "mod", "min", "max", "and", "or")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True, slots=True)
class Binary:
    """`left op right`, op one of `ARITHMETIC` or `COMPARISONS`; operands share one type.

    `div` and `mod` on integers are floor division and its remainder; on floats, division and C's fmod.
    `min` and `max` on floats propagate NaN. `and` and `or` are for bool.
    """

    op: str
    left: Expr
    right: Expr

    @property
    def type(self) -> Type:
        return Type(BOOL, self.left.type.lanes) if self.op in COMPARISONS else self.left.type


@dataclass(frozen=True, slots=True)
class Select:
    """Lane by lane `condition ? then : otherwise`; both sides are evaluated (loads there carry masks)."""

    condition: Expr
    then: Expr
    otherwise: Expr

    @property
    def type(self) -> Type:
        return self.then.type


@dataclass(frozen=True, slots=True)
class Cast:
    """Conversion lane by lane: integers wrap; a float truncates to an integer and saturates, NaN to 0."""

    operand: Expr
    dtype: DType

    @property
    def type(self) -> Type:
        return Type(self.dtype, self.operand.type.lanes)


@dataclass(frozen=True, slots=True)
class Call:
    """A function of `math_functions.FUNCTIONS` or one of `instructions.INSTRUCTIONS` by name, lane by lane."""

    function: str
    arguments: tuple[Expr, ...]

    @property
    def type(self) -> Type:
        known = INSTRUCTIONS.get(self.function)
        return self.arguments[0].type if known is None else Type(known.result, self.arguments[0].type.lanes)


@dataclass(frozen=True, slots=True)
class Ramp:
    """The vector `base, base + stride, base + 2*stride, ...`; base is a scalar integer expression."""

    base: Expr
    stride: int
    lanes: int

    @property
    def type(self) -> Type:
        return Type(self.base.type.dtype, self.lanes)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A scalar in every lane."""

    operand: Expr
    lanes: int

    @property
    def type(self) -> Type:
        return Type(self.operand.type.dtype, self.lanes)


@dataclass(frozen=True, slots=True)
class Shuffle:
    """A vector of `len(lanes)` lanes: lane l is the element `lanes[l]` of `left` followed by `right`.

    Both are vectors of one type.
    """

    left: Expr
    right: Expr
    lanes: tuple[int, ...]

    @property
    def type(self) -> Type:
        return Type(self.left.type.dtype, len(self.lanes))


BITS = "bits"
"""The operator of `ReduceLanes` that packs bools."""


@dataclass(frozen=True, slots=True)
class ReduceLanes:
    """The lanes of a vector combined into a scalar with `+ * min max` (or `and`, `or` for bool), in any order.

    With `bits`, up to 64 bools are the bits of an int64, lane 0 the lowest.
    """

    op: str
    operand: Expr

    @property
    def type(self) -> Type:
        return Type(INT64 if self.op == BITS else self.operand.type.dtype)


Expr = Const | Var | Load | Unary | Binary | Select | Cast | Call | Ramp | Broadcast | Shuffle | ReduceLanes

# --- statements --------------------------------------------------------------------------------------------------


class LoopKind(Enum):
    """How the iterations of a loop run."""

    SERIAL = "for"
    PARALLEL = "parallel for"  # iterations are independent: chunks go to the threads of torch's pool
    UNROLLED = "unrolled for"  # constant trip count; replaced by copies of the body (`unroll.py`)
    VECTOR = "vector for"  # iterations are independent or reduce; becomes explicit vectors (`vectorize.py`)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a store: the names of the statements of the def that it helps to compute, and its role.

    role: its purpose if it only serves these, such as "copy of". tensor: the tensor that the role refers to.
    """

    statements: tuple[str, ...]
    role: str = ""
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class Store:
    """`buffer[indices] = value`, or with `op` in `+ * min max`, `buffer[indices] op= value`.

    Indices, lanes and mask as for `Load`. An updating store inside a VECTOR loop on whose variable the indices do
    not depend is a reduction over that loop, and the order of its combination is free.
    """

    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr
    op: str | None = None
    mask: Expr | None = None
    nontemporal: bool = False  # a hint to bypass the caches
    atomic: bool = False  # with `op`: several threads may update one element at the same time
    origin: Origin | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Loop:
    """`for var in range(start, stop, step)`; bounds are int64 expressions, step a positive constant.

    grain: for PARALLEL, the least number of iterations in a chunk. vector_factors: for VECTOR, (lanes, vectors): the
    lanes of a vector, and the vectors per iteration (interleaved accumulators). With 0 vectors, an iteration handles
    one vector under a mask, so that short loops have no remainder.
    """

    var: str
    start: Expr
    stop: Expr
    body: Stmt
    kind: LoopKind = LoopKind.SERIAL
    step: int = 1
    grain: int = 1
    vector_factors: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class While:
    """`while condition: body`, condition a scalar bool that reads values changed by `body`, mostly REGISTER elements.

    The pass that makes the loop guarantees that it ends. Every name in `condition` is bound outside of the loop.
    """

    condition: Expr
    body: Stmt


@dataclass(frozen=True, slots=True)
class If:
    """`if condition: then else: otherwise`, condition a scalar bool."""

    condition: Expr
    then: Stmt
    otherwise: Stmt | None = None


@dataclass(frozen=True, slots=True)
class Let:
    """`name = value` in `body`."""

    name: str
    value: Expr
    body: Stmt


@dataclass(frozen=True, slots=True)
class Allocate:
    """Buffers that exist during `body`, with undefined contents at first.

    SCRATCH and REGISTER buffers belong to the thread that allocates them; the iterations of a PARALLEL loop in `body`
    may share SCRATCH, like global memory. All threads of a block allocate a SHARED buffer together.
    With `lengths` (nonnegative int64), there is one buffer: dynamic SCRATCH, row-major, with these extents.
    """

    buffers: tuple[Buffer, ...]
    body: Stmt
    lengths: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """In `body`, `buffer` is a view of `rows` rows of `source` from the row `start` on.

    A row is a slice of `source` at one index of `dimension`. `length` is the number of all rows, except for at most
    `spare` last ones; the verifier proves that the window is within it. `buffer` may have another shape for the same
    elements, unless its other dimensions are dynamic. A source without dynamic dimensions is viewed as a whole, in
    another shape. All statements of a kernel must access the source through windows of one name, so that emitters know
    from names alone which buffers a store may change.
    """

    buffer: Buffer
    source: Buffer
    start: Expr
    rows: int
    length: Expr
    body: Stmt
    dimension: int = 0
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """If the scalar `condition` is false, record (`site`, `value`) as the module's failure; only the first is kept.

    Kernels after a failed one do not run; the caller turns the site into an error.
    """

    condition: Expr
    site: int
    value: Expr


@dataclass(frozen=True, slots=True)
class Invoke:
    """An intrinsic of `intrinsics.INTRINSICS` by name, on views `(buffer, indices of its first element)`.

    attributes: constants of the program. values: expressions computed at run time.
    """

    name: str
    operands: tuple[tuple[Buffer, tuple[Expr, ...]], ...]
    attributes: tuple[int, ...] = ()
    values: tuple[Expr, ...] = ()
    origin: Origin | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Block:
    """Statements one after another; the empty block does nothing."""

    body: tuple[Stmt, ...]


Stmt = Store | Loop | While | If | Let | Allocate | Window | Check | Invoke | Block

# --- programs ----------------------------------------------------------------------------------------------------


BLOCK = ("block.x", "block.y", "block.z")
"""The int64 variables with the index of a thread's block in the grid."""
THREAD = ("thread.x", "thread.y", "thread.z")
"""The int64 variables with the index of a thread in its block; x varies fastest in warps."""


@dataclass(frozen=True, slots=True)
class BlockCount:
    """How many blocks a launch has along one side of its grid: `min(most, ceil(parameter / tile))`, which may be 0.

    parameter: the parameter of the module that holds the extent. tile: the elements of it that a block takes at once.
    """

    parameter: str
    tile: int
    most: int

    def __str__(self) -> str:
        count = f"ceil({self.parameter} / {self.tile})" if self.tile > 1 else self.parameter
        return f"min({self.most}, {count})"

    def of(self, values: Mapping[str, int]) -> int:
        """The number of blocks for these values of the parameters."""
        return min(self.most, -(-values[self.parameter] // self.tile))


@dataclass(frozen=True, slots=True)
class Launch:
    """The blocks of the grid of a kernel, and the threads of each block: along x, y, z.

    cluster: the number of consecutive blocks along x that run at the same time and can access each other's shared
    memory.
    counts: for each side of the grid, how a call computes the blocks, or None where they are a number; () if all are
    numbers. `grid` then has the most blocks that a call may have.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: int = 1
    counts: tuple[BlockCount | None, ...] = ()

    def bind_parameters(self, values: Mapping[str, int]) -> Launch:
        """The launch of a call with these values of the parameters. A grid of no blocks runs nothing."""
        if not self.counts:
            return self
        x, y, z = (n if c is None else c.of(values) for n, c in zip(self.grid, self.counts, strict=True))
        return Launch((x, y, z), self.block, self.cluster)

    def ranges(self) -> Iterator[tuple[str, int]]:
        """Each variable of `BLOCK` and `THREAD` with its extent."""
        yield from zip((*BLOCK, *THREAD), (*self.grid, *self.block), strict=True)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """The content of a TMA tensor map: how boxes of a GLOBAL buffer are copied to shared memory and back.

    box: its extents, the last dimension being contiguous. swizzle: the bytes of a row in which chunks of 16 bytes are
    permuted, 128, 64 or 32; 0: no swizzle. dimensions: the (extent, stride) of each, if they are not those of the
    buffer; they may contain an element several times. rounds: whether loads round float32 to tf32.
    """

    name: str
    buffer: Buffer
    box: tuple[int, ...]
    swizzle: int
    dimensions: tuple[tuple[int, int], ...] = ()
    rounds: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent of each dimension."""
        return tuple(n for n, _ in self.dimensions) or self.buffer.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The stride of each dimension, in elements."""
        return tuple(s for _, s in self.dimensions) or self.buffer.strides

    @property
    def bytes(self) -> int:
        """The bytes of a box, including parts outside of the tensor."""
        return prod(self.box) * self.buffer.type.dtype.size


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: `body` over the module's buffers.

    With a `launch`, every thread of every block runs `body`, in which the variables of `BLOCK` and `THREAD` are
    defined.
    Threads of one block synchronize at collective intrinsics; blocks, or clusters of blocks, run in any order. The
    kernels of a module run one after another. `readonly` names GLOBAL buffers that it never writes; loads from them use
    the read-only cache if the target has one. At least `min_blocks_per_sm` blocks should be resident on a
    multiprocessor. `maps` are its tensor maps, which intrinsics name by position.
    """

    name: str
    body: Stmt
    launch: Launch | None = None
    readonly: tuple[str, ...] = ()
    min_blocks_per_sm: int = 1
    maps: tuple[TensorMap, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckSite:
    """The test of a `Check`: an index along `dimension` of `tensor`, with `extent` elements from `origin` on."""

    tensor: str
    dimension: int
    extent: int
    origin: int = 0


MOST_EXTENT = 1 << 30
"""The largest extent for which kernels of a range of sizes are made, so that most of their indices have 32 bits."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """An int64 variable of a module, which is an extent, or a stride. most: its greatest value; None: there is none.

    It is at least 0.
    """

    name: str
    most: int | None = MOST_EXTENT


@dataclass(frozen=True, slots=True)
class Module:
    """Kernels launched in order on `arguments` (GLOBAL buffers of the caller) and `temporaries` (of the library).

    The addresses of `arguments`, then of `temporaries`, in order, are the calling convention of every target.
    Temporaries are dynamic only where parameters hold their extents.
    parameters: variables that are defined in all kernels; a call gives their values.
    """

    name: str
    arguments: tuple[Buffer, ...]
    temporaries: tuple[Buffer, ...]
    kernels: tuple[Kernel, ...]
    sites: tuple[CheckSite, ...] = ()
    written: tuple[str, ...] = ()  # names of the arguments that kernels may write
    partial: frozenset[str] = frozenset()  # temporaries with meaningless elements, which may be read but not used
    parameters: tuple[Parameter, ...] = ()
