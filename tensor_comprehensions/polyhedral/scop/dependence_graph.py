"""The dependences between statements in readable form: by kind and tensor, with distances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import islpy as isl

from ...tc_lang.ir import BoundFunction
from .isl_affine import isl_tensor
from .scop import LOCK, Scop, ScopStatement, endpoints, node_name


@dataclass(frozen=True, slots=True)
class Dependence:
    """A dependence: instances of `sink` must follow instances of `source`.

    Attributes:
        kind: "flow" (what `source` writes, `sink` reads), "anti" (`sink` overwrites what `source` reads) or "output"
            (both write).
        source, sink: names of statements of the def. tensor: the tensor that both access.
        distances: the distance along each common free index, in order: "0", "1", "0..2"; "*" if unknown.
    """

    kind: str
    source: str
    sink: str
    tensor: str
    distances: tuple[str, ...]


def list_dependences(function: BoundFunction) -> tuple[Dependence, ...]:
    """The dependences between the statements of `function` (legalized), in the order of the program.

    All terms of a sum count as one instance, as in `Scop.dependences`.
    """
    with LOCK:
        scop = Scop(function, tuple(ScopStatement(node_name(s), (s,)) for s in function.statements))
        tensors = {isl_tensor(t.name): t.name for t in function.tensors}
        order = {n.name: position for position, n in enumerate(scop.nodes)}
        found = [
            Dependence(kind, *endpoints(pair), tensors[tensor], tuple(_print_distance_ranges(pair)))
            for kind, relation in scop.dependences_by_kind()
            for pair, tensor in _list_dependence_pairs(relation)
        ]
    return tuple(sorted(found, key=lambda d: (order[d.sink], order[d.source], d.kind, d.tensor)))


def _list_dependence_pairs(relation: isl.UnionMap) -> Iterator[tuple[isl.Map, str]]:
    """(relation, name of the tensor) for each pair of nodes and tensor, from maps `source -> [sink -> element]`."""
    pieces: list[isl.Map] = []
    relation.foreach_map(pieces.append)
    for piece in pieces:
        inner = piece.range().unwrap()
        tensor = inner.get_tuple_name(isl.dim_type.out)
        yield piece.uncurry().domain().unwrap(), tensor


def _print_distance_ranges(pair: isl.Map) -> Iterator[str]:
    """The range of distances in each dimension that source and sink have in common."""
    depth = min(pair.dim(isl.dim_type.in_), pair.dim(isl.dim_type.out))
    for d in range(depth):
        moved = pair.project_out(isl.dim_type.in_, 0, d).project_out(isl.dim_type.out, 0, d)
        moved = moved.project_out(isl.dim_type.in_, 1, moved.dim(isl.dim_type.in_) - 1)
        moved = moved.project_out(isl.dim_type.out, 1, moved.dim(isl.dim_type.out) - 1)
        steps = moved.reset_tuple_id(isl.dim_type.in_).reset_tuple_id(isl.dim_type.out).deltas()
        least, most = steps.dim_min_val(0), steps.dim_max_val(0)
        if not (least.is_int() and most.is_int()) or (least.is_neg() and most.is_pos()):
            yield "*"
        else:
            yield str(least) if least.eq(most) else f"{least}..{most}"
