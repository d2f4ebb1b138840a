"""The frozen option records of the lowerings: keyword arguments, command-line flags and search genes at once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, TypeAlias

from .core.errors import ArgumentError
from .core.fluent import with_callable_fields
from .structured.language.schedule_types import ScheduleArguments, freeze_schedule
from .target import GpuTarget

FUSION_STRATEGIES = ("max", "preserve3", "min")


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How a def is lowered for a CPU. Every field has a default that is chosen from the sizes.

    Attributes:
        fusion: "max" fuses wherever dependences allow, "preserve3" only where parallelism survives,
            "min" keeps one loop nest per statement.
        tile: sizes for the outer band, outermost first; 0 leaves a dimension alone; empty chooses.
        interleave: vectors in flight in an innermost vector loop; 0 chooses.
        grain_size: least number of scalar operations worth a thread; 0 never runs in parallel.
        use_microkernels: hand contractions to the register-tiled micro-kernels of `structured`.
        localize_temporaries: keep temporaries that fusion makes local in small thread-private buffers.
        split_k: cut sums, and other reductions, that have no more results than terms into about so many parts
            of at least 16 terms, which threads share and which are added up in a fixed order. 1 does not; 0 chooses.
        schedule: how contractions are lowered, instead of as the cost model says: a schedule, a heuristic (a
            function of an op and a target that returns one), or pairs of the tensor that a contraction defines and
            one of these.
    """

    fusion: str = field(default="preserve3", metadata={"choices": FUSION_STRATEGIES})
    tile: tuple[int, ...] = field(default=(), metadata={"choices": ((), (8,), (16,), (32,), (64,))})
    interleave: int = field(default=0, metadata={"choices": (0, 1, 2, 4, 8)})
    grain_size: int = field(default=32768, metadata={"choices": (0, 8192, 32768, 131072)})
    use_microkernels: bool = field(default=True, metadata={"choices": (False, True)})
    localize_temporaries: bool = field(default=True, metadata={"choices": (False, True)})
    split_k: int = field(default=0, metadata={"choices": (0, 1, 2, 4, 8, 16, 64)})
    schedule: ScheduleArguments = None


_FLAG = {"choices": (False, True)}
_AUTO = {"choices": ("auto", "always", "never")}
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class SparseOptions:
    """How a def with sparse operands is lowered for a CPU. No choice changes a result by more than rounding.

    Attributes:
        order: names of indices, outermost loop first. Statements loop in this order, as far as they have these indices;
            operands that are stored in another order are converted by every call. Empty chooses.
        convert: whether operands may be converted to other formats; else a def that needs it is refused.
        chunk_positions: stored positions in a chunk of the outermost loop, which threads share; 0 runs on one thread.
        count_first: whether the elements of sparse results are counted before they are written, so that threads share
            that: "auto" from three threads on.
        branchless_merge: sums of operands at one index are computed without branches on which of them are present.
        prefetch_distance: stored positions from what is computed to the rows that are asked for; 0 asks for none.
        max_vectors: vectors that an innermost dense loop keeps in registers side by side.
        gather: whether sums over stored positions run in vectors: "auto" where the processor gathers fast.
    """

    order: tuple[str, ...] = ()
    convert: bool = field(default=True, metadata=_FLAG)
    chunk_positions: int = field(default=16384, metadata={"choices": (0, 2048, 16384, 131072)})
    count_first: str = field(default="auto", metadata=_AUTO)
    branchless_merge: bool = field(default=True, metadata=_FLAG)
    prefetch_distance: int = field(default=4, metadata={"choices": (0, 2, 4, 8, 16)})
    max_vectors: int = field(default=8, metadata={"choices": (1, 2, 4, 8, 16)})
    gather: str = field(default="auto", metadata=_AUTO)


def check_sparse_options(options: SparseOptions) -> None:
    """Has every option a value that means something? Raises ArgumentError."""
    if not isinstance(options.order, tuple) or not all(isinstance(name, str) for name in options.order):
        raise ArgumentError(f"the option order is {options.order!r}", expected="names of indices, such as ('i', 'j')")
    if len(set(options.order)) < len(options.order):
        raise ArgumentError(f"the option order names an index twice: {options.order!r}")
    check_fields(options)
    _require(options.max_vectors >= 1, "max_vectors", options.max_vectors, "at least 1")


@with_callable_fields("tile", "unroll")
@dataclass(frozen=True, slots=True)
class MappingOptions:
    """How the polyhedral lowering maps a def to the blocks and threads of a GPU (the options of the TC paper).

    The defaults are the paper's `naive` ones. Every method gives a copy:
    `MappingOptions.naive().tile(32, 32).map_to_threads(32, 8)`.

    Attributes:
        tile: sizes for the loops of the outer band, then for the loops below it, outermost first; 0 leaves a loop
            alone, and so does the end of the list.
        threads: of a block along x, y, z; x runs along the innermost mapped loop.
        blocks: of the grid, at most; x runs along the outermost loop.
        unroll: so many statement instances at most are unrolled; 1 unrolls nothing.
        outer_fusion: "max" fuses wherever dependences allow, "preserve3" where parallelism survives, "min" nowhere.
        intra_tile_fusion: the same for the loops inside a tile, which "min" keeps apart.
        shared_memory: keep tiles of reused or badly coalesced tensors in shared memory.
        max_shared_memory: bytes of it for a block; 0 is what a block may have without asking.
        private_memory: keep accumulators and reused tiles in registers.
        cooperative_reductions: let the threads of a block share the terms of a reduction.
        split_k: cut sums, and other reductions, that have fewer results than the target has threads into about
            so many parts of at least 16 terms; a second kernel adds the parts up. 1 does not.
        collapse_loops: make adjacent loops that walk memory as one loop one loop.
        vector_width: elements that a thread computes next to each other along x.
        double_buffer: copy the next tile to shared memory while the present one is used, where that is possible.
        shared_depth: so many loops of the schedule are around the copies to shared memory; -1 puts them where reuse is
            found: what one nest leaves for another inside the loops over tiles of the rows, the rest inside as many
            loops over tiles as change it. Below loops that threads share there are no such copies.
        private_depth: the same for registers; -1 puts accumulators around the loops over tiles of terms, what threads
            reuse inside the innermost loops but those that are written out.
        unroll_copy_shared: write out the loops of copies to and from shared memory up to 16 trips, beyond `unroll`.
        read_only_cache: read what a kernel does not write by `__ldg`; else CUDA's compiler decides. OpenCL has no such
            reads.
        match_library_calls: what is exactly a product of matrices, or of a batch of them, is torch's, between kernels.
    """

    tile: tuple[int, ...] = field(default=(32, 32, 32), metadata={"choices": (0, *_POWERS)})
    threads: tuple[int, ...] = field(default=(32, 8), metadata={"choices": (*_POWERS, 512, 1024)})
    blocks: tuple[int, ...] = field(default=(256, 256), metadata={"choices": (*_POWERS, 1024, 16384, 65535)})
    unroll: int = field(default=1, metadata={"choices": _POWERS})
    outer_fusion: str = field(default="preserve3", metadata={"choices": FUSION_STRATEGIES})
    intra_tile_fusion: str = field(default="preserve3", metadata={"choices": FUSION_STRATEGIES})
    shared_memory: bool = field(default=False, metadata=_FLAG)
    max_shared_memory: int = field(default=0, metadata={"choices": (0, 8192, 16384, 32768, 49152, 65536, 98304)})
    private_memory: bool = field(default=False, metadata=_FLAG)
    shared_depth: int = field(default=-1, metadata={"choices": (-1, 0, 1, 2, 3, 4, 5, 6)})
    private_depth: int = field(default=-1, metadata={"choices": (-1, 0, 1, 2, 3, 4, 5, 6)})
    unroll_copy_shared: bool = field(default=False, metadata=_FLAG)
    read_only_cache: bool = field(default=False, metadata=_FLAG)
    match_library_calls: bool = field(default=False, metadata=_FLAG)
    cooperative_reductions: bool = field(default=False, metadata=_FLAG)
    split_k: int = field(default=1, metadata={"choices": (1, 16, 64, 256)})
    collapse_loops: bool = field(default=False, metadata=_FLAG)
    vector_width: int = field(default=1, metadata={"choices": (1, 2, 4)})
    double_buffer: bool = field(default=False, metadata=_FLAG)

    @staticmethod
    def naive() -> MappingOptions:
        """Right for every def, fast for none."""
        return MappingOptions()

    @staticmethod
    def single_thread() -> MappingOptions:
        """One thread of one block: the simplest kernel, as a reference."""
        return MappingOptions(tile=(1,), threads=(1,), blocks=(1,))

    @staticmethod
    def pointwise() -> MappingOptions:
        return MappingOptions(tile=(32, 32, 32), threads=(32, 4, 4), blocks=(100, 100, 100), unroll=128)

    @staticmethod
    def mlp() -> MappingOptions:
        return MappingOptions(tile=(1,), threads=(128,), blocks=(128,), outer_fusion="max")

    @staticmethod
    def convolution() -> MappingOptions:
        return MappingOptions(tile=(4, 8, 8, 8), threads=(4, 16, 4), blocks=(256, 256, 256))

    @staticmethod
    def group_convolution() -> MappingOptions:
        return MappingOptions(tile=(1, 1), threads=(4, 16, 4), blocks=(256, 256))

    def map_to_threads(self, *threads: int) -> MappingOptions:
        return replace(self, threads=threads)

    def map_to_blocks(self, *blocks: int) -> MappingOptions:
        return replace(self, blocks=blocks)

    def fuse(self, strategy: str) -> MappingOptions:
        """Both fusion strategies."""
        return replace(self, outer_fusion=strategy, intra_tile_fusion=strategy)

    def use_shared_memory(self, use: bool = True) -> MappingOptions:
        return replace(self, shared_memory=use)

    def use_private_memory(self, use: bool = True) -> MappingOptions:
        return replace(self, private_memory=use)

    def use_read_only_cache(self, use: bool = True) -> MappingOptions:
        return replace(self, read_only_cache=use)

    def with_max_shared_memory(self, size: int) -> MappingOptions:
        """`size` in bytes."""
        return replace(self, max_shared_memory=size)


@dataclass(frozen=True, slots=True)
class TileOptions:
    """How products of a def run on the tensor cores of a GPU; the rest of the def is mapped by default.

    Empty fields are chosen from the sizes. `TileOptions()` asks for tensor cores where the cost model would not take
    them. A def without a product that they take is refused, with the reason for each of its products.

    Attributes:
        tile: rows, columns and terms of the tile of a block. Rows and columns are those of the result, columns where
            neighbors are neighbors in memory.
        warps: that share the rows, and the columns, of a tile.
        stages: tiles of both factors in shared memory, of which one is used while the others are on their way.
        group: so many rows of tiles are walked side by side, so that blocks share what they read.
        split: parts of a sum that are blocks of their own; a second kernel adds them up. 1 does not split.
        instruction: "mma" of warps, or "wgmma" of warpgroups on sm_90, for which `warps` is (4, 1), (8, 1) or (12, 1).
    """

    tile: tuple[int, ...] = field(default=(), metadata={"choices": (16, 32, 64, 128, 256)})
    warps: tuple[int, ...] = field(default=(), metadata={"choices": (1, 2, 4, 8)})
    stages: int = field(default=0, metadata={"choices": (0, 2, 3, 4, 5, 6)})
    group: int = field(default=0, metadata={"choices": (0, 1, 2, 4, 8, 16)})
    split: int = field(default=0, metadata={"choices": (0, 1, 2, 4, 8, 16)})
    instruction: str = field(default="", metadata={"choices": ("", "mma", "wgmma")})


GpuOptions: TypeAlias = MappingOptions | TileOptions
"""What a user may ask of a lowering for GPUs."""


def check_gpu_options(options: GpuOptions, target: GpuTarget) -> None:
    """Are `options` legal, and within the limits of `target`? Raises ArgumentError."""
    if isinstance(options, TileOptions):
        check_tiles(options, target)
    else:
        check_mapping(options, target)


def check_tiles(options: TileOptions, target: GpuTarget) -> None:
    """Are `options` legal, and within the limits of `target`? Raises ArgumentError."""
    check_fields(options)
    if not target.tensor_ops:
        raise ArgumentError(f"TileOptions need tensor cores of sm_80 or newer, not {target.name}")
    for name, given, multiples in (("tile", options.tile, (16, 8, 16)), ("warps", options.warps, (1, 1))):
        fine = all(n >= least and n % least == 0 for n, least in zip(given, multiples, strict=False))
        expected = f"empty, or multiples of {', '.join(map(str, multiples))}"
        _require(len(given) in (0, len(multiples)) and fine, name, given, expected)
    _require(prod(options.warps) * target.warp <= target.max_threads_per_block, "warps", options.warps, "fewer warps")
    groups = options.instruction == "wgmma"
    _require(not groups or target.group_ops > 0, "instruction", options.instruction, f"mma: {target.name} has no other")
    fine = not (groups and options.warps) or (options.warps[0] in (4, 8, 12) and options.warps[1] == 1)
    _require(fine, "warps", options.warps, "(4, 1), (8, 1) or (12, 1) for wgmma")
    _require(options.stages != 1, "stages", options.stages, "0, which chooses, or at least 2")
    if options.tile and options.warps:
        (rows, columns, _), (across, along) = options.tile, options.warps
        expected = f"multiples of {16 * across} rows and {8 * along} columns, for {across} x {along} warps"
        _require(rows % (16 * across) == 0 and columns % (8 * along) == 0, "tile", options.tile, expected)


def check_mapping(options: MappingOptions, target: GpuTarget) -> None:
    """Are `options` legal, and within the limits of `target`? Raises ArgumentError."""
    check_fields(options)
    _require(len(options.tile) >= 1, "tile", options.tile, "at least one size; 0 leaves a loop alone")
    _require(options.unroll >= 1, "unroll", options.unroll, "at least 1, which unrolls nothing")
    _require(options.split_k >= 1, "split_k", options.split_k, "at least 1")
    _require(options.vector_width in (1, 2, 4), "vector_width", options.vector_width, "1, 2 or 4")
    for name, given, limits in (
        ("threads", options.threads, target.block),
        ("blocks", options.blocks, target.grid),
    ):
        _require(1 <= len(given) <= 3, name, given, "one to three numbers")
        for axis, number, limit in zip("xyz", given, limits, strict=False):
            _require(1 <= number <= limit, name, given, f"between 1 and {limit} along {axis} on {target.name}")
    expected = f"at most {target.max_threads_per_block} in all on {target.name}"
    _require(prod(options.threads) <= target.max_threads_per_block, "threads", options.threads, expected)
    asked = options.max_shared_memory
    expected = f"at most {target.max_shared_optin} bytes on {target.name}"
    _require(asked <= target.max_shared_optin, "max_shared_memory", asked, expected)
    if options.max_shared_memory and not options.shared_memory:
        raise ArgumentError("max_shared_memory is given, but shared_memory is not used", expected="shared_memory=True")
    if options.unroll_copy_shared and not options.shared_memory:
        raise ArgumentError("unroll_copy_shared is given, but shared_memory is not used", expected="shared_memory=True")
    if options.double_buffer and not options.shared_memory:
        raise ArgumentError("double_buffer is given, but shared_memory is not used", expected="shared_memory=True")


def _require(fine: bool, name: str, value: object, expected: str) -> None:
    if not fine:
        raise ArgumentError(f"the option {name} is {value!r}", expected=expected)


def check_fields(options: Any) -> None:
    """Has every field of a record of options a value that means something? Raises ArgumentError."""
    for f in fields(options):
        value = getattr(options, f.name)
        if f.name == "schedule":
            freeze_schedule(value)
        if "choices" not in f.metadata:
            continue
        choices, numbers = f.metadata["choices"], value if isinstance(value, tuple) else (value,)
        if not isinstance(value, type(f.default)) or isinstance(value, bool) is not isinstance(f.default, bool):
            wrong = True
        elif isinstance(value, str):
            wrong = value not in choices
        else:
            least = min((c for c in choices if isinstance(c, int)), default=0)
            wrong = not all(isinstance(n, int) and min(0, least) <= n < 1 << 31 for n in numbers)
        if wrong:
            raise ArgumentError(
                f"the option {f.name} is {value!r}", expected=f"such as {', '.join(map(repr, choices))}"
            )
