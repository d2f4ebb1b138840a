"""Work that is interrupted at a random moment, and then done again: `python -m tools.interrupts KIND COUNT
[SEED]`.

Every sample is a child process that has done nothing yet, so that what happens once in a process is interrupted, too.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core import knobs

TEXT = """
def f(float(N,K) a, float(M,K) b) -> (c, s) {
    c(n,m) +=! a(n,k) * b(m,k)
    c(n,m) = tanh(c(n,m))
    s(n) +=! c(n,m)
}
"""
HANGS = 300
"""Seconds after which a sample counts as stuck."""
RAISED = (KeyboardInterrupt, MemoryError)


def work(kind: str) -> list[torch.Tensor]:
    """The results of work that ends with a `kind` of step."""
    op = tc.define(TEXT).f
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(8, 16, generator=generator) for _ in range(2))
    if kind == "define":
        return [torch.tensor(op.overload._schema.name == op.overload.name())]
    if kind == "call":
        return [*op(a, b), *op.overload(a, b), *op.overload(a.bfloat16().float(), b)]
    if kind == "backward":
        a.requires_grad_()
        b.requires_grad_()
        torch.autograd.backward(op(a, b), [torch.ones(8, 8), torch.ones(8)])
        assert a.grad is not None
        assert b.grad is not None
        grads = [a.grad.clone(), b.grad.clone()]
        c, s = op.overload(a, b)
        (c.sum() + s.sum()).backward()
        return [*grads, a.grad, b.grad]
    op.autotune(a, b, budget=1, generations=1, population=4)
    return [*op(a, b)]


def check(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


@contextmanager
def interrupt_after(delay: float, error: type[BaseException]) -> Iterator[None]:
    """Raise `error` after `delay` seconds of the block, unless it has ended; KeyboardInterrupt as Ctrl-C does.

    An import of another package is let go on: what it leaves when it fails is not ours.
    """

    def strike(number: int, frame: FrameType | None) -> None:
        if error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        elif any("importlib" in f.f_code.co_filename for f, _ in traceback.walk_stack(frame)):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        else:
            raise error

    before = signal.signal(signal.SIGALRM, strike)
    keys = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, keys)


def sample(kind: str, seed: int, seconds: float, wanted: list[torch.Tensor]) -> str:
    """What became of interrupted work: "finished", or the exception; raises where something stays wrong after it.

    seconds: about what the work takes.
    """
    chosen = random.Random(seed)
    delay, error = chosen.uniform(1e-4, seconds), RAISED[seed % 4 == 0]
    outcome, trace = "finished", ""
    try:
        with interrupt_after(delay, error):
            check(work(kind), wanted)
    except (*RAISED, tc.TCError) as raised:
        outcome, trace = type(raised).__name__, traceback.format_exc()
    except BaseException as raised:
        raise AssertionError(f"{type(raised).__name__} came out of an interrupt") from raised
    try:
        assert torch.is_grad_enabled(), "gradients are not recorded any more"
        assert gc.isenabled(), "no garbage is collected any more"
        check(work(kind), wanted)
        assert forks(), "a child cannot compute"
        gc.collect()
        assert kind != "tune" or no_children(), "a child process is left"
    except BaseException as raised:
        raise AssertionError(f"after this:\n{trace}") from raised
    return outcome


def forks() -> bool:
    """Does a forked child find every lock open?"""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check(work("call")[:2], work("call")[2:4])
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def no_children() -> bool:
    for _ in range(100):
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        time.sleep(0.05)
    return False


def in_child(action: Callable[[], str]) -> str:
    """The last line that `action` gives in a forked process, or how that ended."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)  # pytest's writes somewhere else
            faulthandler.dump_traceback_later(HANGS, exit=True)
            code = 1
            try:
                print(action(), file=sys.stderr)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        said.seek(0)
        text = said.read()
    if status:
        return f"failed with {os.waitstatus_to_exitcode(status)}:\n{text}"
    return text.strip().splitlines()[-1]


def run(kind: str, count: int, seed: int = 0) -> Counter[str]:
    """What became of so many samples."""
    import torch.fx.experimental.symbolic_shapes  # torch's backward imports it, and sympy is broken by an interrupt

    with tempfile.TemporaryDirectory() as folder, knobs.override_knobs(cache_dir=folder):
        torch.set_num_threads(1)

        def expected() -> str:
            start = time.perf_counter()
            found = work(kind)
            seconds = time.perf_counter() - start
            torch.save(found, f"{folder}/wanted.pt")
            return str(seconds)

        in_child(expected)  # what is read from the disk is in memory then
        seconds = float(in_child(expected))
        wanted = torch.load(f"{folder}/wanted.pt")
        results: Counter[str] = Counter()
        for n in range(seed, seed + count):
            with knobs.override_knobs(cache="off" if n % 3 else "readwrite", cache_dir=f"{folder}/{n % 5}"):
                said = in_child(lambda n=n: sample(kind, n, seconds, wanted))  # type: ignore[misc]
            results[f"sample {n} {said}" if said.startswith("failed") else said] += 1
        return results


if __name__ == "__main__":
    for said, times in run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0).items():
        print(times, said)
