"""The machine this process runs on, as a target."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path

import llvmlite.binding as llvm

from ...core import knobs
from ...core.errors import ArgumentError
from ...core.processors import BASELINE, FEATURES
from ...target import CpuTarget

_AVX512 = ("avx512f", "avx512vl", "avx512bw", "avx512dq")
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
_TYPICAL_CACHE = (32768, 1048576, 16777216)
_DISGUISES = ("rocketlake", "icelake-client", "icelake-server", "cascadelake", "skylake-avx512")
"""Names under which virtual machines present newer processors."""
_NEWER = (("amx-fp16", "graniterapids"), ("amx-tile", "sapphirerapids"))
"""Features that only newer processors have: the first that is present determines the processor."""


def host() -> CpuTarget:
    """The processor, its vectors and its caches; with `TC_TARGET`, restricted to the features of the one it names."""
    return _host(knobs.current_knobs().target)


@functools.cache
def _host(named: str) -> CpuTarget:
    """The processor, restricted to the features of `named`, unless that is ""."""
    features = _found_features()
    if named:
        if not is_x86():
            raise ArgumentError(f"TC_TARGET is {named!r}", expected="nothing", found="a processor that is not x86-64")
        for name in features:
            features[name] = features[name] and name in FEATURES[named]
    available = {name for name in features if features[name]}
    name = named or _name(llvm.get_host_cpu_name(), available)
    bits, registers = _vectors(available)
    return CpuTarget("cpu", name, features.flatten(), bits, registers, _caches())


def _found_features() -> llvm.FeatureMap:
    """The features that the processor has and the system allows, by LLVM's names."""
    features = llvm.get_host_cpu_features()
    if features.get("amx-tile") and not _request_amx_permission():
        for name in features:
            features[name] = features[name] and not name.startswith("amx-")
    return features


def missing_features(target: CpuTarget) -> tuple[str, ...]:
    """The features that code for `target` may use and that this processor lacks.

    If the table of features does not know a name, only a processor of the same name can run its code.
    """
    here = host()
    if here is target:
        return ()
    missing = target.code_features - here.code_features
    if not is_x86() and target.name not in (here.name, "generic"):
        missing |= {target.name}
    return tuple(sorted(missing))


@functools.cache
def unused_features(target: CpuTarget) -> str:
    """Flags that disable features which LLVM infers from the processor's name, but which `target` does not list.

    They come before `target.features`, which may enable them again.
    """
    if not is_x86():
        return ""
    usable = target.code_features | BASELINE
    return "".join(f"-{name}," for name in sorted(llvm.get_host_cpu_features()) if name not in usable)


@functools.cache
def is_x86() -> bool:
    """Whether `core.processors` has a table for this processor."""
    return platform.machine().lower() in ("x86_64", "amd64")


def _request_amx_permission() -> bool:
    """Ask Linux to let this process, with all its threads, use the tile registers of AMX: it saves them on demand."""
    if sys.platform != "linux" or not is_x86():
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA)
    return refused == 0


def _name(llvm_name: str, features: set[str]) -> str:
    """LLVM's name of the processor, or that of a newer one if its features show that it is newer."""
    if llvm_name not in _DISGUISES:
        return llvm_name
    return next((name for feature, name in _NEWER if feature in features), llvm_name)


def _vectors(features: set[str]) -> tuple[int, int]:
    """The bits of a vector register, and the number of registers."""
    if features.issuperset(_AVX512):
        return 512, 32
    if features.issuperset(("avx2", "fma", "f16c")):
        return 256, 16
    return 128, 32 if platform.machine().lower() in ("aarch64", "arm64") else 16


def _caches(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> tuple[int, ...]:
    """Bytes of the data caches from the innermost out; typical values if the system reports fewer than two."""
    sizes: dict[int, int] = {}
    try:
        for index in sorted(os.listdir(folder)):
            entry = Path(folder, index)
            if index.startswith("index") and (entry / "type").read_text().strip() != "Instruction":
                sizes[int((entry / "level").read_text())] = _parse_byte_size((entry / "size").read_text().strip())
    except (OSError, ValueError):
        return _TYPICAL_CACHE
    return tuple(size for _, size in sorted(sizes.items())) if len(sizes) > 1 else _TYPICAL_CACHE


def _parse_byte_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)
