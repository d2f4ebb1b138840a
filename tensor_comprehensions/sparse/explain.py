"""Human-readable schedules of sparse defs: formats, loops, merges, conversions, results, phases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..tc_lang.formats import Format
from ..tc_lang.ir import Access, Const, Function, Index, Role
from ..tc_lang.syntax import tree as s
from ..tc_lang.syntax.parse import parse_program
from ..tc_lang.syntax.printer import to_text
from .graph import Nest, build_nest, outer_block_loop
from .lattice import Lattice, build_lattice
from .lower import Program, Result
from .operand_buffers import Assembled


def explain(program: Program) -> str:
    """Describe how each tensor is stored and each statement runs, one fact per line."""
    return "\n".join([*_print_tensors(program), *_print_statements(program), *_print_phases(program)])


def text_with_formats(function: Function) -> str:
    """The text of a def with the current formats of its tensors.

    A def derived from another, such as its batched form, has no source text and is printed in canonical form.
    """
    definition = next((d for d in parse_program(function.source).defs if d.name == function.name), None)
    formats = {t.name: t.format for t in function.tensors if t.is_sparse and t.format is not None}
    if definition is None:
        stored = ", ".join(f"{t.name}: {formats.get(t.name, 'dense')}" for t in function.tensors)
        return f"{function.canonical}\nwith {stored}"

    def declare(d: s.Declaration) -> s.Declaration:
        return replace(d, format=_make_format_name(formats[d.name])) if d.name in formats else d

    parameters, returns = (tuple(map(declare, x)) for x in (definition.parameters, definition.returns))
    return to_text(replace(definition, parameters=parameters, returns=returns))


def _make_format_name(format: Format) -> s.FormatName:
    word, _, numbers = str(format).rstrip(")").partition("(")
    return s.FormatName(word, tuple(map(int, numbers.split(","))) if numbers else ())


def _print_tensors(program: Program) -> Iterator[str]:
    problem, shared = program.problem, dict(program.problem.shared)
    sources, versions = {c.name: c for c in program.conversions}, {v.name: v for _, v in program.versions}
    for t in problem.function.tensors:
        if t.is_sparse:
            origin = ""
            if t.name in sources:
                origin = f", converted from {sources[t.name].source} before every run"
            elif t.name in versions:
                origin = f", what {versions[t.name].source} holds before statement {versions[t.name].statement}"
            elif t.name in shared:
                origin = f", with the stored places of {shared[t.name]}"
            yield f"{t.name}: {t.format}{origin}"
        elif t.role is Role.TEMPORARY:
            yield f"{t.name}: a dense temporary"
    if problem.fixed:
        yield "fixed sizes: " + ", ".join(f"{name} = {value}" for name, value in problem.fixed)


def _print_statements(program: Program) -> Iterator[str]:
    problem = program.problem
    results = {r.arrays.statement: r for r in program.results}
    for number, order in enumerate(program.orders):
        nest = build_nest(problem, number)
        yield f"statement {number}: {nest.statement.target}, loops {', '.join(order) or 'none'}"
        for loop in order:
            for line in _print_loop(nest, loop):
                yield f"  {loop}: {line}"
        if number in results:
            yield f"  result: {_print_result(results[number])}"


def _print_loop(nest: Nest, loop: str) -> Iterator[str]:
    iterators = [a for a, path in nest.paths.items() if any(step.loop == loop for step in path.iterated)]
    if not iterators:
        yield "every value" + (" of a block" if _is_inside_a_block(nest, loop) else "")
        return
    lattice = build_lattice(nest.term, iterators)
    if len(iterators) == 1 and not lattice.is_full:
        yield f"what {_print_access(iterators[0])} stores"
        return
    yield f"merges {', '.join(map(_print_access, iterators))}: {_print_lattice_points(lattice)}"


def _is_inside_a_block(nest: Nest, loop: str) -> bool:
    return any(loop not in (name, outer_block_loop(name)) and loop.startswith(f"{name}.") for name in nest.blocks)


def _print_lattice_points(lattice: Lattice) -> str:
    points = [" and ".join(sorted(map(_print_access, p.present))) for p in lattice.points]
    return "; ".join([*points, "nothing stored"] if lattice.is_full else points)


def _print_access(a: Access) -> str:
    subscripts = [
        e.name if isinstance(e, Index) else str(e.value) if isinstance(e, Const) else "?" for e in a.subscripts
    ]
    return f"{a.tensor}({','.join(subscripts)})"


def _print_result(r: Result) -> str:
    if not isinstance(r.arrays, Assembled):
        return "elements are collected in order" if r.arrays.is_sorted else "elements are collected, then sorted"
    if r.arrays.bound:
        shared = "; threads share its rows, through a staging buffer" if r.arrays.stages_rows else ""
        return f"levels are written into memory for the elements of {' and '.join(r.arrays.bound)} together{shared}"
    return "elements are counted first, then levels are written"


def _print_phases(program: Program) -> Iterator[str]:
    for number, module in enumerate(program.phases):
        yield f"phase {number}: {', '.join(k.name for k in module.kernels) or 'nothing'}"
