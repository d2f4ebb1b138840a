"""A pause of garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_gc() -> Iterator[None]:
    """Run the `with` block without garbage collection, for work that creates many long-lived objects."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():  # unfreezing would affect a program that uses gc.freeze itself
                gc.freeze()
                gc.unfreeze()  # moves all objects to the oldest generation, so the next collection skips torch's
            gc.enable()
