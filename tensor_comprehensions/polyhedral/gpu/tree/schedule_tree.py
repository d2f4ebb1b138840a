"""Schedule trees as Python values, which are printed as text for isl to parse.

Blocks and threads are the parameters `b0 b1 b2` and `t0 t1 t2` of the sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import islpy as isl
from typing_extensions import assert_never

from ...scop.isl_affine import isl_parameter, isl_parameters
from ..plan.statement_phases import Unit, filter_of

BLOCK_IDS = ("b0", "b1", "b2")
THREAD_IDS = ("t0", "t1", "t2")
PARAMETERS = f"[{', '.join((*BLOCK_IDS, *THREAD_IDS))}] -> "


def declare_parameters(variables: Iterable[str]) -> str:
    """The parameters for blocks and threads, and those for `variables`, as the prefix of a set in isl's notation."""
    names = (*BLOCK_IDS, *THREAD_IDS, *map(isl_parameter, dict.fromkeys(variables)))
    return f"[{', '.join(names)}] -> "


@dataclass(frozen=True, slots=True)
class MappedBandMember:
    """A loop. values: (name of a unit, the loop's value as isl text in terms of the unit's indices)."""

    values: tuple[tuple[str, str], ...]
    coincident: bool
    label: str
    """The label for display: the index, and the part of it that the loop iterates."""

    def value(self, unit: Unit) -> str:
        return dict(self.values)[unit.name]


@dataclass(frozen=True, slots=True)
class Band:
    """Loops around `child`, outermost first."""

    members: tuple[MappedBandMember, ...]
    units: tuple[Unit, ...]
    child: Tree


@dataclass(frozen=True, slots=True)
class MappingFilter:
    """A mapping to blocks or threads: a filter `identifier = value` for every unit.

    values: (identifier, its extent, the value for each unit by name).
    """

    values: tuple[tuple[str, int, tuple[tuple[str, str], ...]], ...]
    units: tuple[Unit, ...]
    child: Tree


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation of all threads of a block, such as a barrier, once per iteration of the loops above."""

    name: str


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """Children one after another.

    domain: the values of the enclosing loops as isl text; used for collectives. variables: the int64 variables in it.
    """

    children: tuple[tuple[tuple[Unit, ...], Tree] | Collective, ...]
    domain: str
    variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A named mark in the tree, which later steps search for."""

    name: str
    child: Tree


@dataclass(frozen=True, slots=True)
class Empty:
    """An empty tree."""


Tree = Band | MappingFilter | SequenceNode | Mark | Empty


def tree_to_isl(context: isl.Context, units: Sequence[Unit], tree: Tree) -> isl.Schedule:
    """The isl schedule of `tree`, with the domain of `units`."""
    domain = isl_parameters(v for u in units for v in u.variables) + "{ " + "; ".join(u.domain for u in units) + " }"
    return isl.Schedule.read_from_str(context, f'{{ domain: "{domain}"{_print_child(tree)} }}')


def _print_child(tree: Tree) -> str:
    text = _print_tree(tree)
    return f", child: {{ {text} }}" if text else ""


def _print_tree(tree: Tree) -> str:
    match tree:
        case Empty():
            return ""
        case Mark(name, child):
            below = _print_child(child)
            return f'mark: "{name}"{below}' if below else ""
        case Band(members, units, child):
            if not members:
                return _print_tree(child)
            rows = ", ".join(
                "{ " + "; ".join(f"{u.instance} -> [({m.value(u)})]" for u in units) + " }" for m in members
            )
            coincident = ", ".join(str(int(m.coincident)) for m in members)
            return f'schedule: "[{rows}]", permutable: 1, coincident: [{coincident}]{_print_child(child)}'
        case MappingFilter(values, units, child):
            conditions = {
                u.name: " and ".join(f"({dict(of)[u.name]}) = {name}" for name, _, of in values) for u in units
            }
            return (
                f'filter: "{PARAMETERS}{filter_of(units, conditions)}"{_print_child(child)}'
                if values
                else _print_tree(child)
            )
        case SequenceNode():
            return _print_sequence(tree)
        case _:
            assert_never(tree)


def _print_sequence(tree: SequenceNode) -> str:
    if len(tree.children) == 1 and not isinstance(tree.children[0], Collective):
        return _print_tree(tree.children[0][1])
    texts = []
    for child in tree.children:
        if isinstance(child, Collective):
            texts.append(f'{{ filter: "{{ {child.name}[] }}" }}')
        else:
            units, below = child
            texts.append(f'{{ filter: "{filter_of(units)}"{_print_child(below)} }}')
    text = f"sequence: [ {', '.join(texts)} ]"
    extra = [c.name for c in tree.children if isinstance(c, Collective)]
    if not extra:
        return text
    space, _, condition = tree.domain.partition(" : ")
    tail = f" : {condition}" if condition else ""
    maps = "; ".join(f"{space} -> {name}[]{tail}" for name in extra)
    return f'extension: "{declare_parameters(tree.variables)}{{ {maps} }}", child: {{ {text} }}'


def with_mark(tree: Tree, name: str, depth: int, *, threads: bool) -> Tree:
    """`tree` with a mark named `name` on every path, inside `depth` loops; bands are split there.

    threads: whether the mark is for single threads: then it is placed as far down as this depth allows. Otherwise it is
    for the whole block: as far up, and left out where threads are mapped above this depth.
    """
    match tree:
        case Mark() if depth or threads:
            return replace(tree, child=with_mark(tree.child, name, depth, threads=threads))
        case MappingFilter(values=values) if depth or threads:
            here = any(identifier in THREAD_IDS for identifier, _, _ in values)
            return (
                replace(tree, child=with_mark(tree.child, name, depth, threads=threads))
                if threads or not here
                else tree
            )
        case SequenceNode(children) if depth:
            parts = (
                c if isinstance(c, Collective) else (c[0], with_mark(c[1], name, depth, threads=threads))
                for c in children
            )
            return replace(tree, children=tuple(parts))
        case Band(members, units, child) if not members or len(members) <= depth:
            return Band(members, units, with_mark(child, name, depth - len(members), threads=threads))
        case Band(members, units, child) if depth:
            return Band(members[:depth], units, Mark(name, Band(members[depth:], units, child)))
        case Empty() if depth:
            return tree
    return Mark(name, tree)


def without_collectives(tree: Tree) -> Tree:
    """`tree` without its collectives; the order of instances is the same."""
    match tree:
        case Empty():
            return tree
        case SequenceNode(children, domain):
            kept = tuple((c[0], without_collectives(c[1])) for c in children if not isinstance(c, Collective))
            return SequenceNode(kept, domain, tree.variables)
        case Band() | MappingFilter() | Mark():
            return replace(tree, child=without_collectives(tree.child))
        case _:
            assert_never(tree)


def format_tree(tree: Tree) -> Iterator[str]:
    """The lines of a tree, for display."""
    match tree:
        case Empty():
            pass
        case Mark(name, child):
            yield f"mark: {name}"
            yield from format_tree(child)
        case Band(members, _, child):
            if members:
                loops = ", ".join(m.label + ("" if m.coincident else " (ordered)") for m in members)
                yield f"band: {loops}"
            yield from _indent_tree(child, bool(members))
        case MappingFilter(values, units, child):
            ids = ", ".join(f"{name} = {dict(of)[units[0].name]} of {count}" for name, count, of in values)
            if values:
                yield f"mapping: {ids}"
            yield from _indent_tree(child, bool(values))
        case SequenceNode(children):
            if len(children) == 1 and not isinstance(children[0], Collective):
                yield from format_tree(children[0][1])
                return
            yield "sequence:"
            for part in children:
                if isinstance(part, Collective):
                    yield f"  {part.name}"
                else:
                    yield f"  filter: {', '.join(u.name for u in part[0])}"
                    yield from ("    " + line for line in format_tree(part[1]))
        case _:
            assert_never(tree)


def _indent_tree(tree: Tree, deeper: bool) -> Iterator[str]:
    yield from ("  " + line if deeper else line for line in format_tree(tree))
