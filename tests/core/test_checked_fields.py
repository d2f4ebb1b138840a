"""Every field of every record of settings refuses, when the record is made, values that it cannot have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.checked_fields import MOST, describe_value
from tensor_comprehensions.core.knobs import Knobs, override_knobs
from tensor_comprehensions.schedules import tile
from tensor_comprehensions.target import AVX2, GPUS

RECORDS = (tc.CpuOptions(), tc.SparseOptions(), tc.MappingOptions(), tc.TileOptions(), AVX2, GPUS["cuda:sm_90"])
NO_SETTINGS: tuple[Any, ...] = (
    None, b"x", [], [1], {"a": 1}, {1: 2}, object(), int, (None,), (b"x",), ((1,),), 1j, np.int64(3), np.float32(1),
    torch.zeros(2), range(3), -1.5, math.nan, math.inf, 10**5000, -(10**5000), "\ud800",
)  # fmt: skip
"""What no field of any record can be, but None as a schedule, and texts where any text will do."""


class Unprintable:
    def __repr__(self) -> str:
        raise ZeroDivisionError


def change_knob(name: str, value: object) -> None:
    with override_knobs(**{name: value}):
        pass


def settings() -> Iterator[tuple[str, Field[Any], Callable[[Any], object]]]:
    for record in RECORDS:
        for f in fields(record):
            if f.name != "kind":
                yield f"{type(record).__name__}.{f.name}", f, lambda v, r=record, n=f.name: replace(r, **{n: v})
    for f in fields(Knobs):
        yield f"Knobs.{f.name}", f, lambda v, n=f.name: change_knob(n, v)


SETTINGS = [pytest.param(f, make, id=name) for name, f, make in settings()]


def assert_refused(f: Field[Any], make: Callable[[Any], object], wrong: object) -> tc.ArgumentError:
    with pytest.raises(tc.ArgumentError) as caught:
        make(wrong)
    assert f.name.partition("_")[0] in str(caught.value)
    assert caught.value.expected
    assert len(str(caught.value)) < 1000
    return caught.value


@pytest.mark.parametrize(("f", "make"), SETTINGS)
def test_values_that_no_setting_has(f: Field[Any], make: Callable[[Any], object]) -> None:
    is_free_text = f.type == "str" and not {"choices", "pattern"} & set(f.metadata)
    for wrong in (*NO_SETTINGS, Unprintable()):
        if not (isinstance(wrong, str) and is_free_text) and not (wrong is None and f.name == "schedule"):
            assert_refused(f, make, wrong)


@pytest.mark.parametrize(("f", "make"), SETTINGS)
def test_values_near_those_of_a_setting(f: Field[Any], make: Callable[[Any], object]) -> None:
    """A bool for a number, a number for a bool, a number beyond the bounds, a word with a wrong letter."""
    kind = str(f.type)
    is_tuple = kind.startswith("tuple[")
    make_item = (lambda v: make((v,))) if is_tuple else make
    if "int" in kind or "float" in kind:
        least = f.metadata.get(
            "least", min((c for c in f.metadata.get("choices", ()) if isinstance(c, int)), default=0)
        )
        for wrong in (True, False, 1.5 if "int" in kind else "1.5", "1", least - 1, f.metadata.get("most", MOST) * 2):
            assert_refused(f, make_item, wrong)
    elif kind == "bool":
        for wrong in (0, 1, "True", "false"):
            assert_refused(f, make, wrong)
    elif words := [c for c in f.metadata.get("choices", ()) if c]:
        for wrong in (words[-1] + "x", words[-1][:-1] + "z"):
            assert "did you mean" in assert_refused(f, make_item, wrong).suggestion
    else:
        assert f.name in ("order", "schedule", "name", "features") or f.metadata.get("path")


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_names_that_no_field_has(record: Any) -> None:
    last = fields(record)[-1].name
    with pytest.raises(tc.ArgumentError) as caught:
        replace(record, **{f"{last}s": 1})
    assert caught.value.suggestion == f"did you mean '{last}'?"


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_values_of_a_setting(record: Any) -> None:
    """Choices are what a search tries: a record can have each of them."""
    assert replace(record) == record
    for f in fields(record):
        for choice in f.metadata.get("choices", ()):
            if str(f.type).startswith("tuple[") and not isinstance(choice, tuple):
                lengths = [n for n in f.metadata.get("lengths", (1,)) if n]
                choice = (choice,) * lengths[-1]
            assert getattr(replace(record, **{f.name: choice}), f.name) == choice


def test_schedules_are_values_once_a_record_is_made() -> None:
    one = tile(m=4)
    options = tc.CpuOptions(schedule={"C": one})  # type: ignore[arg-type]
    assert options.schedule == (("C", one),)
    assert hash(options) == hash(tc.CpuOptions(schedule=(("C", one),)))
    for wrong in ((1, 2), ("a",), (("C", 3),), (("C", one, one),), ((1, one),), {"C": []}, "tile(m=4)", type(one)):
        with pytest.raises(tc.ArgumentError):
            tc.CpuOptions(schedule=wrong)


def test_features_without_a_sign_end_no_process() -> None:
    """LLVM aborts on them."""
    for wrong in ("avx2", "+avx2 +fma", "+avx2, +fma", "+", "++fma", "+avx2,,+fma"):
        with pytest.raises(tc.ArgumentError, match="features"):
            replace(AVX2, features=wrong)
    assert replace(AVX2, features="").features == ""


def test_described_values_are_short() -> None:
    assert describe_value(10**5000) == "a number of 16610 bits"
    assert describe_value((10**5000,)) == "a tuple"
    assert "Unprintable" in describe_value(Unprintable())
    assert len(describe_value("x" * 10_000)) < 100
