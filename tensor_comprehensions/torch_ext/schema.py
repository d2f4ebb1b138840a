"""The name and the schema of a def as an operator of torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256

import torch

from ..tc_lang.ir import Function

NAMESPACE = "tc"


@dataclass(frozen=True, slots=True)
class Schema:
    """The signature of a def in torch.

    Attributes:
        name: the name within the namespace, which depends on the content of the def.
        functional: `name(Tensor A, SymInt k, Tensor C) -> (Tensor C)`; initial values of in/out outputs come last.
        out: the overload `out`, which takes the tensors to write to by keyword.
        destinations: the names of these keywords.
    """

    name: str
    functional: str
    out: str
    destinations: tuple[str, ...]


def schema_of(function: Function, gradient: str) -> Schema:
    """The schema of a def. gradient: a text that identifies its gradient."""
    taken = (*function.parameters, *function.inouts)
    parts = (function.canonical, *(t.name for t in taken), "->", *function.returns, gradient)
    name = f"{function.name}_{sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"
    names: set[str] = set()
    kinds = ((t, "SymInt" if t.is_compile_time else "Tensor") for t in taken)
    arguments = ", ".join(f"{kind} {free_argument_name(t.name, names)}" for t, kind in kinds)
    destinations = tuple(free_argument_name(n, names) for n in _list_destination_names(function))
    mutated = ", ".join(f"Tensor(a{n}!) {d}" for n, d in enumerate(destinations))
    returns = ", ".join("Tensor" for _ in function.returns)
    out = f"{name}.out({', '.join(filter(None, (arguments, f'*, {mutated}')))}) -> ()"
    return Schema(name, f"{name}({arguments}) -> ({returns})", out, destinations)


def _list_destination_names(function: Function) -> tuple[str, ...]:
    return ("out",) if len(function.returns) == 1 else tuple(f"{r}_out" for r in function.returns)


def free_argument_name(name: str, taken: set[str]) -> str:
    """`name` as an argument of a schema, changed if another argument or the schema language uses it."""
    while name in taken or not _is_name(name):
        name += "_"
    taken.add(name)
    return name


@cache
def _is_name(name: str) -> bool:
    try:
        torch._C.parse_schema(f"f(Tensor {name}) -> ()")
    except RuntimeError:
        return False
    return True
