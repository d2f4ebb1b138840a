"""The dependences between the statements of a def, with the reason where two kernels keep them apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core.decisions import Decision
from ..loop_ir.origins import statement_of
from ..polyhedral.scop.dependence_graph import list_dependences
from ..tc_lang.ir import BoundFunction
from .kernel_report import Edge, Listing, SourceStatement


def list_edges(
    function: BoundFunction,
    spell_tensor: dict[str, str],
    statements: Sequence[SourceStatement],
    decisions: Iterable[Decision],
    loops: Listing,
) -> tuple[Edge, ...]:
    """One edge for each pair of statements and each tensor through which one depends on the other.

    function: legalized, in canonical names; `spell_tensor` has the tensors' own. decisions, loops: of the report.
    """
    known = {s.name for s in statements}
    kernels = kernels_of(loops)
    apart = [d for d in decisions if d.subject == "fusion" and d.chosen == "two kernels"]
    found: dict[tuple[str, str, str], Edge] = {}
    for d in list_dependences(function):
        source, sink = statement_of(d.source), statement_of(d.sink)
        key = (source, sink, spell_tensor.get(d.tensor, d.tensor))
        if not {source, sink} <= known:
            continue
        if key in found:
            found[key] = found[key].with_kind(d.kind)
            continue
        shared = kernels.get(source) == kernels.get(sink)
        why = next((x.why for x in apart if {source, sink} <= set(x.statements)), "")
        found[key] = Edge(*key, (d.kind,), d.distances, shared, "" if shared else why)
    return tuple(found.values())


def kernels_of(loops: Listing) -> dict[str, int]:
    """The kernel, from 0 on, that computes each statement; of several, the last."""
    headers = (line for line in loops.lines if line.text.startswith("kernel "))
    return {name: number for number, line in enumerate(headers) for name in line.statements}
