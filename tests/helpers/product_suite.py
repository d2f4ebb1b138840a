"""Defs with products for tensor cores: the conformance programs and the benchmarks, in the types that these multiply.

Each program is rewritten from float to a narrow type, and kept if a product of it is a region then. Benchmarks have
sizes that are no multiples of anything, and sizes that TMA takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from random import Random
from typing import Any

import numpy as np

from benchmarks import sources
from tensor_comprehensions.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, DType
from tensor_comprehensions.core.errors import CannotLower, TCError
from tensor_comprehensions.options import TileOptions
from tensor_comprehensions.target import GpuTarget, parse_gpu_target
from tensor_comprehensions.tc_lang import compile_source
from tensor_comprehensions.tiles.products.lower_def import divide_def

from .def_products import GROUP_CASES, random_group_options, random_options
from .gpu_suite import CASES as PROGRAMS
from .gpu_suite import SIZES, Case, case_of, round_values, small_case

ALIGNED = {n: size if n in {"B", "G", "KH", "KW"} else -(-size // 16) * 16 for n, size in SIZES.items()}
"""Sizes whose rows are multiples of 16 bytes in all types."""
TYPES = (FLOAT16, BFLOAT16, INT8)
TOLERANCES = {FLOAT16: 2e-2, BFLOAT16: 6e-2, INT8: 1e-3, FLOAT32: 1e-2}
"""Of results, after some roundings to a type; of float32, of products whose factors are rounded to tf32."""
SMALL_TARGET = parse_gpu_target("cuda:sm_80")
"""A target whose instructions take every region."""
DRAWS = 24
"""Sets of random options that are tried before the default is taken."""


def product_cases(way: str) -> Iterator[Case]:
    """All defs with a region: in halves, bfloat16 and int8, or, for `tf32`, in float32 rounded to it."""
    options = TileOptions(products="tf32" if way == "tf32" else "")
    for case in _all_cases((FLOAT32,) if way == "tf32" else TYPES):
        if _takes(case, options):
            yield case


def _takes(case: Case, options: TileOptions, target: GpuTarget | None = None) -> bool:
    try:
        divide_def(case.bound, options, target or SMALL_TARGET)
    except CannotLower:
        return False
    return True


def _all_cases(types: tuple[DType, ...]) -> Iterator[Case]:
    for dtype in types:
        yield from (replace(c, tolerance=TOLERANCES[dtype]) for c in _rewrite_cases(dtype))
    if FLOAT32 not in types:
        yield from _write_cases()


def draw_product_cases(random: Random, count: int) -> list[Case]:
    """So many of the conformance programs and benchmarks that have a region, each in some type."""
    makers = [make for dtype in TYPES for make in _makers(dtype)]
    random.shuffle(makers)
    cases = (replace(case, tolerance=TOLERANCES[dtype]) for make, dtype in makers if (case := make()) is not None)
    return list(islice((case for case in cases if _takes(case, TileOptions())), count))


def _rewrite_cases(dtype: DType) -> Iterator[Case]:
    """The conformance programs and benchmarks, in a type instead of float32."""
    return (case for make, _ in _makers(dtype) if (case := make()) is not None)


def _makers(dtype: DType) -> Iterator[tuple[Callable[[], Case | None], DType]]:
    """Functions that make them; None: a program has no such type."""
    for program in PROGRAMS:
        if program.error is None:
            yield partial(_rewrite_program, program, dtype), dtype
    for name, text in vars(sources).items():
        if name.isupper() and isinstance(text, str):
            for kind, sizes in (("", SIZES), (" aligned", ALIGNED)):
                yield partial(_rewrite_benchmark, f"{name.lower()}{kind}", text, sizes, dtype), dtype


def _rewrite_program(program: Any, dtype: DType) -> Case | None:
    inputs, initial = program.arrays()
    arrays = {n: _narrow(a, dtype) for n, a in {**inputs, **initial}.items()}
    name, wanted = f"{program.id} {dtype.name}", program.record.get("fn")
    with suppress(TCError):
        return case_of(name, _rewrite(program.source, dtype), wanted, arrays, set(initial))
    return None


def _rewrite_benchmark(name: str, text: str, sizes: dict[str, int], dtype: DType) -> Case | None:
    with suppress(TCError):
        return small_case(f"{name} {dtype.name}", _rewrite(text, dtype), sizes)
    return None


def _write_cases() -> Iterator[Case]:
    """The defs that are products of narrow types as they are written."""
    for product in GROUP_CASES:
        functions = compile_source(product.text)
        names = [p.name for p in functions[0].parameters]
        arrays = dict(zip(names, (x.float().numpy() if x.dtype.is_floating_point else x.numpy()
                                  for x in product.arguments()), strict=True))  # fmt: skip
        first = {n: x.float().numpy() for n, x in product.initial_values().items()}
        types = {p.name: p.dtype for p in (*functions[0].parameters, *functions[0].inouts)}
        whole = {n: round_values(a, types[n]) for n, a in {**arrays, **first}.items()}
        yield replace(case_of(product.name, product.text, "f", whole, set(first)), tolerance=TOLERANCES[BFLOAT16])


def _rewrite(text: str, dtype: DType) -> str:
    """A text in a type. Bytes are multiplied as int32."""
    if dtype == FLOAT32:
        return text
    if dtype != INT8:
        return re.sub(r"\bfloat\b", {FLOAT16: "half"}.get(dtype, dtype.name), text)
    return re.sub(r"def [^{]*?->|[^\n;]*\+=[^\n;]*", _as_bytes, text)


def _as_bytes(found: re.Match[str]) -> str:
    text = found.group()
    if text.startswith("def "):
        return re.sub(r"\bfloat\b", "int8", text)
    left, plus, right = text.partition("+=")
    return left + plus + re.sub(r"\b([A-Za-z_]\w*)\(([^()]*)\)", r"int32(\1(\2))", right)


def _narrow(a: Any, dtype: DType) -> Any:
    if a.dtype != np.float32 or dtype == FLOAT32:
        return a
    return np.clip(np.rint(2 * a), -4, 4).astype(np.int8) if dtype == INT8 else round_values(a, dtype)


def tile_options(case: Case, number: int, way: str, target: GpuTarget) -> TileOptions:
    """The default for the first round of each target, then random options that the def takes.

    Every second set for sm_90 is for warpgroups, if some of these fit.
    """
    products = "tf32" if way == "tf32" else ""
    random = Random(f"{case.name} {number}")
    grouped = target.group_ops > 0 and number // 2 % 2 == 1
    if number > 1:
        for draw in (random_group_options, random_options) if grouped else (random_options,):
            for _ in range(DRAWS):
                found = replace(draw(random), products=products)
                if _takes(case, found, target):
                    return found
    return TileOptions(products=products)
