"""`tensorc cache`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.cache import measurement_store
from tensor_comprehensions.cache.measurement_store import Measurement
from tensor_comprehensions.cache.store import Store, current_store
from tensor_comprehensions.cli import main
from tensor_comprehensions.core import knobs
from tensor_comprehensions.options import CpuOptions

MATMUL = str(Path(__file__).parents[2] / "examples" / "matmul.tc")
SIZES = ["--def", "matmul", "--sizes", "M=6,K=5,N=4"]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A cache with a kernel and two measurements."""
    with knobs.override_knobs(cache="readwrite", cache_dir=str(tmp_path / "cache"), verify=False):
        op = tc.define(Path(MATMUL).read_text()).matmul
        a, b = torch.randn(6, 5), torch.randn(5, 4)
        op(a, b)
        entry = op.cache_entry(a, b)
        measured = [Measurement(CpuOptions(interleave=v), 1e-5 * (v + 1), True, time=0) for v in (1, 2)]
        measurement_store.record_measurements(current_store(), entry.tuning_key, measured)
        yield tmp_path / "cache"


def run(*arguments: object) -> int:
    return main.main(["cache", *map(str, arguments)])


def test_everything_is_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ls") == 0
    text = capsys.readouterr().out
    for part in ("kernel", "(6,5)(5,4)(6,4)", "def f0(float32(x0, x1) x2", "2 ways", "best 20.0 us", str(root)):
        assert part in text


def test_another_folder_is_looked_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store(tmp_path / "other").write(("kernel", "f", "d"), b"")
    assert run("--dir", tmp_path / "other", "ls") == 0
    assert str(tmp_path / "other") in capsys.readouterr().out
    assert run("--dir", tmp_path / "none", "ls") == 2
    assert "there is no cache" in capsys.readouterr().err


def test_an_entry_is_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("ls")
    kernel, tuned = (line.split()[0] for line in capsys.readouterr().out.splitlines()[:2])
    assert run("show", kernel) == 0
    text = capsys.readouterr().out
    for part in ("target.features", "options.fusion", "version.llvmlite", "temporaries", "bytes"):
        assert part in text
    assert run("show", tuned) == 0
    text = capsys.readouterr().out
    assert "20.0 us  1970-01-01  CpuOptions(" in text
    assert run("show", "") == 2
    assert "2 entries begin with ''" in capsys.readouterr().err
    assert run("show", "nothing") == 2


def test_a_call_is_explained(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", MATMUL, *SIZES) == 0
    text = capsys.readouterr().out
    assert "there is a kernel for this key" in text
    assert "20.0 us" in text
    assert run("explain", MATMUL, *SIZES, "--fusion", "min") == 1
    text = capsys.readouterr().out
    assert "the nearest has another\n  options.fusion               'preserve3'" in text


def test_damage_is_found_and_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify") == 0
    assert "0 are not" in capsys.readouterr().out
    (kernel,) = (root / "v2" / "kernel").rglob("*.tc")
    kernel.write_bytes(kernel.read_bytes()[:-1] + b"?")
    (tuned,) = (root / "v2" / "tuning").rglob("*.tc")
    other = tuned.parents[1] / "another key" / tuned.name
    other.parent.mkdir()
    tuned.rename(other)
    assert run("verify") == 1
    assert "2 are not" in capsys.readouterr().out
    assert run("verify", "--remove") == 1
    assert f"damaged: {kernel}, removed" in capsys.readouterr().out
    assert not kernel.exists()
    assert run("verify") == 0


def test_measurements_travel(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, there = tmp_path / "shared.tct", tmp_path / "there"
    assert run("export", file.with_suffix("")) == 0
    assert file.name in capsys.readouterr().out
    first = file.read_bytes()
    file.chmod(0o666)  # whoever may have changed it, it is checked
    assert run("--dir", there, "import", file) == 0
    assert run("--dir", there, "import", file) == 0
    assert [line.split()[-3] for line in capsys.readouterr().out.splitlines()] == ["2", "0"]
    assert measurement_store.all_measurements(Store(there)) == measurement_store.all_measurements(Store(root))
    assert run("--dir", there, "export", file) == 0
    assert file.read_bytes() == first
    third = tmp_path / "third"
    assert run("--dir", third, "merge", there, root, file) == 0
    assert measurement_store.all_measurements(Store(third)) == measurement_store.all_measurements(Store(root))


@pytest.mark.parametrize("content", [b"", b"<html>", b"\x00" * 100])
def test_files_that_are_no_collection_are_refused(
    root: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(content)
    assert run("import", tmp_path / "file") == 2
    assert "CacheError" in capsys.readouterr().err


def test_measurements_do_not_replace_defs(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    defs = tmp_path / "layers.tc"
    defs.write_text("def f(float(N) x) -> (y) { y(i) = x(i) }")
    assert run("export", defs) == 2
    assert "layers.tct" in capsys.readouterr().err
    assert defs.read_text().startswith("def")
    old = tmp_path / "tuned.tc"  # as earlier versions called such files
    assert run("export", tmp_path / "tuned") == 0
    (tmp_path / "tuned.tct").rename(old)
    assert run("--dir", tmp_path / "there", "import", old) == 0
    assert measurement_store.all_measurements(Store(tmp_path / "there")) == measurement_store.all_measurements(
        Store(root)
    )


def test_code_travels_only_with_a_key(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, there = tmp_path / "code", tmp_path / "there"
    assert run("export", "--code", folder) == 2
    assert "TC_CACHE_SIGNING_KEY" in capsys.readouterr().err
    secret = tmp_path / "secret"
    secret.write_bytes(b"k" * 32)
    secret.chmod(0o600)
    with knobs.override_knobs(cache_signing_key=str(secret)):
        op = tc.define(Path(MATMUL).read_text()).matmul
        a, b = torch.randn(6, 5), torch.randn(5, 4)
        op(a, b)
        assert run("export", "--code", folder) == 0
        assert run("--dir", there, "import", "--code", folder) == 0
        assert capsys.readouterr().out.split("\n")[-2] == "1 kernels copied"
        with knobs.override_knobs(cache_dir=str(there)):
            assert op.cache_entry(a, b).kernel is not None
        for path in folder.rglob("*.tc"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert run("--dir", tmp_path / "fourth", "import", "--code", folder) == 0
        assert "0 kernels copied" in capsys.readouterr().out


def test_the_cache_is_kept_small_and_cleared(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gc", "--limit", "1M") == 0
    assert "0 entries and 0 leftovers removed" in capsys.readouterr().out
    assert run("gc", "--limit", "0") == 0
    assert "0 entries of 0 bytes are left" in capsys.readouterr().out
    assert run("gc", "--limit", "many") == 2
    for name in (("kernel", "f", "a"), ("tuning", "f", "b", "c")):
        current_store().write(name, b"")
    assert run("clear", "--layer", "kernel") == 0
    assert list(current_store().walk()) == [("tuning", "f", "b", "c")]
    assert run("clear") == 0
    assert list(current_store().walk()) == []
