"""What may leave a call: the package's own exceptions, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .errors import ArgumentError, InternalError, TCError

P = ParamSpec("P")
R = TypeVar("R")


_NO_MEMORY = ("not enough memory", "out of memory", "allocate memory", "Storage size calculation overflowed")
"""How torch says, in a RuntimeError, that there is not so much."""


def told(error: Exception) -> Exception:
    """An exception that is not meant to leave a call, as one that is: a lack of memory or of stack, or our bug."""
    text = str(error)
    if isinstance(error, RecursionError):
        return ArgumentError(
            f"there is no stack for this: {error}",
            suggestion="nest the def, or the calls around this one, less deeply, or raise sys.setrecursionlimit",
        )
    if isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY):
        return ArgumentError(f"there is no memory for this: {error}")
    return InternalError(f"{type(error).__name__}: {error}")


def guarded(call: Callable[P, R]) -> Callable[P, R]:
    """`call`, out of which come only the package's own exceptions."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except (TCError, InternalError, Warning):  # a warning that is to be an error, too
            raise
        except Exception as error:
            raise told(error) from error

    return wrapper
