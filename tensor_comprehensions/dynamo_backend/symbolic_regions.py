"""Regions of a graph whose sizes are symbols, as defs with names for sizes: one kernel for all their values.

Formulas are written for sizes that are numbers. So primes that occur nowhere else are substituted for the symbols of a
graph, twice. A region whose two defs differ in these numbers alone is a def for all sizes, with a name for each symbol.
A multiple of a symbol, such as the tokens of all sequences, is a size of its own. The region becomes a kernel if the
named sizes count rows; the other regions stay with torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_symbols

from ..core.diagnostics import get_logger
from ..tc_lang.dynamic_sizes.row_axes import find_axes
from ..tc_lang.ir import Function
from .graph_nodes import is_compute, topological_order
from .literals import Unsupported
from .partition import FusedRegion

PROBES = ((1009, 1511, 2003, 2503, 3001, 3511), (1013, 1523, 2011, 2521, 3011, 3517))
"""Two sets of primes to substitute for the symbols of a graph."""
FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Multiples of these primes to try where sizes must be divisible."""
SYMBOLIC = torch.SymInt | torch.SymFloat | torch.SymBool
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?")
Translate = Callable[[fx.Graph, frozenset[fx.Node]], list[FusedRegion]]
"""Takes a graph of known sizes, and nodes to leave out; returns the regions of the graph."""


@dataclass(frozen=True, slots=True)
class DimensionOf:
    """The size of a dimension of an argument of a region, by the indices of both."""

    argument: int
    dimension: int


Extent = int | DimensionOf


@dataclass(frozen=True, slots=True)
class SymbolicRegion:
    """A region of a graph with symbols.

    Attributes:
        region: nodes of that graph, and a def with names for sizes; its inputs are followed by the numbers that torch's
            operations take. takes: how many inputs the def has.
        sizes: for each name, a dimension of an argument that has this size.
        shapes: the extents of each output, in memory order. orders: the dimensions in that order.
        probe: the region of the graph with numbers.
    """

    region: FusedRegion
    takes: int
    sizes: Mapping[str, DimensionOf]
    shapes: tuple[tuple[Extent, ...], ...]
    orders: tuple[tuple[int, ...], ...]
    probe: FusedRegion

    @property
    def numbers(self) -> dict[str, int]:
        """An example of each size."""
        return {name: self.probe.inputs[p.argument].meta["val"].shape[p.dimension] for name, p in self.sizes.items()}


@dataclass(frozen=True, slots=True)
class SymbolicRegions:
    """The regions of a graph that are one def for all sizes, whether all are, and the nodes that compute something."""

    regions: list[SymbolicRegion]
    complete: bool
    computing: frozenset[fx.Node]


@dataclass(frozen=True, slots=True)
class _Probe:
    """A graph with numbers for its symbols. origin: the node of the graph with symbols for each node."""

    graph: fx.Graph
    origin: Mapping[fx.Node, fx.Node]
    refused: frozenset[fx.Node]


def find_symbolic_regions(
    graph: fx.Graph, translate: Translate, memory_order: Callable[[fx.Node], list[int]]
) -> SymbolicRegions:
    """The regions of `graph` that are one def for all sizes."""
    symbols = sorted(_symbols_of(graph), key=str)
    if not symbols or len(symbols) > len(PROBES[0]):
        return SymbolicRegions([], False, frozenset(graph.nodes))
    factor = _find_factor(symbols)
    if not factor:
        get_logger("graph").debug("no kernel for all sizes: their equations hold for none of the numbers tried")
        return SymbolicRegions([], False, frozenset(graph.nodes))
    numbers = [_number_symbols(symbols, probe, factor) for probe in PROBES]
    try:
        probes = [_substitute_sizes(graph, values) for values in numbers]
    except Unsupported as reason:
        get_logger("graph").debug("no kernel for all sizes: %s", reason)
        return SymbolicRegions([], False, frozenset(graph.nodes))
    first, second = (translate(p.graph, p.refused) for p in probes)
    rivals = {tuple(probes[1].origin[n] for n in r.nodes): r for r in second}
    found = []
    for region in first:
        rival = rivals.get(tuple(probes[0].origin[n] for n in region.nodes))
        text, names = ("", {}) if rival is None else _merge_defs(region.text, rival.text)
        if not text:
            get_logger("graph").debug("a region is another def for other sizes: torch runs it\n%s", region.text)
            continue
        made = _restore_symbols(replace(region, text=text), probes[0].origin, names, memory_order)
        found += [] if made is None else [made]
    computing = frozenset(probes[0].origin[n] for n in probes[0].graph.nodes if is_compute(n))
    return SymbolicRegions(found, len(found) == len(first), computing)


def find_varying(function: Function, numbers: Mapping[str, int]) -> tuple[str, ...]:
    """As many sizes of a def as possible that only count rows; () if there are none. numbers: an example of each."""
    names = tuple(numbers)
    while names:
        found = find_axes(function, names, {n: v for n, v in numbers.items() if n not in names})
        if not found.reasons:
            break
        for reason in found.reasons:
            get_logger("graph").debug("not one kernel for all sizes: %s", reason)
        names = tuple(n for n in names if n not in found.refused_sizes)
    return names


# --- numbers for symbols --------------------------------------------------------------------------------------------


def _symbols_of(graph: fx.Graph) -> set[Any]:
    return {symbol for n in graph.nodes if n.op == "placeholder" for symbol in _list_symbols(n.meta.get("val"))}


def _list_symbols(value: Any) -> set[Any]:
    """The symbols of a value: a tensor or a number or several of them."""
    if isinstance(value, tuple | list):
        return {symbol for x in value for symbol in _list_symbols(x)}
    return set(free_symbols(value)) if isinstance(value, Tensor | SYMBOLIC) else set()


def _number_symbols(symbols: Sequence[Any], probe: Sequence[int], factor: int) -> dict[Any, int]:
    return {symbol: prime * factor for symbol, prime in zip(symbols, probe, strict=False)}


def _find_factor(symbols: Sequence[Any]) -> int:
    """The factor of the least multiples of the probes for which all equations between sizes hold; 0 if none does.

    The chunks of a tensor, for example, are equal for even sizes only.
    """
    mode = detect_fake_mode()
    guards = [] if mode is None or mode.shape_env is None else [g.expr for g in mode.shape_env.guards]
    equations = [e for e in guards if isinstance(e, sympy.Eq)]

    def fits(factor: int) -> bool:
        numbers = [_number_symbols(symbols, probe, factor) for probe in PROBES]
        return all(e.subs(values) != sympy.false for e in equations for values in numbers)

    return next(filter(fits, FACTORS), 0)


def _substitute_sizes(graph: fx.Graph, numbers: Mapping[Any, int]) -> _Probe:
    """`graph` with these numbers for its symbols; values of other sizes, which operations find, stay as they are."""
    new, made, refused = fx.Graph(), dict[fx.Node, fx.Node](), set[fx.Node]()
    found = {n for n in graph.nodes if _list_symbols(n.meta.get("val")) - numbers.keys()}
    with detect_fake_mode() or FakeTensorMode():
        values = {n: n.meta.get("val") for n in graph.nodes}
        values |= {n: _substitute_symbols(value, numbers) for n, value in values.items() if n not in found}
    known = {n for n in graph.nodes if is_size(n)} - found
    for node in graph.nodes:
        if is_number(node) and all(map(is_number, node.all_input_nodes)):
            made[node] = new.placeholder(node.name)
        else:
            made[node] = new.node_copy(node, lambda n: values[n] if n in known else made[n])
            read = node.all_input_nodes
            if node in found or is_number(node) or any(n in found or (is_number(n) and not is_size(n)) for n in read):
                refused.add(made[node])
        made[node].meta = {**node.meta, "val": values[node]}
    return _Probe(new, {copy: node for node, copy in made.items()}, frozenset(refused))


def is_number(node: fx.Node) -> bool:
    """Whether the value of a node is a symbolic number."""
    return isinstance(node.meta.get("val"), SYMBOLIC)


def is_size(node: fx.Node) -> bool:
    """Whether the value of a node is a symbolic integer."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def _substitute_symbols(value: Any, numbers: Mapping[Any, int]) -> Any:
    """`value`, a tensor or a number or several of them, with numbers for symbols."""
    if isinstance(value, torch.SymInt):
        return int(value.node.expr.subs(numbers))
    if isinstance(value, Tensor):
        shape, strides = ([_substitute_symbols(n, numbers) for n in part] for part in (value.shape, value.stride()))
        if any(n < 0 for n in shape):
            raise Unsupported("a size is less than another one: images are larger than taps")
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    if isinstance(value, tuple | list):
        return type(value)(_substitute_symbols(x, numbers) for x in value)
    return value


# --- names for numbers ----------------------------------------------------------------------------------------------


def _merge_defs(first: str, second: str) -> tuple[str, dict[int, str]]:
    """One def with a name for each number of the first probe where two defs differ; "" if more differs."""
    names: dict[int, str] = {}
    numbers = NUMBER.findall(first), NUMBER.findall(second)
    if NUMBER.split(first) != NUMBER.split(second):
        return "", names
    texts: list[str] = []
    for x, y in zip(*numbers, strict=True):
        text = x if x == y else _name_number(x, y, names)
        if not text:
            return "", names
        texts.append(text)
    rest = iter(texts)
    return NUMBER.sub(lambda _: next(rest), first), names


def _name_number(x: str, y: str, names: dict[int, str]) -> str:
    """A size, or a formula of `_FORMS` for one, that is `x` in one def and `y` in the other; "" if there is none."""
    for p, q in zip(*PROBES, strict=True):
        if (x + y).isdecimal():
            if int(x) % p == 0 and int(x) // p * q == int(y):
                return names.setdefault(int(x), f"N{len(names)}")
            continue
        for form, value, guess in _FORMS:
            factor = round(guess(float(x)) / p)
            if factor > 0 and (float(x), float(y)) == (value(factor * p), value(factor * q)):
                return form.format(_format_size_multiple(factor * p, p, names))
    return ""


def _format_size_multiple(number: int, prime: int, names: dict[int, str]) -> str:
    """`number` as a multiple of a size that has a name already, else of `prime`, which gets a name."""
    known = next((n for n in names if n % prime == 0 and number % n == 0), prime)
    name = names.setdefault(known, f"N{len(names)}")
    return name if known == number else f"({name} * {number // known}.0)"


_FORMS: tuple[tuple[str, Callable[[int], float], Callable[[float], float]], ...] = (
    ("{0}", float, lambda x: x),
    ("(1.0 / {0})", lambda n: 1.0 / n, lambda x: 1.0 / x if x else 0.0),
    ("({0} / ({0} - 1.0))", lambda n: n / (n - 1), lambda x: x / (x - 1.0) if x != 1.0 else 0.0),
)
"""Formulas of a count n of elements: the text, its value for n, and n for a value. Means divide by n or multiply by
its reciprocal; the last formula corrects a variance."""


def _restore_symbols(
    region: FusedRegion,
    origin: Mapping[fx.Node, fx.Node],
    names: Mapping[int, str],
    memory_order: Callable[[fx.Node], list[int]],
) -> SymbolicRegion | None:
    """A region of a probe as one of the graph with symbols; None if its outputs have sizes that no input has."""
    places = {
        n: DimensionOf(k, d)
        for k, x in enumerate(region.inputs)
        for d, n in enumerate(x.meta["val"].shape)
        if n in names
    }
    orders = tuple(tuple(memory_order(n)) for n in region.outputs)
    if names.keys() - places.keys():
        return None
    shapes = []
    for node, order in zip(region.outputs, orders, strict=True):
        here, there = node.meta["val"].shape, origin[node].meta["val"].shape
        if any(isinstance(s, torch.SymInt) and n not in places for n, s in zip(here, there, strict=True)):
            return None
        shapes.append(tuple(places.get(here[d], here[d]) for d in order))
    own = replace(
        region,
        nodes=[origin[n] for n in region.nodes],
        outputs=tuple(origin[n] for n in region.outputs),
        inputs=tuple(origin[n] for n in region.inputs),
    )
    own = replace(own, inputs=(*own.inputs, *_numbers_of(own)))
    return SymbolicRegion(
        own, len(region.inputs), {name: places[n] for n, name in names.items()}, tuple(shapes), orders, region
    )


def _numbers_of(region: FusedRegion) -> Iterator[fx.Node]:
    """The symbolic numbers that the operations of a region take."""
    inputs = frozenset(region.inputs)
    order = topological_order(region.outputs, lambda n: () if n in inputs or is_number(n) else n.all_input_nodes)
    return (n for n in order if is_number(n))
