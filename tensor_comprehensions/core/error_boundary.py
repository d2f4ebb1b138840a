"""The error boundary of a call: only the package's own exceptions leave it, with the user's frames in the traceback."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from . import knobs
from .checked_fields import suggest_word
from .errors import ArgumentError, InternalError, TCError, to_printable

P = ParamSpec("P")
R = TypeVar("R")


_NO_MEMORY = ("not enough memory", "out of memory", "allocate memory", "Storage size calculation overflowed")
"""Texts by which a RuntimeError of torch reports a lack of memory."""
_TOO_MANY_DIGITS = "for integer string conversion"
"""Text by which Python's ValueError reports that a number has too many digits to print."""


def to_public_error(error: Exception) -> Exception:
    """Convert any other exception to an ArgumentError (no memory, no stack, too many digits) or an InternalError."""
    text = str(error)
    if isinstance(error, RecursionError):
        return ArgumentError(
            f"the stack is too small: {error}",
            suggestion="nest the def, or the calls around this one, less deeply, or raise sys.setrecursionlimit",
        )
    if isinstance(error, ValueError) and _TOO_MANY_DIGITS in text:  # a message would show the argument
        return ArgumentError(f"an argument is a number of more than {sys.get_int_max_str_digits()} digits")
    if isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY):
        return ArgumentError(f"there is no memory for this call: {error}")
    return InternalError(to_printable(f"{type(error).__name__}: {error}"))


def only_tc_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate `call` so that it raises only the package's own exceptions and warnings."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return call(*args, **kwargs)
            except (TCError, InternalError, Warning):  # the user's filters turn this warning into an error
                raise
            except TypeError as error:
                if _is_raised_here(error):  # the call did not start
                    raise _to_signature_error(call, error) from None
                raise to_public_error(error) from error
            except Exception as error:
                raise to_public_error(error) from error
        except (TCError, Warning) as error:
            shorten_traceback(error)
            raise

    return wrapper


def _is_raised_here(error: BaseException) -> bool:
    """Whether the frame that catches an exception is the one that raised it."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def _to_signature_error(call: Callable[..., Any], error: TypeError) -> ArgumentError:
    """The ArgumentError for a call whose arguments do not match the signature of `call`."""
    names = [p.name for p in inspect.signature(call).parameters.values()]
    wrong = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return ArgumentError(
        str(error),
        expected=", ".join(name for name in names if name != "self"),
        suggestion=suggest_word(wrong[1], names) if wrong else "",
    )


def shorten_traceback(error: BaseException) -> None:
    """Reduce the traceback of a mistake to the user's frames, unless TC_TRACEBACKS=full.

    The caller must re-raise with a bare `raise`, which adds no frame of its own from Python 3.11 on.
    """
    if knobs.current_or_default().tracebacks == "full":
        return
    first = error.__traceback__
    error.__traceback__ = _strip_package_frames(first)
    if sys.version_info < (3, 11) and first is not None:  # a bare `raise` restores the caught traceback
        first.tb_next = error.__traceback__
    for inner in (error.__cause__, error.__context__):
        if inner is not None and _is_raised_in_package(inner.__traceback__):
            inner.__traceback__ = _strip_package_frames(inner.__traceback__)
            if inner.__traceback__ is None:  # the message repeats its text
                error.__cause__, error.__suppress_context__ = None, True


_OURS = __name__.partition(".")[0]
_HIDDEN = (_OURS, "torch")
"""The packages whose frames are hidden if this package called them."""


def _get_package_name(traceback: TracebackType) -> str:
    return str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_raised_in_package(traceback: TracebackType | None) -> bool:
    """Whether the first frame is of this package, so that no user code holds the exception yet."""
    return traceback is None or _get_package_name(traceback) == _OURS


def _strip_package_frames(traceback: TracebackType | None) -> TracebackType | None:
    """`traceback` without the frames of this package and of torch below them. Frames of user functions stay."""
    kept: list[TracebackType] = []
    inside = False
    while traceback is not None:
        package = _get_package_name(traceback)
        inside = inside or package == _OURS
        if not (inside and package in _HIDDEN):
            kept.append(traceback)
        traceback = traceback.tb_next
    made: TracebackType | None = None
    for one in reversed(kept):
        made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made
