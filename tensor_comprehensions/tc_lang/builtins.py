"""The builtin functions of the language: their names, their arities, and the C functions that they denote."""

from __future__ import annotations

from ..core.math_functions import FUNCTIONS, TF32

SPECIAL: dict[str, tuple[int, int | None]] = {
    "abs": (1, 1), "relu": (1, 1), "sigmoid": (1, 1), "min": (2, None), "max": (2, None),
}  # fmt: skip
"""Builtins that the checker expands into simpler expressions, with their least and greatest number of arguments."""

CONSTANTS = {"inf": float("inf"), "nan": float("nan")}


def canonical_name(name: str) -> str | None:
    """The key in `FUNCTIONS` of a C function, for `fmaxf` as for `fmax`; None if `name` is not a C function."""
    if name in FUNCTIONS:
        return name
    if name.endswith("f") and name[:-1] in FUNCTIONS and name[:-1] != TF32:
        return name[:-1]
    return None


def is_builtin(name: str) -> bool:
    return name in SPECIAL or canonical_name(name) is not None


def builtin_arity(name: str) -> tuple[int, int | None]:
    """The least and the greatest number of arguments of a builtin (None: any number)."""
    if name in SPECIAL:
        return SPECIAL[name]
    canonical = canonical_name(name)
    assert canonical is not None
    n = FUNCTIONS[canonical].arity
    return n, n


def builtin_names() -> tuple[str, ...]:
    return (*FUNCTIONS, *SPECIAL)
