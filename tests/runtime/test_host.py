from __future__ import annotations

from pathlib import Path

import pytest

from tensor_comprehensions.runtime import host
from tensor_comprehensions.runtime.process import mathematics


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
    asked = host.host.__wrapped__().tiles_bfloat16
    monkeypatch.setattr(host, "_may_use_tiles", lambda: False)
    refused = host.host.__wrapped__()
    assert "+amx-tile" not in refused.features
    assert not refused.tiles_bfloat16
    monkeypatch.undo()
    assert host.host.__wrapped__().tiles_bfloat16 is asked


def test_torch_brings_vector_mathematics() -> None:
    symbols = mathematics()
    assert symbols["exp.float32x8"] == "Sleef_expf8_u10"
    assert {"tanh.float32x8", "log.float64x4", "pow.float32x8", "erf.float32x8"} <= set(symbols)


@pytest.mark.parametrize(
    ("told", "features", "expected"),
    [
        ("rocketlake", {"avx512f", "amx-tile"}, "sapphirerapids"),
        ("rocketlake", {"avx512f", "amx-tile", "amx-fp16"}, "graniterapids"),
        ("rocketlake", {"avx512f"}, "rocketlake"),
        ("emeraldrapids", {"avx512f", "amx-tile"}, "emeraldrapids"),
    ],
)
def test_a_processor_in_disguise_is_known_by_what_it_can_do(told: str, features: set[str], expected: str) -> None:
    assert host._name(told, features) == expected
