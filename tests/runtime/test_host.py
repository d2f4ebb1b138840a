from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import llvmlite.binding as llvm
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.processors import FEATURES
from tensor_comprehensions.runtime.cpu import host
from tensor_comprehensions.runtime.cpu.host_symbols import vector_functions
from tensor_comprehensions.target import AVX2, AVX512, CpuTarget


def test_the_host_is_a_processor_llvm_knows() -> None:
    target = host.host()
    assert target.kind == "cpu"
    assert target.name
    assert target.vector_bits in (128, 256, 512)
    assert target.cache == tuple(sorted(target.cache))
    assert target.lanes(32) * 32 == target.vector_bits


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"sse2"}, 128),
        ({"avx2"}, 128),
        ({"avx2", "fma", "f16c"}, 256),
        ({"avx2", "fma", "f16c", "avx512f"}, 256),
        ({"avx2", "fma", "f16c", "avx512f", "avx512vl", "avx512bw", "avx512dq"}, 512),
    ],
)
def test_vectors_are_as_wide_as_all_instructions_allow(features: set[str], expected: int) -> None:
    assert host._vectors(features)[0] == expected


def test_caches_are_read_from_the_system(tmp_path: Path) -> None:
    for n, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2M")]
    ):
        folder = tmp_path / f"index{n}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    assert host._caches(str(tmp_path)) == (49152, 2097152)
    (tmp_path / "index2" / "size").write_text("")
    assert host._caches(str(tmp_path)) == host._TYPICAL_CACHE
    (tmp_path / "index2" / "level").unlink()
    (tmp_path / "index2" / "type").write_text("Instruction\n")  # the first level alone is left
    assert host._caches(str(tmp_path)) == host._TYPICAL_CACHE
    assert host._caches(str(tmp_path / "absent")) == host._TYPICAL_CACHE


def test_tile_registers_need_the_leave_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = host._host.__wrapped__("").has_amx_bf16
    monkeypatch.setattr(host, "_request_amx_permission", lambda: False)
    refused = host._host.__wrapped__("")
    assert "+amx-tile" not in refused.features
    assert not refused.has_amx_bf16
    monkeypatch.undo()
    assert host._host.__wrapped__("").has_amx_bf16 is asked


def test_torch_brings_vector_mathematics() -> None:
    symbols = vector_functions()
    assert symbols["exp.float32x8"] == "Sleef_expf8_u10"
    assert {"tanh.float32x8", "log.float64x4", "pow.float32x8", "erf.float32x8"} <= set(symbols)


@pytest.mark.parametrize(
    ("llvm_name", "features", "expected"),
    [
        ("rocketlake", {"avx512f", "amx-tile"}, "sapphirerapids"),
        ("rocketlake", {"avx512f", "amx-tile", "amx-fp16"}, "graniterapids"),
        ("rocketlake", {"avx512f"}, "rocketlake"),
        ("emeraldrapids", {"avx512f", "amx-tile"}, "emeraldrapids"),
    ],
)
def test_a_processor_in_disguise_is_known_by_what_it_can_do(llvm_name: str, features: set[str], expected: str) -> None:
    assert host._name(llvm_name, features) == expected


# --- other processors -------------------------------------------------------------------------------------------

SAPPHIRE_RAPIDS = replace(AVX512, name="sapphirerapids", cache=(49152, 2097152, 110100480))


def doctor(patch: pytest.MonkeyPatch, name: str, without: str = "") -> CpuTarget:
    """Let this process take its processor for `name`, whatever it is, less the features in `without`."""
    have = FEATURES[name] - set(without.split())
    found = llvm.FeatureMap({f: f in have for f in {*llvm.get_host_cpu_features(), *FEATURES["graniterapids"]}})
    patch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap(found))
    patch.setattr(llvm, "get_host_cpu_name", lambda: name)
    patch.setattr(host, "_request_amx_permission", lambda: True)
    patch.setattr(host, "_host", host._host.__wrapped__)
    patch.setattr(knobs, "_current", replace(knobs.current_knobs(), target=""))
    return host.host()


@pytest.mark.parametrize(
    ("here", "target", "missing"),
    [
        ("sapphirerapids", SAPPHIRE_RAPIDS, ""),
        ("emeraldrapids", SAPPHIRE_RAPIDS, ""),
        ("graniterapids", SAPPHIRE_RAPIDS, ""),
        ("znver4", SAPPHIRE_RAPIDS, "amx-bf16 amx-int8 amx-tile avx512fp16 avxvnni"),
        ("znver5", SAPPHIRE_RAPIDS, "amx-bf16 amx-int8 amx-tile avx512fp16"),
        ("znver4", AVX512, ""),
        ("znver4", AVX2, ""),
        ("znver4", replace(AVX512, name="skylake-avx512"), ""),
        ("znver4", replace(AVX512, features="-avx512bf16,+avx512fp16"), "avx512fp16"),
        ("skylake-avx512", replace(AVX512, name="skylake-avx512", features="+avx512bf16"), "avx512bf16"),
        ("haswell", AVX2, ""),
        ("haswell", replace(AVX2, name="no-such-processor", features="+avx2,+fma"), ""),
        ("nehalem", AVX2, "avx avx2 bmi bmi2 f16c fma lzcnt movbe pclmul xsave"),
        ("nehalem", CpuTarget("cpu", "x86-64", "", 128, 16, (32768, 1 << 20)), ""),
    ],
)
def test_code_runs_where_each_feature_is_that_it_may_use(
    here: str, target: CpuTarget, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor(monkeypatch, here)
    assert target.missing_features() == tuple(missing.split())
    assert target.runs_here() == (not missing)


def test_the_processor_itself_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that lacks what others of its name have."""
    assert host.host().runs_here()
    assert replace(host.host(), cache=(1024, 4096)).runs_here()
    assert "amx-tile" not in doctor(monkeypatch, "sapphirerapids", "amx-tile amx-bf16 amx-int8").code_features
    assert host.host().runs_here()
    assert SAPPHIRE_RAPIDS.missing_features() == ("amx-bf16", "amx-int8", "amx-tile")


def test_on_other_architectures_only_the_same_processor_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    here = CpuTarget("cpu", "neoverse-v1", "+sve,+neon", 256, 32, (65536, 1 << 20))
    monkeypatch.setattr(host, "is_x86", lambda: False)
    monkeypatch.setattr(host, "host", lambda: here)
    assert replace(here, cache=(1024, 4096)).runs_here()
    assert replace(here, name="generic", features="+neon").runs_here()
    assert replace(here, name="neoverse-n1", features="+neon").missing_features() == ("neoverse-n1",)
    assert replace(here, name="generic", features="+sve2").missing_features() == ("sve2",)
    assert host.unused_features(here) == ""


def test_a_kernel_for_another_processor_is_refused_by_the_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """This was an illegal instruction on Zen 4: a transposition of halves for Sapphire Rapids."""
    op = tc.define("def flip(half(M,N) I) -> (O) { O(j,i) = I(i,j) }").flip
    x = torch.randn(37, 83).half()
    doctor(monkeypatch, "znver4")
    kernel = op.compile(x, target=SAPPHIRE_RAPIDS)
    for call in (kernel, partial(kernel, out=torch.empty(83, 37).half())):
        with pytest.raises(tc.ArgumentError, match=r"is for sapphirerapids(.|\n)*without amx-bf16, .*avx512fp16"):
            call(x)
    assert "vmov" in kernel.source("asm")


def test_code_uses_nothing_but_the_features_of_its_target() -> None:
    """The name of a processor stands for all of them, unless the target says that it lacks one."""
    op = tc.define("def flip(half(M,N) I) -> (O) { O(j,i) = I(i,j) }").flip
    x = torch.randn(37, 83).half()
    less = replace(SAPPHIRE_RAPIDS, features=f"{AVX512.features},-avx512fp16")
    assert "vmovsh" in op.compile(x, target=SAPPHIRE_RAPIDS).source("asm")
    assert "vmovsh" not in op.compile(x, target=less).source("asm")
    strange = replace(AVX512, name="tigerlake", features="-avx512f")
    assert "zmm" not in op.compile(x, target=strange).source("asm")


@pytest.mark.parametrize(("name", "bits"), [("haswell", 256), ("nehalem", 128), ("x86-64-v4", 512)])
def test_tc_target_takes_the_processor_for_another(name: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor(monkeypatch, "graniterapids")
    with knobs.override_knobs(target=name):
        here = host.host()
        assert (here.name, here.vector_bits) == (name, bits)
        assert here.code_features == FEATURES[name]
        assert not SAPPHIRE_RAPIDS.runs_here()
    assert SAPPHIRE_RAPIDS.runs_here()


def test_tc_target_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor(monkeypatch, "haswell", without="fma")
    with knobs.override_knobs(target="sapphirerapids"):
        assert host.host().code_features == FEATURES["haswell"] - {"fma"}
        assert host.host().vector_bits == 128
    monkeypatch.setattr(host, "is_x86", lambda: False)
    with knobs.override_knobs(target="haswell"), pytest.raises(tc.ArgumentError, match="TC_TARGET is 'haswell'"):
        host.host()


def test_tc_target_in_the_environment() -> None:
    program = (
        "import torch, tensor_comprehensions as tc\n"
        "op = tc.define('def f(float(N) x) -> (y) { y(i) = 2 * x(i) }').f\n"
        "kernel = op.compile(torch.ones(99))\n"
        "print(kernel(torch.ones(99)).sum(), kernel.compiled.target.name, 'zmm' in kernel.source('asm'))"
    )
    environment = os.environ | {"TC_TARGET": "nehalem"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["tensor(198.)", "nehalem", "False"], done.stderr
