"""Numbers and conversions as texts of a def."""

from __future__ import annotations

import math
import struct

from ..core.dtypes import BFLOAT16, BOOL, FLOAT16, FLOAT32, DType

CHUNK_BITS = 30
"""Bits of an integer that one literal holds: the language's literals are of 32 bits."""


class Unsupported(Exception):
    """This operation, with these arguments, stays with torch; the message says why."""


def compute_dtype(dtype: DType) -> DType:
    """The type in which torch computes with elements of `dtype`."""
    return FLOAT32 if dtype in (FLOAT16, BFLOAT16) else dtype


def cast_text(text: str, source: DType, target: DType) -> str:
    return text if source == target else f"{target.name}({text})"


def format_literal(value: float | int | bool, dtype: DType) -> str:
    """`value` as a literal of arithmetic in `dtype`. Raises Unsupported if the type cannot represent it."""
    kind = compute_dtype(dtype)
    if kind == BOOL:
        return f"bool({int(bool(value))})"
    return _float_literal(float(value), kind) if kind.is_float else _integer_literal(value, kind)


def _integer_literal(value: float | int | bool, kind: DType) -> str:
    """The literal of an integer, truncated to the low bits that `kind` has, as in torch."""
    if isinstance(value, float) and not value.is_integer():
        raise Unsupported(f"{value} is no {kind}")
    number = int(value) & ((1 << kind.bits) - 1)
    if kind.is_signed and number >> (kind.bits - 1):
        number -= 1 << kind.bits
    return _integer_text(number, kind.name)


def _integer_text(number: int, name: str) -> str:
    if -(2**31) < number < 2**31:
        return f"{name}({number})"
    rest, low = divmod(number, 1 << CHUNK_BITS)
    return f"({_integer_text(rest, name)} * {name}({1 << CHUNK_BITS}) + {name}({low}))"


def _float_literal(number: float, kind: DType) -> str:
    """The literal of a float32, or of a float64 as an exact sum of float32 literals."""
    if math.isinf(number) or math.isnan(number):
        return cast_text("nan" if math.isnan(number) else "inf" if number > 0 else "(-inf)", FLOAT32, kind)
    if kind == FLOAT32:
        _round_to_float(number)
        return _print_signed(number)
    parts: list[float] = []
    while number or not parts:
        parts.append(_round_to_float(number))
        number -= parts[-1]
        if len(parts) > 3:
            raise Unsupported("a number between those that literals have")
    text = " + ".join(f"{kind.name}({_print_signed(x)})" for x in parts)
    return text if len(parts) == 1 else f"({text})"


def _round_to_float(number: float) -> float:
    """`number` as a float32."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        raise Unsupported(f"the number {number} is too large for float32") from None
    return rounded


def _print_signed(number: float) -> str:
    return f"({number!r})" if math.copysign(1, number) < 0 else repr(number)
