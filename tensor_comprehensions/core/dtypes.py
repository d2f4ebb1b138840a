"""The scalar types of the language, and how two of them combine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The interpretation of a scalar's bits."""

    BOOL = "bool"
    UNSIGNED = "unsigned"
    SIGNED = "signed"
    FLOAT = "float"


@dataclass(frozen=True, slots=True)
class DType:
    """A scalar type: its name as in NumPy and torch, its kind and its width in bits."""

    name: str
    kind: Kind
    bits: int

    def __hash__(self) -> int:
        """Hash only the name, which determines the rest: every expression has types, so this must be fast."""
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, DType) and self.name == other.name)

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        return self.kind is Kind.FLOAT

    @property
    def is_integer(self) -> bool:
        return self.kind in (Kind.SIGNED, Kind.UNSIGNED)

    @property
    def is_bool(self) -> bool:
        return self.kind is Kind.BOOL

    @property
    def is_signed(self) -> bool:
        return self.kind in (Kind.SIGNED, Kind.FLOAT)

    @property
    def accumulator(self) -> DType:
        """The type that arithmetic and reductions use: float32 for the storage types float16 and bfloat16."""
        return FLOAT32 if self in (FLOAT16, BFLOAT16) else self

    def __repr__(self) -> str:
        return self.name.upper()

    def __str__(self) -> str:
        return self.name


BOOL = DType("bool", Kind.BOOL, 8)
UINT8 = DType("uint8", Kind.UNSIGNED, 8)
UINT16 = DType("uint16", Kind.UNSIGNED, 16)
UINT32 = DType("uint32", Kind.UNSIGNED, 32)
UINT64 = DType("uint64", Kind.UNSIGNED, 64)
INT8 = DType("int8", Kind.SIGNED, 8)
INT16 = DType("int16", Kind.SIGNED, 16)
INT32 = DType("int32", Kind.SIGNED, 32)
INT64 = DType("int64", Kind.SIGNED, 64)
FLOAT16 = DType("float16", Kind.FLOAT, 16)
BFLOAT16 = DType("bfloat16", Kind.FLOAT, 16)
FLOAT32 = DType("float32", Kind.FLOAT, 32)
FLOAT64 = DType("float64", Kind.FLOAT, 64)

DTYPES = {
    t.name: t
    for t in (
        BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64,
    )
}  # fmt: skip
ALIASES = {"byte": UINT8, "int": INT32, "long": INT64, "half": FLOAT16, "float": FLOAT32, "double": FLOAT64}


def promote_dtypes(a: DType, b: DType) -> DType:
    """The type in which a binary operator on `a` and `b` computes, which is also its result type."""
    if a == b:
        return a
    if a.is_float and b.is_float:
        return FLOAT32 if a.bits == b.bits else max(a, b, key=lambda t: t.bits)
    if a.is_float or b.is_float:
        return a if a.is_float else b
    if a.is_bool or b.is_bool:
        return b if a.is_bool else a
    wide = max(a.bits, b.bits)
    if a.kind is b.kind is Kind.UNSIGNED:
        return DTYPES[f"uint{wide}"]
    return DTYPES[f"int{wide}"]


def wrap_integer(value: int, to: DType) -> int:
    """`value` wrapped around to the range of the integer type `to`."""
    value %= 2**to.bits
    return value - 2**to.bits if to.kind is Kind.SIGNED and value >= 2 ** (to.bits - 1) else value
