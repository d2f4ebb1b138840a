"""The cases of the algebra: layouts, tensors, threads, index expressions, banks and descriptors, each by its name."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tensor_comprehensions import layouts
from tensor_comprehensions import tiles as t
from tensor_comprehensions.core.errors import ArgumentError, CannotLower
from tensor_comprehensions.layouts import Swizzle, parse
from tensor_comprehensions.loop_ir.intervals import Interval
from tensor_comprehensions.loop_ir.nodes import Var
from tensor_comprehensions.loop_ir.passes.simplify import simplify

from ..helpers.index_expressions import expression, operations, value

NAMES = {"divide": "divide_layout", "product": "layout_product", "blocked": "blocked_product", "raked": "raked_product"}
"""What the package calls an operation of the cases."""
CASES = json.loads((Path(__file__).parent / "data" / "algebra.json").read_text())


def test_every_case_is_here() -> None:
    assert len(CASES) == 114
    assert {case["op"] for case in CASES} == set(OPERATIONS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case: dict[str, Any]) -> None:
    OPERATIONS[case["op"]](case)


def layout(case: dict[str, Any]) -> None:
    operation = getattr(layouts, NAMES.get(case["op"], case["op"]))
    compare(case, lambda: operation(*map(operand, case["args"])))


def offset(case: dict[str, Any]) -> None:
    compare(case, lambda: operand(case["args"][0])(operand(case["args"][1])))


def cosize(case: dict[str, Any]) -> None:
    compare(case, lambda: operand(case["args"][0]).cosize)


def coalesce_modes(case: dict[str, Any]) -> None:
    compare(case, lambda: layouts.coalesce_modes(operand(case["args"][0])))


def swizzle(case: dict[str, Any]) -> None:
    compare(case, lambda: Swizzle(*case["args"][0])(case["args"][1]))


def tile(case: dict[str, Any]) -> None:
    def run() -> object:
        tensor = read(case["args"][0])
        for sizes in case["args"][1:]:
            tensor = tensor.tile(*map(tiler, sizes))
        assert str(read(str(tensor))) == str(tensor)
        return tensor

    compare(case, run)


def threads(case: dict[str, Any]) -> None:
    found = t.threads(case["args"][0])
    for step, *values in case["args"][1:]:
        found = found.tile(*map(tiler, values)) if step == "tile" else found.reshape(values[0], tuple(values[1]))
    compare(case, lambda: found)
    formulas = [e for level in range(len(found.levels)) for e in found.indices(level, thread=Var("t"))]
    for mine, text in zip(formulas, case["indices"], strict=True):
        given = expression(text)
        assert operations(mine) <= operations(given)
        assert all(value(mine, {"t": n}) == value(given, {"t": n}) for n in range(found.size))


def check_simplified(case: dict[str, Any]) -> None:
    text, extents = case["args"]
    before, right = expression(text), expression(case["expect"])
    after = simplify(before, {name: Interval(0, extent - 1) for name, extent in extents.items()})
    assert operations(after) <= case["most"]
    for point in product(*map(range, extents.values())):
        at = dict(zip(extents, point, strict=True))
        assert value(after, at) == value(before, at) == value(right, at)


def bank_conflicts(case: dict[str, Any]) -> None:
    (of,) = case["args"]
    shared = t.tensor(f"[{of['rows']},{of['columns']}].fp{of['bits']}.SH")
    swizzled = shared.swizzled(Swizzle(*of["swizzle"]) if of["swizzle"] else None)
    assert t.conflicts(swizzled, of["access"]) == case["expect"]


def descriptor(case: dict[str, Any]) -> None:
    found = t.descriptor(**case["args"][0])
    assert found.value == int(case["expect"], 16)
    for row, k, address in case["places"]:
        assert found.place(row, k) == address


OPERATIONS = {
    **dict.fromkeys(
        (
            "coalesce", "compose", "compose_modes", "complement", "right_inverse", "left_inverse", "divide",
            "divide_modes", "product", "blocked", "raked", "widen", "narrow", "common_vector", "enlarge",
        ),
        layout,
    ),
    "offset": offset, "cosize": cosize, "coalesce_modes": coalesce_modes, "swizzle": swizzle, "tile": tile,
    "threads": threads, "simplify": check_simplified, "bank_conflicts": bank_conflicts, "descriptor": descriptor,
}  # fmt: skip


def compare(case: dict[str, Any], run: Any) -> None:
    """What `run` gives has the text that the case expects, or it refuses and names the operands that are layouts."""
    if case["expect"] != "refuse":
        assert compact(str(run())) == compact(str(case["expect"]))
        return
    with pytest.raises((ArgumentError, CannotLower)) as refusal:
        run()
    for text in case["args"]:
        for part in text if isinstance(text, list) else [text]:
            if isinstance(part, str) and ":" in part and "." not in part:
                assert compact(part) in compact(str(refusal.value))


def compact(text: str) -> str:
    """Spaces and the comma of a tuple of one do not count."""
    return re.sub(r",\)", ")", re.sub(r"\s", "", text))


def operand(x: Any) -> Any:
    return parse(x) if isinstance(x, str) else tuple(map(operand, x)) if isinstance(x, list) else x


def tiler(text: str) -> int | str | None:
    return None if text == "_" else int(text) if text.isdigit() else text


def read(text: str) -> Any:
    return t.threads(text) if text.endswith("thread") else t.tensor(text)
