from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_comprehensions import options as option_records
from tensor_comprehensions.cache import measurement_store, options_proto
from tensor_comprehensions.cache.key import Key, Uncacheable
from tensor_comprehensions.cache.measurement_store import Measurement
from tensor_comprehensions.cache.store import Store
from tensor_comprehensions.cache.tc_cache_pb2 import Field, Options, Value
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.schedules import pack, tile, vectorize

KEY = Key((("kind", "tuning"), ("def", "def f0(...)"), ("shapes", "(3)")))
PIPELINE = tile(m=8, n=32) >> (pack(B="n1") | pack("B")) >> vectorize("n")

any_options = st.builds(
    CpuOptions,
    tile=st.sampled_from([(), (8,), (8, 16)]),
    interleave=st.sampled_from([0, 2]),
    schedule=st.sampled_from([None, PIPELINE, (("C", PIPELINE), ("D", tile(i=4)))]),
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
    for record in options_proto.option_classes().values():
        assert options_proto.from_message(options_proto.to_message(record())) == record()


@given(any_options)
def test_options_go_into_a_message_and_come_back(options: CpuOptions) -> None:
    assert (
        options_proto.from_message(Options.FromString(options_proto.to_message(options).SerializeToString())) == options
    )


def test_every_field_is_in_the_message() -> None:
    message = options_proto.to_message(CpuOptions())
    assert [x.name for x in message.fields] == [x.name for x in fields(CpuOptions)]


def test_a_function_cannot_be_written_down() -> None:
    with pytest.raises(Uncacheable):
        options_proto.to_message(CpuOptions(schedule=lambda op, target: PIPELINE))


@pytest.mark.parametrize(
    "field",
    [
        Field(name="interleave", value=Value(number=-1)),
        Field(name="interleave", value=Value(number=1 << 31)),
        Field(name="interleave", value=Value(text="4")),
        Field(name="interleave"),
        Field(name="fusion", value=Value(text="most")),
        Field(name="schedule", value=Value(pipeline="__import__('os').system('true')")),
        Field(name="schedule", value=Value(pipeline="tile(m=-8)")),
        Field(name="schedule", value=Value(pipeline="(" * 20000)),
        Field(name="schedule", value=Value(pipeline="tile(m=8) >> " * 9000 + "tile(m=8)")),
        Field(name="schedule", value=Value(number=3)),
        Field(name="unheard_of", value=Value(flag=True)),
    ],
)
def test_fault_53_options_out_of_range_or_unknown_are_refused(field: Field) -> None:
    with pytest.raises(ArgumentError):
        options_proto.from_message(Options(record="CpuOptions", fields=[field]))


def test_fault_53_records_that_are_no_options_are_refused() -> None:
    with pytest.raises(ArgumentError, match="CpuOptions"):
        options_proto.from_message(Options(record="Path"))


def test_a_field_that_an_older_version_did_not_have_gets_its_default() -> None:
    assert options_proto.from_message(Options(record="CpuOptions")) == CpuOptions()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0, 1e-12, 1e9])
def test_fault_43_times_that_no_call_takes_are_refused(seconds: float) -> None:
    with pytest.raises(ArgumentError):
        Measurement(CpuOptions(), seconds, True)


def test_fault_43_such_times_in_a_message_are_passed_over() -> None:
    message = measurement_store.Tuning.FromString(
        measurement_store.measurements_to_bytes(KEY, [Measurement(CpuOptions(), 1.0, True)])
    )
    message.measurements[0].seconds = float("nan")
    assert measurement_store.measurements_from_bytes(message.SerializeToString()) == (KEY, ())


# --- merging -----------------------------------------------------------------------------------------------------


@given(st.lists(measurements, max_size=6), st.lists(measurements, max_size=6), st.lists(measurements, max_size=6))
def test_merging_does_not_depend_on_order_grouping_or_repetition(
    a: list[Measurement], b: list[Measurement], c: list[Measurement]
) -> None:
    assert measurement_store.merge_measurements([*a, *b]) == measurement_store.merge_measurements([*b, *a])
    assert measurement_store.merge_measurements(
        [*measurement_store.merge_measurements([*a, *b]), *c]
    ) == measurement_store.merge_measurements([*a, *measurement_store.merge_measurements([*b, *c])])
    assert measurement_store.merge_measurements(
        [*a, *measurement_store.merge_measurements(a)]
    ) == measurement_store.merge_measurements(a)


def test_merging_keeps_the_fastest_that_was_validated() -> None:
    slow, fast = Measurement(CpuOptions(), 2.0, True), Measurement(CpuOptions(), 1.0, True)
    unsure = Measurement(CpuOptions(), 0.5, False)
    assert measurement_store.merge_measurements([slow, unsure, fast]) == (fast,)


def test_merging_keeps_no_more_than_a_number_of_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement_store, "MAX_MEASUREMENTS", 3)
    ways = [Measurement(CpuOptions(grain_size=n), 1.0 + n, True) for n in range(5)]
    assert measurement_store.merge_measurements(reversed(ways)) == tuple(ways[:3])


# --- on disk -----------------------------------------------------------------------------------------------------


def test_what_is_recorded_is_recalled_best_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    slow, fast = Measurement(CpuOptions(), 2.0, True), Measurement(CpuOptions(interleave=2), 1.0, True)
    measurement_store.record_measurements(store, KEY, [slow])
    measurement_store.record_measurements(store, KEY, [fast])
    assert measurement_store.recall_measurements(store, KEY) == (fast, slow)
    assert measurement_store.all_measurements(store) == {KEY: (fast, slow)}
    best = measurement_store.best_measurement(store, KEY)
    assert best == fast


def test_the_best_is_of_the_installed_versions_where_there_is_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    here, old = Measurement(CpuOptions(), 2.0, True), Measurement(CpuOptions(), 1.0, True, versions=(("x", "1"),))
    unsure = Measurement(CpuOptions(grain_size=0), 0.1, False)
    measurement_store.record_measurements(store, KEY, [old, unsure])
    assert measurement_store.best_measurement(store, KEY) == old
    measurement_store.record_measurements(store, KEY, [here])
    assert measurement_store.best_measurement(store, KEY) == here


def test_options_that_use_other_names_are_not_the_best(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    named = Measurement(CpuOptions(schedule=PIPELINE), 1.0, True, names_digest="of one def")
    measurement_store.record_measurements(store, KEY, [named])
    assert measurement_store.best_measurement(store, KEY, "of another def") is None
    assert measurement_store.best_measurement(store, KEY, "of one def") == named


def test_many_recordings_end_in_few_files(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    for n in range(100):
        measurement_store.record_measurements(store, KEY, [Measurement(CpuOptions(grain_size=n), 1.0 + n, True)])
    assert len(store.names(("tuning", KEY.family, KEY.digest))) <= measurement_store.MAX_FILES
    assert [m.options.grain_size for m in measurement_store.recall_measurements(store, KEY)] == list(range(100))


def test_keys_that_differ_in_sizes_are_a_family(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    other = Key((*KEY.parts[:-1], ("shapes", "(4)")))
    stranger = Key((KEY.parts[0], ("def", "def f0(---)"), KEY.parts[2]))
    found = Measurement(CpuOptions(), 1.0, True)
    for key in (KEY, other, stranger):
        measurement_store.record_measurements(store, key, [found])
    assert measurement_store.family_measurements(store, KEY) == {other: (found,)}


def test_collections_say_what_they_were_made_of() -> None:
    found = {KEY: measurement_store.merge_measurements([Measurement(CpuOptions(), 1.0, True)])}
    assert measurement_store.collection_from_bytes(measurement_store.collection_to_bytes(found)) == found
    with pytest.raises(ArgumentError):
        measurement_store.collection_from_bytes(b"<html>")


def test_measurements_carry_the_versions_of_this_installation() -> None:
    assert Measurement(CpuOptions(), 1.0, True).is_current
    assert not replace(Measurement(CpuOptions(), 1.0, True), versions=()).is_current


def test_all_records_of_options_are_known() -> None:
    assert "CpuOptions" in options_proto.option_classes()
    assert all(vars(option_records)[name] is x for name, x in options_proto.option_classes().items())
