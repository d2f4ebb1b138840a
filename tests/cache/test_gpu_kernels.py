"""Kernels for graphics processors that an earlier process made: their texts, and machine code under its own keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.cache import key
from tensor_comprehensions.cache import stored_kernels as cache
from tensor_comprehensions.cache.store import current_store
from tensor_comprehensions.cache.stored_kernels import StoredKernel
from tensor_comprehensions.compiler.gpu_passes import CompiledGpuKernel
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.errors import RangeError
from tensor_comprehensions.dispatch import persistent_kernel_cache
from tensor_comprehensions.dispatch.cuda import gpu_kernel_cache as gpu_recall
from tensor_comprehensions.options import MappingOptions, TileOptions
from tensor_comprehensions.runtime.cuda import cubins, nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target

needs_compiler = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="compiling CUDA needs NVRTC")
SM90 = "cuda:sm_90"
MATMUL = "def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
LOOKUP = "def lookup(float(V,D) table, long(B) words) -> (out) { out(b,d) = table(words(b),d) }"
A, B = torch.randn(20, 30), torch.randn(30, 24)
SHARED = MappingOptions(tile=(8, 8, 8), threads=(8, 4), blocks=(4, 4), shared_memory=True, private_memory=True)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with knobs.override_knobs(cache="readwrite", cache_dir=str(tmp_path / "cache"), verify=False):
        yield tmp_path / "cache"


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the defs that are mapped from now on."""
    names: list[str] = []
    original = gpu_recall.compile_gpu

    def noted(bound: Any, *rest: Any, **more: Any) -> Any:
        names.append(bound.name)
        return original(bound, *rest, **more)

    monkeypatch.setattr(gpu_recall, "compile_gpu", noted)
    return names


def made(**more: Any) -> CompiledGpuKernel:
    kernel: CompiledGpuKernel = tc.define(MATMUL).mm.compile(A, B, **{"target": SM90, **more}).compiled
    return kernel


@needs_compiler
@pytest.mark.parametrize("options", [None, SHARED], ids=["default", "shared"])
def test_a_text_that_was_made_is_found(root: Path, mapped: list[str], options: MappingOptions | None) -> None:
    first, again = made(options=options), made(options=options)
    assert mapped == ["mm"]
    assert again.seconds[0][0] == persistent_kernel_cache.FOUND
    for name in ("bound", "text", "options", "target", "aligned", "code", "arguments", "temporaries", "sites"):
        assert getattr(again, name) == getattr(first, name), name
    found = tc.define(MATMUL).mm.compile(A, B, target=SM90, options=options).emulate(A, B)
    torch.testing.assert_close(found, A @ B, rtol=1e-4, atol=1e-4)


BOXES = {
    "clusters": (torch.bfloat16, TileOptions((64, 16, 64), (4, 1), instruction="wgmma", cluster=2)),
    "rounded": (torch.float32, TileOptions((64, 16, 64), (4, 1), instruction="wgmma", products="tf32", cluster=1)),
}


@pytest.mark.parametrize("name", BOXES)
def test_launches_and_tensor_maps_are_found(root: Path, mapped: list[str], name: str) -> None:
    dtype, options = BOXES[name]
    text = "def mm(bfloat16(M,K) A, bfloat16(N,K) B) -> (C) { C(m,n) +=! float(A(m,k)) * float(B(n,k)) }"
    x = torch.ones(128, 64, dtype=dtype)
    op = tc.define(text.replace("bfloat16", "float") if dtype == torch.float32 else text).mm
    first, again = (op.compile(x, x, target=SM90, options=options).compiled for _ in range(2))
    assert mapped == ["mm"]
    assert again.code == first.code
    (kernel,) = again.code.kernels
    assert (kernel.launch.cluster, kernel.maps[0].rounds) == ((2, False) if name == "clusters" else (1, True))


def test_what_a_text_depends_on_is_in_its_key(root: Path, mapped: list[str]) -> None:
    made()
    for more in ({"target": "cuda:sm_80"}, {"options": SHARED}, {"options": replace(SHARED, unroll=2)}):
        assert made(**more).seconds[0][0] != persistent_kernel_cache.FOUND
    tc.define(MATMUL.replace("mm", "product")).product.compile(A, B, target=SM90)  # the text has the name
    assert mapped == ["mm"] * 4 + ["product"]


@needs_compiler
def test_a_text_is_found_under_other_names(root: Path, mapped: list[str]) -> None:
    table, words = torch.randn(9, 8), torch.tensor([1, 8, 0, 3])
    for source in (LOOKUP, LOOKUP.replace("table", "a1").replace("words", "i0")):
        kernel = tc.define(source).lookup.compile(table, words, target=SM90)
        assert torch.equal(kernel.emulate(table, words), table[words])
        with pytest.raises(RangeError, match=r"'(table|a1)' is out of bounds in dimension 0") as caught:
            kernel.emulate(table, torch.tensor([1, 9, 0, 3]))
        assert ("a1" in str(caught.value)) == ("a1" in source)
    assert mapped == ["lookup"]


@needs_compiler
def test_checks_and_unaligned_tensors_survive(root: Path, mapped: list[str]) -> None:
    table, words = torch.randn(9, 8), torch.tensor([1, 8, 0, 3])
    w = torch.randn(32 * 32 + 1)
    options = MappingOptions(tile=(16, 16, 16), threads=(8, 8), shared_memory=True)
    aligned, shifted = w[:-1].view(32, 32), w[1:].view(32, 32)
    for _ in range(2):
        kernel = tc.define(LOOKUP).lookup.compile(table, words, target=SM90)
        assert torch.equal(kernel.emulate(table, words), table[words])
        with pytest.raises(RangeError, match="'table' is out of bounds in dimension 0"):
            kernel.emulate(table, torch.tensor([1, 9, 0, 3]))
        mm = tc.define(MATMUL).mm.compile(aligned, aligned, target=SM90, options=options)
        torch.testing.assert_close(mm.emulate(shifted, aligned), shifted @ aligned, rtol=1e-4, atol=1e-4)
    assert mapped == ["lookup", "mm", "mm"]


def test_without_a_key_a_kernel_is_made(root: Path, mapped: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the text of this package changes under a process."""
    made()

    def unreadable() -> str:
        raise key.Uncacheable("the text has changed")

    monkeypatch.setattr(key, "_source", unreadable)
    assert made().code == made().code
    assert mapped == ["mm"] * 3


def test_facts_that_make_no_kernel_are_passed_over(root: Path, mapped: list[str]) -> None:
    kernel, store = made(), current_store()
    function = tc.define(MATMUL).mm.function
    known = gpu_recall.gpu_kernel_key(function, kernel.bound, None, parse_gpu_target(SM90), aligned=True)
    assert known is not None
    found = cache.find_kernel(store, known)
    assert found is not None
    for facts in ({}, {**found.metadata, "kernels": [[1, 2]]}, {**found.metadata, "arguments": [["A", "no type"]]}):
        cache.store_kernel(store, StoredKernel(known, facts, found.data))
        assert made().code == kernel.code
    assert mapped == ["mm"] * 4


@needs_nvrtc
def test_machine_code_is_compiled_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    original = nvrtc.compile_text
    monkeypatch.setattr(nvrtc, "compile_text", lambda s, a: compiled.append(a) or original(s, a))
    first = made().cubin
    loaded = nvrtc._load_library
    monkeypatch.setattr(nvrtc, "_load_library", None)  # 100 megabytes that finding it does not need
    again = made().cubin
    monkeypatch.setattr(nvrtc, "_load_library", loaded)
    assert compiled == ["sm_90"]
    assert first == again
    assert again.resources["mm"].registers > 8
    assert made(target="cuda:sm_80").cubin.binary != first.binary
    assert compiled == ["sm_90", "sm_80"]
    tools = nvrtc.find_toolchain()
    assert (
        cubins.cubin_key("text", "sm_90", tools).digest
        != cubins.cubin_key("text", "sm_90", replace(tools, version=(99, 0))).digest
    )


@needs_nvrtc
def test_the_command_lists_both(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensor_comprehensions.cli.main import main

    digest = made().cubin and current_store().names(("kernel",))
    assert len(digest) == 2
    assert main(["cache", "ls"]) == 0
    listed = capsys.readouterr().out
    assert "cubin" in listed
    assert "sm_90" in listed
    assert main(["cache", "verify"]) == 0


PROGRAM = f"""
import json, sys
import torch
import tensor_comprehensions as tc
from tensor_comprehensions.cache import package_digest

package_digest._imported = "others may edit the package meanwhile"
package_digest._stamp = lambda: package_digest._imported
A, B = torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(3, 4)
kernel = tc.define({MATMUL!r}).mm.compile(A, B, target="cuda:sm_90")
resources = kernel.resources
heavy = [name for name in ("islpy", "lark") if name in sys.modules]
print(json.dumps([kernel.source(), resources, heavy]))
"""


@needs_nvrtc
def test_a_new_process_needs_no_mapper(tmp_path: Path) -> None:
    environment = os.environ | {"TC_CACHE": "readwrite", "TC_CACHE_DIR": str(tmp_path / "cache"), "TC_VERIFY": "0"}
    first, second = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", PROGRAM], env=environment | more, capture_output=True, text=True, check=True
            ).stdout
        )
        for more in ({}, {"TC_CACHE": "read", "TC_CACHE_STRICT": "1"})
    )
    assert first[:2] == second[:2]
    assert first[2] == ["islpy", "lark"]
    assert second[2] == []
