"""The program in the form of isl: nodes with their domains, accesses and dependences.

A node is the work of one innermost loop nest: a statement of the language, or a cluster (a contraction and statements
around it that `use_microkernels` lowers as one). Its domain is the box of its free indices; reductions stay inside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import islpy as isl

from ...core.internal_names import SEPARATOR
from ...structured.match.match_contraction import MatchedContraction
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundIndex, BoundStatement, Inequality, walk_expr
from .isl_affine import isl_name, isl_tensor, quasi_affine

CONTEXT = isl.Context()
"""A context for this package alone, since limits are per context and must not affect other users."""

# isl is not thread-safe: every lowering must hold this lock.
LOCK = threading.RLock()

R = TypeVar("R")


def with_op_limit(operations: int, run: Callable[[], R]) -> R | None:
    """The result of `run`, or None if it takes more isl operations than allowed; that is the same on all machines."""
    CONTEXT.reset_operations()
    CONTEXT.set_max_operations(operations)
    try:
        return run()
    except isl.Error as error:
        if "number of operations" not in str(error):
            raise
        return None
    finally:
        CONTEXT.set_max_operations(0)


@dataclass(frozen=True)
class ScopStatement:
    """The work of one loop nest: a statement, or the statements of a cluster that `use_microkernels` lowers as one.

    It has the name of its first statement, so that listings, logs and schedules agree on the names of statements.
    All statements use the same index names; the free indices are those of the domain.
    """

    name: str
    statements: tuple[BoundStatement, ...]
    cluster: MatchedContraction | None = None

    @property
    def free(self) -> tuple[BoundIndex, ...]:
        return self.statements[0].free

    @cached_property
    def reduction_indices(self) -> tuple[BoundIndex, ...]:
        return tuple(dict.fromkeys(i for s in self.statements for i in s.reduction_indices))

    @property
    def elements(self) -> tuple[Inequality, ...]:
        """Conditions that all needed elements satisfy; the same for all statements of a cluster."""
        return self.statements[0].elements

    @cached_property
    def domain(self) -> tuple[Inequality, ...]:
        """Conditions that all computed points satisfy. For isl, the node's instances are still the whole box."""
        return tuple(dict.fromkeys(g for s in self.statements for g in s.domain))

    @cached_property
    def writes(self) -> tuple[tc.Access, ...]:
        return tuple(tc.Access(s.target, s.subscripts, s.value.dtype) for s in self.statements)

    @cached_property
    def reads(self) -> tuple[tc.Access, ...]:
        """Every read, including that of the target by an update or in/out reduction."""
        found: list[tc.Access] = []
        for s in self.statements:
            found += (e for e in _walk_statement_exprs(s) if isinstance(e, tc.Access))
            if s.reduction and not s.initialize:
                found.append(tc.Access(s.target, s.subscripts, s.value.dtype))
        return tuple(dict.fromkeys(found))

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(a.tensor for a in (*self.writes, *self.reads)))


def statements_of(nodes: Iterable[ScopStatement]) -> tuple[str, ...]:
    """The names of the statements that `nodes` compute."""
    return tuple(s.name for n in nodes for s in n.statements)


def check_reads(s: BoundStatement) -> frozenset[str]:
    """The tensors that the checks of `s` read."""
    roots = [e for c in s.checks for e in (c.subscript, c.guard) if e is not None]
    return frozenset(x.tensor for e in roots for x in walk_expr(e) if isinstance(x, tc.Access))


def _walk_statement_exprs(s: BoundStatement) -> Iterator[tc.Expr]:
    for root in (s.value, *s.subscripts, *(c.subscript for c in s.checks), *(c.guard for c in s.checks if c.guard)):
        yield from walk_expr(root)


@dataclass(frozen=True)
class Scop:
    """Nodes in program order, with cached results of isl. It is immutable.

    parts: the temporaries that hold partial sums of split reductions.
    """

    function: BoundFunction
    nodes: tuple[ScopStatement, ...]
    parts: frozenset[str] = frozenset()

    @cached_property
    def domain(self) -> isl.UnionSet:
        return domain_of(self.nodes)

    @cached_property
    def dependences(self) -> isl.UnionMap:
        """Memory-based dependences between instances of nodes: flow, anti and output, in program order.

        The terms of a reduction commute, so they count as one instance without dependences among themselves. A definite
        write hides earlier writes: dependences on those follow transitively.
        """
        result = union_map("{ }")
        if self._is_independent():
            return result
        certain, possible = self._writes()
        reads, order = self._reads_among(self._written_tensors()), self._program_order
        for source, sink in ((possible, reads), (reads.union(possible), certain.union(possible))):
            info = isl.UnionAccessInfo.from_sink(sink).set_must_source(certain).set_may_source(source)
            flow = info.set_schedule_map(order).compute_flow()
            result = result.union(flow.get_may_dependence()).union(flow.get_must_dependence())
        return result.coalesce()

    def _is_independent(self) -> bool:
        """Whether each element is evidently written at most once and never read; then isl need not search."""
        writes = [(node, access) for node in self.nodes for access in node.writes]
        tensors = self._written_tensors()
        if len(tensors) < len(writes) or any(a.tensor in tensors for node in self.nodes for a in node.reads):
            return False
        return all(
            {i.name for i in node.free} <= {e.name for e in access.subscripts if isinstance(e, tc.Index)}
            for node, access in writes
        )

    def dependences_by_kind(self) -> Iterator[tuple[str, isl.UnionMap]]:
        """(kind, dependences) for "flow", "anti" and "output", as maps `source -> [sink -> element]`."""
        certain, possible = self._writes()
        reads, order = self._reads_among(self._written_tensors()), self._program_order
        written = certain.union(possible)
        for kind, source, sink in (("flow", written, reads), ("anti", reads, written), ("output", written, written)):
            info = isl.UnionAccessInfo.from_sink(sink).set_must_source(certain).set_may_source(source)
            flow = info.set_schedule_map(order).compute_flow()
            found = flow.get_full_may_dependence()
            yield kind, found if kind == "anti" else found.union(flow.get_full_must_dependence())

    def _written_tensors(self) -> frozenset[str]:
        return frozenset(access.tensor for node in self.nodes for access in node.writes)

    def _reads_among(self, tensors: frozenset[str]) -> isl.UnionMap:
        pieces = [self._access(node, a) for node in self.nodes for a in node.reads if a.tensor in tensors]
        return union_map("{ " + "; ".join(pieces) + " }")

    def _writes(self) -> tuple[isl.UnionMap, isl.UnionMap]:
        """The elements that instances definitely write, and those that they may write, depending on data."""
        pieces: tuple[list[str], list[str]] = ([], [])
        for node in self.nodes:
            for access in node.writes:
                exact = all(quasi_affine(e) is not None for e in access.subscripts)
                pieces[0 if exact else 1].append(self._access(node, access))
        certain, possible = (union_map("{ " + "; ".join(p) + " }") for p in pieces)
        return certain, possible

    def _access(self, node: ScopStatement, access: tc.Access) -> str:
        tensor = self.function.tensor(access.tensor)
        conditions = _print_index_bounds((*node.free, *node.reduction_indices))
        for d, e in enumerate(access.subscripts):
            text = quasi_affine(e)
            if text is not None:
                conditions.append(f"x{d} = {text}")
            if text is None or access.guarded:  # it depends on data, or is skipped out of bounds
                conditions.append(f"0 <= x{d} < {tensor.shape[d]}")
        inner = ", ".join(isl_name(i.name) for i in node.reduction_indices)
        formula = (f"exists {inner} : " if inner else "") + (" and ".join(conditions) or "0 = 0")
        element = ", ".join(f"x{d}" for d in range(len(access.subscripts)))
        return f"{instance_tuple(node)} -> {isl_tensor(tensor.name)}[{element}] : {formula}"

    @cached_property
    def _program_order(self) -> isl.UnionMap:
        depth = max((len(n.free) for n in self.nodes), default=0)
        pieces = []
        for position, node in enumerate(self.nodes):
            time = [str(position), *(isl_name(i.name) for i in node.free), *("0",) * (depth - len(node.free))]
            pieces.append(f"{instance_tuple(node)} -> [{', '.join(time)}]")
        return union_map("{ " + "; ".join(pieces) + " }").intersect_domain(self.domain)

    @cached_property
    def _dependences_by_sink(self) -> dict[str, dict[str, isl.Map]]:
        found: dict[str, dict[str, isl.Map]] = {}
        for relation in _list_sorted_maps(self.dependences):
            source, sink = endpoints(relation)
            found.setdefault(sink, {})[source] = relation
        return found

    def sources_of(self, node: ScopStatement) -> frozenset[str]:
        """The names of the nodes on which `node` depends, which may include itself."""
        return frozenset(self._dependences_by_sink.get(node.name, ()))

    @cached_property
    def _coincident(self) -> dict[tuple[str, str], frozenset[tuple[str, str]]]:
        return {}

    def coincident_indices(self, source: ScopStatement, sink: ScopStatement) -> frozenset[tuple[str, str]]:
        """The pairs (index of `source`, index of `sink`) of equal extent along which dependences have distance zero.

        The distance is between the positions of both instances, counted from the lower bounds of their indices.
        """
        key = source.name, sink.name
        if key not in self._coincident:
            relation = self._dependences_by_sink[sink.name][source.name]
            self._coincident[key] = frozenset(
                (a.name, b.name)
                for k, a in enumerate(source.free)
                for n, b in enumerate(sink.free)
                if a.extent == b.extent and _keeps_position(relation, k, n, b.lower - a.lower)
            )
        return self._coincident[key]


def _list_sorted_maps(relation: isl.UnionMap) -> list[isl.Map]:
    found: list[isl.Map] = []
    relation.foreach_map(found.append)
    return sorted(found, key=endpoints)


def endpoints(relation: isl.Map) -> tuple[str, str]:
    """The names of the source and target nodes of a relation."""
    return relation.get_tuple_name(isl.dim_type.in_), relation.get_tuple_name(isl.dim_type.out)


def _keeps_position(relation: isl.Map, a: int, b: int, shift: int) -> bool:
    """Whether in all pairs of `relation`, index `b` of the target is index `a` of the source plus `shift`."""
    space = relation.get_space()
    same = isl.Constraint.alloc_equality(isl.LocalSpace.from_space(space)).set_constant_val(shift)
    same = same.set_coefficient_val(isl.dim_type.in_, a, 1).set_coefficient_val(isl.dim_type.out, b, -1)
    return bool(relation.is_subset(isl.Map.universe(space).add_constraint(same)))


def union_map(text: str) -> isl.UnionMap:
    return isl.UnionMap(text, CONTEXT)


def domain_of(nodes: Sequence[ScopStatement]) -> isl.UnionSet:
    """The set of all instances of `nodes`."""
    return isl.UnionSet("{ " + "; ".join(map(_print_node_domain, nodes)) + " }", CONTEXT)


def node_name(first: BoundStatement) -> str:
    """The name of the node whose first statement is `first`, in characters that isl accepts."""
    return first.name.replace(SEPARATOR, "_")


def instance_tuple(node: ScopStatement) -> str:
    """The tuple of an instance of `node` in isl's notation, such as `S0[i_i, i_j]`."""
    return f"{node.name}[{', '.join(isl_name(i.name) for i in node.free)}]"


def _print_index_bounds(indices: Sequence[BoundIndex]) -> list[str]:
    return [f"{i.lower} <= {isl_name(i.name)} < {i.upper}" for i in indices]


def _print_node_domain(node: ScopStatement) -> str:
    bounds = " and ".join(_print_index_bounds(node.free))
    return instance_tuple(node) + (f" : {bounds}" if bounds else "")
