"""Contraction paths: the order in which to contract the operands of an einsum, pair by pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

Labels = frozenset[str]
MAX_EXACT_OPERANDS = 9
"""Most operands for which all orders are compared; the work triples with each operand."""


@dataclass(frozen=True, slots=True)
class ContractionPath:
    """The order in which to contract operands, two at a time.

    Attributes:
        steps: positions of the two factors of each step, in the list of all operands followed by all results so far.
        operations: multiplications of all steps.
        memory: elements of all intermediate results together.
    """

    steps: tuple[tuple[int, int], ...]
    operations: int
    memory: int


def best_path(operands: Sequence[Labels], output: Labels, sizes: Mapping[str, int]) -> ContractionPath:
    """The path with the fewest multiplications, then the least memory; greedy above `MAX_EXACT_OPERANDS`."""
    pairs = (
        _find_optimal_pairs(operands, output, sizes)
        if len(operands) <= MAX_EXACT_OPERANDS
        else _find_greedy_pairs(operands, output, sizes)
    )
    return _build_path(pairs, operands, output, sizes)


Tree = tuple[int, ...]
"""The positions of the operands that a result was computed from, in order."""


def _find_optimal_pairs(
    operands: Sequence[Labels], output: Labels, sizes: Mapping[str, int]
) -> list[tuple[Tree, Tree]]:
    """The best pairs, by dynamic programming over the subsets of the operands."""
    everything = tuple(range(len(operands)))
    best: dict[Tree, tuple[int, int, tuple[Tree, Tree] | None]] = {(n,): (0, 0, None) for n in everything}
    for count in range(2, len(operands) + 1):
        for subset in combinations(everything, count):
            memory = _count_elements(_kept_labels(subset, operands, output), sizes) if count < len(operands) else 0
            best[subset] = min(
                (
                    best[one][0] + best[other][0] + _count_pair_operations(one, other, operands, output, sizes),
                    best[one][1] + best[other][1] + memory,
                    (one, other),
                )
                for one, other in _list_bipartitions(subset)
            )
    pairs: list[tuple[Tree, Tree]] = []

    def collect(subset: Tree) -> None:
        split = best[subset][2]
        if split is not None:
            collect(split[0])
            collect(split[1])
            pairs.append(split)

    collect(everything)
    return pairs


def _list_bipartitions(subset: Tree) -> Iterable[tuple[Tree, Tree]]:
    """All partitions of a set into two; the first part contains the first member."""
    first, *rest = subset
    for count in range(len(rest)):
        for others in combinations(rest, count):
            yield (first, *others), tuple(n for n in rest if n not in others)


def _find_greedy_pairs(operands: Sequence[Labels], output: Labels, sizes: Mapping[str, int]) -> list[tuple[Tree, Tree]]:
    """Contract the pair whose result adds least to the memory in use, until one is left."""
    left: list[Tree] = [(n,) for n in range(len(operands))]
    pairs: list[tuple[Tree, Tree]] = []

    def growth(pair: tuple[Tree, Tree]) -> tuple[int, int]:
        one, other = (_count_elements(_kept_labels(part, operands, output), sizes) for part in pair)
        both = _count_elements(_kept_labels(tuple(sorted(pair[0] + pair[1])), operands, output), sizes)
        return both - one - other, _count_pair_operations(*pair, operands, output, sizes)

    while len(left) > 1:
        pair = min(combinations(left, 2), key=growth)
        pairs.append(pair)
        left = [t for t in left if t not in pair] + [tuple(sorted(pair[0] + pair[1]))]
    return pairs


def _build_path(
    pairs: Sequence[tuple[Tree, Tree]], operands: Sequence[Labels], output: Labels, sizes: Mapping[str, int]
) -> ContractionPath:
    place: dict[Tree, int] = {(n,): n for n in range(len(operands))}
    steps: list[tuple[int, int]] = []
    operations = memory = 0
    for one, other in pairs:
        steps.append((place[one], place[other]))
        both = tuple(sorted(one + other))
        place[both] = len(place)
        operations += _count_pair_operations(one, other, operands, output, sizes)
        if len(both) < len(operands):
            memory += _count_elements(_kept_labels(both, operands, output), sizes)
    return ContractionPath(tuple(steps), operations, memory)


def _kept_labels(subset: Tree, operands: Sequence[Labels], output: Labels) -> Labels:
    """The labels that the result of contracting `subset` has: those of the output and of the other operands."""
    inside = frozenset().union(*(operands[n] for n in subset))
    outside = output.union(*(labels for n, labels in enumerate(operands) if n not in subset))
    return inside & outside if len(subset) > 1 else inside


def _count_pair_operations(
    one: Tree, other: Tree, operands: Sequence[Labels], output: Labels, sizes: Mapping[str, int]
) -> int:
    return _count_elements(_kept_labels(one, operands, output) | _kept_labels(other, operands, output), sizes)


def _count_elements(labels: Labels, sizes: Mapping[str, int]) -> int:
    return prod(sizes[label] for label in labels)


def is_single_loop_cheaper(
    operands: Sequence[Labels],
    output: Labels,
    sizes: Mapping[str, int],
    densities: Sequence[float],
    steps: Sequence[tuple[int, int]],
) -> bool:
    """Whether one loop nest over the stored elements of sparse operands is cheaper than `steps` with dense results.

    densities: the stored fraction of each operand, 1 for dense ones.
    """
    together = _count_elements(frozenset().union(*operands), sizes)
    at_once = (len(operands) - 1) * together * prod(densities)
    return at_once <= _stepwise_cost(operands, output, sizes, densities, steps)


def _stepwise_cost(
    operands: Sequence[Labels],
    output: Labels,
    sizes: Mapping[str, int],
    densities: Sequence[float],
    steps: Sequence[tuple[int, int]],
) -> float:
    """The multiplications of all steps plus the elements of their intermediate results."""
    trees: list[Tree] = [(n,) for n in range(len(operands))]
    stored = [*densities]
    total = 0.0
    for one, other in steps:
        both = tuple(sorted(trees[one] + trees[other]))
        total += _count_pair_operations(trees[one], trees[other], operands, output, sizes) * stored[one] * stored[other]
        if len(both) < len(operands):
            total += _count_elements(_kept_labels(both, operands, output), sizes)
        trees.append(both)
        stored.append(1.0)
    return total
