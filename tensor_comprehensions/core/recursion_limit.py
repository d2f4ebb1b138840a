"""More of Python's stack for passes, which recurse through statements: a register tile nests hundreds of lets."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PASS_FRAMES = 10_000
"""Frames that passes may use beyond those of their caller. Calls among Python functions use no other stack."""
_lock = threading.Lock()
_users = 0
_before = 0


@contextmanager
def raise_recursion_limit() -> Iterator[None]:
    """Raise the recursion limit of the process for the `with` block. The last of several threads restores it."""
    global _users, _before
    with _lock:
        _users += 1
        if _users == 1:
            _before = sys.getrecursionlimit()
            sys.setrecursionlimit(_before + PASS_FRAMES)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and sys.getrecursionlimit() == _before + PASS_FRAMES:  # else someone else has set it
                sys.setrecursionlimit(_before)
