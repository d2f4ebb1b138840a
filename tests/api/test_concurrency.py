"""Many Python threads, and forks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.compiler import cpu_passes

SOURCE = """
def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }
def twice(float(N) x) -> (y) { y(i) = 2 * x(i) }
"""


def test_eight_threads_compile_each_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Counter[tuple[int, ...]] = Counter()
    original = cpu_passes.compile_function

    def counting(bound: object, *rest: object) -> object:
        compiled[bound.tensors[0].shape] += 1  # type: ignore[attr-defined]
        return original(bound, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_passes, "compile_function", counting)
    op = tc.define(SOURCE, dynamic=False).mm
    start = threading.Barrier(8)
    wrong: list[object] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start.wait(300)
        for n in (8, 20, 33, 8, 20):
            a, b = torch.randn(n, 12, generator=generator), torch.randn(12, n, generator=generator)
            try:
                if not torch.allclose(op(a, b), a @ b, atol=1e-4):
                    wrong.append((seed, n))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    assert not wrong
    assert compiled == {(8, 12): 1, (20, 12): 1, (33, 12): 1}


FORK = f"""
import os, sys, torch, warnings
warnings.simplefilter("ignore")
import tensor_comprehensions as tc
torch.set_num_threads(2)
ops = tc.define('''{SOURCE}''')
x = torch.randn(1_000_000)
assert torch.equal(ops.twice(x), 2 * x)
child = os.fork()
if child == 0:
    y = ops.twice(x)                                    # a kernel that the parent made, in parallel there
    z = ops.mm(torch.ones(300, 40), torch.ones(40, 300))  # one of the child's own
    x.mul_(2)                                           # torch itself hangs in a child unless it has one thread
    os._exit(0 if torch.equal(y, x) and (z == 40).all() else 1)
_, status = os.waitpid(child, 0)
assert torch.equal(ops.twice(x), 2 * x)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_runs_and_compiles() -> None:
    program = FORK.replace("    x.mul_(2) ", "    torch.set_num_threads(1); x.mul_(2) ")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
