"""What a key depends on, and what not; faults by their numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_comprehensions.cache import key, package_digest
from tensor_comprehensions.cache.key import Key, Uncacheable, make_key
from tensor_comprehensions.cache.store import Store
from tensor_comprehensions.options import CpuOptions, MappingOptions
from tensor_comprehensions.runtime.cuda import cubins
from tensor_comprehensions.runtime.cuda.nvrtc import Toolchain
from tensor_comprehensions.schedules import tile, vectorize
from tensor_comprehensions.target import AVX2, AVX512, GPUS
from tensor_comprehensions.tc_lang import bind, compile_source
from tests.helpers.programs import Program, programs

MATMUL = "def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
SIZES = {"M": 4, "K": 5, "N": 6}
STAMP = package_digest._stamp


def of(
    text: str = MATMUL, sizes: dict[str, int] | None = None, scalars: Any = None, strides: Any = None, **rest: Any
) -> Key:
    function = compile_source(text)[-1]
    bound = bind(function, SIZES if sizes is None else sizes, scalars, strides)
    given = {"target": AVX2, "options": CpuOptions(), **rest}
    return make_key(function, bound, given.pop("target"), **given)


def other(value: Any, metadata: Mapping[str, Any]) -> Any:
    """Another value that a field with this metadata may have."""
    choices = [c for c in metadata.get("choices", ()) if c != value]
    match value:
        case tuple():
            return (*value[:-1], value[-1] - 1) if "lengths" in metadata else (*value, 8)
        case _ if choices:
            return choices[0]
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return next(s for s in (value + "x", value[:-1] + "1") if re.fullmatch(metadata.get("pattern", ".*"), s))
        case None:
            return tile(m=8)
        case Enum():
            return next(x for x in type(value) if x is not value)
    raise AssertionError(f"what else could {value!r} be?")


# --- what makes another key --------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [CpuOptions(), MappingOptions()], ids=["cpu", "gpu"])
def test_fault_28_every_option_is_part_of_the_key(record: Any) -> None:
    keys = {of(options=record).digest}
    for x in fields(record):
        value = getattr(record, x.name)
        changed = replace(record, **{x.name: other(value, x.metadata)})
        keys.add(of(options=changed).digest)
    assert len(keys) == 1 + len(fields(record))


def test_fault_28_every_fact_of_the_target_is_part_of_the_key() -> None:
    changed = [replace(AVX2, **{x.name: other(getattr(AVX2, x.name), x.metadata)}) for x in fields(AVX2)]
    assert len({of(target=target).digest for target in [AVX2, *changed]}) == 1 + len(changed)


def test_fault_28_versions_flags_and_alignment_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {of().digest, of(flags={"llvm": "1"}).digest, of(flags={"llvm": "2"}).digest, of(alignment=64).digest}
    monkeypatch.setattr(key, "toolchain_versions", lambda: (("llvmlite", "0.0"),))
    keys.add(of().digest)
    monkeypatch.setattr(key, "_source", lambda: "another text")
    keys.add(of().digest)
    assert len(keys) == 6


def test_fault_31_processors_of_other_abilities_have_other_keys() -> None:
    masked = replace(AVX512, features=AVX512.features.replace("+avx512vl", "-avx512vl"))
    assert len({of(target=target).digest for target in (AVX2, AVX512, masked)}) == 3


def test_fault_32_every_fact_of_a_graphics_processor_is_part_of_the_key() -> None:
    card = GPUS["cuda:sm_80"]
    changed = [replace(card, **{x.name: other(getattr(card, x.name), x.metadata)}) for x in fields(card)]
    keys = {of(target=target, options=MappingOptions()).digest for target in (card, *changed)}
    assert len(keys) == 1 + len(changed)


def test_fault_32_machine_code_is_for_one_architecture_text_and_compiler() -> None:
    tools = Toolchain(Path("libnvrtc.so.12"), (), (12, 4))
    keys = {
        cubins.cubin_key(text, architecture, version).digest
        for text in ("one", "two")
        for architecture in ("sm_80", "sm_90")
        for version in (tools, replace(tools, version=(12, 6)))
    }
    assert len(keys) == 8


def test_fault_33_sizes_strides_types_and_numbers_make_other_keys() -> None:
    number = "def f(float(N) x, int s) -> (y) { y(i) = x(s * i) where i in 0:2 }"
    keys = [
        of(),
        of(sizes={**SIZES, "M": 7}),
        of(strides={"A": (1, 4)}),
        of(MATMUL.replace("float", "double")),
        of(MATMUL.replace("+=!", "max=!")),
        of(MATMUL.replace("+=!", "+=!").replace("A(m,k)", "A(m,k) * 2")),
        of(number, {"N": 9}, {"s": 1}),
        of(number, {"N": 9}, {"s": 2}),
    ]
    assert len({k.digest for k in keys}) == len(keys)


def test_measurements_have_keys_by_the_number_of_threads_and_without_versions() -> None:
    one, two = of(options=None, threads=1), of(options=None, threads=2)
    assert one.difference(two) == ("threads",)
    assert not [name for name, _ in one.parts if name.startswith(("version", "source", "options"))]


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=4, unique_by=lambda p: p[0]), st.data())
def test_parts_do_not_run_together(parts: list[tuple[str, str]], data: st.DataObject) -> None:
    changed = data.draw(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=4))
    assert (Key(tuple(parts)).digest == Key(tuple(changed)).digest) == (parts == changed)


# --- what does not -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        MATMUL.replace("mm", "other").replace("A", "Left").replace("B", "Right").replace("C", "Out"),
        MATMUL.replace("(m,", "(row,").replace(",k)", ",sum)").replace("(k,", "(sum,").replace("n)", "col)"),
        MATMUL.replace("{", "{  # what it does\n\n").replace("*", "  *  "),
        MATMUL.replace("M", "P").replace("K", "Q"),
    ],
)
def test_fault_29_names_comments_and_layout_make_no_other_key(text: str) -> None:
    function = compile_source(text)[-1]
    sizes = dict(zip(function.sizes, SIZES.values(), strict=True))
    assert of(text, sizes).digest == of().digest


def test_names_count_where_the_options_use_them() -> None:
    options = CpuOptions(schedule=tile(m=8))
    renamed = MATMUL.replace("(m,", "(row,")
    assert of(options=options).difference(of(renamed, options=options)) == ("spelling",)


def test_fault_30_keys_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "_source", lambda: "somebody may edit it meanwhile")
    program = (
        "from tensor_comprehensions.cache import key\n"
        "key._source = lambda: 'somebody may edit it meanwhile'\n"
        "from tensor_comprehensions.cache.key import make_key\n"
        "from tensor_comprehensions.tc_lang import bind, compile_source\n"
        "from tensor_comprehensions.target import AVX2\n"
        "from tensor_comprehensions.options import CpuOptions\n"
        f"f, = compile_source({MATMUL!r})\n"
        f"print(make_key(f, bind(f, {SIZES!r}), AVX2, options=CpuOptions(), flags=dict(a='1', b='2')).digest)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "77", "TC_CACHE": "off"},
    ).stdout.strip()  # fmt: skip
    assert found == of(flags={"b": "2", "a": "1"}).digest  # in this process, whose seed is random


@settings(max_examples=30, deadline=None)
@given(programs())
def test_fault_29_any_def_has_the_key_of_its_renamed_copy(program: Program) -> None:
    renamed = re.sub(r"\b([TXYABC]\d*|f)\b", r"new_\1", program.source)
    renamed = re.sub(r"\b([abc])\b(?!\()", r"index_\1", renamed)
    mine = of(program.source, dict(program.sizes))
    theirs = of(renamed, {f"new_{name}": size for name, size in program.sizes})
    assert mine.difference(theirs) == ()


@settings(max_examples=30, deadline=None)
@given(programs(), programs())
def test_defs_that_differ_have_other_keys(first: Program, second: Program) -> None:
    one, two = of(first.source, dict(first.sizes)), of(second.source, dict(second.sizes))
    assert (one.digest == two.digest) == (one["def"] == two["def"] and one["shapes"] == two["shapes"])


# --- refusals ----------------------------------------------------------------------------------------------------


def test_a_function_has_no_key() -> None:
    with pytest.raises(Uncacheable):
        of(options=CpuOptions(schedule=lambda op, target: tile(m=8)))


def test_records_within_records_are_written_out() -> None:
    @dataclass(frozen=True)
    class Inner:
        x: float = 0.5

    @dataclass(frozen=True)
    class Outer:
        inner: Inner = Inner()
        names: tuple[str, ...] = ("a", "b")

    assert key.canonical_text(Outer()) == "Outer(inner=Inner(x=0.5), names=('a', 'b'))"


# --- the text of the package -------------------------------------------------------------------------------------


def test_fault_26_another_text_of_the_package_has_other_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    module = package / "module.py"
    module.write_text("first")
    store = Store(tmp_path / "cache")
    monkeypatch.setattr(package_digest, "_FOLDER", str(package))
    monkeypatch.setattr(package_digest, "_stamp", STAMP)

    def imported() -> str:
        monkeypatch.setattr(package_digest, "_imported", package_digest._stamp())
        package_digest.package_digest.cache_clear()
        return package_digest.package_digest(store)

    first = imported()
    assert imported() == first  # found in the store
    module.write_text("other")
    with pytest.raises(package_digest.SourceChanged, match="changed since"):
        package_digest.check_unchanged()
    second = imported()
    module.write_text("first")
    third = imported()
    package_digest.package_digest.cache_clear()
    assert first != second
    assert first == third


def test_a_package_that_is_not_files_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_digest, "_FOLDER", str(tmp_path / "archive.zip"))
    monkeypatch.setattr(package_digest, "_stamp", STAMP)
    monkeypatch.setattr(package_digest, "_imported", package_digest._stamp())
    package_digest.package_digest.cache_clear()
    with pytest.raises(Uncacheable):
        of()
    package_digest.package_digest.cache_clear()


def test_versions_are_plain_texts() -> None:
    versions = dict(key.toolchain_versions())
    assert {type(text) for text in versions.values()} == {str}
    assert versions["torch"] != "9" * 5000  # torch's own class would make a number of it


def test_a_schedule_is_written_as_it_prints() -> None:
    schedule = tile(m=8) >> vectorize("n")
    assert key.canonical_text((("C", schedule),)) == f"(('C', {schedule!r}))"


def test_versions_do_not_depend_on_loaded_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata of torch's CUDA builds lack the local part of the version that the module states."""
    find_versions = key.toolchain_versions.__wrapped__
    monkeypatch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + "+cu132")
    loaded = find_versions()
    monkeypatch.delitem(sys.modules, "torch")
    assert find_versions() == loaded
