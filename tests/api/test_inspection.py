"""What `TC_DUMP` and `TC_LOGS` show of real kernels, and that emitted bytes do not depend on the process."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

PROGRAM = """
import torch, tensor_comprehensions as tc
ops = tc.define('''
def fcrelu(float(B,I) in, float(O,I) weight, float(O) bias) -> (out) {
    out(i,j) = bias(j)
    out(b,o) += in(b,i) * weight(o,i)
    out(i,j) = fmaxf(out(i,j), 0)
}
def softmax(float(N,D) x) -> (out) {
    peak(n) max=! x(n,d)
    out(n,d) = exp(x(n,d) - peak(n))
    total(n) +=! out(n,d)
    out(n,d) = out(n,d) / total(n)
}
def lookup(float(V,D) table, long(B) words) -> (out) { out(b,d) = table(words(b),d) }
''')
"""
PRINT_EVERYTHING = """
kernels = [
    ops.fcrelu.compile(torch.ones(32, 48), torch.ones(64, 48), torch.ones(64)),
    ops.softmax.compile(torch.ones(16, 100)),
    ops.lookup.compile(torch.ones(10, 20), torch.ones(5, dtype=torch.long)),
]
for kernel in kernels:
    for kind in ("schedule", "loops", "c", "llvm", "asm"):
        print(kind, kernel.source(kind))
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done


def test_emitted_bytes_do_not_depend_on_the_hash_seed() -> None:
    """It is the same in another process as in this one, whose seed is random."""
    with redirect_stdout(StringIO()) as mine:
        exec(PROGRAM + PRINT_EVERYTHING, {})
    assert len(mine.getvalue()) > 10_000
    assert run(PROGRAM + PRINT_EVERYTHING, PYTHONHASHSEED="1").stdout == mine.getvalue()


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("dump")
    call = "x = torch.ones(4, 5)\nops.softmax(x)\nops.softmax(x.t())\nops.softmax.compile(x)\n"
    return folder, run(PROGRAM + call, TC_DUMP=str(folder), TC_LOGS="all").stderr


def test_dump_has_every_stage_of_every_kernel(explained: tuple[Path, str]) -> None:
    kernels = sorted(explained[0].iterdir())
    assert [k.name.rpartition("_")[0] for k in kernels] == ["softmax", "softmax"]
    for kernel in kernels:
        files = sorted(p.name for p in kernel.iterdir())
        assert files[0] == "00_def.tc"
        stages = [name.partition("_")[2] for name in files]
        for stage in ("bound.txt", "lower.05_schedule.txt", "lower.txt", "vectorize.txt", "emit.ll", "assembly.s"):
            assert stage in stages
        assert all((kernel / name).read_text().strip() for name in files)


@pytest.mark.parametrize(
    ("topic", "part"),
    [
        ("schedule", "softmax: schedule:"),
        ("loops", "softmax: after simplify"),
        ("code", "define "),
        ("cache", "softmax: compiled, the first"),
        ("cache", "softmax: compiled, because of new sizes and strides"),
        ("cache", "softmax: found"),
        ("passes", "vectorize"),
    ],
)
def test_logs_explain(explained: tuple[Path, str], topic: str, part: str) -> None:
    prefix = f"[tensor_comprehensions.{topic}] "
    messages = [message for message in explained[1].split("[tensor_comprehensions.") if message.startswith(topic + "]")]
    assert any(part in message for message in messages), (prefix, part)


def test_nothing_is_said_without_being_asked() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("TC_LOGS", "TC_DUMP")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + "ops.softmax(torch.ones(4, 5))"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
