"""Targets: a device to emit code for, and the facts about it that lowering uses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .core.checked_fields import check_fields, with_checked_names
from .core.errors import ArgumentError
from .core.lazy_import import lazy_module
from .core.processors import BASELINE, FEATURES

_this: Any = lazy_module("runtime.cpu.host")
"""The processor of this process, detected only when code is about to run."""

_MESHED = frozenset(
    ("skylake-avx512", "cascadelake", "cooperlake", "icelake-server", "sapphirerapids", "emeraldrapids",
     "graniterapids")
)  # fmt: skip
"""Processors whose last-level cache is a victim cache of L2, spread over all cores."""

_GATHERING = frozenset(("sapphirerapids", "emeraldrapids", "graniterapids"))
"""Processors that gather lanes faster than they load them one by one; no security mitigation slows their gathers."""


USABLE_FRACTION = 0.75
"""The fraction of a cache that a kernel can expect to use."""
FAR = 8
"""Working set, in sizes of the private caches, above which a mesh cache is no better for stores than memory."""


@with_checked_names
@dataclass(frozen=True, slots=True)
class CpuTarget:
    """A machine to compile for.

    Attributes:
        kind: "cpu".
        name: LLVM's name of the processor, which implies the features in `processors.FEATURES`.
        features: LLVM's feature string, "+avx2,-fma,...": additional and missing features.
        vector_bits: width of the widest vector register worth using.
        vector_registers: number of vector registers.
        cache: bytes of the data caches of one core, smallest first; at least two levels.
    """

    kind: str
    name: str = field(metadata={"pattern": r"[\w.+-]*", "example": "haswell"})
    features: str = field(metadata={"pattern": r"([+-][\w.-]+(,[+-][\w.-]+)*)?,?", "example": "+avx2,-fma"})
    vector_bits: int = field(metadata={"choices": (64, 128, 256, 512, 1024, 2048), "exact": True})
    vector_registers: int = field(metadata={"least": 8, "most": 1024})
    cache: tuple[int, ...] = field(metadata={"least": 1, "most": 1 << 40, "example": 32768})

    def __post_init__(self) -> None:
        """Check every field. Raises ArgumentError."""
        check_fields(self, "the CPU target's")

    @property
    def code_features(self) -> frozenset[str]:
        """The features that code for this target may use."""
        flags = [f.strip() for f in self.features.split(",")]
        present, absent = ({f[1:] for f in flags if f.startswith(sign)} for sign in "+-")
        return (FEATURES.get(self.name, BASELINE) | present) - absent

    def missing_features(self) -> tuple[str, ...]:
        """The features of this target that the processor of this process lacks."""
        found: tuple[str, ...] = _this.missing_features(self)
        return found

    def runs_here(self) -> bool:
        """Whether this process can run code for this target."""
        return not self.missing_features()

    def lanes(self, bits: int) -> int:
        """The number of scalars of `bits` bits in a vector register."""
        return max(1, self.vector_bits // bits)

    @property
    def has_mesh_llc(self) -> bool:
        """Whether the last-level cache is reached over a mesh, at several times the usual latency."""
        return self.name in _MESHED

    @property
    def private_caches(self) -> tuple[int, ...]:
        """`cache` without its last level if that is on a mesh, which stores should bypass."""
        return self.cache[:-1] if self.has_mesh_llc else self.cache

    @property
    def reuse_limit_bytes(self) -> float:
        """Working set in bytes above which outputs are written with non-temporal stores.

        Below it, the next kernel finds the results in a cache. Storing to a mesh cache costs more than storing to
        memory; the later reads make up for it up to `FAR` times the private caches.
        """
        return USABLE_FRACTION * min(self.cache[-1], FAR * self.private_caches[-1])

    @property
    def writeback_limit_bytes(self) -> float:
        """Working set in bytes above which partly written lines go to a mesh cache and back; infinite without one."""
        return self.private_caches[-1] if len(self.private_caches) < len(self.cache) else float("inf")

    @property
    def fetch_bytes(self) -> int:
        """Bytes per fetch from the last cache or from memory: 128 with adjacent-line prefetch, else 64."""
        return 128 if self.has_mesh_llc else 64

    @property
    def issue_bits_per_cycle(self) -> int:
        """Bits of vector multiply-adds, and equally of vector loads, that can start per cycle."""
        halves = self.vector_bits == 512 and not self.has_mesh_llc and self.name != "znver5"
        return self.vector_bits if halves else 2 * self.vector_bits

    @property
    def has_fast_gather(self) -> bool:
        """Whether a gather instruction is faster than loading lanes of 32 and 64 bits one by one."""
        return self.vector_bits == 512 and self.name in _GATHERING

    @property
    def has_mask_registers(self) -> bool:
        """Whether a store of some lanes costs no more than one of all (AVX-512).

        Without, it is microcode on AMD: 42 operations and 12 cycles on Zen 3.
        """
        return self.vector_bits == 512

    @property
    def has_bf16_dot(self) -> bool:
        """Whether one instruction multiplies vectors of bfloat16 pairs and adds them to float32 (AVX512-BF16)."""
        return self.vector_bits == 512 and "+avx512bf16" in self.features.split(",")

    @property
    def has_amx_bf16(self) -> bool:
        """Whether the processor also multiplies bfloat16 matrices (AMX), in tile registers that the system grants."""
        return self.has_bf16_dot and {"+amx-tile", "+amx-bf16"} <= set(self.features.split(","))


AVX512 = CpuTarget(
    "cpu", "znver4", "+avx512f,+avx512vl,+avx512bw,+avx512dq,+avx2,+fma", 512, 32, (32768, 1048576, 33554432)
)
AVX2 = CpuTarget("cpu", "haswell", "+avx2,+fma", 256, 16, (32768, 262144, 8388608))


RESERVED_SHARED = 1024
"""Bytes of shared memory that the system reserves in each block."""
_POSITIVE = {"least": 1}
_RATE = {"least": 1, "most": 1e18}


@with_checked_names
@dataclass(frozen=True, slots=True)
class GpuTarget:
    """A GPU to compile for. A multiprocessor is a streaming multiprocessor (SM).

    Attributes:
        kind: "cuda".
        name: NVRTC's name of the architecture.
        num_sms: multiprocessors of the typical card.
        l2: bytes of the L2 cache.
        bandwidth: memory bandwidth in bytes per second.
        clock: cycles per second under load.
        float32_lanes: float32 operations per cycle and multiprocessor.
        max_shared_optin: most bytes of shared memory that a block can request.
        shared_per_sm: bytes of shared memory of a multiprocessor.
        threads_per_sm, blocks_per_sm: most resident threads and blocks of a multiprocessor.
        max_shared: most bytes of shared memory of a block without a request.
        warp: threads of a warp.
        max_threads_per_block: most threads of a block.
        block, grid: most threads of a block, and blocks, along x, y, z.
        registers: most registers of a thread.
        registers_per_sm: registers of a multiprocessor, and most registers of a block.
        async_copies: whether global memory can be copied to shared memory without registers (`cp.async`).
        tensor_ops, tensor_ops_int8: tensor-core operations per cycle and multiprocessor, two for each product, by `mma`
            on half precision with float32 sums, and on bytes; 0 if tile kernels cannot use tensor cores there. These
            are the vendor's peak rates for the typical card, divided by multiprocessors and clock. For Hopper and
            Blackwell, they are only the part that `mma` reaches, without `wgmma` and `tcgen05`.
        group_ops: the same by `wgmma` on half precision; 0 if the GPU has none.
        l2_bytes: bytes per cycle that a multiprocessor gets from L2.
        shared_bytes: bytes per cycle from shared memory to a multiprocessor: 32 banks of 4.
    """

    kind: str
    name: str = field(metadata={"pattern": r"sm_[0-9]{2,3}", "example": "sm_90"})
    num_sms: int = field(metadata=_POSITIVE)
    l2: int = field(metadata=_POSITIVE)
    bandwidth: float = field(metadata=_RATE)
    clock: float = field(metadata=_RATE)
    float32_lanes: int = field(metadata=_POSITIVE)
    max_shared_optin: int = field(metadata=_POSITIVE)
    shared_per_sm: int = field(metadata=_POSITIVE)
    threads_per_sm: int = field(metadata=_POSITIVE)
    blocks_per_sm: int = field(metadata=_POSITIVE)
    max_shared: int = field(default=48 << 10, metadata=_POSITIVE)
    warp: int = field(default=32, metadata=_POSITIVE)
    max_threads_per_block: int = field(default=1024, metadata=_POSITIVE)
    block: tuple[int, int, int] = field(default=(1024, 1024, 64), metadata={**_POSITIVE, "lengths": (3,)})
    grid: tuple[int, int, int] = field(default=(2**31 - 1, 65535, 65535), metadata={**_POSITIVE, "lengths": (3,)})
    registers: int = field(default=255, metadata=_POSITIVE)
    registers_per_sm: int = field(default=65536, metadata=_POSITIVE)
    async_copies: bool = True
    tensor_ops: int = 0
    tensor_ops_int8: int = 0
    group_ops: int = 0
    l2_bytes: int = field(default=40, metadata=_POSITIVE)
    shared_bytes: int = field(default=128, metadata=_POSITIVE)

    def __post_init__(self) -> None:
        """Check every field. Raises ArgumentError."""
        check_fields(self, "the GPU target's")

    @property
    def capability(self) -> int:
        """The number in the name: 90 for sm_90."""
        return int(self.name.removeprefix("sm_"))

    def resident_block_limits(self, threads: int, registers: int, shared: int) -> dict[str, int]:
        """How many blocks fit on a multiprocessor, according to each of its limits by name.

        threads: per block. registers: per thread; 0 if unknown. shared: bytes per block.
        """
        limits = {"blocks": self.blocks_per_sm, "threads": self.threads_per_sm // threads}
        if registers:
            limits["registers"] = self.registers_per_sm // (registers * threads)
        return {**limits, "shared memory": self.shared_per_sm // (shared + RESERVED_SHARED)}


_K, _M = 1 << 10, 1 << 20

# A typical card of each architecture: T4, A100, RTX 3090, RTX 4090, H200, B200, RTX 5090.
_GPUS = (
    GpuTarget("cuda", "sm_75", 40, 4 * _M, 320e9, 1.4e9, 64, 64 * _K, 64 * _K, 1024, 16, async_copies=False),
    GpuTarget("cuda", "sm_80", 108, 40 * _M, 1.94e12, 1.41e9, 64, 163 * _K, 164 * _K, 2048, 32),
    GpuTarget("cuda", "sm_86", 82, 6 * _M, 936e9, 1.7e9, 128, 99 * _K, 100 * _K, 1536, 16),
    GpuTarget("cuda", "sm_89", 128, 72 * _M, 1.01e12, 2.5e9, 128, 99 * _K, 100 * _K, 1536, 24),
    GpuTarget("cuda", "sm_90", 132, 50 * _M, 4.8e12, 1.75e9, 128, 227 * _K, 228 * _K, 2048, 32),
    GpuTarget("cuda", "sm_100", 148, 126 * _M, 8e12, 1.85e9, 128, 227 * _K, 228 * _K, 2048, 32),
    GpuTarget("cuda", "sm_120", 170, 96 * _M, 1.79e12, 2.4e9, 128, 99 * _K, 100 * _K, 1536, 24),
)

_TENSOR_OPS = {
    "sm_80": (2048, 4096, 0), "sm_86": (512, 2048, 0), "sm_89": (512, 2048, 0), "sm_90": (2560, 5120, 4096),
    "sm_100": (2048, 4096, 0), "sm_120": (512, 2048, 0),
}  # fmt: skip
"""`tensor_ops`, `tensor_ops_int8` and `group_ops` of these cards."""

GPUS = {
    f"{g.kind}:{g.name}": replace(g, tensor_ops=ops, tensor_ops_int8=of_bytes, group_ops=of_groups)
    for g in _GPUS
    for ops, of_bytes, of_groups in (_TENSOR_OPS.get(g.name, (0, 0, 0)),)
}
"""The known GPUs by name, such as "cuda:sm_90"."""


def parse_gpu_target(text: str) -> GpuTarget:
    """The target named `text`, one of `GPUS`; "sm_90" is short for "cuda:sm_90". Raises ArgumentError."""
    found = GPUS.get(text) or GPUS.get(f"cuda:{text}")
    if found is None:
        raise ArgumentError(f"there is no target {text!r}", expected=f"a Target, or one of {', '.join(GPUS)}")
    return found
