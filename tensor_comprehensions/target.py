"""What code is emitted for: a device and the facts about it that lowering may use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .core.errors import ArgumentError
from .core.lazy_import import lazy_module
from .core.processors import BASELINE, FEATURES

_this: Any = lazy_module("runtime.cpu.host")
"""The processor of this process, which is looked at when code is to be run."""

_MESHED = frozenset(
    ("skylake-avx512", "cascadelake", "cooperlake", "icelake-server", "sapphirerapids", "emeraldrapids",
     "graniterapids")
)  # fmt: skip
"""Processors whose last cache takes what the second one gives up, and is spread over all cores."""


_GATHERING = frozenset(("sapphirerapids", "emeraldrapids", "graniterapids"))
"""Processors that gather the lanes of a vector faster than they load them one by one, and that no mitigation slows."""


USABLE_FRACTION = 0.75
"""The part of a cache that a kernel finds free."""
FAR = 8
"""Times the near caches: what a kernel may touch before a far one is no better for its results than memory."""


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """A machine to compile for.

    Attributes:
        kind: "cpu".
        name: the processor, as LLVM names it: code uses what it has by `processors.FEATURES`.
        features: LLVM's feature string, "+avx2,-fma,...": what it has beside that, and what it lacks.
        vector_bits: width of the widest vector register that pays.
        vector_registers: how many of them there are.
        cache: bytes of the data caches of one core, smallest first; two levels at least.
    """

    kind: str
    name: str
    features: str
    vector_bits: int
    vector_registers: int
    cache: tuple[int, ...]

    @property
    def code_features(self) -> frozenset[str]:
        """The features that code for it may use."""
        told = [f.strip() for f in self.features.split(",")]
        present, absent = ({f[1:] for f in told if f.startswith(sign)} for sign in "+-")
        return (FEATURES.get(self.name, BASELINE) | present) - absent

    def missing_features(self) -> tuple[str, ...]:
        """Those that the processor of this process lacks."""
        found: tuple[str, ...] = _this.missing_features(self)
        return found

    def runs_here(self) -> bool:
        """Whether this process can run code for it."""
        return not self.missing_features()

    def lanes(self, bits: int) -> int:
        """How many scalars of `bits` bits fill a vector register."""
        return max(1, self.vector_bits // bits)

    @property
    def has_mesh_llc(self) -> bool:
        """Whether the last cache is a mesh away from the core, several times as far as elsewhere."""
        return self.name in _MESHED

    @property
    def private_caches(self) -> tuple[int, ...]:
        """`cache`, without a last one that all cores reach by a mesh: what is written had better go past that."""
        return self.cache[:-1] if self.has_mesh_llc else self.cache

    @property
    def reuse_limit_bytes(self) -> float:
        """Bytes that a kernel may touch for its results to stay in the caches for whoever reads them.

        A far cache gives back later what writing to it costs more than memory, up to a few times what the others hold.
        """
        return USABLE_FRACTION * min(self.cache[-1], FAR * self.private_caches[-1])

    @property
    def writeback_limit_bytes(self) -> float:
        """Bytes that a kernel may touch before lines that it writes in parts travel to a far cache and back."""
        return self.private_caches[-1] if len(self.private_caches) < len(self.cache) else float("inf")

    @property
    def fetch_bytes(self) -> int:
        """Bytes that come from a far cache or from memory at a time: there, a line brings the other one of its pair."""
        return 128 if self.has_mesh_llc else 64

    @property
    def issue_bits_per_cycle(self) -> int:
        """Bits of all the multiply-adds of vectors, and of all the vectors loaded, that start in a cycle."""
        halves = self.vector_bits == 512 and not self.has_mesh_llc and self.name != "znver5"
        return self.vector_bits if halves else 2 * self.vector_bits

    @property
    def has_fast_gather(self) -> bool:
        """Whether lanes of 32 and 64 bits at addresses of their own had better be loaded by one instruction."""
        return self.vector_bits == 512 and self.name in _GATHERING

    @property
    def has_bf16_dot(self) -> bool:
        """Whether vectors of pairs of bfloat16 are multiplied and added to float32 in one instruction."""
        return self.vector_bits == 512 and "+avx512bf16" in self.features.split(",")

    @property
    def has_amx_bf16(self) -> bool:
        """Whether the same is done with matrices of such pairs, in registers that the system lets the process use."""
        return self.has_bf16_dot and {"+amx-tile", "+amx-bf16"} <= set(self.features.split(","))


AVX512 = CpuTarget(
    "cpu", "znver4", "+avx512f,+avx512vl,+avx512bw,+avx512dq,+avx2,+fma", 512, 32, (32768, 1048576, 33554432)
)
AVX2 = CpuTarget("cpu", "haswell", "+avx2,+fma", 256, 16, (32768, 262144, 8388608))


RESERVED_SHARED = 1024
"""Bytes of shared memory that each block on a GPU takes beside its own."""


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """A graphics processor to compile for.

    Attributes:
        kind: "cuda".
        name: the architecture, as NVRTC names it.
        num_sms: streaming multiprocessors of the typical card.
        l2: bytes of the cache that they share.
        bandwidth: of its memory, in bytes per second.
        clock: cycles per second under load.
        float32_lanes: float32 operations that a processor starts in a cycle.
        max_shared_optin: most bytes of shared memory that a block may ask for.
        shared_per_sm: bytes that the blocks on one processor share.
        threads_per_sm, blocks_per_sm: most that are there at once.
        max_shared: bytes of shared memory that a block may have without asking.
        warp: threads that run in step.
        max_threads_per_block: most threads of a block.
        block, grid: most threads of a block, and blocks, along x, y, z.
        registers: most registers of a thread.
        registers_per_sm: registers that the threads on one processor, and those of one block, share.
        async_copies: whether there are copies from global to shared memory past the registers.
        tensor_ops, tensor_ops_int8: operations, two for each product, that the tensor cores of a processor do in a
            cycle by `mma` on half-precision numbers with float32 sums, and on bytes; 0 where tile kernels have none.
            Peak rates of the vendor's papers for the typical card over processors and clock; of Hopper and Blackwell
            the part of it that `mma` reaches, not `wgmma` and `tcgen05`.
        group_ops: the same by `wgmma`, of warpgroups, on half-precision numbers; 0 where there is none.
        l2_bytes: that a processor gets from the second-level cache in a cycle.
        shared_bytes: that shared memory gives to a processor in a cycle: 32 banks of 4.
    """

    kind: str
    name: str
    num_sms: int
    l2: int
    bandwidth: float
    clock: float
    float32_lanes: int
    max_shared_optin: int
    shared_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    max_shared: int = 48 << 10
    warp: int = 32
    max_threads_per_block: int = 1024
    block: tuple[int, int, int] = (1024, 1024, 64)
    grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    registers: int = 255
    registers_per_sm: int = 65536
    async_copies: bool = True
    tensor_ops: int = 0
    tensor_ops_int8: int = 0
    group_ops: int = 0
    l2_bytes: int = 40
    shared_bytes: int = 128

    @property
    def capability(self) -> int:
        """The number in the name: 90 for sm_90."""
        return int(self.name.removeprefix("sm_"))

    def resident_block_limits(self, threads: int, registers: int, shared: int) -> dict[str, int]:
        """How many blocks a processor has room for, by what it has a limit of.

        registers: of a thread; 0 where they are not known. shared: bytes of a block.
        """
        limits = {"blocks": self.blocks_per_sm, "threads": self.threads_per_sm // threads}
        if registers:
            limits["registers"] = self.registers_per_sm // (registers * threads)
        return {**limits, "shared memory": self.shared_per_sm // (shared + RESERVED_SHARED)}


_K, _M = 1 << 10, 1 << 20

# Per architecture a typical card: T4, A100, RTX 3090, RTX 4090, H200, B200, RTX 5090.
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
"""The graphics processors that are known, by the text that names them: "cuda:sm_90"."""


def parse_gpu_target(text: str) -> GpuTarget:
    """The target that `text` names, one of `GPUS`; `sm_90` is `cuda:sm_90`. Raises ArgumentError."""
    found = GPUS.get(text) or GPUS.get(f"cuda:{text}")
    if found is None:
        raise ArgumentError(f"there is no target {text!r}", expected=f"a Target, or one of {', '.join(GPUS)}")
    return found
