"""Short ways from a text to what tests look at."""

from __future__ import annotations

from typing import Any

from tensor_comprehensions.tc_lang import BoundFunction, Function, bind, compile_source
from tensor_comprehensions.tc_lang.reference.evaluator import evaluate_def


def compile_last_def(source: str) -> Function:
    """The last def of a text."""
    return compile_source(source)[-1]


def bound(source: str, scalars: dict[str, int] | None = None, **sizes: int) -> BoundFunction:
    """The last def of a text, bound."""
    return bind(compile_last_def(source), sizes, scalars)


def run(source: str, scalars: dict[str, int] | None = None, **arrays: Any) -> dict[str, Any]:
    """The last def of a text, evaluated; sizes come from the arrays."""
    function = compile_last_def(source)
    sizes = {
        getattr(extent, "name", ""): found
        for symbol in (*function.parameters, *function.inouts)
        for extent, found in zip(symbol.extents or (), arrays[symbol.name].shape, strict=False)
    }
    return evaluate_def(bind(function, {n: sizes[n] for n in function.sizes}, scalars), arrays)
