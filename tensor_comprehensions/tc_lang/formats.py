"""Formats: how a tensor is stored, dimension by dimension (TACO: "Format Abstraction for Sparse Tensor Algebra
Compilers", OOPSLA 2018, sections 3 and 4).

A stored tensor is a tree. Each of its levels stores the coordinates of one dimension below every position of the level
above. Each position of the last level has a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from functools import cached_property, lru_cache

from ..core.errors import InternalError
from .unlocated_error import UnlocatedTypeError


class LevelKind(Enum):
    """How a level stores its coordinates."""

    DENSE = "dense"  # all coordinates exist, so nothing is stored
    COMPRESSED = "compressed"  # crd lists the coordinates; those of parent p are at pos[p] to pos[p + 1]
    SINGLETON = "singleton"  # one coordinate for each parent, in crd


@dataclass(frozen=True, slots=True)
class Level:
    """One level. unique: whether a coordinate occurs at most once below one parent."""

    kind: LevelKind
    unique: bool = True

    @property
    def letter(self) -> str:
        return next(letter for letter, level in LEVELS.items() if level == self)

    @property
    def is_dense(self) -> bool:
        return self.kind is LevelKind.DENSE


LEVELS = {
    "d": Level(LevelKind.DENSE),
    "s": Level(LevelKind.COMPRESSED),
    "u": Level(LevelKind.COMPRESSED, unique=False),
    "q": Level(LevelKind.SINGLETON),
    "c": Level(LevelKind.SINGLETON, unique=False),
}
"""The level of each letter of a format word."""

_MATRICES = {
    "csr": ("ds", (0, 1)), "csc": ("ds", (1, 0)), "dcsr": ("ss", (0, 1)), "dcsc": ("ss", (1, 0)),
}  # fmt: skip
_BLOCKED = {"bsr": (0, 1, 2, 3), "bsc": (1, 0, 2, 3)}
_ANY_RANK = {"dense": 0, "csf": 3, "coo": 2}
"""Format names for any rank, each with the least rank for which formats are printed by that name."""
NAMES = (*_ANY_RANK, *_MATRICES, *_BLOCKED)
"""All format names, besides words of level letters."""


@dataclass(frozen=True)  # without slots: every call asks for its cached properties
class Format:
    """The levels of a tensor, outermost first.

    Attributes:
        levels: one for each dimension; with `blocks`, one more for each blocked dimension.
        order: the dimension that each level stores. Blocked dimensions count twice: the coordinates of the blocks
            come first, those inside a block after all of them.
        blocks: the extents of a block, for every dimension of the tensor; empty if it has no blocks.
    """

    levels: tuple[Level, ...]
    order: tuple[int, ...]
    blocks: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of numbers, since a pickled format keeps it, and strings have other hashes in other processes."""
        return hash((*(ord(letter) for letter in self.word), self.order, self.blocks))

    @cached_property
    def rank(self) -> int:
        """The number of dimensions of the tensor."""
        return len(self.levels) - len(self.blocks)

    @cached_property
    def word(self) -> str:
        """The format word: one letter per level."""
        return "".join(level.letter for level in self.levels)

    @cached_property
    def is_dense(self) -> bool:
        """Whether every element is stored."""
        return all(level.is_dense for level in self.levels)

    @cached_property
    def depth(self) -> int:
        """The number of levels down to the last one that is not dense. The levels below are the dense tail."""
        return max((n for n, level in enumerate(self.levels, 1) if not level.is_dense), default=0)

    @cached_property
    def is_unique(self) -> bool:
        """Whether each element is stored at most once."""
        return not self.depth or self.levels[self.depth - 1].unique

    @cached_property
    def repeats_padding(self) -> bool:
        """Whether padding may store the same coordinates several times.

        A singleton below a dense level stores some coordinate for each position of that level, even if there is no
        element. Below repeated coordinates, these may be equal.
        """
        kinds = list(enumerate(self.levels[: self.depth]))
        repeated = next((n for n, level in kinds if not level.unique), self.depth)
        dense = next((n for n, level in kinds if n > repeated and level.is_dense), self.depth)
        return any(level.kind is LevelKind.SINGLETON for n, level in kinds if n > dense)

    @property
    def with_unique_elements(self) -> Format:
        """This format, restricted to tensors that store each element at most once."""
        if self.is_unique:
            return self
        last = replace(self.levels[self.depth - 1], unique=True)
        return replace(self, levels=(*self.levels[: self.depth - 1], last, *self.levels[self.depth :]))

    @property
    def with_compressed_levels(self) -> Format:
        """This format with every level that is not dense replaced by a compressed one with unique coordinates."""
        return replace(self, levels=tuple(x if x.is_dense else LEVELS["s"] for x in self.levels))

    def extents(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The extent of each level, for a tensor of this shape."""
        split = (*(n // b for n, b in zip(shape, self.blocks, strict=True)), *self.blocks) if self.blocks else shape
        return tuple(split[d] for d in self.order)

    def tail(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The extents of the dense tail: the shape of the values at each position of the last level above it."""
        return self.extents(shape)[self.depth :]

    def __str__(self) -> str:
        return self._name

    @cached_property
    def _name(self) -> str:
        if self.blocks:
            name = next(name for name, order in _BLOCKED.items() if order == self.order)
            return f"{name}({','.join(map(str, self.blocks))})"
        for name, (word, order) in _MATRICES.items():
            if (word, order) == (self.word, self.order):
                return name
        if self.order != tuple(range(self.rank)):
            return f"{self.word}({','.join(map(str, self.order))})"
        for name, rank in _ANY_RANK.items():
            if self.rank >= rank and self.word == _word_of(name, self.rank):
                return name
        return self.word


def can_store_any_pattern(format: Format) -> bool:
    """Whether `format` can store a tensor with any sparsity pattern.

    A singleton level may then only follow a level with repeated coordinates, since it stores one coordinate per parent.
    A compressed level must not be below repeated coordinates.
    """
    above: Level | None = None
    repeats = False
    for level in format.levels:
        if level.kind is LevelKind.SINGLETON and (above is None or above.unique):
            return False
        if level.kind is LevelKind.COMPRESSED and repeats:
            return False
        repeats, above = repeats or not level.unique, level
    return True


def dense_format(rank: int) -> Format:
    """The format of a dense tensor with `rank` dimensions."""
    return Format((LEVELS["d"],) * rank, tuple(range(rank)))


def coo_format(sparse: int, dense: int = 0, *, unique: bool = True) -> Format:
    """The coordinate (COO) format of `sparse` dimensions, followed by `dense` dimensions."""
    word = _word_of("coo", sparse)
    return parse_format((word if unique else _with_repeats(word)) + "d" * dense, (), sparse + dense)


def _word_of(name: str, rank: int) -> str:
    match name:
        case "dense":
            return "d" * rank
        case "csf":
            return "s" * rank
        case "coo":
            return "s" if rank == 1 else "u" + "c" * (rank - 2) + "q" if rank else ""
    raise InternalError(f"{name} is no format of any rank")


def _with_repeats(word: str) -> str:
    return word[:-1] + {"s": "u", "q": "c"}[word[-1]]


def parse_format(word: str, numbers: Sequence[int], rank: int) -> Format:
    """The format that `word(numbers)` denotes for a tensor of `rank` dimensions. Equal formats are the same object.

    Raises:
        UnlocatedTypeError: there is no such format, or not for this rank.
    """
    return _intern_format(word, tuple(numbers), rank)


_interned: dict[Format, Format] = {}


@lru_cache(maxsize=4096)
def _intern_format(word: str, numbers: tuple[int, ...], rank: int) -> Format:
    found = _parse_anew(word, numbers, rank)
    return _interned.setdefault(found, found)


def _parse_anew(word: str, numbers: Sequence[int], rank: int) -> Format:
    if word in _BLOCKED:
        return _blocked_format(word, tuple(numbers), rank)
    order: tuple[int, ...]
    letters, order = _MATRICES.get(word, ("", ()))
    if letters and numbers:
        raise UnlocatedTypeError(
            f"'{word}' takes no numbers", found=_print_format(word, numbers), suggestion=f"write {word}"
        )
    if not letters and word in _ANY_RANK:
        letters = _word_of(word, rank)
    if not letters and not (word == "dense" and rank == 0):
        letters = _check_level_letters(word)
    if len(letters) != rank:
        raise UnlocatedTypeError(
            f"the format '{word}' is for {_print_dimension_count(len(letters))}, the tensor has {rank}",
            expected=f"{rank} levels", found=_print_format(word, numbers),
        )  # fmt: skip
    order = order or tuple(numbers) or tuple(range(rank))
    if sorted(order) != list(range(rank)):
        raise UnlocatedTypeError(
            f"({','.join(map(str, order))}) is not an order of {_print_dimension_count(rank)}",
            expected=f"each of 0 to {rank - 1} once" if rank > 1 else "0",
            found=_print_format(word, numbers),
        )
    return Format(tuple(LEVELS[letter] for letter in letters), order)


def _check_level_letters(word: str) -> str:
    """Return `word` if all its letters are levels that can follow one another. Raises UnlocatedTypeError otherwise."""
    unknown = next((letter for letter in word if letter not in LEVELS), None)
    if unknown is not None:
        near = get_close_matches(word, NAMES, n=1, cutoff=0.3)
        raise UnlocatedTypeError(
            f"there is no format '{word}'",
            expected=f"{', '.join(NAMES)}, or a letter of {' '.join(LEVELS)} for each level",
            suggestion=f"did you mean {near[0]}?" if near else "",
        )
    for n, below in enumerate(word):
        above = word[:n]
        if below in "qc" and not above:
            raise UnlocatedTypeError(
                f"the format '{word}' begins with a singleton", expected="d, s or u as first level"
            )
        if below in "su" and any(letter in above for letter in "uc"):
            raise UnlocatedTypeError(
                f"in the format '{word}' a compressed level follows one with repeated coordinates",
                expected="q, c or d below u and c",
            )
    return word


def _blocked_format(word: str, blocks: tuple[int, ...], rank: int) -> Format:
    if rank != 2:
        raise UnlocatedTypeError(f"the format '{word}' is for 2 dimensions, the tensor has {rank}")
    if len(blocks) != 2 or min(blocks) < 1:
        raise UnlocatedTypeError(
            f"'{word}' needs the two extents of a block, from 1 up",
            expected=f"{word}(2,2)", found=_print_format(word, blocks),
        )  # fmt: skip
    return Format(tuple(LEVELS[letter] for letter in "dsdd"), _BLOCKED[word], blocks)


def _print_format(word: str, numbers: Sequence[int]) -> str:
    return f"{word}({','.join(map(str, numbers))})" if numbers else word


def _print_dimension_count(n: int) -> str:
    return f"{n} dimension{'' if n == 1 else 's'}"
