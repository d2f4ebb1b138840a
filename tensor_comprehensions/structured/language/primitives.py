"""Pipelines: how a structured op is to be lowered, as values that compose.

    tile(m=288, n=128, k=512) >> tile(m=12, n=32) >> pack(A="m1", B="n1") >> vectorize("n") >> unroll(k=4)

A piece says one thing; `a >> b` is first `a`, then `b`; `a | b` leaves the choice to the cost model or to a search
(`>>` binds tighter than `|`). Iterators have the names of the def's indices, and the loop that the second `tile` of an
iterator `m` makes is `m2` (or `m.2`, where an iterator has that very name), counted from the outside. `repr` gives the
expression back. What a piece means for an op is in `apply.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from keyword import iskeyword

from ...core.errors import ArgumentError

Sizes = tuple[tuple[str, int], ...]
LONGEST = 1 << 16
"""Characters of a pipeline as a text; longer ones are refused unread."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A loop per iterator over tiles of so many points, in this order, inside the loops of earlier tiles."""

    sizes: Sizes

    def __str__(self) -> str:
        return f"tile({_keywords(self.sizes)})"


@dataclass(frozen=True, slots=True)
class Interchange:
    """The loops named take one another's places, to stand in this order."""

    loops: tuple[str, ...]

    def __str__(self) -> str:
        return f"interchange({' '.join(self.loops)!r})"


@dataclass(frozen=True, slots=True)
class Pack:
    """What the loops inside a loop read of a factor is first copied, in the order they read it; None: all of it."""

    operand_loops: tuple[tuple[str, str | None], ...]

    def __str__(self) -> str:
        whole = [repr(name) for name, loop in self.operand_loops if loop is None]
        parts = _keywords(pair for pair in self.operand_loops if pair[1] is not None)
        return f"pack({', '.join([*whole, *filter(None, [parts])])})"


@dataclass(frozen=True, slots=True)
class Pad:
    """The last tiles of what moves these packed factors alone are whole ones, zeros in the panels past the end."""

    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"pad({', '.join(map(repr, self.operands))})"


@dataclass(frozen=True, slots=True)
class Peel:
    """The last tile of the loops, where it is shorter, is code of its own after the loop, not a branch in it."""

    loops: tuple[str, ...]

    def __str__(self) -> str:
        return f"peel({', '.join(map(repr, self.loops))})"


@dataclass(frozen=True, slots=True)
class Vectorize:
    """An iterator runs along the lanes of vectors; the points of the innermost tiles are registers.

    iterator: None chooses the longest along which the output is contiguous. lanes: 0 chooses from the target.
    vectors_per_register: so many vectors that are neighbors in a panel share a register.
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
    """Reductions inside the register tile run so many steps per iteration; 0: all of them, without a loop."""

    factors: Sizes

    def __str__(self) -> str:
        whole = [repr(name) for name, factor in self.factors if not factor]
        return f"unroll({', '.join([*whole, *filter(None, [_keywords(f for f in self.factors if f[1])])])})"


@dataclass(frozen=True, slots=True)
class Parallel:
    """The outermost loops run as one loop whose iterations are shared among the threads.

    grain_size: least number of iterations worth a thread; 0 chooses from the work in one.
    """

    loops: tuple[str, ...]
    grain_size: int = 0

    def __str__(self) -> str:
        parts = [repr(name) for name in self.loops]
        return f"parallel({', '.join([*parts, *([f'grain_size={self.grain_size}'] if self.grain_size else [])])})"


@dataclass(frozen=True, slots=True)
class NontemporalStores:
    """The output is written past the caches, which its elements would only pass through."""

    def __str__(self) -> str:
        return "nontemporal_stores()"


@dataclass(frozen=True, slots=True)
class MatrixInstruction:
    """The register tile is computed by an instruction that multiplies matrices, in registers of their own."""

    instruction: str = ""

    def __str__(self) -> str:
        return f"matrix_instruction({self.instruction!r})" if self.instruction else "matrix_instruction()"


@dataclass(frozen=True, slots=True)
class Prefetch:
    """While the loops inside a loop run, what its next iteration reads of a factor is brought near."""

    operand_loops: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"prefetch({_keywords(self.operand_loops)})"


@dataclass(frozen=True, slots=True)
class PackOutput:
    """The results of the loops inside a loop are kept in a panel, as these compute them, and stored when complete."""

    loop: str

    def __str__(self) -> str:
        return f"pack_output({self.loop!r})"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several pipelines."""

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
    """Pieces in the order they apply."""

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
        """Every pipeline without a choice that this one stands for, in order."""
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
    """The pipeline that `text`, written as in Python, describes. Raises ArgumentError; runs nothing."""
    if len(text) > LONGEST:
        raise ArgumentError(f"a pipeline has {len(text)} characters", expected=f"at most {LONGEST}")
    try:
        return _evaluate_node(ast.parse(text.strip(), mode="eval").body)
    except (RecursionError, MemoryError):  # both of the nesting, with a frame for each level
        raise ArgumentError("a pipeline nests too deep", expected="pieces, one after the other") from None
    except (SyntaxError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{text!r} is no pipeline: {error}", expected='such as tile(m=8, n=32) >> pack(B="n1")'
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


# --- how pieces are written --------------------------------------------------------------------------------------


def tile(**sizes: int) -> Schedule:
    """Loops over tiles of so many points, one per iterator, in the order written, inside all earlier tile loops."""
    _check_numbers("tile", sizes, least=1)
    if not sizes:
        raise ArgumentError("tile() has no sizes", suggestion="name iterators: tile(m=12, n=32)")
    return Schedule((Tile(tuple(sizes.items())),))


def interchange(loops: str) -> Schedule:
    """Put loops in another order: `interchange("m1 k1 n1")`. The name of an iterator is its innermost loop's."""
    names = tuple(loops.split())
    if len(set(names)) < max(2, len(names)):
        raise ArgumentError(f"interchange({loops!r})", expected="the names of two or more loops, with blanks between")
    return Schedule((Interchange(names),))


def pack(*whole: str, **factors: str) -> Schedule:
    """Copy factors before they are read: `pack(A="m1")` what one iteration of `m1` reads; `pack("A")` all of it first.

    Factors have the names of their tensors; `left` and `right` name them by their places.
    """
    named = (*((name, None) for name in whole), *factors.items())
    _check_names("pack", [name for name, _ in named], "the names of tensors")
    return Schedule((Pack(named),))


def pad(*factors: str) -> Schedule:
    """Make the last register tile along a packed factor a whole one: its panel has zeros past the end.

    What lies there is computed and not stored; one micro-kernel serves all tiles.
    """
    _check_names("pad", factors, "the names of packed tensors")
    return Schedule((Pad(factors),))


def peel(*loops: str) -> Schedule:
    """Give the last, shorter tile of loops code of its own, so that the loop itself has no condition.

    The name of an iterator is that of its innermost loop.
    """
    _check_names("peel", loops, "the names of loops")
    return Schedule((Peel(loops),))


def vectorize(iterator: str | None = None, *, lanes: int = 0, vectors_per_register: int = 1) -> Schedule:
    """Keep the points of the innermost tiles in registers, those of `iterator` along the lanes of vectors.

    vectors_per_register: so many vectors of a packed factor, of several rows of it where one has few, share a
    register: rows of 24 points leave no lanes of 16 idle as `lanes=8, vectors_per_register=2`.
    """
    _check_numbers("vectorize", {"lanes": lanes}, least=0)
    _check_numbers("vectorize", {"vectors_per_register": vectors_per_register}, least=1)
    for name, count in (("lanes", lanes), ("vectors_per_register", vectors_per_register)):
        if count & (count - 1):
            raise ArgumentError(f"vectorize has {name}={count}", expected="a power of two")
    return Schedule((Vectorize(iterator, lanes, vectors_per_register),))


def unroll(*whole: str, **factors: int) -> Schedule:
    """Take several steps of a reduction per iteration, `unroll(k=4)`, or do without the loop, `unroll("k")`."""
    _check_numbers("unroll", factors, least=1)
    _check_names("unroll", [*whole, *factors], "the names of reductions")
    return Schedule((Unroll((*((name, 0) for name in whole), *factors.items())),))


def parallel(*loops: str, grain_size: int = 0) -> Schedule:
    """Share the iterations of the outermost loops, `parallel("n1", "m1")`, among the threads."""
    _check_numbers("parallel", {"grain_size": grain_size}, least=0)
    _check_names("parallel", loops, "the names of the outermost loops")
    return Schedule((Parallel(loops, grain_size),))


def nontemporal_stores() -> Schedule:
    """Write the output past the caches: for large ones that nobody reads soon, in tiles of whole cache lines."""
    return Schedule((NontemporalStores(),))


def matrix_instruction(instruction: str = "") -> Schedule:
    """Compute the register tile by an instruction that multiplies matrices, where the processor has one.

    Without a name it is the first that multiplies such factors. Tiles are whole fragments, or their last one is filled
    up with zeros: the factor of the lanes is packed, and so is the other where memory does not hold fragments.
    """
    if not isinstance(instruction, str):
        raise ArgumentError(f"fragments has {instruction!r}", expected="the name of an instruction, or none")
    return Schedule((MatrixInstruction(instruction),))


def prefetch(**factors: str) -> Schedule:
    """Bring near what the next iteration of a loop reads of a factor, `prefetch(B="n1")`, while this one is computed.

    For a factor that is contiguous along the lanes and comes from behind the second cache. Named as for `pack`.
    """
    _check_names("prefetch", list(factors), "the names of tensors, each with a loop's")
    return Schedule((Prefetch(tuple(factors.items())),))


def pack_output(loop: str) -> Schedule:
    """Keep the results of what is inside a loop in a panel, `pack_output("m1")`, and store them when they are complete.

    For lanes across the output's runs: there the panel is turned across, in place of the factor that the lanes read.
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


def _keywords(values: Iterable[tuple[str, object]]) -> str:
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
"""What `parse_schedule` knows."""
