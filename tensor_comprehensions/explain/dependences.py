"""The dependences between the statements of a def, with the reason if these are in different kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..core.decisions import Decision
from ..loop_ir.origins import statement_of
from ..polyhedral.scop.dependence_graph import list_dependences
from ..tc_lang.ir import BoundFunction
from .kernel_report import Listing, SourceStatement, StatementDependence


def list_edges(
    function: BoundFunction,
    spell_tensor: dict[str, str],
    statements: Sequence[SourceStatement],
    decisions: Iterable[Decision],
    loops: Listing,
) -> tuple[StatementDependence, ...]:
    """One dependence for each pair of statements and each tensor through which one depends on the other.

    Args:
        function: the legalized def, with canonical names.
        spell_tensor: the original names of tensors.
        statements, decisions, loops: as in the report.
    """
    order = {s.name: position for position, s in enumerate(statements)}
    kernels = number_kernels(loops)
    apart = [d for d in decisions if d.subject == "fusion" and d.chosen == "two kernels"]
    found: dict[tuple[str, str, str], StatementDependence] = {}
    for d in list_dependences(function):
        source, sink = statement_of(d.source), statement_of(d.sink)
        key = (source, sink, spell_tensor.get(d.tensor, d.tensor))
        if not {source, sink} <= order.keys():
            continue
        if key in found:
            found[key] = found[key].with_kind(d.kind)
            continue
        shared = kernels.get(source) == kernels.get(sink)
        why = next((x.why for x in apart if _prevents_fusion(x, source, sink, order)), "")
        found[key] = StatementDependence(*key, (d.kind,), d.distances, shared, "" if shared else why)
    return tuple(found.values())


def _prevents_fusion(d: Decision, source: str, sink: str, order: Mapping[str, int]) -> bool:
    """Whether a decision against fusion concerns these statements, or statements between them."""
    about = sorted(order[name] for name in d.statements if name in order)
    return {source, sink} <= set(d.statements) or (
        len(about) > 1 and order[source] <= about[0] < order[sink] and about[-1] <= order[sink]
    )


def number_kernels(loops: Listing) -> dict[str, int]:
    """The number (from 0) of the last kernel that computes each statement, by statement."""
    headers = (line for line in loops.lines if line.text.startswith("kernel "))
    return {name: number for number, line in enumerate(headers) for name in line.statements}
