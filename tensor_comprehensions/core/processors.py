"""The features that compiled code may use on the processors that LLVM knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

BASELINE = frozenset(["64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"])
"""The features of every x86-64 processor."""

_NEHALEM = BASELINE | {"crc32", "cx16", "popcnt", "sahf", "sse3", "ssse3", "sse4.1", "sse4.2"}
_SANDYBRIDGE = _NEHALEM | {"avx", "pclmul", "xsave"}
_HASWELL = _SANDYBRIDGE | {"avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
_SKYLAKE = _HASWELL | {"adx", "aes", "prfchw"}
_AVX512 = frozenset(["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"])
_ICELAKE = frozenset(
    [
        "avx512bitalg",
        "avx512ifma",
        "avx512vbmi",
        "avx512vbmi2",
        "avx512vnni",
        "avx512vpopcntdq",
        "gfni",
        "sha",
        "vaes",
        "vpclmulqdq",
    ]
)
_ICELAKE_SERVER = _SKYLAKE | _AVX512 | _ICELAKE
_SAPPHIRERAPIDS = _ICELAKE_SERVER | frozenset(
    ["amx-bf16", "amx-int8", "amx-tile", "avx512bf16", "avx512fp16", "avxvnni"]
)
_ALDERLAKE = _SKYLAKE | {"avxvnni", "gfni", "sha", "vaes", "vpclmulqdq"}
_ZNVER1 = _SKYLAKE | {"sha"}
_ZNVER3 = _ZNVER1 | {"vaes", "vpclmulqdq"}
_ZNVER4 = _ZNVER3 | _AVX512 | _ICELAKE | {"avx512bf16"}

FEATURES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "x86-64": BASELINE,
        "x86-64-v2": _NEHALEM,
        "x86-64-v3": _HASWELL - {"pclmul"},
        "x86-64-v4": (_HASWELL - {"pclmul"}) | _AVX512,
        "nehalem": _NEHALEM,
        "westmere": _NEHALEM | {"pclmul"},
        "sandybridge": _SANDYBRIDGE,
        "ivybridge": _SANDYBRIDGE | {"f16c"},
        "haswell": _HASWELL,
        "broadwell": _HASWELL | {"adx", "prfchw"},
        "skylake": _SKYLAKE,
        "skylake-avx512": _SKYLAKE | _AVX512,
        "cascadelake": _SKYLAKE | _AVX512 | {"avx512vnni"},
        "cooperlake": _SKYLAKE | _AVX512 | {"avx512vnni", "avx512bf16"},
        "icelake-client": _ICELAKE_SERVER,
        "rocketlake": _ICELAKE_SERVER,
        "tigerlake": _ICELAKE_SERVER,
        "icelake-server": _ICELAKE_SERVER,
        "sapphirerapids": _SAPPHIRERAPIDS,
        "emeraldrapids": _SAPPHIRERAPIDS,
        "graniterapids": _SAPPHIRERAPIDS | {"amx-fp16"},
        "alderlake": _ALDERLAKE,
        "raptorlake": _ALDERLAKE,
        "znver1": _ZNVER1,
        "znver2": _ZNVER1,
        "znver3": _ZNVER3,
        "znver4": _ZNVER4,
        "znver5": _ZNVER4 | {"avxvnni"},
    }
)
"""Features of each x86-64 processor, by LLVM's name. All other features are disabled in LLVM.

Features that no loop program needs are omitted, as are those that only AMD's processors have.
"""
