"""Loop programs as indented text for people to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from typing_extensions import assert_never

from ..core.memory_layout import contiguous_strides
from .nodes import (
    COMPARISONS,
    Allocate,
    Binary,
    Block,
    Broadcast,
    Buffer,
    Call,
    Cast,
    Check,
    Const,
    Expr,
    If,
    Invoke,
    Kernel,
    Let,
    Load,
    Loop,
    LoopKind,
    Module,
    Ramp,
    ReduceLanes,
    Select,
    Shuffle,
    Stmt,
    Store,
    Unary,
    Var,
    While,
    Window,
)
from .rewrite import map_stmt

_SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "and", "or": "or",
}  # fmt: skip
_PRECEDENCE = {"or": 1, "and": 2, **dict.fromkeys(COMPARISONS, 4), "add": 5, "sub": 5, "mul": 6, "div": 6, "mod": 6}
_ATOM = 9


Line = tuple[str, Stmt | None]
"""The text of a line, and the statement that it shows, if any."""


@dataclass(frozen=True, slots=True)
class LineNumbers:
    """The line numbers, from 1 on, of statements (by id) and kernels (in order) in the text of a program.

    They are valid as long as the program lives. A statement object that occurs several times has the number of its
    first line; in a program from `separate_statements`, each occurs once.
    """

    statements: Mapping[int, int]
    kernels: tuple[int, ...]

    @staticmethod
    def of(lines: Sequence[Line]) -> LineNumbers:
        """The line numbers in `lines`, as returned by `list_lines`."""
        found: dict[int, int] = {}
        for number, (_, s) in enumerate(lines, 1):
            if s is not None:
                found.setdefault(id(s), number)
        headers = (n for n, (text, s) in enumerate(lines, 1) if s is None and text.startswith("kernel "))
        return LineNumbers(found, tuple(headers))


def format_program(program: Module | Kernel | Stmt | Expr) -> str:
    """`program` as text: one line per statement, two spaces per level.

    `ramp(b, s, n)` is the vector b, b + s, ... of n lanes; `x4(e)` is the scalar e in four lanes; `@ m` is a mask.
    """
    match program:
        case Module() | Kernel():
            return "\n".join(text for text, _ in list_lines(program)) + "\n"
        case Store() | Loop() | While() | If() | Let() | Allocate() | Window() | Check() | Invoke() | Block():
            return "\n".join(text for text, _ in _stmt_lines(program, "", {})) + "\n"
        case _:
            return _format_expr(program)


def separate_statements(m: Module) -> Module:
    """`m` with statement objects that occur several times copied, so that each occurs once."""
    seen: set[int] = set()
    return replace(m, kernels=tuple(replace(k, body=_copy_repeated_statements(k.body, seen)) for k in m.kernels))


def _copy_repeated_statements(s: Stmt, seen: set[int]) -> Stmt:
    own = map_stmt(s, lambda e: e, lambda c: _copy_repeated_statements(c, seen))
    if id(s) in seen and own is s:
        own = copy(s)
    seen.add(id(s))
    return own


Texts = dict[int, str]
"""Cached texts of stores and expressions by id, so that parts that passes leave unchanged are formatted only once."""


def list_lines(program: Module | Kernel, known: Texts | None = None) -> Iterator[Line]:
    """The lines of `format_program`, each with the statement that it shows, or None.

    known: a cache to share with other calls for programs with common parts; these programs must outlive it.
    """
    known = {} if known is None else known
    yield from _module_lines(program, known) if isinstance(program, Module) else _kernel_lines(program, known)


def _module_lines(m: Module, known: Texts) -> Iterator[Line]:
    yield f"module {m.name}", None
    for b in m.arguments:
        yield f"  argument {_format_buffer_declaration(b)}{' written' if b.name in m.written else ''}", None
    for b in m.temporaries:
        yield f"  temporary {_format_buffer_declaration(b)}", None
    for p in m.parameters:
        yield f"  parameter {p.name}", None
    for n, site in enumerate(m.sites):
        yield f"  site {n}: dimension {site.dimension} of {site.tensor}, extent {site.extent} from {site.origin}", None
    for kernel in m.kernels:
        yield "", None
        yield from _kernel_lines(kernel, known)


def _kernel_lines(kernel: Kernel, known: Texts) -> Iterator[Line]:
    yield f"kernel {kernel.name}:", None
    if kernel.launch is not None and kernel.launch.counts:
        blocks = (str(c or n) for n, c in zip(kernel.launch.grid, kernel.launch.counts, strict=True))
        yield f"  blocks {', '.join(blocks)}", None
    for m in kernel.maps:
        swizzle = f" swizzle {m.swizzle} bytes" if m.swizzle else ""
        sides = "".join(f"[{n}:{s}]" for n, s in m.dimensions)
        yield f"  map {m.name} of {m.buffer.name}{sides} box {m.box}{swizzle}{' tf32' if m.rounds else ''}", None
    yield from _stmt_lines(kernel.body, "  ", known)


def _format_buffer_declaration(b: Buffer) -> str:
    shape = "".join(f"[{b.extent_variable(n) or '' if n in b.dynamic else extent}]" for n, extent in enumerate(b.shape))
    strides = "" if b.strides == contiguous_strides(b.shape) else f" strides {b.strides}"
    if any(b.stride_variables):
        strides = f" strides ({', '.join(str(v or s) for v, s in zip(b.stride_variables, b.strides, strict=True))})"
    swizzle = "" if b.swizzle is None else f" swizzle {b.swizzle}"
    return f"{b.type} {b.name}{shape}{strides}{swizzle}"


def _stmt_lines(s: Stmt, indent: str, known: Texts) -> Iterator[Line]:
    deeper = indent + "  "
    match s:
        case Block(()):
            yield f"{indent}pass", s
        case Block(body):
            for c in body:
                yield from _stmt_lines(c, indent, known)
        case Store():
            if id(s) not in known:
                known[id(s)] = _store(s)
            yield indent + known[id(s)], s
        case Loop(var, start, stop, body):
            by = f" by {s.step}" if s.step != 1 else ""
            yield (
                f"{indent}{s.kind.value} {var} in {_format_expr(start)} .. {_format_expr(stop)}{by}"
                f"{_format_loop_hint(s)}:",
                s,
            )
            yield from _stmt_lines(body, deeper, known)
        case While(condition, body):
            yield f"{indent}while {_format_expr(condition)}:", s
            yield from _stmt_lines(body, deeper, known)
        case If(condition, then, otherwise):
            yield f"{indent}if {_format_expr(condition)}:", s
            yield from _stmt_lines(then, deeper, known)
            if otherwise is not None:
                yield f"{indent}else:", s
                yield from _stmt_lines(otherwise, deeper, known)
        case Let(name, value, body):
            if id(value) not in known:
                known[id(value)] = _format_expr(value)
            yield f"{indent}let {name}: {value.type} = {known[id(value)]}", s
            yield from _stmt_lines(body, indent, known)
        case Allocate(buffers, body, lengths):
            count = f" length {', '.join(map(_format_expr, lengths))}" if lengths else ""
            for buffer in buffers:
                yield f"{indent}allocate {buffer.space.value} {_format_buffer_declaration(buffer)}{count}", s
            yield from _stmt_lines(body, indent, known)
        case Window(buffer, source, start, rows, length, body):
            part = f"{rows} rows of {source.name} from {_format_expr(start)} of {_format_expr(length)}"
            part += f" in dimension {s.dimension}" if s.dimension else ""
            yield f"{indent}window {_format_buffer_declaration(buffer)} is {part}", s
            yield from _stmt_lines(body, indent, known)
        case Check(condition, site, value):
            yield f"{indent}check {_format_expr(condition)} else fail site {site} with {_format_expr(value)}", s
        case Invoke(name, operands, attributes, values):
            views = [f"&{_format_access(b, where, None)}" for b, where in operands] + [str(a) for a in attributes]
            yield f"{indent}{name}({', '.join([*views, *map(_format_expr, values)])})", s
        case _:
            assert_never(s)


def _store(s: Store) -> str:
    target = _format_access(s.buffer, s.indices, None)
    text = f"{target} {_format_store_operator(s.op)} {_format_expr(s.value)}{_format_mask(s.mask)}"
    return text + ("  # streaming" if s.nontemporal else "")


def _format_loop_hint(loop: Loop) -> str:
    if loop.kind is LoopKind.VECTOR:
        return f" lanes {loop.vector_factors[0]} x {loop.vector_factors[1]}"
    return f" grain {loop.grain}" if loop.grain != 1 else ""


def _format_store_operator(op: str | None) -> str:
    return "=" if op is None else f"{op}="


def _format_mask(mask: Expr | None) -> str:
    return "" if mask is None else f" @ {_format_expr(mask, _ATOM)}"


def _format_access(buffer: Buffer, indices: tuple[Expr, ...], mask: Expr | None) -> str:
    where = f"[{', '.join(_format_expr(i) for i in indices)}]"
    return f"{buffer.name}{where}{_format_mask(mask)}"


def _format_expr(e: Expr, outer: int = 0) -> str:
    """`e` in parentheses where its operator binds less tightly than `outer`."""
    match e:
        case Const(value, t):
            text = repr(value) if not t.dtype.is_bool else str(value).lower()
            return text if t.lanes == 1 else f"x{t.lanes}({text})"
        case Var(name):
            return name
        case Load(buffer, indices, mask):
            text = _format_access(buffer, indices, mask)
            return f"({text})" if mask is not None and outer else text
        case Unary(op, operand):
            return f"{'-' if op == 'neg' else 'not '}{_format_expr(operand, _ATOM)}"
        case Binary(op, left, right):
            return _format_binary(op, left, right, outer)
        case Select(condition, then, otherwise):
            return f"select({_format_expr(condition)}, {_format_expr(then)}, {_format_expr(otherwise)})"
        case Cast(operand, dtype):
            return f"{dtype}({_format_expr(operand)})"
        case Call(function, arguments):
            return f"{function}({', '.join(_format_expr(a) for a in arguments)})"
        case Ramp(base, stride, lanes):
            return f"ramp({_format_expr(base)}, {stride}, {lanes})"
        case Broadcast(operand, lanes):
            return f"x{lanes}({_format_expr(operand)})"
        case Shuffle(left, right, lanes):
            return f"shuffle({_format_expr(left)}, {_format_expr(right)}, {list(lanes)})"
        case ReduceLanes(op, operand):
            return f"reduce_{'add' if op == '+' else 'mul' if op == '*' else op}({_format_expr(operand)})"
        case _:
            assert_never(e)


def _format_binary(op: str, left: Expr, right: Expr, outer: int) -> str:
    if op in ("min", "max"):
        return f"{op}({_format_expr(left)}, {_format_expr(right)})"
    symbol = _SYMBOLS.get(op)
    if symbol is None:
        floor = left.type.dtype.is_integer
        symbol = {"div": "//" if floor else "/", "mod": "%" if floor else "fmod"}[op]
    level = _PRECEDENCE[op]
    # The right operand of equal level keeps its parentheses: floats do not associate.
    text = f"{_format_expr(left, level)} {symbol} {_format_expr(right, level + 1)}"
    return f"({text})" if level < outer else text
