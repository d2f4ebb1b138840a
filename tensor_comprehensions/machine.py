"""Hardware constants of the cost models: cycles, bytes, and the sizes of hardware structures.

Facts that differ between processors, such as caches and rates, are attributes of `target.CpuTarget` and
`target.GpuTarget`. The constants here hold for all of them. Sizes of structures come from the vendors' manuals. Cycles
are fitted by hand to interleaved timings of `benchmarks.structured`, `benchmarks.contractions` and
`benchmarks.random_contractions` on AMD Zen 4 and on Intel Sapphire Rapids; those that name a mesh, only on the latter.
Thresholds of decisions are in `thresholds`.
"""

from __future__ import annotations

# --- structures -------------------------------------------------------------------------------------------------------

CACHE_LINE_BYTES = 64
"""Bytes of a cache line, at every level."""
PAGE_BYTES = 4096
"""Bytes of a page of memory without huge pages. Hardware prefetching stops at its end."""
TLB_PAGES = 2048
"""Pages in the second-level TLB, at least: Sapphire Rapids has 2048, Zen 4 3072."""
L1_SETS = 64
"""Sets of the first cache. Lines a multiple of this many lines apart compete for one set."""
L1_WAYS = 8
"""Minimum number of lines in a set of L1: Zen 4 has 8, Sapphire Rapids 12."""
L1_EVICTED_LINE_CYCLES = 2.0
"""Cycles per step of a sum, times excess**2 / (lines that fit), if lines of scalars exceed their L1 sets (Zen 4)."""
PREFETCH_STREAMS = 48
"""Streams that the hardware prefetcher tracks. A copy that transposes more rows at once restarts them in each block."""
SHUFFLE_BYTES = 16
"""Bytes of the pieces that shuffles work within. Only whole pieces move across them."""
MESH_L2_USABLE_FRACTION = 0.95
"""Usable part of L2 for reused data if the last cache is a mesh, where L2 is large; else `target.USABLE_FRACTION`."""

# --- arithmetic -------------------------------------------------------------------------------------------------------

FMA_LATENCY_CYCLES = 4.0
"""Cycles from the start of a multiply-add until the next one can add to its result."""
ISSUE_PER_CYCLE = 3.0
"""Multiply-adds and loads that start per cycle. An instruction with an indexed memory operand counts as both."""
REGISTER_TILE_CYCLES = 24.0
"""Cycles to start and finish a register tile, beyond its loads and stores."""
TRANSPOSED_TILE_CYCLES = 30.0
"""Cycles to start and finish storing a register tile transposed."""
TRANSPOSED_ELEMENT_CYCLES = 0.4
"""Cycles for each element of a register tile that is stored transposed."""
DOT_PRODUCT_CYCLES = 10.0
"""Cycles to add up the lanes of a vector once, at the end of a register tile whose lanes run along the sum."""
LANE_SUM_CYCLES = 12.0
"""Cycles to add up and store the lanes of one result in a loop of its own."""
GATHERED_ELEMENT_CYCLES = 0.7
"""Cycles per element of a vector that is assembled from distant elements."""

# --- loads from caches and memory -------------------------------------------------------------------------------------

TRANSFER_CYCLES_PER_BYTE = (1 / 64, 1 / 14, 1 / 6)
"""Cycles per byte into L1, L2 and L3, each from the next cache or from memory."""
MESH_CYCLES_PER_BYTE = 1 / 5
"""Cycles per byte from a last-level cache on a mesh."""
EXPOSED_TRANSFER_FRACTION = 0.4
"""Part of the time of transfers that multiply-adds do not hide."""
EXPOSED_STREAM_FRACTION = 0.2
"""The same if both factors are contiguous along the sum, so that they are prefetched."""
L2_LINE_CYCLES = 2.0
"""Cycles until a line arrives from L2, if many are requested."""
L2_STRIDED_BYTES_PER_CYCLE = 14.0
"""Bytes per cycle that L2 delivers of rows of one or a few lines, far apart. Measured on Zen 3."""
L2_PANEL_VECTOR_CYCLES = 0.1
"""Extra cycles per vector of a panel that comes from L2."""
L2_SPLIT_VECTOR_CYCLES = 1.0
"""Cycles per step of a sum, for each vector after the third that crosses cache lines in L2."""
L2_SCATTERED_LINE_CYCLES = 1.5
"""Cycles that a register tile waits for a line from L2 if its run is shorter than `L2_SCATTERED_RUN_BYTES`."""
L2_SCATTERED_RUN_BYTES = 256
"""Minimum contiguous bytes in L2 whose lines are prefetched into L1."""
SPLIT_VECTOR_CYCLES = 0.5
"""Cycles per unaligned vector, as in windows over an image: it may begin in one cache line and end in the next."""
TLB_MISS_CYCLES = 45.0
"""Cycles per page that is not in the TLB."""
MESH_ROW_CYCLES = 0.5
"""Cycles per step of a sum and row of a register tile that is read from a mesh cache."""
MESH_QUEUE_CYCLES = 0.1
"""Cycles per step and vector of an L2 panel, times the number of vectors: they queue behind rows from a mesh cache."""
MESH_L2_ROW_FACTOR = 0.5
"""Factor on `MESH_ROW_CYCLES` and `MESH_QUEUE_CYCLES` if the rows come from L2."""
MESH_IN_PLACE_VECTOR_CYCLES = 0.4
"""Cycles per step for each vector after the fourth of a row that is read in place from a mesh cache."""
MESH_RUN_CYCLES = 35.0
"""Cycles that a copy waits for the first line of a contiguous run from beyond a mesh cache."""
MESH_STALL_CYCLES = 200.0
"""The same for multiply-adds."""
MESH_PREFETCHED_RUN_BYTES = 1024
"""Minimum contiguous bytes for which prefetching hides `MESH_RUN_CYCLES` and `MESH_STALL_CYCLES`."""
MESH_FETCH_COLUMNS = 320
"""Minimum columns of a tile of rows from a mesh cache: longer pieces of a row do not arrive faster."""

# --- stores -----------------------------------------------------------------------------------------------------------

OTHER_LINE_STORE_CYCLES = 2.0
"""Cycles to store to another cache line than the store before."""
SHARED_LINE_CYCLES = 8.0
"""Cycles per line that two register tiles write parts of, if the output is large."""
PARTIAL_LINE_FETCH_CYCLES = 20.0
"""Cycles per line that is fetched from memory only because a register tile writes a part of it."""
NONTEMPORAL_RUN_CYCLES = 17.0
"""Cycles per contiguous run that is written with non-temporal stores."""
HIDDEN_STORE_CYCLES = 60.0
"""Cycles of multiply-adds per output line that hide the store of the line to a mesh cache."""
OPEN_PAGES = 64
"""Number of pages that stores can alternate between without waiting for memory."""

# --- copies: cycles per element of 4 bytes, or per copy ---------------------------------------------------------------

RUN_COPY_CYCLES = 0.6
"""Copied in vectors."""
TRANSPOSE_COPY_CYCLES = 1.2
"""Copied in blocks that are transposed in registers."""
ELEMENT_COPY_CYCLES = 2.5
"""Copied one by one."""
COPY_START_CYCLES = 1000.0
"""Cycles to start a copy of a whole tensor, on the scale of `REORDER_RUN_CYCLES`."""
REORDER_RUN_CYCLES = 1.0
"""Copied in vectors, in model cycles of whole contractions: real cycles are 0.6 times these, as for the multiply-adds
that they are compared with.
"""
REORDER_TRANSPOSE_CYCLES = 1.3
"""The same, transposed."""
REORDER_SHORT_TRANSPOSE_CYCLES = 2.0
"""The same, transposed with runs shorter than a few lanes."""
FAR_COPY_FACTOR = 2.0
"""Factor on the cycles of copies that do not stay in L2."""

# --- threads ----------------------------------------------------------------------------------------------------------

THREAD_START_CYCLES = 6000.0
"""Cycles to start and join another thread."""

# --- AMX matrix tiles -------------------------------------------------------------------------------------------------

AMX_CONFIGURE_CYCLES = 300.0
"""Cycles to configure the tile registers and to release them."""
AMX_TILE_CYCLES = 30.0
"""Cycles to begin and finish a register tile."""
AMX_STORE_CYCLES = 3.0
"""Cycles to store a vector."""
AMX_ROW_CYCLES = 0.5
"""Cycles to load a row of a matrix tile."""

# --- GPUs -------------------------------------------------------------------------------------------------------------

WARP_THREADS = 32
"""Threads of a warp on every NVIDIA GPU."""
GPU_VECTOR_BYTES = 16
"""Maximum bytes that one load or store of a thread moves."""
GPU_ASYNC_COPY_BYTES = (4, 8, 16)
"""Bytes that one `cp.async` copies."""
GPU_MEMORY_LATENCY_CYCLES = 800
"""Latency of global memory, at the upper end of what public microbenchmarks report."""
GPU_PENDING_BYTES_PER_THREAD = 16
"""Bytes of loads in flight per thread, if the thread only adds up loaded values."""
GPU_LAUNCH_SECONDS = 3e-6
"""Idle time between two kernels: from the last blocks of one until the next fills the processors. An estimate."""
GPU_MAX_GRID = (1 << 31) - 1
"""Maximum blocks of a kernel along x."""
