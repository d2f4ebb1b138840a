"""Whatever is interrupted, by Ctrl-C or by a lack of memory, can be done again, with the right results."""

from __future__ import annotations

import linecache
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core import lazy_import
from tensor_comprehensions.core.interrupts import deferred_interrupts
from tensor_comprehensions.core.single_flight import SingleFlightCache
from tensor_comprehensions.runtime.fastpath import boxed
from tensor_comprehensions.torch_ext import boxed_kernels, registration
from tools import interrupts


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize(("kind", "count"), [("define", 1), ("call", 2), ("backward", 2), ("tune", 1)])
def test_work_that_was_interrupted_can_be_done_again(kind: str, count: int) -> None:
    """A sample; all of it is `python -m tools.interrupts`."""
    results = interrupts.run(kind, count, seed=2026)
    assert set(results) <= {"finished", "KeyboardInterrupt", "MemoryError", "ArgumentError"}, "\n".join(results)


REGISTRATION = {registration.__file__, boxed_kernels.__file__, boxed.__file__, torch.library.__file__}


class _Strike:
    """Raises at one of the lines that registration runs, if it has as many."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.at, self.error, self.struck = at, error, False

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in REGISTRATION:
            return None
        if event == "line":
            self.at -= 1
            if self.at < 0 and not self.struck:
                self.struck = True
                raise self.error
        return self


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_registration_interrupted_at_any_line_is_gone_on_with(error: type[BaseException]) -> None:
    x, at, struck = torch.ones(3, requires_grad=True), 0, True
    while struck:
        text = f"def twice(float(N) x) -> (y) {{ y(i) = {2 + at} * x(i) + {len(error.__name__)} }}"
        strike, before = _Strike(at, error), sys.gettrace()
        try:
            sys.settrace(strike)
            tc.define(text)
        except (error, tc.ArgumentError):
            pass
        finally:
            sys.settrace(before)
        struck = strike.struck
        op = tc.define(text).twice
        if at % 2 == 0 or not struck:
            for call in (op, op.overload):
                y = call(x)
                y.sum().backward()
                assert y[0].item() == 2 + at + len(error.__name__)
                assert x.grad is not None
                assert x.grad[0].item() == 2 + at
                x.grad = None
            with torch.no_grad():
                getattr(torch.ops.tc, op.overload._schema.name[4:]).out(x, out=y.detach())
        at += 5 if at < 150 else 25
    assert at > 60, "a registration has many lines"


def test_an_interrupt_in_the_kernel_of_an_operator_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was printed and forgotten, and the arguments came back as results."""
    op = tc.define("def f(float(N) x) -> (y) { y(i) = 3 * x(i) + 0.125 }").f

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(boxed.BoxedCallCache, "call_slow_path", interrupted)
        op.overload(torch.ones(5))
    assert op.overload(torch.ones(5)).tolist() == [3.125] * 5


def test_an_interrupt_waits_for_the_end_of_an_import() -> None:
    steps, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), deferred_interrupts():
            steps.append(1)
            signal.raise_signal(signal.SIGINT)
            with deferred_interrupts():
                signal.raise_signal(signal.SIGINT)
            steps.append(2)
    finally:
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert steps == [1, 2]
    thread = threading.Thread(target=lambda: lazy_import.import_without_gc("json"))  # where no handler may be set
    thread.start()
    thread.join()


def test_a_block_that_never_came_to_its_end_keeps_no_interrupt() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        deferred_interrupts().__enter__()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_after_an_interrupt_does_not_wait_for_ever() -> None:
    """The gate counted threads, and an interrupt could come between counting up and counting down."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    values: SingleFlightCache[int, int] = SingleFlightCache(2)
    for at in range(40):
        left = at

        def strike(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if "once.py" in frame.f_code.co_filename and event == "line" and "with " not in line:
                left -= 1  # between the end of a `with` block and the release of its lock comes no signal
                if left == 0:
                    raise KeyboardInterrupt
            return strike

        before = sys.gettrace()
        try:
            sys.settrace(strike)
            values.get(at, lambda: 1)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert values.get(at, lambda: 1) == 1
    waiting = threading.Thread(target=lambda: os.waitpid(os.fork() or os._exit(0), 0))
    waiting.start()
    waiting.join(300)
    assert not waiting.is_alive()
