"""Which sizes of a call are parameters of its kernel (dynamic), and which are compiled in as constants.

By default the first two values of a size are compiled into kernels; from the third on, new kernels take the size as a
parameter. So full batches and a shorter last one get exact kernels, and further values compile nothing more. A size
that the user marks is a parameter from the first call on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from threading import Lock

from ..core import knobs
from ..core.errors import ArgumentError
from ..tc_lang.ir import Function
from .arguments import with_article

EXACT_VALUES = 2
"""Number of values of a size that get kernels for exactly this value."""


ANY_VALUE = 0
"""Stands for an unknown typical value of a size."""
Dynamic = bool | Collection[str] | Mapping[str, int | None] | None
"""The sizes that are parameters: None decides by the calls, True is all sizes, False none; or a collection of names, or
a mapping from names to typical values (None: unknown)."""


def check_dynamic(dynamic: object, functions: Collection[Function]) -> None:
    """Check that `dynamic` is valid and names sizes of the defs. Raises ArgumentError."""
    if dynamic is None or isinstance(dynamic, bool):
        return
    if isinstance(dynamic, str) or not isinstance(dynamic, Collection):
        raise ArgumentError(
            f"dynamic is {with_article(type(dynamic).__name__)}", expected='True, False, or sizes such as {"N"}'
        )
    known = sorted({name for f in functions for name in f.sizes})
    for name in dynamic:
        if name not in known:
            raise ArgumentError(f"no def has a size {name!r}", expected=", ".join(known) or "nothing")
        typical = dynamic[name] if isinstance(dynamic, Mapping) else None
        if typical is not None and (not isinstance(typical, int) or isinstance(typical, bool) or typical < 1):
            raise ArgumentError(f"the typical value of {name!r} is {typical!r}", expected="a number, at least 1")


class DynamicSizes:
    """Decides which sizes of a def are parameters: by the user's marks, or by the values of earlier calls."""

    def __init__(self, function: Function, asked: Dynamic) -> None:
        self.asked = asked
        self._names = function.sizes
        self._marked: dict[str, int] = {}
        if isinstance(asked, bool):
            self._marked = {name: ANY_VALUE for name in self._names if asked}
        elif asked is not None:
            given = asked if isinstance(asked, Mapping) else dict.fromkeys(asked)
            self._marked = {name: given[name] or ANY_VALUE for name in self._names if name in given}
        self._seen: dict[str, tuple[int, ...]] = {}
        self._lock = Lock()

    @property
    def may_be_dynamic(self) -> bool:
        """Whether any size can be a parameter."""
        mode = knobs.current_knobs().dynamic
        return mode != "off" and (bool(self._marked) or self.asked is None) and bool(self._names)

    def note(self, sizes: Mapping[str, int], *, is_call: bool = True) -> Mapping[str, int]:
        """The sizes that are parameters of the kernel for a call with `sizes`, with their typical values.

        is_call: whether to record `sizes` as those of a call; if not, only sizes marked by the user are parameters.
        """
        mode = knobs.current_knobs().dynamic
        if self.asked is not None or mode == "off":
            return self._marked if mode != "off" else {}
        if mode == "always":
            return dict.fromkeys(self._names, ANY_VALUE)
        if not is_call:
            return {}
        with self._lock:
            return {name: ANY_VALUE for name in self._names if self._has_changed(name, sizes[name])}

    def _has_changed(self, name: str, value: int) -> bool:
        """Record `value`. Returns whether the size has had more than `EXACT_VALUES` values."""
        seen = self._seen.get(name, ())
        if value not in seen and len(seen) <= EXACT_VALUES:
            self._seen[name] = seen = (*seen, value)
        return len(seen) > EXACT_VALUES
