"""A module of the loop program as one self-contained C99 file with OpenMP, for people to read and reuse.

Scalar programs print as loops; explicit vectors print as short loops over their lanes, which any compiler turns
back into vectors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ...loop_ir import nodes as ir
from ...loop_ir.rewrite import allocated_buffers, walk_stmts
from ...loop_ir.show import LineNumbers
from .dialect import C99, CDialect
from .expressions import PrintScope, array_shape
from .statements import on_stack, print_braced, print_statement
from .text_lines import indent_lines


def emit_c(module: ir.Module, *, header: str = "", dialect: CDialect = C99, marks: LineNumbers | None = None) -> str:
    """The C text of `module`: one function `int NAME(arguments..., temporaries...)`.

    It returns 0; or n > 0 if the n-th check site failed; or -1 if scratch memory could not be allocated.

    Args:
        module: a verified module, before or after vectorization.
        header: the content of the opening comment: the def, its sizes, the options.
        dialect: the spellings of the language.
        marks: if given, mark each line with its line in the loop text (`split_marks`); the result does not compile.

    Raises:
        CannotLower: the module invokes an intrinsic that has no spelling in C.
    """
    body = list(_print_function(module, dialect, marks))
    words = collect_words(body)
    helpers = used_helpers(words, dialect)
    lines = [*_print_header_comment(module, header), *needed_includes(words | collect_words(helpers), dialect), ""]
    for helper in helpers:
        lines += [helper, ""]
    return "\n".join([*lines, *body, ""])


# --- the file around the function --------------------------------------------------------------------------------


def _print_header_comment(module: ir.Module, header: str) -> Iterator[str]:
    yield f"/* {module.name}"
    for line in header.strip("\n").splitlines():
        yield f" * {line}".rstrip().replace("*/", "* /")
    yield " *"
    yield " * cc -std=c99 -O3 -march=native -fopenmp -fwrapv; link with -lm."
    if module.temporaries:
        yield f" * The caller provides the memory of {', '.join(t.name for t in module.temporaries)}."
    if module.sites:
        yield " * Returns 0, or the number of the check that failed:"
    for number, site in enumerate(module.sites, 1):
        extent = f"{site.extent} elements from {site.origin} on"
        yield f" *   {number}: dimension {site.dimension} of {site.tensor}, {extent}"
    yield " */"


def collect_words(lines: Iterable[str]) -> set[str]:
    """The identifiers and keywords in a text."""
    return set(re.findall(r"[A-Za-z_]\w*", "\n".join(lines)))


def needed_includes(words: set[str], dialect: CDialect) -> list[str]:
    """The `#include` lines of a text with these words."""
    return [f"#include <{name}>" for name, asked_by in dialect.includes if not words.isdisjoint(asked_by)]


def used_helpers(words: set[str], dialect: CDialect) -> list[str]:
    """The definitions of the helpers that a text with these words calls, in an order that compiles."""
    words = set(words)
    used: list[str] = []
    for name, definition in reversed(list(dialect.helpers.items())):  # a helper may call those defined before it
        if name in words:
            used.insert(0, definition)
            words |= collect_words((definition,))
    return used


def _print_function(module: ir.Module, dialect: CDialect, marks: LineNumbers | None) -> Iterator[str]:
    scope = PrintScope(dialect, {}, marks=marks)
    name, scope = scope.with_values(names={n: n for n in dialect.library}).bind(f"%{module.name}")
    scope = scope.with_values(names={f"%{module.name}": name})
    parameters = []
    for buffer in (*module.arguments, *module.temporaries):
        identifier, scope = scope.bind(f"@{buffer.name}")
        constant = buffer in module.arguments and buffer.name not in module.written
        parameters.append(("const " if constant else "") + _print_parameter(buffer, identifier, dialect))
    yield f"int {name}("
    yield from indent_lines(f"{p}," for p in parameters[:-1])
    yield from indent_lines(parameters[-1:] or ["void"])
    yield ") {"
    yield from indent_lines(_print_kernels(module, scope))
    yield "}"


def _print_kernels(module: ir.Module, scope: PrintScope) -> Iterator[str]:
    fails = any(_can_fail(kernel.body, scope.dialect) for kernel in module.kernels)
    if fails:
        yield "int status = 0;"
    for position, kernel in enumerate(module.kernels):
        if len(module.kernels) > 1:
            yield f"/* {kernel.name} */"
        yield from print_braced(kernel.body, scope) if len(module.kernels) > 1 else print_statement(kernel.body, scope)
        if position + 1 < len(module.kernels) and _can_fail(kernel.body, scope.dialect):
            yield "if (status) return status;"
    yield "return status;" if fails else "return 0;"


def _can_fail(s: ir.Stmt, dialect: CDialect) -> bool:
    return any(isinstance(x, ir.Check) for x in walk_stmts(s)) or not all(
        on_stack(b, dialect) for b in allocated_buffers(s)
    )


def _print_parameter(buffer: ir.Buffer, identifier: str, dialect: CDialect) -> str:
    spelling = dialect.type(buffer.type.dtype)
    shape = array_shape(buffer)
    if not shape:
        return f"{spelling} *{dialect.restrict} {identifier}"
    first, *rest = shape
    return f"{spelling} {identifier}[{dialect.restrict} {first}]" + "".join(f"[{n}]" for n in rest)
