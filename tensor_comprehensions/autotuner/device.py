"""Devices that candidates are measured on, as a user names them and as a worker recognizes itself."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

from ..core.errors import ArgumentError
from ..runtime.cpu.host import host

_NAME = r"cpu(?::(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*))?"
MAX_DIGITS = 9
"""The maximum number of digits of a processor number; a longer number is out of range."""
MAX_PROCESSORS = 1 << 16
"""The maximum number of processors of a range; the rest is cut off."""


@dataclass(frozen=True, slots=True)
class TuningDevice:
    """A set of processors. name: as the user wrote it, "cpu" or "cpu:0-3". threads: the number that run kernels."""

    name: str
    cpus: tuple[int, ...]
    threads: int


def is_gpu(name: object) -> bool:
    """Whether `name` is a GPU such as "cuda:0", or an emulated one such as "emulated:sm_90"."""
    return isinstance(name, str) and name.startswith(("cuda", "emulated"))


def parse_device(name: object) -> TuningDevice:
    """Parse a device: "cpu" (all processors, torch's threads) or "cpu:0,2-3". Raises ArgumentError."""
    if not isinstance(name, str) or not (match := re.fullmatch(_NAME, name, re.ASCII)):
        raise ArgumentError(f"the device is {name!r}", expected="cpu, or processors such as cpu:0-3 or cpu:0,2")
    here = available_cpus()
    if match[1] is None:
        return TuningDevice(name, here, torch.get_num_threads())
    cpus: set[int] = set()
    for part in match[1].split(","):
        found = _parse_processor_range(part)
        if not found or (missing := [n for n in found if n not in here]):
            raise ArgumentError(
                f"there is no processor {missing[0] if found else name}", expected=f"one of {', '.join(map(str, here))}"
            )
        cpus.update(found)
    return TuningDevice(name, tuple(sorted(cpus)), len(cpus))


def _parse_processor_range(part: str) -> range:
    """The processors of "3" or "0-3"; at most `MAX_PROCESSORS` of them."""
    first, dash, last = part.partition("-")
    low, high = (int(n) if len(n) <= MAX_DIGITS else 10**MAX_DIGITS for n in (first, last if dash else first))
    return range(low, min(high + 1, low + MAX_PROCESSORS))


def parse_devices(names: Sequence[object]) -> tuple[TuningDevice, ...]:
    """Parse devices that share no processor and have equally many threads. Raises ArgumentError."""
    if not isinstance(names, Sequence):
        raise ArgumentError(f"the devices are {names!r}", expected='names such as ["cpu"]')
    found = tuple(map(parse_device, names))
    every = [cpu for d in found for cpu in d.cpus]
    if not found or len(set(every)) < len(every):
        raise ArgumentError(f"the devices are {list(names)!r}", expected="one or more that share no processor")
    if len({d.threads for d in found}) > 1:
        raise ArgumentError(
            f"the devices {list(names)!r} differ", suggestion="times can only be compared on devices that are alike"
        )
    return found


def available_cpus() -> tuple[int, ...]:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_fingerprint(threads: int | None = None) -> str:
    """An identifier of this process's CPU and of the number of threads that run kernels (default: torch's).

    Times from workers with equal fingerprints can be compared.
    """
    target = host()
    facts = repr((target, torch.get_num_threads() if threads is None else threads))
    return f"{target.name}-{sha256(facts.encode()).hexdigest()[:16]}"
