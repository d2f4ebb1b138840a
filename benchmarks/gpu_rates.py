"""The rates of a GPU that the cost models use, measured: `python -m benchmarks.gpu --calibrate`.

Each probe repeats one instruction in all warps of all multiprocessors. Every block writes its cycles and nanoseconds,
so a rate per cycle does not depend on the clock, which is measured, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tensor_comprehensions.runtime.cuda import launch, nvrtc
from tensor_comprehensions.runtime.cuda.cuda_api import CudaApi
from tensor_comprehensions.target import GpuTarget

TIMES = 2048
"""Repetitions of a probe's body."""
LARGE = 1 << 30
"""Bytes of the copy by which memory is measured."""
FOOTPRINT = 8 << 20
"""Bytes that the probe of the second-level cache reads again and again."""
COLUMNS = 256
"""Of the widest product of a warpgroup."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A kernel that measures one rate.

    Attributes:
        field: of `GpuTarget`.
        setup, body: statements of each thread, before the clock starts and repeated. end: an expression that keeps
            the work alive.
        work: operations or bytes of a block in one repetition.
        threads: of a block. blocks: of a multiprocessor. accelerated: whether it needs sm_90a.
    """

    field: str
    setup: str
    body: str
    end: str
    work: int
    threads: int = 256
    blocks: int = 2
    accelerated: bool = False

    @property
    def source(self) -> str:
        """The CUDA text of the kernel `probe`."""
        return _FRAME.format(
            setup=self.setup, body=self.body, end=self.end, times=TIMES, threads=self.threads, footprint=FOOTPRINT
        )

    def rate(self, cycles: Sequence[int]) -> float:
        """Operations or bytes per cycle and multiprocessor, from the cycles that each block took."""
        return self.work * TIMES * self.blocks * len(cycles) / sum(cycles)


@dataclass(frozen=True, slots=True)
class Rate:
    """A number of the table of GPUs, and what this one has."""

    field: str
    assumed: float
    measured: float

    def text(self) -> str:
        return f"{self.field:18} {self.assumed:14.4g} {self.measured:14.4g} {self.measured / self.assumed:7.1%}"


_FRAME = """
extern "C" __global__ void __launch_bounds__({threads}) probe(long long *found, const float4 *memory, float *kept) {{
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    unsigned int shared = (unsigned int)__cvta_generic_to_shared(shared_bytes);
    unsigned int seed = threadIdx.x + blockIdx.x * {threads}u, mask = {footprint}u / 16u - 1u;
    for (unsigned int n = threadIdx.x; n < 10240u; n += {threads}u) ((float *)shared_bytes)[n] = 0.0f;
    {setup}
    __syncthreads();
    long long first, last, from = clock64();
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(first));
    #pragma unroll 1
    for (int step = 0; step < {times}; ++step) {{
        {body}
    }}
    __syncthreads();
    long long cycles = clock64() - from;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(last));
    float end = (float)({end});
    if (end == 12345.678f) kept[0] = end;
    if (threadIdx.x == 0) {{
        found[2 * blockIdx.x] = cycles;
        found[2 * blockIdx.x + 1] = last - first;
    }}
}}
"""
_PRODUCTS = (
    ("tensor_ops", "m16n8k16", "float", "f32.f16.f16.f32", 16),
    ("tensor_ops_int8", "m16n8k32", "int", "s32.s8.s8.s32", 32),
)
"""Products of warps: their fields, shapes, sums, types and terms."""
SHARED_BYTES = 40 << 10
"""Dynamic shared memory of every probe, all zeros."""


def probes(target: GpuTarget) -> Iterator[Probe]:
    """The probes that a GPU has instructions for."""
    chains = range(8)
    yield Probe(
        "float32_lanes", _declare("float", "x", chains, "seed * 1e-9f"),
        _lines(f"x{n} = fmaf(x{n}, 0.999f, 1e-3f);" for n in chains), _total("x", chains), 256 * len(chains),
    )  # fmt: skip
    for field, shape, sums, kind, depth in _PRODUCTS:
        values = range(4 * len(chains))
        yield Probe(
            field, _declare(sums, "x", values, "0") + " unsigned int a = 0u;",
            _lines(_mma(shape, kind, sums, 4 * n) for n in chains), _total("x", values),
            2 * 16 * 8 * depth * len(chains) * 256 // 32,
        )  # fmt: skip
    if target.group_ops:
        values = range(COLUMNS // 2)
        yield Probe(
            "group_ops", _declare("float", "x", values, "0.0f") + _DESCRIPTOR, _wgmma(), _total("x", values),
            2 * 2 * 64 * COLUMNS * 16 * 4, blocks=1, accelerated=True,
        )  # fmt: skip
    loads = range(4)
    yield Probe(
        "l2_bytes", _declare("float", "x", loads, "0.0f"),
        "unsigned int at = seed + step * 1031u * 1024u;"
        + _lines(f"{{ float4 v = __ldcg(memory + ((at + {n}u * 65536u) & mask)); x{n} += v.x + v.w; }}" for n in loads),
        _total("x", loads), 16 * len(loads) * 256, blocks=4,
    )  # fmt: skip
    yield Probe(
        "shared_bytes", _declare("float", "x", loads, "0.0f"), _lines(map(_shared_load, loads)), _total("x", loads),
        16 * len(loads) * 256, blocks=4,
    )  # fmt: skip


def calibrate(device: int = 0) -> list[Rate]:
    """The rates of a CUDA device beside those of the table.

    Raises:
        ArgumentError: the device is too old.
        TCError: NVRTC or CuPy is not installed.
    """
    target, api = launch.device_target(device), launch.cuda_api()
    found, clocks = [], []
    for probe in probes(target):
        times = _run(probe, target, api, device)
        found.append(Rate(probe.field, getattr(target, probe.field), probe.rate([cycles for cycles, _ in times])))
        clocks.append(sum(cycles for cycles, _ in times) / sum(nanoseconds for _, nanoseconds in times) * 1e9)
    found.append(Rate("clock", target.clock, min(clocks)))
    found.append(Rate("bandwidth", target.bandwidth, _copy_rate(device)))
    return found


def _run(probe: Probe, target: GpuTarget, api: CudaApi, device: int) -> list[tuple[int, int]]:
    """The cycles and nanoseconds of each block, the second time."""
    blocks = target.num_sms * probe.blocks
    architecture = f"{target.name}a" if probe.accelerated else target.name
    cubin = nvrtc.compile_text(probe.source, architecture)
    place = torch.device("cuda", device)
    found = torch.zeros(blocks, 2, dtype=torch.int64, device=place)
    memory, kept = torch.zeros(FOOTPRINT, dtype=torch.uint8, device=place), torch.zeros(1, device=place)
    addresses = (ctypes.c_uint64 * 3)(found.data_ptr(), memory.data_ptr(), kept.data_ptr())
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(addresses) + 8 * n for n in range(3)))
    with torch.cuda.device(place):
        function = api.get_function(api.load_module(cubin.binary), "probe")
        api.allow_shared_bytes(function, SHARED_BYTES)
        stream = launch.current_stream(device)
        for _ in range(2):
            api.launch(function, blocks, 1, 1, probe.threads, 1, 1, SHARED_BYTES, stream, ctypes.addressof(pointers), 0)
        api.synchronize(stream)
    return [(int(cycles), int(nanoseconds)) for cycles, nanoseconds in found.tolist()]


def _copy_rate(device: int) -> float:
    """Bytes per second that a copy reads and writes, the best of some."""
    source = torch.zeros(LARGE, dtype=torch.uint8, device=torch.device("cuda", device))
    to, times = torch.empty_like(source), []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        to.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * LARGE / min(times)


# --- text --------------------------------------------------------------------------------------------------------


def _lines(statements: Iterator[str] | map[str]) -> str:
    return "\n        ".join(statements)


def _declare(kind: str, name: str, numbers: range, value: str) -> str:
    return f"{kind} " + ", ".join(f"{name}{n} = {value}" for n in numbers) + ";"


def _total(name: str, numbers: range) -> str:
    return " + ".join(f"{name}{n}" for n in numbers)


def _mma(shape: str, kind: str, sums: str, first: int) -> str:
    """A product of warps: into four sums, from factors of zeros."""
    outputs = ", ".join(f'"+{"f" if sums == "float" else "r"}"(x{first + n})' for n in range(4))
    return (
        f'asm volatile("mma.sync.aligned.{shape}.row.col.{kind} {{%0, %1, %2, %3}}, {{%4, %4, %4, %4}}, {{%4, %4}}, '
        f'{{%0, %1, %2, %3}};" : {outputs} : "r"(a));'
    )


_DESCRIPTOR = """
    unsigned long long place = (unsigned long long)(shared >> 4) & 0x3FFF;
    unsigned long long tile = place | (1ull << 16) | (64ull << 32) | (1ull << 62);
"""
"""Of rows of 128 bytes in panels that are swizzled so, one beside the other."""


def _wgmma() -> str:
    """Four products of a warpgroup, and the wait for them."""
    values = range(COLUMNS // 2)
    sums = ", ".join(f"%{n}" for n in values)
    outputs = ", ".join(f'"+f"(x{n})' for n in values)
    tile = COLUMNS // 2
    product = (
        f'asm volatile("wgmma.mma_async.sync.aligned.m64n{COLUMNS}k16.f32.f16.f16 {{{sums}}}, %{tile}, %{tile}, '
        f'1, 1, 1, 0, 0;" : {outputs} : "l"(tile));'
    )
    return _lines(
        iter(
            [
                'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', *[product] * 4,
                'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");',
                'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");',
            ]
        )
    )  # fmt: skip


def _shared_load(number: int) -> str:
    """Sixteen bytes of each thread, neighbors of neighbors: no bank is asked twice."""
    address = f"shared + (((threadIdx.x & 31u) + {number}u * 32u + (step & 7) * 128u) << 4)"
    return (
        f'{{ float a, b, c, d; asm volatile("ld.shared.v4.f32 {{%0, %1, %2, %3}}, [%4];" : "=f"(a), "=f"(b), "=f"(c), '
        f'"=f"(d) : "r"({address})); x{number} += a + d; }}'
    )
