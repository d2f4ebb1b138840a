from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_comprehensions import options as option_records
from tensor_comprehensions.cache import records, tuning
from tensor_comprehensions.cache.key import Key, NotAKey
from tensor_comprehensions.cache.store import Store
from tensor_comprehensions.cache.tc_cache_pb2 import Field, Options, Value
from tensor_comprehensions.cache.tuning import Measurement
from tensor_comprehensions.errors import ArgumentError
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.strategies import pack, tile, vectorize

KEY = Key((("kind", "tuning"), ("def", "def f0(...)"), ("shapes", "(3)")))
PIPELINE = tile(m=8, n=32) >> (pack(B="n1") | pack("B")) >> vectorize("n")

any_options = st.builds(
    CpuOptions,
    tile=st.sampled_from([(), (8,), (8, 16)]),
    vectors=st.sampled_from([0, 2]),
    strategy=st.sampled_from([None, PIPELINE, (("C", PIPELINE), ("D", tile(i=4)))]),
)
measurements = st.builds(
    Measurement,
    any_options,
    st.floats(1e-8, 1e5),
    st.booleans(),
    samples=st.integers(1, 3),
    versions=st.sampled_from([(("a", "1"),), (("a", "2"),)]),
    time=st.integers(0, 3),
)


def test_every_record_of_options_goes_into_a_message_and_comes_back() -> None:
    for record in records.records().values():
        assert records.from_message(records.to_message(record())) == record()


@given(any_options)
def test_options_go_into_a_message_and_come_back(options: CpuOptions) -> None:
    assert records.from_message(Options.FromString(records.to_message(options).SerializeToString())) == options


def test_every_field_is_in_the_message() -> None:
    message = records.to_message(CpuOptions())
    assert [x.name for x in message.fields] == [x.name for x in fields(CpuOptions)]


def test_a_function_cannot_be_written_down() -> None:
    with pytest.raises(NotAKey):
        records.to_message(CpuOptions(strategy=lambda op, target: PIPELINE))


@pytest.mark.parametrize(
    "field",
    [
        Field(name="vectors", value=Value(number=-1)),
        Field(name="vectors", value=Value(number=1 << 31)),
        Field(name="vectors", value=Value(text="4")),
        Field(name="vectors"),
        Field(name="fusion", value=Value(text="most")),
        Field(name="strategy", value=Value(pipeline="__import__('os').system('true')")),
        Field(name="strategy", value=Value(pipeline="tile(m=-8)")),
        Field(name="strategy", value=Value(pipeline="(" * 20000)),
        Field(name="strategy", value=Value(pipeline="tile(m=8) >> " * 9000 + "tile(m=8)")),
        Field(name="strategy", value=Value(number=3)),
        Field(name="unheard_of", value=Value(flag=True)),
    ],
)
def test_fault_53_options_out_of_range_or_unknown_are_refused(field: Field) -> None:
    with pytest.raises(ArgumentError):
        records.from_message(Options(record="CpuOptions", fields=[field]))


def test_fault_53_records_that_are_no_options_are_refused() -> None:
    with pytest.raises(ArgumentError, match="CpuOptions"):
        records.from_message(Options(record="Path"))


def test_a_field_that_an_older_version_did_not_have_gets_its_default() -> None:
    assert records.from_message(Options(record="CpuOptions")) == CpuOptions()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0, 1e-12, 1e9])
def test_fault_43_times_that_no_call_takes_are_refused(seconds: float) -> None:
    with pytest.raises(ArgumentError):
        Measurement(CpuOptions(), seconds, True)


def test_fault_43_such_times_in_a_message_are_passed_over() -> None:
    message = tuning.Tuning.FromString(tuning.to_bytes(KEY, [Measurement(CpuOptions(), 1.0, True)]))
    message.measurements[0].seconds = float("nan")
    assert tuning.from_bytes(message.SerializeToString()) == (KEY, ())


# --- merging -----------------------------------------------------------------------------------------------------


@given(st.lists(measurements, max_size=6), st.lists(measurements, max_size=6), st.lists(measurements, max_size=6))
def test_merging_does_not_depend_on_order_grouping_or_repetition(
    a: list[Measurement], b: list[Measurement], c: list[Measurement]
) -> None:
    assert tuning.merge([*a, *b]) == tuning.merge([*b, *a])
    assert tuning.merge([*tuning.merge([*a, *b]), *c]) == tuning.merge([*a, *tuning.merge([*b, *c])])
    assert tuning.merge([*a, *tuning.merge(a)]) == tuning.merge(a)


def test_merging_keeps_the_fastest_that_was_validated() -> None:
    slow, fast = Measurement(CpuOptions(), 2.0, True), Measurement(CpuOptions(), 1.0, True)
    unsure = Measurement(CpuOptions(), 0.5, False)
    assert tuning.merge([slow, unsure, fast]) == (fast,)


def test_merging_keeps_no_more_than_a_number_of_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "KEPT", 3)
    ways = [Measurement(CpuOptions(grain=n), 1.0 + n, True) for n in range(5)]
    assert tuning.merge(reversed(ways)) == tuple(ways[:3])


# --- on disk -----------------------------------------------------------------------------------------------------


def test_what_is_recorded_is_recalled_best_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    slow, fast = Measurement(CpuOptions(), 2.0, True), Measurement(CpuOptions(vectors=2), 1.0, True)
    tuning.record(store, KEY, [slow])
    tuning.record(store, KEY, [fast])
    assert tuning.recall(store, KEY) == (fast, slow)
    assert tuning.everything(store) == {KEY: (fast, slow)}
    best = tuning.best(store, KEY)
    assert best == fast


def test_the_best_is_of_the_installed_versions_where_there_is_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    here, old = Measurement(CpuOptions(), 2.0, True), Measurement(CpuOptions(), 1.0, True, versions=(("x", "1"),))
    unsure = Measurement(CpuOptions(grain=0), 0.1, False)
    tuning.record(store, KEY, [old, unsure])
    assert tuning.best(store, KEY) == old
    tuning.record(store, KEY, [here])
    assert tuning.best(store, KEY) == here


def test_options_that_use_other_names_are_not_the_best(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    named = Measurement(CpuOptions(strategy=PIPELINE), 1.0, True, spelling="of one def")
    tuning.record(store, KEY, [named])
    assert tuning.best(store, KEY, "of another def") is None
    assert tuning.best(store, KEY, "of one def") == named


def test_many_recordings_end_in_few_files(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    for n in range(100):
        tuning.record(store, KEY, [Measurement(CpuOptions(grain=n), 1.0 + n, True)])
    assert len(store.names(("tuning", KEY.family, KEY.digest))) <= tuning.SEGMENTS
    assert [m.options.grain for m in tuning.recall(store, KEY)] == list(range(100))


def test_keys_that_differ_in_sizes_are_a_family(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    other = Key((*KEY.parts[:-1], ("shapes", "(4)")))
    stranger = Key((KEY.parts[0], ("def", "def f0(---)"), KEY.parts[2]))
    found = Measurement(CpuOptions(), 1.0, True)
    for key in (KEY, other, stranger):
        tuning.record(store, key, [found])
    assert tuning.family(store, KEY) == {other: (found,)}


def test_collections_say_what_they_were_made_of() -> None:
    found = {KEY: tuning.merge([Measurement(CpuOptions(), 1.0, True)])}
    assert tuning.from_collection(tuning.collection(found)) == found
    with pytest.raises(ArgumentError):
        tuning.from_collection(b"<html>")


def test_measurements_carry_the_versions_of_this_installation() -> None:
    assert Measurement(CpuOptions(), 1.0, True).is_current
    assert not replace(Measurement(CpuOptions(), 1.0, True), versions=()).is_current


def test_all_records_of_options_are_known() -> None:
    assert "CpuOptions" in records.records()
    assert all(vars(option_records)[name] is x for name, x in records.records().items())
