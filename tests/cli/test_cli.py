from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from tensor_comprehensions.cli import main
from tensor_comprehensions.runtime.fastpath import availability

EXAMPLES = Path(__file__).parents[2] / "examples"
MATMUL = str(EXAMPLES / "matmul.tc")
SIZES = ["--sizes", "M=6, K=5,N=4"]


def test_show_prints_every_form_under_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["show", MATMUL, *SIZES]) == 0
    text = capsys.readouterr().out
    for part in ("# ranges", "m in 0:6", "# schedule", "# loops", "# c", "#include"):
        assert part in text


@pytest.mark.parametrize(("kind", "part"), [("tc", "def matmul"), ("llvm", "define "), ("ranges", "float32(6,5) A")])
def test_show_one_form(kind: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["show", MATMUL, *SIZES, "--emit", kind]) == 0
    text = capsys.readouterr().out
    assert part in text
    assert "# ranges" not in text


def test_show_for_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["show", MATMUL, *SIZES, "--target", "cuda:sm_90"]) == 0
    text = capsys.readouterr().out
    for part in ("# ranges", "# schedule", "blocks of", "# cuda", "__global__ void"):
        assert part in text
    assert main.main(["show", MATMUL, *SIZES, "--target", "cuda:sm_90", "--emit", "opencl"]) == 0
    assert "__kernel void" in capsys.readouterr().out
    assert main.main(["show", MATMUL, *SIZES, "--target", "fpga"]) == 2


def test_show_a_sparse_def(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spmv.tc"
    file.write_text("def spmv(float(N,M) A: csr, float(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }")
    assert main.main(["show", str(file), "--sizes", "N=9,M=7"]) == 0
    text = capsys.readouterr().out
    for part in ("# schedule", "# loops", "# c", "A.pos1"):
        assert part in text
    assert main.main(["show", str(file), "--sizes", "N=9,M=7", "--fusion", "min"]) == 2
    assert "SparseOptions" in capsys.readouterr().err
    assert main.main(["run", str(file), "--sizes", "N=9,M=7", "--repeat", "3"]) == 0
    assert "largest difference" in capsys.readouterr().out


RUNS = [
    ("matmul.tc", "matmul", "M=6,K=5,N=4"),
    ("matmul.tc", "gemm", "M=6,K=5,N=4,alpha=0.5,beta=-2"),
    ("convolution.tc", "maxpool", "N=1,C=2,H=9,W=7,k=3,s=2"),
    ("lookup.tc", "embedding_sum", "V=9,D=4,B=3,L=2"),
    ("lookup.tc", "histogram", "N=100,K=7"),
    ("norms.tc", "moments", "N=3,D=40"),
]


@pytest.mark.parametrize(("file", "name", "sizes"), RUNS, ids=[name for _, name, _ in RUNS])
def test_run_checks_and_times(file: str, name: str, sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", str(EXAMPLES / file), "--def", name, "--sizes", sizes, "--repeat", "3"]) == 0
    text = capsys.readouterr().out
    for part in ("compiled in", "median of 3 runs", "largest difference"):
        assert part in text


def test_run_without_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", MATMUL, *SIZES, "--repeat", "1", "--no-check"]) == 0
    assert "difference" not in capsys.readouterr().out


def test_options_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for flags in ([], ["--no-use-microkernels"], ["--fusion", "min", "--tile", "4,4", "--interleave", "2"]):
        assert main.main(["show", MATMUL, *SIZES, "--emit", "loops", *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]
    assert main.main(["show", MATMUL, *SIZES, "--fusion", "most"]) == 2
    assert "the option fusion is 'most'" in capsys.readouterr().err


def test_the_program_comes_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f(float(N) x) -> (y) { y(i) = x(i) }"))
    assert main.main(["run", "-", "--sizes", "N=3"]) == 0


def test_the_mark_that_some_editors_put_in_front_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "marked.tc").write_bytes(b"\xef\xbb\xbf" + Path(MATMUL).read_bytes())
    assert main.main(["show", str(tmp_path / "marked.tc"), *SIZES, "--emit", "tc"]) == 0
    assert "def matmul" in capsys.readouterr().out


def test_doctor_tells_versions_and_that_a_def_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (
        "torch ",
        "islpy",
        "LLVM",
        "processor",
        "vectors",
        "threads",
        "SLEEF",
        "fast path of calls    on: ",
        "CUDA launches",
        "a def compiles        yes",
    ):
        assert part in text


def test_doctor_says_why_calls_are_slow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "decide_fast_path", lambda: availability.FastPathDecision(False, "no handles"))
    assert main.main(["doctor"]) == 0
    assert "fast path of calls    OFF: no handles" in capsys.readouterr().out


MISTAKES = {
    "no file": (["show", "nothing.tc"], "cannot read nothing.tc"),
    "folder": (["show", str(EXAMPLES)], "cannot read"),
    "no such def": (["show", MATMUL, "--def", "matmull"], "did you mean 'matmul'?"),
    "no size": (["run", MATMUL, "--sizes", "M=3,K=2"], "matmul needs a value of its size N"),
    "unknown size": (["run", MATMUL, "--sizes", "M=3,K=2,N=2,Q=1"], "no size and no number called 'Q'"),
    "no number": (["run", MATMUL, "--sizes", "M=three"], "'M=three'"),
    "no equals sign": (["run", MATMUL, "--sizes", "M"], "NAME=NUMBER"),
    "sizes beyond all memory": (["run", MATMUL, "--sizes", f"M={10**8},K={10**7},N=2"], "no memory for this"),
    "sizes beyond all numbers": (["run", MATMUL, "--sizes", f"M={10**10},K={10**10},N=2"], "no memory for this"),
    "a size beyond 64 bits": (["run", MATMUL, "--sizes", f"M={10**20},K=1,N=1"], "the size M is too large"),
    "no name of a file": (["show", "a\0b"], "cannot read"),
    "negative size": (["run", MATMUL, "--sizes", "M=-3,K=2,N=2"], "matmul needs a value of its size M"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_2_and_a_message(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, part = MISTAKES[mistake]
    assert main.main(arguments) == 2
    assert part in capsys.readouterr().err


def test_a_mistake_in_the_program_shows_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.tc").write_text("def f(float(N) x) -> (y) {\n  y(i) = z(i)\n}")
    assert main.main(["show", str(tmp_path / "wrong.tc")]) == 2
    assert "CheckError: 2:10" in capsys.readouterr().err


def test_a_program_without_defs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.tc").write_text("# nothing\n")
    assert main.main(["show", str(tmp_path / "empty.tc")]) == 2
    assert "has no def" in capsys.readouterr().err


def test_the_command_without_traceback_and_into_a_closed_pipe() -> None:
    """The installed entry point, as a shell would run it."""
    tensorc = [sys.executable, "-m", "tensor_comprehensions.cli.main"]
    wrong = subprocess.run([*tensorc, "show", "nothing.tc"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
    with pytest.raises(SystemExit, match="2"):
        main.main(["dance"])
    with subprocess.Popen(
        [*tensorc, "show", MATMUL, "--sizes", "M=64,K=64,N=64"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as piped:
        assert piped.stdout is not None
        assert piped.stderr is not None
        piped.stdout.readline()
        piped.stdout.close()
        assert "Traceback" not in piped.stderr.read()


def test_sizes_of_which_a_kernel_is_for_all_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["show", str(EXAMPLES / "softmax.tc"), "--sizes", "N=*,D=33", "--emit", "loops"]) == 0
    assert "for .tile in 0 .. .rows grain" in capsys.readouterr().out
    assert main.main(["run", str(EXAMPLES / "softmax.tc"), "--sizes", "N=*,D=33", "--repeat", "1"]) == 0
    assert "relative to its largest value" in capsys.readouterr().out
    assert main.main(["show", str(EXAMPLES / "softmax.tc"), "--sizes", "N=8,D=*", "--emit", "loops"]) == 0
    assert "= max(.sizes[1], 0)" in capsys.readouterr().out
    (tmp_path / "last.tc").write_text("def last(float(N,D) x) -> (o) { o(d) = x(N-1,d) }")
    assert main.main(["show", str(tmp_path / "last.tc"), "--sizes", "N=*,D=8"]) != 0
    assert "no kernel of last" in capsys.readouterr().err
