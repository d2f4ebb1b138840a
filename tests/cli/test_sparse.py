"""`tensorc sparse` shows, reads, makes, runs, checks and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.cli import main, sparse_command

RESIDUAL = ["sparse", "y(i) = b(i) - A(i,j)*x(j)", "-f", "A:csr", "-d", "A:6,5"]


def test_shows_text_plan_and_loops(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(RESIDUAL) == 0
    text = capsys.readouterr().out
    for part in (
        "# tc",
        "float32(I, J) A: csr,",
        "y(i) += -(A(i, j) * x(j))",
        "# plan",
        "j: what A(i,j) stores",
        "# loops",
        "A.pos1",
    ):
        assert part in text


@pytest.mark.parametrize(("kind", "part"), [("c", "A_crd1"), ("llvm", "define "), ("asm", ".section")])
def test_emits_one_kind_without_a_heading(kind: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*RESIDUAL, "--emit", kind]) == 0
    text = capsys.readouterr().out
    assert part in text
    assert f"# {kind}\n" not in text


def test_compiles_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*RESIDUAL, "--target", "cuda:sm_90", "--emit", "plan,cuda", "--verify"]) == 0
    text = capsys.readouterr().out
    assert "blocks; a team of" in text
    assert "__global__" in text
    assert "largest difference from the reference" in text
    assert main.main([*RESIDUAL, "--target", "cuda:sm_80"]) == 0
    assert "# loops" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["y(i) = A(i,j)*x(j)", "-f", "A:csr", "-d", "A:40,30", "-g", "A:uniform:0.3"],
        ["y(i) = A(i,j)*x(j)", "-f", "A:ds(1,0)", "-d", "A:40,30", "-g", "A:power:0.1", "-t", "A:double"],
        ["y(i) = A(i,j)*x(j)", "-f", "A:bsr(2,5)", "-d", "A:40,30", "-g", "A:band:2"],
        ["C(i,j) = A(i,k)*B(k,j)", "-f", "A:csr", "-f", "B:csc", "-f", "C:csr", "-d", "A:9,8", "-d", "B:8,7"],
        ["C(i,j) = A(i,j) + B(i,j)", "-f", "A:csr", "-f", "B:csr", "-f", "C:dcsr", "-d", "A:9,8"],
        ["C(i,j) = A(i,j) - B(i,j)", "-f", "A:csr", "-f", "C:csr", "-d", "A:9,8", "-t", "A:int", "-t", "B:int"],
        ["y(i) = A(i,j)*A(i,j)", "-f", "A:dcsc", "-d", "A:9,8", "-t", "A:bfloat16"],
        ["a = b(i)*c(i)", "-f", "b:s", "-d", "b:50", "-g", "c:uniform:0.5"],
        ["A(i,r) = B(i,j,k)*C(j,r)*D(k,r)", "-f", "B:csf", "-d", "B:5,6,7", "-d", "C:6,4"],
        ["y(i) = A(i,j)*x(j)", "-f", "A:csr", "-d", "A:0,3"],
        ["y(i) = alpha*x(i)", "-d", "x:5"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)  # fmt: skip
def test_runs_and_verifies(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["sparse", *arguments, "--time", "2", "--verify"]) == 0
    text = capsys.readouterr().out
    assert "median of 2 runs" in text
    assert "largest difference from the reference" in text


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tc.Op, "reference", lambda self, *operands: self(*operands) + 1)
    assert main.main([*RESIDUAL, "--verify"]) == 1
    assert "largest difference" in capsys.readouterr().out


def test_other_stored_places_are_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(self: tc.Op, *operands: tc.SparseTensor) -> tc.SparseTensor:
        result = self(*operands)
        everywhere = torch.ones(result.shape).nonzero().T
        return tc.SparseTensor.from_coordinates(everywhere, result.to_dense().reshape(-1), result.shape, result.format)

    monkeypatch.setattr(tc.Op, "reference", full)
    assert main.main(["sparse", "C(i,j) = 2*A(i,j)", "-f", "A:csr", "-f", "C:csr", "-d", "A:9,9", "--verify"]) == 1
    assert "stored places differ" in capsys.readouterr().out


def test_reads_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = torch.tensor([[1.0, 0, 2], [0, 3, 0]]).double()
    tc.write_tensor(tmp_path / "a.mtx", tc.as_sparse(a, "csr"))
    (tmp_path / "x.tns").write_text("1 1\n2 10\n")  # no element in the last place, so that -d is needed
    source = ["sparse", "y(i) = A(i,j)*x(j)", "-i", f"A:{tmp_path / 'a.mtx'}", "-i", f"x:{tmp_path / 'x.tns'}"]
    named = ["-f", "A:csc", "-d", "x:3", "-o", f"y:{tmp_path / 'y.tns'}"]
    assert main.main([*source, *named]) == 0
    assert f"wrote {tmp_path / 'y.tns'}" in capsys.readouterr().out
    assert tc.read_tensor(tmp_path / "y.tns").to_dense().tolist() == [1.0, 30.0]
    product = ["sparse", "B(i,j) = A(i,j)*A(i,j)", "-f", "A:csr", "-f", "B:csr", "-t", "A:double"]
    assert main.main([*product, "-i", f"A:{tmp_path / 'a.mtx'}", "-o", f"B:{tmp_path / 'b.npz'}"]) == 0
    squares = tc.read_tensor(tmp_path / "b.npz")
    assert str(squares.format) == "csr"
    assert torch.equal(squares.to_dense(), a * a)
    assert main.main(["sparse", "s = x(i)", "-i", f"x:{tmp_path / 'x.tns'}", "-o", f"s:{tmp_path / 's.tns'}"]) == 0
    assert (tmp_path / "s.tns").read_text().strip() == "11.0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["y(i) += A(i,j)"], ["ParseError", "from_expression"]),
        (["y(i) = A(i,j)*x(j)", "-f", "A"], ["-f has 'A'", "NAME:VALUE"]),
        (["y(i) = A(i,j)*x(j)", "-f", "A:crs"], ["'crs'", "did you mean csr?"]),
        (["y(i) = A(i,j)*x(j)", "-f", "B:csr"], ["'B'", "A, x, y"]),
        (["y(i) = A(i,j)*x(j)", "-t", "A:real"], ["'real' is not a type"]),
        (["y(i) = A(i,j)*x(j)"], ["dimension 0 of 'A'", "-d A:100,100"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5,x"], ["-d has A:5,x"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5"], ["'A' has 2 dimensions"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5,6", "-d", "x:7"], ["'x'", "expected: 6", "found: 7"]),
        (["y(i) = A(i,j)*x(j)", "-d", "B:5,6"], ["-d names 'B'", "A, x"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5,6", "-o", "x:x.tns"], ["-o names 'x'", "y"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5,6", "-g", "A:star:1"], ["'star'", "uniform:NUMBER"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5,6", "-g", "A:uniform:-1"], ["uniform:-1"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5,6", "-g", "x:band:1"], ["'band' is for matrices"]),
        (["y = A", "-g", "A:power:0"], ["'A' is a number", "no pattern"]),
        (["y(i) = A(i,j)*x(j)", "-i", "A:nowhere.mtx"], ["cannot read nowhere.mtx"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5,6", "--emit", "c,cuda"], ["'cuda'", "--target cuda:sm_90"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5,6", "--emit", "asm", "--target", "cuda:sm_90"], ["'asm'", "cuda, opencl"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5,6", "--time", "3", "--target", "cuda:sm_90"], ["--time is for CPUs"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5,6", "--target", "cuda:sm_1"], ["no target 'cuda:sm_1'"]),
        (["y(i) = A(i,j)*x(j)", "-d", "A:5,6", "--emit", "ptx"], ["'ptx'", "tc, plan, loops"]),
        (["y(i) = A(i,j)*x(j)", "-f", "A:csr", "-d", "A:9999,99999", "-g", "A:band:0", "--verify"], ["instances"]),
    ],
)  # fmt: skip
def test_mistakes(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["sparse", *arguments]) == 2
    text = capsys.readouterr().err
    for word in words:
        assert word in text


def test_a_file_with_other_sizes_than_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tc.write_tensor(tmp_path / "a.mtx", tc.as_sparse(torch.eye(3), "csr"))
    assert main.main(["sparse", "s = A(i,j)", "-i", f"A:{tmp_path / 'a.mtx'}", "-d", "A:4,4"]) == 2
    assert "(3, 3)" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", sparse_command.PATTERNS)
def test_patterns_are_the_same_in_every_process(pattern: str) -> None:
    op = tc.from_notation("s = A(i,j)", A="double")
    first, again = (
        sparse_command.make_operands(op, {"A": "csr"}, {"A": "50,40"}, {}, {"A": f"{pattern}:2"}) for _ in range(2)
    )
    assert torch.equal(first[0].to_dense(), again[0].to_dense())
    assert 0 < first[0].nnz <= 2000
    assert first[0].check()
