"""Numbers of processors that cost models use: cycles, bytes, and the sizes of hardware structures.

Facts that differ between processors, such as caches and rates, are attributes of `target.CpuTarget` and
`target.GpuTarget`. The numbers here hold for all of them. Sizes of structures come from the vendors' manuals. Cycles
are fitted by hand to interleaved timings of `benchmarks.structured`, `benchmarks.contractions` and
`benchmarks.random_contractions` on AMD Zen 4 and on Intel Sapphire Rapids; those that name a mesh, only on the latter.
Limits of decisions are in `thresholds`.
"""

from __future__ import annotations

# --- structures -------------------------------------------------------------------------------------------------------

CACHE_LINE_BYTES = 64
"""A line of every cache."""
PAGE_BYTES = 4096
"""A page of memory without huge pages, at whose end hardware prefetching stops."""
TLB_PAGES = 2048
"""Pages in the second-level TLB, at least: Sapphire Rapids has 2048, Zen 4 3072."""
L1_SETS = 64
"""Sets of the first cache. Lines a multiple of this many lines apart compete for one set."""
L1_WAYS = 8
"""Lines of a set, at least: Zen 4 has 8, Sapphire Rapids 12."""
L1_EVICTED_LINE_CYCLES = 2.0
"""Per step of a sum, for each line of scalars too many for its sets of L1, times their excess: measured on Zen 4."""
PREFETCH_STREAMS = 48
"""Streams of memory that the hardware follows. A copy that transposes more rows at once restarts them in each block."""
SHUFFLE_BYTES = 16
"""Shuffles work on pieces of this many bytes. Only whole pieces move across them."""
MESH_L2_USABLE_FRACTION = 0.95
"""Usable part of L2 for reused data if the last cache is a mesh, where L2 is large; else `target.USABLE_FRACTION`."""

# --- arithmetic -------------------------------------------------------------------------------------------------------

FMA_LATENCY_CYCLES = 4.0
"""Until the result of a multiply-add can be added to."""
ISSUE_PER_CYCLE = 3.0
"""Multiply-adds and loads that start; instructions with a memory operand, such as indexed addresses, are both."""
REGISTER_TILE_CYCLES = 24.0
"""To start and finish a register tile, beyond its loads and stores."""
TRANSPOSED_TILE_CYCLES = 30.0
"""To start and finish storing a register tile transposed."""
TRANSPOSED_ELEMENT_CYCLES = 0.4
"""For each element of a register tile that is stored transposed."""
DOT_PRODUCT_CYCLES = 10.0
"""To add up the lanes of a vector once, at the end of a register tile whose lanes run along the sum."""
LANE_SUM_CYCLES = 12.0
"""To add up and store the lanes of one result in a loop of its own."""
GATHERED_ELEMENT_CYCLES = 0.7
"""Per element of a vector that is assembled from distant elements."""

# --- loads from caches and memory -------------------------------------------------------------------------------------

TRANSFER_CYCLES_PER_BYTE = (1 / 64, 1 / 14, 1 / 6)
"""Into L1, L2 and L3, each from the next cache or from memory."""
MESH_CYCLES_PER_BYTE = 1 / 5
"""From a last cache on a mesh."""
EXPOSED_TRANSFER_FRACTION = 0.4
"""Part of the time of transfers that multiply-adds do not hide."""
EXPOSED_STREAM_FRACTION = 0.2
"""The same if both factors are read in runs along the sum, which are prefetched."""
L2_LINE_CYCLES = 2.0
"""Until a line arrives from L2, if many are requested."""
L2_STRIDED_BYTES_PER_CYCLE = 14.0
"""That L2 delivers of rows of a line or a few, far apart: measured on Zen 3."""
L2_PANEL_VECTOR_CYCLES = 0.1
"""Per vector of a panel, because it comes from L2."""
L2_SPLIT_VECTOR_CYCLES = 1.0
"""Per step of a sum, for each vector after the third that crosses lines of L2."""
L2_SCATTERED_LINE_CYCLES = 1.5
"""That a register tile waits for a line from L2 in runs of less than `L2_SCATTERED_RUN_BYTES`."""
L2_SCATTERED_RUN_BYTES = 256
"""A run from which on the lines of L2 are prefetched into L1."""
SPLIT_VECTOR_CYCLES = 0.5
"""Per vector that begins anywhere in a cache line, as windows over an image do, and so ends in the next one."""
TLB_MISS_CYCLES = 45.0
"""Per page that is not in the TLB."""
MESH_ROW_CYCLES = 0.5
"""Per step of a sum and row of a register tile that is read from a mesh cache."""
MESH_QUEUE_CYCLES = 0.1
"""Per step and vector of an L2 panel, times the number of vectors, because they queue behind rows from a mesh cache."""
MESH_L2_ROW_FACTOR = 0.5
"""Factor of both if the rows come from L2."""
MESH_IN_PLACE_VECTOR_CYCLES = 0.4
"""Per step and vector after the fourth of rows that are read in place from a mesh cache."""
MESH_RUN_CYCLES = 35.0
"""Until the first line of a run arrives from beyond a mesh cache, for a copy."""
MESH_STALL_CYCLES = 200.0
"""The same for multiply-adds that wait for it."""
MESH_PREFETCHED_RUN_BYTES = 1024
"""A run from which on prefetching hides both."""
MESH_FETCH_COLUMNS = 320
"""Columns of rows from a mesh cache: longer pieces of them do not arrive faster."""

# --- stores -----------------------------------------------------------------------------------------------------------

OTHER_LINE_STORE_CYCLES = 2.0
"""To store to another cache line than the store before."""
SHARED_LINE_CYCLES = 8.0
"""Per line that two register tiles write parts of, if the output is large."""
PARTIAL_LINE_FETCH_CYCLES = 20.0
"""Per line that is fetched from memory only because a register tile writes a part of it."""
NONTEMPORAL_RUN_CYCLES = 17.0
"""Per run of memory that is stored past the caches."""
HIDDEN_STORE_CYCLES = 60.0
"""Of multiply-adds for each line of the output, which hide its store to a mesh cache."""
OPEN_PAGES = 64
"""Pages that stores alternate between without waiting for memory."""

# --- copies: cycles per element of 4 bytes, and for a copy ------------------------------------------------------------

RUN_COPY_CYCLES = 0.6
"""By vectors."""
TRANSPOSE_COPY_CYCLES = 1.2
"""In blocks that are transposed in registers."""
ELEMENT_COPY_CYCLES = 2.5
"""One by one."""
COPY_START_CYCLES = 1000.0
"""To start a copy of a whole tensor, on the scale of `REORDER_RUN_CYCLES`."""
REORDER_RUN_CYCLES = 1.0
"""By vectors, on the scale of whole contractions: the machine takes 0.6 of these cycles, and as much of the cycles of
multiply-adds that they are compared with.
"""
REORDER_TRANSPOSE_CYCLES = 1.3
"""The same, transposed."""
REORDER_SHORT_TRANSPOSE_CYCLES = 2.0
"""The same, transposed with runs shorter than a few lanes."""
FAR_COPY_FACTOR = 2.0
"""Of copies that do not stay in L2."""

# --- threads ----------------------------------------------------------------------------------------------------------

THREAD_START_CYCLES = 6000.0
"""To start and join another thread."""

# --- AMX matrix tiles -------------------------------------------------------------------------------------------------

AMX_CONFIGURE_CYCLES = 300.0
"""To get the tile registers and to give them back."""
AMX_TILE_CYCLES = 30.0
"""To begin and finish a register tile."""
AMX_STORE_CYCLES = 3.0
"""To store a vector."""
AMX_ROW_CYCLES = 0.5
"""To load a row of a matrix tile."""

# --- GPUs -------------------------------------------------------------------------------------------------------------

WARP_THREADS = 32
"""Threads of a warp on every NVIDIA GPU."""
GPU_VECTOR_BYTES = 16
"""Most bytes of a load or store of one thread."""
GPU_ASYNC_COPY_BYTES = (4, 8, 16)
"""Bytes that one `cp.async` copies."""
GPU_MEMORY_LATENCY_CYCLES = 800
"""Until data arrive from memory, at the upper end of what public microbenchmarks report."""
GPU_PENDING_BYTES_PER_THREAD = 16
"""Loads in flight of a thread that only sums them."""
GPU_LAUNCH_SECONDS = 3e-6
"""From the last blocks of a kernel, which leave processors idle, to when the next kernel fills them. An estimate."""
GPU_MAX_GRID = (1 << 31) - 1
"""Most blocks of a kernel along x."""
