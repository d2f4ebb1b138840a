"""Kernels that an earlier process compiled; faults by their numbers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.cache import checked_defs, package_digest, stored_kernels
from tensor_comprehensions.cache.file_format import HEADER
from tensor_comprehensions.cache.plain_records import to_plain
from tensor_comprehensions.cache.store import KERNEL, Store, current_store
from tensor_comprehensions.cache.stored_kernels import StoredKernel
from tensor_comprehensions.compiler import cpu_passes
from tensor_comprehensions.compiler.cpu_passes import KINDS
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.errors import CannotLower
from tensor_comprehensions.dispatch import persistent_kernel_cache
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.runtime.cpu import host_symbols, object_code
from tensor_comprehensions.schedules import tile, vectorize
from tensor_comprehensions.tc_lang import compile_source
from tensor_comprehensions.tc_lang.semantics import check

EXAMPLES = Path(__file__).parents[2] / "examples"
MATMUL = "def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
SOFTMAX = """def softmax(float(N,D) x) -> (y) {
    m(n) max=! x(n,d)
    e(n,d) = exp(x(n,d) - m(n))
    s(n) +=! e(n,d)
    y(n,d) = e(n,d) / s(n)
}"""
LOOKUP = "def lookup(float(V,D) table, long(B) words) -> (out) { out(b,d) = table(words(b),d) }"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A cache in use, as far from the user's as can be."""
    with knobs.override_knobs(cache="readwrite", cache_dir=str(tmp_path / "cache"), verify=False):
        yield tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the defs that are compiled from now on."""
    names: list[str] = []
    original = cpu_passes.compile_function

    def noted(bound: Any, *rest: Any) -> Any:
        names.append(bound.name)
        return original(bound, *rest)

    monkeypatch.setattr(cpu_passes, "compile_function", noted)
    return names


def mm() -> tuple[Any, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tc.define(MATMUL).mm, torch.randn(6, 5, generator=generator), torch.randn(5, 7, generator=generator)


def kernel_file(root: Path) -> Path:
    (path,) = (root / "v2" / "kernel").rglob("*.tc")
    return path


# --- hits --------------------------------------------------------------------------------------------------------

PROGRAM = f"""
import sys
import torch
import tensor_comprehensions as tc
from tensor_comprehensions.cache import package_digest

package_digest._imported = "others may edit the package meanwhile"
package_digest._stamp = lambda: package_digest._imported
x = torch.arange(60.0).reshape(6, 10)
ops = tc.define({SOFTMAX + MATMUL + LOOKUP!r})
y = ops.softmax(x)
z = ops.mm(x, x.t().contiguous())
COMPILER = "polyhedral codegen structured loop_ir compiler".split()
COMPILER += "tc_lang.syntax.parse tc_lang.semantics.check tc_lang.gradients".split()
parts = tuple(f"tensor_comprehensions.{{part}}." for part in COMPILER)
light = "structured structured.language structured.language.schedule_types".split()
light += "compiler compiler.compiled_kernel compiler.row_strides".split()
light = [f"tensor_comprehensions.{{name}}." for name in light]
made = [name for name in sys.modules if f"{{name}}.".startswith(parts) and f"{{name}}." not in light]
w = ops.lookup(x, torch.tensor([5, 0]))
heavy = [name for name in ("islpy", "lark", "google.protobuf", "sympy") if name in sys.modules] + made
print(y.double().sum().item(), z.double().sum().item(), w.double().sum().item(), *heavy)
"""


def test_a_new_process_needs_no_compiler_and_neither_isl_nor_lark_nor_protobuf(tmp_path: Path) -> None:
    environment = os.environ | {"TC_CACHE": "readwrite", "TC_CACHE_DIR": str(tmp_path / "cache"), "TC_VERIFY": "0"}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment | more, capture_output=True, text=True, check=True
        ).stdout.split()
        for more in ({}, {"TC_CACHE": "read", "TC_CACHE_STRICT": "1"})
    ]
    assert outputs[0][:3] == outputs[1][:3]
    assert "islpy" in outputs[0]
    assert outputs[1][3:] == []


def test_what_was_compiled_is_found(root: Path, compiled: list[str]) -> None:
    op, a, b = mm()
    first = op(a, b)
    assert compiled == ["mm"]
    again, _, _ = mm()
    torch.testing.assert_close(again(a, b), first, rtol=0, atol=0)
    assert compiled == ["mm"]
    kernel = again.compile(a, b)
    assert [name for name, _ in kernel.compiled.seconds] == [persistent_kernel_cache.FOUND]
    assert kernel.resources == op.compile(a, b).resources


def test_a_def_with_other_names_finds_it_too(root: Path, compiled: list[str]) -> None:
    op, a, b = mm()
    expected = op(a, b)
    other = tc.define("def product(float(R,S) X, float(S,T) Y) -> (Z) { Z(r,t) +=! X(r,s) * Y(s,t) }").product
    torch.testing.assert_close(other(a, b), expected, rtol=0, atol=0)
    assert compiled == ["mm"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_forms_of_a_kernel_that_was_found(root: Path, kind: str) -> None:
    op, a, b = mm()
    made = op.compile(a, b)
    found = mm()[0].compile(a, b)
    assert [name for name, _ in found.compiled.seconds] == [persistent_kernel_cache.FOUND]
    assert found.source(kind) == made.source(kind)


def test_temporaries_of_a_kernel_that_was_found(root: Path, compiled: list[str]) -> None:
    x, options = torch.randn(20, 30), CpuOptions(fusion="min", localize_temporaries=False)
    for _ in range(2):
        kernel = tc.define(SOFTMAX).softmax.compile(x, options=options)
        assert kernel.resources["temporary_bytes"] > 0
        torch.testing.assert_close(kernel(x), x.softmax(1))
    assert compiled == ["softmax"]


def test_failed_checks_of_a_kernel_that_was_found_name_the_tensors_of_the_def(root: Path, compiled: list[str]) -> None:
    table, words = torch.randn(5, 4), torch.tensor([1, 9])
    other = LOOKUP.replace("table", "rows").replace("words", "which")
    for text, name in ((LOOKUP, "table"), (other, "rows")):
        with pytest.raises(tc.RangeError, match=f"'{name}'.*out of bounds in dimension 0"):
            tc.define(text).lookup(table, words)
    assert compiled == ["lookup"]


def test_pipelines_are_found_without_being_settled(
    root: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, a, b = mm()
    schedule = tile(m=3, n=4) | tile(m=2, n=8)
    made = op.compile(a, b, schedule=schedule >> vectorize("n"))
    monkeypatch.setattr(cpu_passes, "resolve_schedules", None)
    found = mm()[0].compile(a, b, schedule=schedule >> vectorize("n"))
    assert compiled == ["mm"]
    assert found.compiled.options == made.compiled.options
    torch.testing.assert_close(found(a, b), made(a, b), rtol=0, atol=0)


def test_what_an_expert_returns_is_found(root: Path, compiled: list[str]) -> None:
    _, a, b = mm()
    for _ in range(2):
        mm()[0].compile(a, b, schedule=lambda op, target: tile(m=3, n=4) >> vectorize("n"))
    assert compiled == ["mm"]


def test_sizes_strides_and_options_are_distinguished(root: Path, compiled: list[str]) -> None:
    op, a, b = mm()
    for x, y, options in ((a, b, None), (a[:4], b, None), (a.t().contiguous().t(), b, None), (a, b, "min")):
        kernel = op.compile(x, y, options=None if options is None else CpuOptions(fusion=options))
        torch.testing.assert_close(kernel(x, y), x @ y)
    assert compiled == ["mm"] * 4


@pytest.mark.parametrize("seen", [{"verify": True}, {"dump": "folder"}])
def test_who_wants_to_see_a_kernel_made_sees_it(
    root: Path, compiled: list[str], seen: dict[str, Any], tmp_path: Path
) -> None:
    op, a, b = mm()
    op(a, b)
    with knobs.override_knobs(**{name: str(tmp_path) if value == "folder" else value for name, value in seen.items()}):
        mm()[0](a, b)
    assert compiled == ["mm", "mm"]


def test_who_wants_to_read_code_sees_it(root: Path, compiled: list[str], caplog: pytest.LogCaptureFixture) -> None:
    op, a, b = mm()
    op(a, b)
    with caplog.at_level(logging.DEBUG, logger="tensor_comprehensions.code"):
        mm()[0](a, b)
    assert "tc_entry" in caplog.text


def test_the_log_tells_what_was_found_and_what_is_new(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    op, a, b = mm()
    with caplog.at_level(logging.DEBUG, logger="tensor_comprehensions.cache"):
        op(a, b)
        mm()[0](a, b)
        mm()[0](a[:3], b)
    for part in (
        "mm: not on disk",
        "mm: kept on disk as",
        "mm: found on disk",
        "loaded, the first",
        "found the checked def",
    ):
        assert part in caplog.text
    assert "the nearest differs in shapes, bound" in caplog.text


def test_sixteen_threads_compile_and_keep_a_kernel_once(root: Path, compiled: list[str]) -> None:
    """Fault 23."""
    op, a, b = mm()
    threads = [threading.Thread(target=op, args=(a, b)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == ["mm"]


def test_nothing_is_kept_that_an_edited_package_compiled(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op, a, b = mm()
    monkeypatch.setattr(package_digest, "_stamp", lambda: "edited")
    op(a, b)
    assert not (root / "v2" / "kernel").exists()


# --- damage ------------------------------------------------------------------------------------------------------


def places(size: int) -> list[int]:
    """Bytes of every class: magic, version, flags, length, digest, length of the facts, facts, code, the last one."""
    return [0, 7, 8, 10, 12, 19, 20, HEADER - 1, HEADER, HEADER + 4, HEADER + 100, size // 2, size - 600, size - 1]


@pytest.mark.parametrize("cut", [False, True], ids=["flipped", "cut"])
def test_faults_1_and_2_damaged_code_never_reaches_the_loader(
    root: Path, compiled: list[str], cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, a, b = mm()
    expected = op(a, b)
    path = kernel_file(root)
    whole = path.read_bytes()
    loaded: list[bytes] = []
    original = host_symbols.load_code
    monkeypatch.setattr(host_symbols, "load_code", lambda data: loaded.append(data) or original(data))
    for n, place in enumerate(places(len(whole)), 1):
        path.write_bytes(whole[:place] if cut else whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        torch.testing.assert_close(mm()[0](a, b), expected, rtol=0, atol=0)
        assert len(compiled) == 1 + n
        assert path.read_bytes() == whole, "the entry is repaired"
    assert all(data == op.compile(a, b).compiled.code.data for data in loaded)


def test_fault_5_the_entry_of_another_key_is_a_miss_and_reported(
    root: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    op, a, b = mm()
    op(a, b)
    one = kernel_file(root)
    op(a[:3], b)
    (two,) = set((root / "v2" / "kernel").rglob("*.tc")) - {one}
    one.write_bytes(two.read_bytes())
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(mm()[0](a, b), a @ b)
    assert compiled == ["mm"] * 3
    assert "another key" in caplog.text


def test_fault_12_a_signed_entry_is_a_miss_under_another_key(root: Path, tmp_path: Path, compiled: list[str]) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 40)
    secret.chmod(0o600)
    op, a, b = mm()
    with knobs.override_knobs(cache_signing_key=str(secret)):
        op(a, b)
        mm()[0](a, b)
        assert compiled == ["mm"]
        path = kernel_file(root)
        kept = path.read_bytes()
    mm()[0](a, b)
    assert compiled == ["mm"] * 2
    assert path.read_bytes() != kept
    with knobs.override_knobs(cache_signing_key=str(secret)):
        mm()[0](a, b)
        assert compiled == ["mm"] * 3


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"symbols": [], "temporaries": "many", "sites": [], "kernels": 1, "schedule": None},
        {"symbols": [], "temporaries": [], "sites": [[7, 0, 1, 0]], "kernels": 1, "schedule": None},
        {"symbols": ["Sleef_nothing"], "temporaries": [], "sites": [], "kernels": 1, "schedule": None},
    ],
)
def test_code_that_cannot_be_used_is_a_miss(root: Path, compiled: list[str], facts: dict[str, Any]) -> None:
    op, a, b = mm()
    entry = op.cache_entry(a, b)
    assert stored_kernels.store_kernel(
        current_store(), StoredKernel(entry.key, facts, op.compile(a, b).compiled.code.data)
    )
    torch.testing.assert_close(mm()[0](a, b), a @ b)
    assert compiled == ["mm", "mm"]


@pytest.mark.parametrize("data", [b"", b"\x01", b"\xff\xff\xff\xff{}", b"\x02\x00\x00\x00[]", b"\x04\x00\x00\x00{{{{",
                                  (200_000).to_bytes(4, "little") + b"[" * 200_000])  # fmt: skip
def test_payloads_that_are_none(data: bytes) -> None:
    assert stored_kernels.kernel_from_bytes(data) is None


def test_a_cache_that_fails_changes_no_result(root: Path, tmp_path: Path) -> None:
    op, a, b = mm()
    (tmp_path / "file").write_text("no folder")
    with knobs.override_knobs(cache_dir=str(tmp_path / "file")):
        torch.testing.assert_close(op(a, b), a @ b)
    with (
        knobs.override_knobs(cache_dir=str(tmp_path / "file"), cache_strict=True),
        pytest.raises(tc.TCError, match="cache"),
    ):
        mm()[0](a, b)


def test_a_cache_that_is_only_read_gets_nothing(root: Path, compiled: list[str]) -> None:
    with knobs.override_knobs(cache="read"):
        op, a, b = mm()
        op(a, b)
    assert not root.exists()
    with knobs.override_knobs(cache="off"):
        mm()[0](a, b)
    assert not root.exists()
    assert compiled == ["mm", "mm"]


# --- entries -----------------------------------------------------------------------------------------------------


def test_an_entry_tells_what_the_cache_has(root: Path) -> None:
    op, a, b = mm()
    entry = op.cache_entry(a, b)
    assert entry.kernel is None
    assert "no kernel of this def for this machine" in entry.explain()
    op(a[:3], b)
    assert "the nearest has another\n  shapes" in entry.explain()
    op(a, b)
    assert entry.kernel is not None
    assert entry.path is not None
    assert entry.path.exists()
    assert "bytes of code, 0 measurements" in repr(entry)
    assert "there is a kernel for this key" in entry.explain()
    assert entry.remove()
    assert not entry.remove()
    assert entry.kernel is None


def test_a_kernel_by_hand_is_used_until_it_is_removed(root: Path, compiled: list[str]) -> None:
    text = "def twice(float(N) x) -> (y) { y(i) = 2 * x(i) }"
    x = torch.ones(4)
    by_hand = """
    define i64 @tc_entry(ptr %arguments) {
      %slot = getelementptr ptr, ptr %arguments, i64 1
      %y = load ptr, ptr %slot
      store <4 x float> <float 2.0, float 2.0, float 2.0, float 7.0>, ptr %y, align 4
      ret i64 0
    }"""
    op = tc.define(text).twice
    assert op(x).tolist() == [2, 2, 2, 2]
    entry = op.cache_entry(x)
    with pytest.raises(tc.ArgumentError, match="computes another 'y'"):
        entry.inject(by_hand)
    assert op(x).tolist() == [2, 2, 2, 2]
    entry.inject(by_hand, check=False)
    assert "put there by hand" in repr(entry)
    assert op(x).tolist() == [2, 2, 2, 7]
    assert tc.define(text).twice(x).tolist() == [2, 2, 2, 7]
    assert compiled == ["twice"]
    assert entry.remove()
    assert op(x).tolist() == [2, 2, 2, 2]


def test_a_kernel_by_hand_that_is_right_passes_the_check(root: Path) -> None:
    op, a, b = mm()
    entry = op.cache_entry(a, b)
    entry.inject(op.compile(a, b).source("llvm"))
    assert entry.kernel is not None
    assert entry.kernel.metadata["injected"]
    assert entry.path is not None
    assert "injected" in entry.path.parts


@pytest.mark.parametrize(
    ("text", "part"), [("nothing", "define i64 @tc_entry"), ("define i64 @tc_entry(ptr %a) { ret i32 0 }", "LLVM")]
)
def test_text_that_is_no_kernel_is_refused(root: Path, text: str, part: str) -> None:
    op, a, b = mm()
    with pytest.raises(tc.ArgumentError, match=part):
        op.cache_entry(a, b).inject(text)


def test_kernels_by_hand_need_a_cache_and_a_key(root: Path) -> None:
    op, a, b = mm()
    with knobs.override_knobs(cache="read"), pytest.raises(tc.TCError, match="cannot be written"):
        op.cache_entry(a, b).inject("")
    with pytest.raises(tc.ArgumentError, match="the kernel is not a text"):
        op.cache_entry(a, b).inject(3)  # type: ignore[arg-type]
    with pytest.raises(tc.ArgumentError, match="have no key"):
        op.cache_entry(a, b, options=CpuOptions(schedule=lambda op, target: tile(m=3)))
    with knobs.override_knobs(cache="off"):
        assert op.cache_entry(a, b).path is None


# --- what else is kept -------------------------------------------------------------------------------------------


def as_written(text: str) -> Any:
    return to_plain(compile_source(text))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.tc")), ids=lambda p: p.stem)
def test_checked_programs_come_back_with_every_place(path: Path) -> None:
    made = compile_source(path.read_text())
    back = checked_defs.defs_from_bytes(checked_defs.defs_to_bytes(made))
    assert back == made
    assert back is not None
    assert to_plain(back) == as_written(path.read_text())


def test_a_text_is_kept_once() -> None:
    def size(count: int) -> int:
        text = "\n".join(MATMUL.replace("mm", f"mm{n}") for n in range(100, 100 + count))
        return len(checked_defs.defs_to_bytes(compile_source(text)))

    assert size(20) < 10.1 * size(2)


def test_checked_programs_are_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checked_defs.load_checked_defs(MATMUL)
    monkeypatch.setattr(check, "compile_source", None)
    assert checked_defs.load_checked_defs(MATMUL) == first


def test_mistakes_are_not_kept(root: Path) -> None:
    for _ in range(2):
        with pytest.raises(tc.ParseError):
            tc.define("def f(float(N) x -> (y) { y(i) = x(i) }")
    assert not (root / "v2" / "program").exists()


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[3]", b'[{"Path": []}]', b'[{"Function": [1]}]', b"[" * 100_000, b'[{"Role": "NONE"}]',
             b'[{"eval": ["1"]}]', b'[{"DType": "float33"}]']
)  # fmt: skip
def test_programs_that_are_none(data: bytes) -> None:
    assert checked_defs.defs_from_bytes(data) is None


def test_what_every_process_runs_is_kept(root: Path) -> None:
    text = "define i64 @tc_nothing_else(i64 %x) { ret i64 %x }"
    first = host_symbols.builtin_code(text)
    (path,) = (root / "v2" / "runtime").rglob("*.tc")
    assert host_symbols.builtin_code(text) == first
    path.write_bytes(path.read_bytes()[:-1])
    assert host_symbols.builtin_code(text) == first


def test_signed_code_is_what_a_key_protects(tmp_path: Path) -> None:
    made = Store(tmp_path / "cache", secret=b"x" * 32)
    for layer in ("kernel", "injected", "runtime"):
        assert made.write((layer, "f", "d"), b"code")
        assert Store(tmp_path / "cache").read((layer, "f", "d")) is None


def test_loading_needs_the_functions_that_the_code_calls() -> None:
    with pytest.raises(CannotLower):
        host_symbols.provide_symbols(["Sleef_nothing"])
    assert object_code.codegen_flags()["llvm"]
    assert KERNEL == "kernel"
