from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tensor_comprehensions.cli import main
from tensor_comprehensions.cli.bench_contraction import ContractionSpec

NAME = "abc-bda-dc"
ARGUMENTS = ["contract", NAME, "--sizes", "a=9,b=10,c=11,d=12"]


def test_lists_the_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(ARGUMENTS) == 0
    text = capsys.readouterr().out
    assert "90 x 11 x 12 (m x n x k)" in text
    assert text.count("vectorize('a'") > 2
    assert "  0 " in text


def test_searches_explains_and_emits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main([*ARGUMENTS, "--search", "3", "--explain", "--emit", "c"]) == 0
    text = capsys.readouterr().out
    for part in ("register tile: ", "domain: S0", f"wrote {NAME}.c"):
        assert part in text
    emitted = (tmp_path / f"{NAME}.c").read_text()
    assert "int contract(" in emitted
    if compiler := shutil.which("cc"):
        subprocess.run([compiler, "-std=c99", "-c", f"{NAME}.c"], cwd=tmp_path, check=True)


def test_the_leftmost_index_has_stride_one() -> None:
    contraction = ContractionSpec.parse(NAME, {"a": 3, "b": 4, "c": 5, "d": 6}, "double")
    source = "def contract(double(Na,Nd,Nb) A, double(Nc,Nd) B) -> (C) { C(c,b,a) +=! A(a,d,b) * B(c,d) }"
    assert contraction.source == source
    a, b = contraction.tensors()
    assert a.shape == (3, 6, 4)
    assert a.dtype == torch.float64
    assert b.shape == (5, 6)
    assert contraction.flops == 2 * 3 * 4 * 5 * 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["abc"], ["'abc'", "C-A-B"]),
        (["ABC-abd-dc"], ["C-A-B"]),
        (["aab-ad-db"], ["'a' twice"]),
        (["abe-ad-db"], ["'e'", "neither"]),
        (["ab-adx-db"], ["'x'", "one tensor"]),
        (["ab-ad-db", "--sizes", "a=3,b=4"], ["'d'", "--sizes"]),
        (["ab-ad-db", "--sizes", "a=3,b=4,d=0"], ["'d'", "is 0"]),
        (["ab-ad-db", "--sizes", "a=3,b=4,d=5,q=6"], ["'q'", "a, d, b"]),
        (["ab-ad-db", "--sizes", "a=9,b=9,d=9", "--emit", "c", "--output", "/nowhere/x.c"], ["cannot write"]),
        (["ab-ad-db", "--sizes", "a=3,b=4,d=5", "--threads", "99999"], ["--threads 99999", "expected 1 to"]),
        (["ab-ad-db", "--sizes", "a=3,b=4,d=5", "--threads", "-1"], ["--threads -1"]),
    ],
)
def test_mistakes(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["contract", *arguments]) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error


def test_any_command_takes_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(Path(__file__).parents[2] / "examples" / "matmul.tc")
    show = ["show", file, "--sizes", "M=20,K=30,N=40", "--emit", "schedule", "--schedule"]
    assert main.main([*show, "tile(m=4, n=16) >> pack(B='n1')"]) == 0
    assert "tile(m=4, n=16) >> pack(B='n1')" in capsys.readouterr().out
    assert main.main([*show, "open('x')"]) == 2
    assert "not a schedule" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--search", "2", "--seconds", "1"]])
def test_a_product_that_no_register_tile_suits(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["contract", "ab-ca-bc", "--sizes", "a=4,b=4,c=4", *arguments]) == 0
    assert "ab-ca-bc" in capsys.readouterr().out
