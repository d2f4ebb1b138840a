"""What code is emitted for: a device and the facts about it that lowering may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A machine to compile for.

    Attributes:
        kind: "cpu" (later "cuda", "opencl").
        name: the processor, as LLVM names it.
        features: LLVM's feature string, "+avx2,+fma,...".
        vector_bits: width of the widest vector register that pays.
        vector_registers: how many of them there are.
        cache: bytes of the data caches of one core, smallest first.
    """

    kind: str
    name: str
    features: str
    vector_bits: int
    vector_registers: int
    cache: tuple[int, ...]

    def lanes(self, bits: int) -> int:
        """How many scalars of `bits` bits fill a vector register."""
        return max(1, self.vector_bits // bits)


AVX512 = Target(
    "cpu", "znver4", "+avx512f,+avx512vl,+avx512bw,+avx512dq,+avx2,+fma", 512, 32, (32768, 1048576, 33554432)
)
AVX2 = Target("cpu", "haswell", "+avx2,+fma", 256, 16, (32768, 262144, 8388608))
