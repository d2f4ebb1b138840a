"""A check that may crash, run in a forked child: it starts in milliseconds, with everything loaded."""

from __future__ import annotations

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable

from ...core.single_flight import fork_at_once

SECONDS = 60.0
"""How long a child may take; it needs some milliseconds of processor time, on a machine that may be busy."""
_PAUSE = 0.001
_LONGEST = 1000
"""The most characters of an answer: a pipe keeps them until the parent reads."""


class NoAnswer(Exception):
    """The child could not be started or did not end; the message says which. The outcome of the check is unknown."""


def run_forked(check: Callable[[], str], seconds: float = SECONDS) -> str:
    """Run `check` in a child of this process; return its result, or how the child crashed.

    `check` may use no lock that another thread of this process might hold.

    Raises NoAnswer.
    """
    try:
        reader, writer = os.pipe()
    except OSError as error:
        raise NoAnswer(f"no pipe can be made: {error}") from error
    try:
        child = _fork(check, writer)
        status = _wait(child, seconds)
        os.set_blocking(reader, False)
        answer = _read(reader)
    finally:
        os.close(reader)
        os.close(writer)
    if answer.endswith(b"\n"):
        return answer[:-1].decode("utf-8", "replace")
    return f"it crashed with signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "it ended without an answer"


def _fork(check: Callable[[], str], writer: int) -> int:
    """Start a child that has only this thread and blocks signals: crashes end it without handlers, which print."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings(), fork_at_once():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the child does not use
            child = os.fork()
            if child == 0:
                _answer(check, writer)
        return child
    except OSError as error:
        raise NoAnswer(f"no child process can be started: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answer(check: Callable[[], str], writer: int) -> None:
    """Write the result of the check and end this process."""
    text = ""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        text = check()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        try:
            os.write(writer, text[:_LONGEST].replace("\n", " ").encode() + b"\n")
        finally:
            os._exit(0)


def _wait(child: int, seconds: float) -> int:
    """The exit status of a child. Raises NoAnswer if it does not end in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            ended, status = os.waitpid(child, os.WNOHANG)
        except ChildProcessError:  # the program ignores or collects the ends of its children
            return 0
        if ended:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise NoAnswer(f"its process did not end in {seconds:.0f} seconds")
        time.sleep(_PAUSE)


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 8 * _LONGEST)
    except BlockingIOError:
        return b""
