"""Whether machine code can serve calls, with this torch on this system.

The code reads undocumented structures of torch. It is used if it was tested with this version of torch and probing
finds the same layout, or else if it passes a test on this installation (`self_test`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...core.lazy_import import lazy_module
from ...core.single_flight import SingleFlightCache
from ..cpu.host import is_x86
from .torch_layout import TensorLayout, UnknownLayout, symbol_addresses, tensor_layout

if TYPE_CHECKING:
    from . import forked_check, self_test
else:
    forked_check, self_test = (lazy_module(f"runtime.fastpath.{name}") for name in ("forked_check", "self_test"))

_LAYOUT_10 = TensorLayout(keys=176, tensor=16, plain=1271310385153, inference=1099511693313)
_LAYOUT_13 = TensorLayout(keys=168, tensor=16, plain=635655225345, inference=549755879425)
TESTED = {"2.10": _LAYOUT_10, "2.13": _LAYOUT_13, "2.15": _LAYOUT_13}
"""The versions of torch with which the self-test and samples of the tests of calls ran on x86-64, with their layouts.
They need no self-test, which costs each process without a cache some 50 ms.
"""
KNOWN_BAD: dict[str, str] = {}
"""The versions whose calls go wrong although they pass the test, with the reasons."""


@dataclass(frozen=True, slots=True)
class FastPathDecision:
    """Whether the machine code is used, and why."""

    available: bool
    reason: str


def is_fast_path_available() -> bool:
    """Whether machine code can serve calls, with this torch and on this system."""
    return decide_fast_path().available


def decide_fast_path() -> FastPathDecision:
    """The decision, which is made once per process."""
    return _verdict.get("", _decide)


_verdict: SingleFlightCache[str, FastPathDecision] = SingleFlightCache(1)


def _decide() -> FastPathDecision:
    version = torch.__version__
    release = ".".join(version.split(".")[:2])
    if release in KNOWN_BAD:
        return FastPathDecision(False, f"torch {version}: {KNOWN_BAD[release]}")
    try:
        symbol_addresses()
        layout = tensor_layout()
    except UnknownLayout as error:
        return FastPathDecision(False, str(error))
    if is_x86() and TESTED.get(release) == layout:
        return FastPathDecision(True, f"this release was tested with torch {release}")
    try:
        with ThreadPoolExecutor(1) as thread:  # in which no mode of the caller is active
            wrong = thread.submit(self_test.run_self_test, layout).result()
    except forked_check.NoAnswer as error:
        return FastPathDecision(False, f"the self-test on torch {version} did not run: {error}")
    if wrong:
        return FastPathDecision(False, f"the self-test on torch {version} failed: {wrong}")
    return FastPathDecision(True, f"the self-test on torch {version} passed")
