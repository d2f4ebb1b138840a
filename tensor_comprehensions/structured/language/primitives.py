"""Schedules: composable values that say how to lower a structured op.

    tile(m=288, n=128, k=512) >> tile(m=12, n=32) >> pack(A="m1", B="n1") >> vectorize("n") >> unroll(k=4)

`a >> b` applies `a`, then `b`; `a | b` leaves the choice to the cost model or to a search (`>>` binds tighter than
`|`). Iterators have the names of the def's indices. The second `tile` of an iterator `m` makes the loop `m2` (`m.2` if
an iterator is called `m2`), counted from the outside. `repr` gives the expression back. `apply_primitives.py` defines
the effect of each primitive on an op.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from keyword import iskeyword

from ...core.errors import ArgumentError

Sizes = tuple[tuple[str, int], ...]
MAX_TEXT_LENGTH = 1 << 16
"""Most characters of a schedule as text; longer texts are rejected without parsing."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Adds one tile loop per iterator, in this order, inside the loops of earlier tilings."""

    sizes: Sizes

    def __str__(self) -> str:
        return f"tile({_print_keyword_arguments(self.sizes)})"


@dataclass(frozen=True, slots=True)
class Interchange:
    """Reorders the named loops among their positions."""

    loops: tuple[str, ...]

    def __str__(self) -> str:
        return f"interchange({' '.join(self.loops)!r})"


@dataclass(frozen=True, slots=True)
class Pack:
    """Packs the part of a factor that one iteration of a loop reads, in the order of the reads; None: all of it."""

    operand_loops: tuple[tuple[str, str | None], ...]

    def __str__(self) -> str:
        whole = [repr(name) for name, loop in self.operand_loops if loop is None]
        parts = _print_keyword_arguments(pair for pair in self.operand_loops if pair[1] is not None)
        return f"pack({', '.join([*whole, *filter(None, [parts])])})"


@dataclass(frozen=True, slots=True)
class Pad:
    """Pads the remainder tiles of these packed factors: their panels have zeros past the end."""

    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"pad({', '.join(map(repr, self.operands))})"


@dataclass(frozen=True, slots=True)
class Peel:
    """Generates separate code for the remainder tile of these loops, instead of a branch in the loop."""

    loops: tuple[str, ...]

    def __str__(self) -> str:
        return f"peel({', '.join(map(repr, self.loops))})"


@dataclass(frozen=True, slots=True)
class Vectorize:
    """Vectorizes along an iterator; the points of the innermost tiles are registers.

    iterator: None chooses the longest along which the output is contiguous. lanes: 0 chooses from the target.
    vectors_per_register: number of adjacent vectors of a panel that share a register.
    """

    iterator: str | None = None
    lanes: int = 0
    vectors_per_register: int = 1

    def __str__(self) -> str:
        parts = [repr(self.iterator)] if self.iterator is not None else []
        parts += [f"lanes={self.lanes}"] if self.lanes else []
        parts += [f"vectors_per_register={self.vectors_per_register}"] if self.vectors_per_register > 1 else []
        return f"vectorize({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Unroll:
    """Unrolls reductions inside the register tile by a factor; 0: completely."""

    factors: Sizes

    def __str__(self) -> str:
        whole = [repr(name) for name, factor in self.factors if not factor]
        return (
            f"unroll({', '.join([*whole, *filter(None, [_print_keyword_arguments(f for f in self.factors if f[1])])])})"
        )


@dataclass(frozen=True, slots=True)
class Parallel:
    """Fuses the outermost loops into one whose iterations the threads share.

    grain_size: least number of iterations per thread; 0 chooses from the work of an iteration.
    """

    loops: tuple[str, ...]
    grain_size: int = 0

    def __str__(self) -> str:
        parts = [repr(name) for name in self.loops]
        return f"parallel({', '.join([*parts, *([f'grain_size={self.grain_size}'] if self.grain_size else [])])})"


@dataclass(frozen=True, slots=True)
class NontemporalStores:
    """Writes the output with non-temporal stores, which bypass the caches."""

    def __str__(self) -> str:
        return "nontemporal_stores()"


@dataclass(frozen=True, slots=True)
class MatrixInstruction:
    """Computes the register tile with a matrix instruction, which has its own tile registers."""

    instruction: str = ""

    def __str__(self) -> str:
        return f"matrix_instruction({self.instruction!r})" if self.instruction else "matrix_instruction()"


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Prefetches the part of a factor that the next iteration of a loop reads."""

    operand_loops: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"prefetch({_print_keyword_arguments(self.operand_loops)})"


@dataclass(frozen=True, slots=True)
class PackOutput:
    """Keeps the results of one iteration of a loop in a panel, and stores them when they are complete."""

    loop: str

    def __str__(self) -> str:
        return f"pack_output({self.loop!r})"


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice between several schedules."""

    options: tuple[Schedule, ...]

    def __str__(self) -> str:
        return f"({' | '.join(str(option) for option in self.options)})"


Primitive = (
    Tile
    | Interchange
    | Pack
    | Pad
    | Peel
    | Vectorize
    | Unroll
    | Parallel
    | NontemporalStores
    | MatrixInstruction
    | Prefetch
    | PackOutput
    | Choice
)


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """Primitives in the order in which they apply."""

    primitives: tuple[Primitive, ...] = ()

    def __rshift__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        return Schedule((*self.primitives, *other.primitives))

    def __or__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        return Schedule((Choice((*self._options(), *other._options())),))

    def __repr__(self) -> str:
        if len(self.primitives) == 1 and isinstance(self.primitives[0], Choice):
            return str(self.primitives[0])[1:-1]
        return " >> ".join(map(str, self.primitives)) or "Schedule()"

    def alternatives(self) -> Iterator[Schedule]:
        """All schedules without choices that this one offers, in order."""
        parts = [
            [chosen for option in piece.options for chosen in option.alternatives()]
            if isinstance(piece, Choice)
            else [Schedule((piece,))]
            for piece in self.primitives
        ]
        for combination in product(*parts):
            yield Schedule(tuple(piece for part in combination for piece in part.primitives))

    def _options(self) -> tuple[Schedule, ...]:
        match self.primitives:
            case (Choice(options),):
                return options
        return (self,)


def parse_schedule(text: str) -> Schedule:
    """Parse a schedule from Python syntax. Nothing is evaluated. Raises ArgumentError."""
    if len(text) > MAX_TEXT_LENGTH:
        raise ArgumentError(f"a schedule has {len(text)} characters", expected=f"at most {MAX_TEXT_LENGTH}")
    try:
        return _evaluate_node(ast.parse(text.strip(), mode="eval").body)
    except (RecursionError, MemoryError):  # deep nesting, with a frame for each level
        raise ArgumentError("a schedule nests too deep", expected="primitives, one after the other") from None
    except (SyntaxError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{text!r} is not a schedule: {error}", expected='such as tile(m=8, n=32) >> pack(B="n1")'
        ) from error


def _evaluate_node(node: ast.expr) -> Schedule:
    match node:
        case ast.BinOp(left=left, op=ast.RShift(), right=right):
            return _evaluate_node(left) >> _evaluate_node(right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _evaluate_node(left) | _evaluate_node(right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _WRITTEN:
            named = {k.arg: ast.literal_eval(k.value) for k in keywords if k.arg is not None}
            for k in keywords:
                named |= {} if k.arg is not None else ast.literal_eval(k.value)
            return _WRITTEN[name](*map(ast.literal_eval, args), **named)
    raise ValueError(f"{ast.unparse(node)} is none of {', '.join(_WRITTEN)}, >> and |")


# --- constructors ------------------------------------------------------------------------------------------------


def tile(**sizes: int) -> Schedule:
    """Add one tile loop per iterator, in the order written, inside all earlier tile loops: `tile(m=48, n=64)`."""
    _check_numbers("tile", sizes, least=1)
    if not sizes:
        raise ArgumentError("tile() has no sizes", suggestion="name iterators: tile(m=12, n=32)")
    return Schedule((Tile(tuple(sizes.items())),))


def interchange(loops: str) -> Schedule:
    """Reorder loops: `interchange("m1 k1 n1")`. The name of an iterator stands for its innermost loop."""
    names = tuple(loops.split())
    if len(set(names)) < max(2, len(names)):
        raise ArgumentError(f"interchange({loops!r})", expected="the names of two or more loops, with blanks between")
    return Schedule((Interchange(names),))


def pack(*whole: str, **factors: str) -> Schedule:
    """Copy the part of A that one iteration of `m1` reads, `pack(A="m1")`, or all of A, `pack("A")`.

    The panel has the order of the reads. An operand has the name of its tensor, or `left` or `right`.
    """
    named = (*((name, None) for name in whole), *factors.items())
    _check_names("pack", [name for name, _ in named], "the names of tensors")
    return Schedule((Pack(named),))


def pad(*factors: str) -> Schedule:
    """Pad the remainder tile along a packed operand: its panel has zeros past the end.

    Results past the end are computed but not stored, so that one micro-kernel serves all tiles.
    """
    _check_names("pad", factors, "the names of packed tensors")
    return Schedule((Pad(factors),))


def peel(*loops: str) -> Schedule:
    """Generate separate code for the remainder tile of loops, so that the loops need no condition.

    The name of an iterator stands for its innermost loop.
    """
    _check_names("peel", loops, "the names of loops")
    return Schedule((Peel(loops),))


def vectorize(iterator: str | None = None, *, lanes: int = 0, vectors_per_register: int = 1) -> Schedule:
    """Vectorize along `iterator`, and keep the points of the innermost tiles in registers.

    Args:
        iterator: by default, the longest along which the output is contiguous.
        lanes: a power of two; 0 chooses from the target.
        vectors_per_register: vectors of a packed operand, also of adjacent rows, that share a register. With `lanes=8,
            vectors_per_register=2`, rows of 24 points leave no lane of 16 idle.
    """
    _check_numbers("vectorize", {"lanes": lanes}, least=0)
    _check_numbers("vectorize", {"vectors_per_register": vectors_per_register}, least=1)
    for name, count in (("lanes", lanes), ("vectors_per_register", vectors_per_register)):
        if count & (count - 1):
            raise ArgumentError(f"vectorize has {name}={count}", expected="a power of two")
    return Schedule((Vectorize(iterator, lanes, vectors_per_register),))


def unroll(*whole: str, **factors: int) -> Schedule:
    """Unroll a reduction by a factor, `unroll(k=4)`, or completely, `unroll("k")`."""
    _check_numbers("unroll", factors, least=1)
    _check_names("unroll", [*whole, *factors], "the names of reductions")
    return Schedule((Unroll((*((name, 0) for name in whole), *factors.items())),))


def parallel(*loops: str, grain_size: int = 0) -> Schedule:
    """Run the outermost loops, `parallel("n1", "m1")`, on all threads.

    grain_size: least number of iterations per thread; 0 chooses from the work of an iteration.
    """
    _check_numbers("parallel", {"grain_size": grain_size}, least=0)
    _check_names("parallel", loops, "the names of the outermost loops")
    return Schedule((Parallel(loops, grain_size),))


def nontemporal_stores() -> Schedule:
    """Write the output with non-temporal stores, which bypass the caches.

    For large outputs that are not read soon. Only whole cache lines benefit.
    """
    return Schedule((NontemporalStores(),))


def matrix_instruction(instruction: str = "") -> Schedule:
    """Compute the register tile with a matrix instruction (AMX), if the processor has one.

    Without a name, it is the first instruction for operands of these types. Register tiles consist of whole matrix
    tiles; the last one is padded with zeros. Pack the vectorized operand, and the other one unless it already has the
    layout in memory that the instruction reads.
    """
    if not isinstance(instruction, str):
        raise ArgumentError(f"matrix_instruction has {instruction!r}", expected="the name of an instruction, or none")
    return Schedule((MatrixInstruction(instruction),))


def prefetch(**factors: str) -> Schedule:
    """Prefetch the rows of B that the next iteration of `n1` reads: `prefetch(B="n1")`.

    For operands that are contiguous along the lanes and do not fit into L2. Operands have the same names as in `pack`.
    """
    _check_names("prefetch", list(factors), "the names of tensors, each with a loop's")
    return Schedule((Prefetch(tuple(factors.items())),))


def pack_output(loop: str) -> Schedule:
    """Keep the results of one iteration of `m1` in a panel, and store them when they are complete: `pack_output("m1")`.

    For lanes across the rows of the output: the stores transpose the panel, so that no operand has to be transposed.
    """
    _check_names("pack_output", [loop], "the name of a loop")
    return Schedule((PackOutput(loop),))


def _check_numbers(piece: str, values: Mapping[str, object], *, least: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ArgumentError(f"{piece} has {name}={value!r}", expected=f"a whole number, at least {least}")


def _check_names(piece: str, names: Sequence[object], expected: str) -> None:
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ArgumentError(f"{piece}({', '.join(map(repr, names))})", expected=f"{expected}, each once")


def _print_keyword_arguments(values: Iterable[tuple[str, object]]) -> str:
    """`values` (name, value) as the keyword arguments of a call."""
    parts = list(values)
    if any(iskeyword(name) or not name.isidentifier() for name, _ in parts):
        return f"**{dict(parts)!r}"
    return ", ".join(f"{name}={value!r}" for name, value in parts)


_WRITTEN: dict[str, Callable[..., Schedule]] = {
    f.__name__: f
    for f in (
        tile,
        interchange,
        pack,
        pad,
        peel,
        vectorize,
        unroll,
        parallel,
        nontemporal_stores,
        matrix_instruction,
        prefetch,
        pack_output,
        Schedule,
    )
}
"""The functions that `parse_schedule` accepts."""
