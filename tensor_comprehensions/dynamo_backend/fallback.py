"""Faults of this package inside of a graph: torch runs the operations concerned, and a warning reports each cause once.

`TC_STRICT=1` raises them instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import extract_tb

from ..core.diagnostics import get_logger
from ..core.knobs import current_or_default
from .emit_def import UnsupportedArguments

_warned: set[tuple[str, ...]] = set()


class FallbackWarning(UserWarning):
    """A part of a graph runs as torch's operations because of a fault of this package."""


@contextmanager
def falls_back(what: str) -> Iterator[None]:
    """Suppress an exception with a warning, so that the caller goes on with torch's operations.

    Interrupts and UnsupportedArguments propagate.
    """
    try:
        yield
    except UnsupportedArguments:
        raise
    except Exception as error:
        report_fallback(what, error)


def report_fallback(what: str, error: Exception) -> None:
    """Log an error; warn, too, but once for each kind of error and line of code.

    Raises the error with `TC_STRICT=1`.
    """
    if current_or_default().strict:
        raise error
    message = f"{what}, torch runs it: {type(error).__name__}: {error}"
    get_logger("graph").info("%s", message)
    frames = extract_tb(error.__traceback__)
    cause = (what, type(error).__name__, *(f"{f.filename}:{f.lineno}" for f in frames[-1:]))
    if cause not in _warned:
        _warned.add(cause)
        warnings.warn(f"{message} (please report it; TC_STRICT=1 raises the error)", FallbackWarning, stacklevel=3)
