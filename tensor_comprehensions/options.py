"""The option records of the lowerings, which also define command-line flags and the genes of a search.

Invariant: the fields of a record have legal types and values. The `check_...` functions check that the fields fit
together and fit the target. They run when a record is used, since builder methods set one field at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

from .core.callable_fields import with_callable_fields
from .core.checked_fields import check_fields, describe_value, with_checked_names
from .core.errors import ArgumentError
from .structured.language.schedule_types import ScheduleArguments, freeze_schedule
from .target import GpuTarget

FUSION_STRATEGIES = ("max", "preserve3", "min")


@with_checked_names
@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How a def is lowered for a CPU. By default, every field is chosen from the sizes.

    Attributes:
        fusion: "max" fuses wherever dependences allow, "preserve3" only where parallelism survives,
            "min" keeps one loop nest per statement.
        tile: sizes for the outer band, outermost first; 0 leaves a dimension alone; empty chooses.
        interleave: vectors in flight in an innermost vector loop; 0 chooses.
        grain_size: least number of scalar operations per thread; 0 never runs in parallel.
        use_microkernels: lower contractions to register-tiled micro-kernels.
        localize_temporaries: keep temporaries that fusion makes local in small thread-private buffers.
        split_k: split reductions that have no more results than terms into about this many parts of at least 16
            terms. Threads share the parts, and a fixed order adds them. 1 does not split; 0 chooses.
        schedule: overrides the cost model for contractions: a schedule, a heuristic (a function of an op and a
            target that returns a schedule), or a mapping from the tensor that a contraction defines to one of these.
    """

    fusion: str = field(default="preserve3", metadata={"choices": FUSION_STRATEGIES})
    tile: tuple[int, ...] = field(default=(), metadata={"choices": ((), (8,), (16,), (32,), (64,))})
    interleave: int = field(default=0, metadata={"choices": (0, 1, 2, 4, 8)})
    grain_size: int = field(default=32768, metadata={"choices": (0, 8192, 32768, 131072)})
    use_microkernels: bool = field(default=True, metadata={"choices": (False, True)})
    localize_temporaries: bool = field(default=True, metadata={"choices": (False, True)})
    split_k: int = field(default=0, metadata={"choices": (0, 1, 2, 4, 8, 16, 64)})
    schedule: ScheduleArguments = None

    def __post_init__(self) -> None:
        """Check every field. Raises ArgumentError."""
        check_fields(self, _LABEL)
        object.__setattr__(self, "schedule", freeze_schedule(self.schedule))


_LABEL = "the option"
_FLAG = {"choices": (False, True)}
_AUTO = {"choices": ("auto", "always", "never")}
_AXES = (1, 2, 3)
"""Lengths that the extents of a block or a grid can have: x, y and z."""
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@with_checked_names
@dataclass(frozen=True, slots=True)
class SparseOptions:
    """How a def with sparse operands is lowered for a CPU. No choice changes a result by more than rounding.

    Attributes:
        order: names of indices, outermost loop first. Every statement orders its loops this way; each call converts
            operands that are stored in another order. Empty chooses.
        convert: whether operands may be converted to other formats; if not, a def that needs a conversion is rejected.
        chunk_positions: stored positions per chunk of the outermost loop; threads share the chunks. 0 uses one thread.
        stage_rows: whether threads share the rows of sums with sparse results, which are written to a staging buffer
            first: "always", "never", or "auto": if there is more than one thread.
        branchless_merge: whether sums of operands at one index run without branches on which operands are present.
        prefetch_distance: how many stored positions ahead rows are prefetched; 0 prefetches nothing.
        max_vectors: vectors that an innermost dense loop keeps in registers at once.
        gather: whether sums over stored positions are vectorized with gathers: "always", "never", or "auto": if the
            processor gathers fast.
        hash_rows: whether rows of sparse results that are written out of order are combined in hash tables instead of
            arrays: "always", "never", or "auto": if a row has more than 2^21 coordinates.
    """

    order: tuple[str, ...] = field(default=(), metadata={"example": "i"})
    convert: bool = field(default=True, metadata=_FLAG)
    chunk_positions: int = field(default=16384, metadata={"choices": (0, 2048, 16384, 131072)})
    stage_rows: str = field(default="auto", metadata=_AUTO)
    branchless_merge: bool = field(default=True, metadata=_FLAG)
    prefetch_distance: int = field(default=16, metadata={"choices": (0, 2, 4, 8, 16, 32)})
    max_vectors: int = field(default=8, metadata={"choices": (1, 2, 4, 8, 16)})
    gather: str = field(default="auto", metadata=_AUTO)
    hash_rows: str = field(default="auto", metadata=_AUTO)

    def __post_init__(self) -> None:
        """Check every field. Raises ArgumentError."""
        check_fields(self, _LABEL)
        _require(len(set(self.order)) == len(self.order), "order", self.order, "each index once")


@with_callable_fields("tile", "unroll")
@with_checked_names
@dataclass(frozen=True, slots=True)
class MappingOptions:
    """How the polyhedral lowering maps a def to the blocks and threads of a GPU (the options of the TC paper).

    The defaults are the paper's `naive` ones. Every method returns a copy:
    `MappingOptions.naive().tile(32, 32).map_to_threads(32, 8)`.

    Attributes:
        tile: sizes for the loops of the outer band, then for the loops below it, outermost first. 0 leaves a loop
            untiled, as are loops beyond the end of the list.
        threads: threads of a block along x, y, z; x runs along the innermost mapped loop.
        blocks: most blocks of the grid along x, y, z; x runs along the outermost loop.
        unroll: most statement instances to unroll; 1 unrolls nothing.
        outer_fusion: "max" fuses wherever dependences allow, "preserve3" where parallelism survives, "min" never.
        intra_tile_fusion: the same for the loops inside a tile; "min" does not fuse them.
        shared_memory: keep tiles of reused or badly coalesced tensors in shared memory.
        max_shared_memory: bytes of shared memory per block; 0 is the default limit of the target (`max_shared`).
        private_memory: keep accumulators and reused tiles in registers.
        cooperative_reductions: let the threads of a block share the terms of a reduction.
        split_k: split reductions that have fewer results than the target has threads into about this many parts of at
            least 16 terms; a second kernel adds the parts. 1 does not split.
        collapse_loops: fuse adjacent loops that access memory like a single loop.
        vector_width: adjacent elements along x that a thread computes.
        double_buffer: copy the next tile to shared memory while the current one is used, if possible.
        shared_depth: number of schedule loops around the copies to shared memory. -1 follows the reuse: a tile that
            one loop nest leaves for another is copied inside the loops over row tiles, any other tile inside the loops
            over tiles that change it. Copies are never placed inside loops that threads share.
        private_depth: the same for registers. -1 puts accumulators around the loops over tiles of terms, and tiles that
            threads reuse inside the innermost loops that are not unrolled.
        unroll_copy_shared: unroll loops of copies to and from shared memory of up to 16 iterations, beyond `unroll`.
        read_only_cache: read tensors that a kernel does not write with `__ldg`; otherwise CUDA's compiler decides.
            OpenCL has no such loads.
        match_library_calls: run statements that are exactly a matrix product, or a batch of them, as `torch.mm` or
            `torch.bmm` between the other kernels.
    """

    tile: tuple[int, ...] = field(default=(32, 32, 32), metadata={"choices": (0, *_POWERS)})
    threads: tuple[int, ...] = field(default=(32, 8), metadata={"choices": (*_POWERS, 512, 1024), "lengths": _AXES})
    blocks: tuple[int, ...] = field(
        default=(256, 256), metadata={"choices": (*_POWERS, 1024, 16384, 65535), "lengths": _AXES}
    )
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
    vector_width: int = field(default=1, metadata={"choices": (1, 2, 4), "exact": True})
    double_buffer: bool = field(default=False, metadata=_FLAG)

    def __post_init__(self) -> None:
        """Check every field. Raises ArgumentError."""
        check_fields(self, _LABEL)
        _require(len(self.tile) >= 1, "tile", self.tile, "at least one size; 0 leaves a loop alone")

    @staticmethod
    def naive() -> MappingOptions:
        """The paper's default options: correct for every def, fast for none."""
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
        """Set both fusion strategies."""
        return replace(self, outer_fusion=strategy, intra_tile_fusion=strategy)

    def use_shared_memory(self, use: bool = True) -> MappingOptions:
        return replace(self, shared_memory=use)

    def use_private_memory(self, use: bool = True) -> MappingOptions:
        return replace(self, private_memory=use)

    def use_read_only_cache(self, use: bool = True) -> MappingOptions:
        return replace(self, read_only_cache=use)

    def with_max_shared_memory(self, size: int) -> MappingOptions:
        """Limit shared memory to `size` bytes per block."""
        return replace(self, max_shared_memory=size)


@with_checked_names
@dataclass(frozen=True, slots=True)
class TileOptions:
    """How products of a def run on the tensor cores of a GPU; the rest of the def gets the default mapping.

    Empty fields are chosen from the sizes. `TileOptions()` uses tensor cores even if the cost model would not. A def is
    rejected if none of its products can run on tensor cores; the error gives the reason for each product.

    Attributes:
        tile: rows, columns and terms of the tile of a block. Rows and columns are those of the result; columns are
            contiguous in memory.
        warps: warps along the rows, and along the columns, of a tile.
        stages: pipeline stages in shared memory: one is used while the others load.
        group: rows of tiles that consecutive blocks visit together, so that they share operands.
        split: parts of a sum, with blocks of their own; a second kernel adds the parts. 1 does not split.
        instruction: "mma" of warps, or "wgmma" of warpgroups on sm_90, for which `warps` is (4, 1), (8, 1) or (12, 1).
        products: "tf32" allows rounding float32 factors to tf32. Without it, float32 products are exact, and only
            factors that the def rounds, as `tf32(x)`, run on tensor cores.
        cluster: blocks of neighboring rows that form a cluster on sm_90, and copy the right factor once for all of
            them. 1: no clusters.
        warpgroups: "staggered" lets one of two warpgroups lead, so that each finishes its sums while the other
            multiplies; "together" does not.
    """

    tile: tuple[int, ...] = field(
        default=(), metadata={"choices": (16, 32, 64, 128, 256), "least": 8, "lengths": (0, 3)}
    )
    warps: tuple[int, ...] = field(default=(), metadata={"choices": (1, 2, 4, 8), "lengths": (0, 2)})
    stages: int = field(default=0, metadata={"choices": (0, 2, 3, 4, 5, 6)})
    group: int = field(default=0, metadata={"choices": (0, 1, 2, 4, 8, 16)})
    split: int = field(default=0, metadata={"choices": (0, 1, 2, 4, 8, 16)})
    instruction: str = field(default="", metadata={"choices": ("", "mma", "wgmma")})
    products: str = field(default="", metadata={"choices": ("", "tf32")})
    cluster: int = field(default=0, metadata={"choices": (0, 1, 2)})
    warpgroups: str = field(default="", metadata={"choices": ("", "together", "staggered")})

    def __post_init__(self) -> None:
        """Check every field. Raises ArgumentError."""
        check_fields(self, _LABEL)
        fine = all(n % least == 0 for n, least in zip(self.tile, _MULTIPLES, strict=False))
        _require(fine, "tile", self.tile, f"empty, or multiples of {', '.join(map(str, _MULTIPLES))}")
        _require(self.stages != 1, "stages", self.stages, "0, which chooses, or at least 2")


_MULTIPLES = (16, 8, 16)
"""Divisors of the rows, columns and terms of a tile."""


GpuOptions: TypeAlias = MappingOptions | TileOptions
"""The options of the GPU lowerings."""


def check_gpu_options(options: GpuOptions, target: GpuTarget) -> None:
    """Check that `options` fit together and the limits of `target`. Raises ArgumentError."""
    if isinstance(options, TileOptions):
        check_tiles(options, target)
    else:
        check_mapping(options, target)


def check_tiles(options: TileOptions, target: GpuTarget) -> None:
    """Check that `options` fit together and the limits of `target`. Raises ArgumentError."""
    if not target.tensor_ops:
        raise ArgumentError(f"TileOptions need tensor cores of sm_80 or newer, not {target.name}")
    _require(prod(options.warps) * target.warp <= target.max_threads_per_block, "warps", options.warps, "fewer warps")
    groups = options.instruction == "wgmma"
    _require(not groups or target.group_ops > 0, "instruction", options.instruction, f"mma: {target.name} has no other")
    fine = not (groups and options.warps) or (options.warps[0] in (4, 8, 12) and options.warps[1] == 1)
    _require(fine, "warps", options.warps, "(4, 1), (8, 1) or (12, 1) for wgmma")
    fine = options.cluster < 2 or (target.group_ops > 0 and options.instruction != "mma")
    _require(fine, "cluster", options.cluster, "0 or 1: only blocks of warpgroups on sm_90 form clusters")
    can_stagger = target.group_ops > 0 and options.warps in ((), (8, 1)) and options.instruction != "mma"
    fine = options.warpgroups != "staggered" or can_stagger
    _require(fine, "warpgroups", options.warpgroups, "together: only two warpgroups on sm_90 are staggered")
    if options.tile and options.warps:
        (rows, columns, _), (across, along) = options.tile, options.warps
        expected = f"multiples of {16 * across} rows and {8 * along} columns, for {across} x {along} warps"
        _require(rows % (16 * across) == 0 and columns % (8 * along) == 0, "tile", options.tile, expected)


def check_mapping(options: MappingOptions, target: GpuTarget) -> None:
    """Check that `options` fit together and the limits of `target`. Raises ArgumentError."""
    for name, given, limits in (
        ("threads", options.threads, target.block),
        ("blocks", options.blocks, target.grid),
    ):
        for axis, number, limit in zip("xyz", given, limits, strict=False):
            _require(number <= limit, name, given, f"between 1 and {limit} along {axis} on {target.name}")
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
        raise ArgumentError(f"{_LABEL} {name} is {describe_value(value)}", expected=expected)
