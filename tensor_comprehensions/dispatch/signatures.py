"""The signature of a def for users: as text, as a docstring, and as a Python signature."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Iterable, Mapping
from functools import lru_cache

from ..core.errors import RangeError
from ..tc_lang.binding.ranges import symbolic_ranges
from ..tc_lang.ir import Const, Expr, Function, Size, Symbol


def declared_dims(symbol: Symbol) -> tuple[str, ...]:
    """The declared sizes of a tensor as written; `?` where none is declared."""
    if symbol.extents is None:
        return ("?",) * symbol.rank
    return tuple(_format_extent(e) for e in symbol.extents)


def _format_extent(e: Expr) -> str:
    match e:
        case Size(name):
            return name
        case Const(value):
            return str(value)
    return "?"


def format_declaration(symbol: Symbol, sizes: tuple[str, ...] | None = None) -> str:
    """A parameter or return as it would be written in a def: `float32(M,N) x`."""
    sizes = declared_dims(symbol) if sizes is None else sizes
    return f"{symbol.dtype}({','.join(sizes)}) {symbol.name}" if sizes else f"{symbol.dtype} {symbol.name}"


@lru_cache(maxsize=64)
def return_sizes(function: Function) -> Mapping[str, tuple[str, ...]]:
    """The sizes of each output as formulas, such as `N - K + 1`; as declared if they depend on scalars."""
    try:
        shape = symbolic_ranges(function).shape
    except RangeError:
        return {r: declared_dims(function.tensor(r)) for r in function.returns}
    return {r: tuple(map(str, shape(r))) for r in function.returns}


def format_returns(function: Function) -> tuple[str, ...]:
    """The outputs with their sizes as formulas: `float32(N - K + 1) out`."""
    return tuple(format_declaration(function.tensor(r), sizes) for r, sizes in return_sizes(function).items())


def format_signature(function: Function) -> str:
    """The signature in one line: `matmul(float32(M,K) A, float32(K,N) B) -> (float32(M,N) C)`."""
    taken = ", ".join(format_declaration(p) for p in function.parameters)
    return f"{function.name}({taken}) -> ({', '.join(format_returns(function))})"


def format_docstring(function: Function) -> str:
    """The docstring of an operator: its parameters, results and errors, and the text of the def."""
    takes = [_format_argument(p) for p in function.parameters]
    sizes = return_sizes(function)
    initial = [f"{format_declaration(p, sizes[p.name])}: initial value, passed by keyword" for p in function.inouts]
    gives = list(format_returns(function))
    sections = [
        format_signature(function),
        *_format_section("Takes", takes),
        *_format_section("Takes by keyword", initial),
        *_format_section("Gives", gives),
        *_format_section("Raises", ["ArgumentError: a tensor has another type, rank, device or size.",
                             "RangeError: a subscript leaves its tensor."]),
        "Defined by:\n" + _indent_lines(function.source.strip("\n").splitlines()),
    ]  # fmt: skip
    return "\n\n".join(sections)


def _format_argument(symbol: Symbol) -> str:
    return format_declaration(symbol) + (" (its value becomes part of the kernel)" if symbol.is_compile_time else "")


def _format_section(title: str, lines: list[str]) -> list[str]:
    return [f"{title}:\n{_indent_lines(lines)}"] if lines else []


def _indent_lines(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}".rstrip() for line in lines)


def python_signature(function: Function) -> inspect.Signature:
    """The Python signature of the operator: tensors by position, in/out outputs and `out` by keyword."""
    required = [p.name for p in function.inouts]
    keywords = required if "out" in required else [*required, "out"]
    parameters: dict[str, inspect.Parameter] = {}
    for name in (*keywords, *(p.name for p in function.parameters)):
        python_name = name
        while keyword.iskeyword(python_name) or python_name in parameters:
            python_name += "_"
        kind = inspect.Parameter.KEYWORD_ONLY if len(parameters) < len(keywords) else inspect.Parameter.POSITIONAL_ONLY
        optional = kind is inspect.Parameter.KEYWORD_ONLY and name not in required
        default = None if optional else inspect.Parameter.empty
        parameters[python_name] = inspect.Parameter(python_name, kind, default=default)
    return inspect.Signature(sorted(parameters.values(), key=lambda p: p.kind))
