"""Thresholds of the CPU and GPU heuristics: the sizes from which on a transformation pays.

The values for CPUs were chosen by interleaved runs of the benchmarks of the operators concerned (`benchmarks.kernels`,
`structured`, `contractions`, `random_contractions`, `sparse`) on AMD Zen 4 and Intel Sapphire Rapids; those for GPUs by
the time model and the reports of NVRTC, without a device. Hardware constants are in `machine`. Limits that protect
correctness or the compiler's own time and memory stay beside the code that needs them.
"""

from __future__ import annotations

# --- threads ----------------------------------------------------------------------------------------------------------

THREAD_FMAS = 1 << 18
"""Minimum multiply-adds of a contraction per thread."""
SHARED_FMAS = 1 << 19
"""Minimum multiply-adds of an unfused contraction that several threads share."""
ALWAYS_SHARED_FMAS = 4 * THREAD_FMAS
"""Minimum multiply-adds for which threads always pay. Below, the cost model decides."""
TWO_THREADS_GAIN = 0.85
"""Maximum cycles of two threads, relative to one, for which two run: the second processor may be busy."""
DEPTHWISE_THREAD_FMAS = 1 << 16
"""Minimum multiply-adds of a depthwise convolution per thread: fewer than for a product, as memory slows them down."""
AMX_THREAD_PAIRS = 1 << 22
"""Minimum products of bfloat16 pairs per thread."""
COPY_THREAD_ELEMENTS = 1 << 15
"""Minimum elements per thread when threads share a copy."""
BALANCED_CHUNKS = 16
"""Minimum iterations that a parallel loop should have, so that threads finish together."""
FEW_CHUNKS = 4
"""The same if more chunks would cost reuse, because operands are transposed or rows stay in L2 for all chunks."""
ENOUGH_PARALLELISM = 32
"""Independent iterations that keep the threads of a usual machine busy; fusion does not leave fewer."""
SERIAL_CHAIN_BATCHES = 4
"""Minimum batches of a chain of products to share among threads if each batch runs its tiles serially."""
ENOUGH_MEMORY_BOUND_ITERATIONS = 32
"""The same as `ENOUGH_PARALLELISM`, for a reduction or a copy that is not fused."""

# --- register tiles of contractions -----------------------------------------------------------------------------------

MAX_TILE_VECTORS = 8
"""Maximum vectors along the lanes of a register tile."""
TILE_ROW_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28)
"""Numbers of rows of a register tile that are tried."""
CONVOLUTION_TILE_ROWS = (4, 6, 8, 12, 14)
"""Numbers of output positions in a register tile of a convolution that a search tries."""
CONVOLUTION_TILE_VECTORS = (1, 2, 3)
"""Numbers of vectors in such a tile."""
MUCH_LARGER_FACTOR = 16
"""Minimum size of one factor, relative to the other, for its memory to decide the order of the sums."""
MAX_ACCUMULATOR_MULTIPLE = 4
"""Maximum accumulators of a register tile, in multiples of the machine's vector registers."""
MIN_LANES = 4
"""Minimum lanes of a vector."""
MAX_LANE_SUM_BITS = 512
"""Maximum bits of the terms of a sum along the lanes that form one vector."""
NEARLY_BEST_TILE = 1.15
"""Maximum cycles of a register tile, relative to the best one, that still count as good."""
COMPARED_TILES = 6
"""Number of register tiles whose plans are compared."""
OFFERED_TILES = 4
"""Number of register tiles that heuristics offer a search as alternatives."""
PRICED_TILES = 3
"""Number of register tiles whose plans are priced as alternatives in reports."""
BETTER_TILE = 0.97
"""A later register tile is better if it takes less than this share of the cycles of those before."""
BETTER_TILE_IN_L2 = 0.9
"""The same if all data is in L2, where loop order and copies matter less than the model predicts."""
SHORT_SUM_TERMS = 32
"""Maximum terms of a sum that takes no longer to compute than to write beyond L2."""
SHORT_SUM_FACTOR = 2.0
"""Maximum cycles of multiply-adds, relative to the best, of the other vector counts that short sums try."""
SHORT_LANE_RUN = 48
"""Extent of the lanes below which tiles that continue past the end of a contiguous run of the output are tried."""
UNROLLED_REDUCTION = 4
"""Maximum iterations of an innermost reduction that is unrolled completely."""
MAX_UNROLLED_STEPS = 8
"""Maximum steps of a sum per iteration: more gain little and take long to compile."""
MAX_UNROLLED_PANEL_STEPS = 4
"""The same if panels are packed."""
MANY_STEPS = 64
"""Minimum steps of a sum for which several steps per iteration pay."""
ADDED_SUM_STEPS = 16
"""Minimum steps of a block of a sum that pay for loading and storing the register tile's sums in between."""

# --- packing ----------------------------------------------------------------------------------------------------------

PACKED_USES = 96
"""Uses of an element that pay for copying it once."""
PACKED_TRANSPOSED_USES = 192
"""The same if the copy is transposed."""
CONVERTED_SCALARS_PANELS = 2
"""Panels along the lanes from which scalars that are converted, such as bfloat16, come from a panel."""
PACKED_SCALARS_PANELS = 4
"""Minimum number of panels of the vector operand for which the broadcast operand may be packed, too."""
OWN_PACKED_USES = 24
"""The same for a panel that each thread packs once for all of its rows."""
OWN_PACKED_TRANSPOSED_USES = 48
"""The same, transposed."""
REPACKED_USES = 512
"""The same if this factor is packed again for every block of the other one."""
AMX_PACKED_ROWS = 512
"""Minimum rows that pay for packing the column operand once more for AMX."""
PACKED_BLOCK_STEPS = 768
"""Maximum steps of a sum in a packed block that many panels use."""
MIN_L1_BLOCK_STEPS = 64
"""Minimum steps of a sum in a block for L1. Of 64 to 512, 64 were fastest (Zen 3); fewer were not tried."""
L1_BLOCK_ROW_TILES = 4
"""Minimum rows of register tiles that use a block of the vector operand in L1. Not measured: few uses save little."""
PANELS_IN_L2 = 4
"""Number of panels that half of L2 should hold."""
IN_PLACE_ROW_BYTES = 1024
"""Minimum bytes of a row that is read in place; shorter rows are packed."""
MAX_USES_IN_PLACE = 256
"""Maximum uses of an element for which rows are read in place at any stride, if they can be prefetched in time."""
IN_PLACE_STRIDE_BYTES = 1024
"""Row stride below which all rows are read in place."""
PACKED_STRIDE_BYTES = 1024
"""Minimum stride of rows that are packed, for data beyond L2."""
PACKED_STRIDE_BYTES_IN_L2 = 2048
"""The same for data in L2."""
PREFETCHED_ROW_SETS = 16
"""Minimum number of L1 sets that rows must spread over to be prefetched in time, unless L1 has room for all rows."""
SHORT_RUN_BYTES = 1536
"""Contiguous bytes below which hardware prefetching does not start."""
MAX_WORKSPACE_BYTES = 1 << 30
"""Maximum bytes of copies of whole operands."""

# --- transposition in registers ---------------------------------------------------------------------------------------

TRANSPOSE_BITS = 256
"""Bits of the vectors that are transposed in registers: square blocks of them fit any register file. They take fewer
shuffles than the widest vectors, and fewer operations on processors that split wide operations in two.
"""
MAX_TRANSPOSE_SIDE = 16
"""Maximum lanes of a square block; a larger one does not fit the register file."""
TRANSPOSE_RUN = 256
"""Elements along a line that are transposed before the next lines start."""
SHORT_TRANSPOSED_LINE = 16
"""Elements of a line below which the lines that follow it in memory are transposed with it."""
LOOPED_ROW_VECTORS = 16
"""Minimum vectors of a row that are copied in a loop instead of unrolled."""
MAX_INTERLEAVED_STRIDE = 4
"""Largest stride of elements that shuffles pick from whole vectors; others are transposed or gathered."""
TRANSPOSED_OPERAND_USES = 1024
"""Uses that pay for transposing operands of register tiles."""
TRANSPOSED_STORE_STEPS = 128
"""Steps of a sum that pay for transposed stores."""
SHORT_OUTPUT_RUN = 128
"""Elements of a contiguous run of the output below which lanes across runs may be better."""
SHORT_STRIDED_RUN = 512
"""The same if the factor is not contiguous along the run and so is transposed, for sums in one block."""

# --- stores -----------------------------------------------------------------------------------------------------------

SHARED_LINE_OUTPUT_BYTES = 1 << 20
"""Bytes of an output above which lines that two register tiles share cost `machine.SHARED_LINE_CYCLES`."""
NONTEMPORAL_RUN_BYTES = 256
"""Minimum contiguous bytes of output that are stored past a mesh cache though they begin or end inside a line."""
NONTEMPORAL_OUTPUT_FACTOR = 1.5
"""Size of results, in L2 sizes, above which they are written with non-temporal stores even if they are read soon."""

# --- depthwise convolutions -------------------------------------------------------------------------------------------

MAX_DEPTHWISE_TAPS = 7
"""Maximum steps of a window that are unrolled."""
MAX_DEPTHWISE_FMAS = 512
"""Maximum multiply-adds of the unrolled code."""

# --- reordered contractions and lanes along sums ----------------------------------------------------------------------

REORDERED_SHORT_RUN = 8
"""Minimum elements of a run for which square blocks of elements are full."""
MAX_REORDERED_L2_SIZES = 16
"""Largest working set of a contraction to reorder, in sizes of L2. Beyond it, the copies go to memory and back, and
plans that pack are better.
"""
MAX_COPIED_L2_SIZES = 4
"""Largest copied tensor, in sizes of L2."""
REORDER_GAIN = 0.9
"""Maximum modeled cycles of a reordered contraction, relative to the original one."""
REORDERINGS_PLANNED = 2
"""How many orders are planned in full: the best by a quick estimate."""
LANE_SUM_TERMS = 64
"""Minimum contiguous terms of a sum for lanes along it, where register tiles have too few rows."""
MIN_REORDERED_SIDE = 2
"""Minimum rows, columns and terms of a contraction to reorder."""
MIN_LANE_SUM_TERMS = 8
"""Minimum terms of a sum with lanes along it."""
MIN_FILLED_LANES = 0.7
"""Minimum fraction of the lanes that such a sum fills."""

# --- split sums -------------------------------------------------------------------------------------------------------

FEW_RESULTS = 16
"""Number of results below which threads are idle unless the sum is split."""
FACTOR_PAIRS_GAIN = 2.0
"""Minimum reduction in multiplications for which a product of several factors is computed two factors at a time."""
MIN_PAIRED_PRODUCTS = 1 << 14
"""Multiplications of the unsplit product below which that does not pay: each step is a loop nest of its own."""
STORED_ELEMENT_PRODUCTS = 4
"""Multiplications that take as long as storing an element of a step and loading it again."""
SPLIT_SUM_TERMS = 1 << 17
"""Minimum terms of all results for which a sum is split: fewer are summed before another thread wakes."""
SUM_PARTS = 64
"""Number of parts of such a sum."""
MIN_PART_TERMS = 16
"""Minimum terms of a part if the options ask for parts."""
COLUMN_SUM_ELEMENTS = 1 << 21
"""Minimum elements of a matrix whose column sums are split by rows among threads: no cache holds it."""
COLUMN_SUM_MESH_FACTOR = 2
"""Bytes of such a matrix with a mesh cache, in sizes of the private caches, if that is fewer."""
COLUMN_SUM_PARTS = 8
"""Number of parts of a split column sum."""
MIN_COLUMN_SUM_ROWS = 16
"""Minimum rows of a part of a column sum."""
MIN_PRODUCT_PART_TERMS = 2048
"""Minimum terms of a part of a matrix product: storing and adding a part costs as much as a few dozen terms."""
MIN_PRODUCT_PARTS = 4
"""Minimum parts of a matrix product that keep the threads busy."""
MAX_PRODUCT_PARTS = 16
"""Maximum parts of a matrix product."""
MIN_PRODUCT_SIDE = 4
"""Minimum rows and columns of a matrix product whose sum is split."""

# --- fusion -----------------------------------------------------------------------------------------------------------

MEMORY_READ_SHARE = 4
"""A tensor larger than the last-level cache divided by this comes from memory: other data uses the cache, too."""
SMALL_RESULT_FACTOR = 16
"""A result counts as small if its operands are larger by this factor."""
CONTRACTION_TILE_ROWS = 64
"""Rows that a register-tiled contraction inside a fused group handles at a time."""
CHAIN_TILE_ROWS = (64, 48, 32, 16)
"""Numbers of rows of a tile of a chain of contractions. The first that leaves enough tiles is used."""
MANY_CHAIN_TILE_ROWS = 128
"""Number of rows that is preferred to these if it leaves enough tiles."""
MAX_WHOLE_CHAIN_ROWS = 96
"""Maximum rows that one tile covers entirely."""
CHAIN_L2_SHARE = 2
"""Temporaries of a tile take at most L2 divided by this."""

# --- loop nests -------------------------------------------------------------------------------------------------------

MAX_ROW_CHUNK = 4096
"""Maximum elements of a row per iteration: enough to amortize the loop around it, while temporaries stay in L1."""
COLUMN_CHUNK_VECTORS = 16
"""Vectors per iteration of a column sum."""
MIN_COLUMN_CHUNKS = 8
"""Minimum iterations of a column sum; if there would be fewer, each takes fewer vectors."""
HEAVY_SHARE = 16
"""A nest with less than a group's work divided by this does not influence the group's tiles."""
LONG_TRANSPOSED_TILES = ((32, 512), (16, 512), (16, 256), (16, 128))
"""Tiles of a transposition, (along the unit strides, along the lanes): few but long runs to write at a time. Shorter
ones are used if there would be too few tiles to share.
"""
TRANSPOSED_TILE = (64, 64)
"""The same if several nests use the tile."""
STAGED_TILES = ((512, 128), (128, 512), (256, 128), (128, 128))
"""Tiles that are staged in L2 before non-temporal stores: long runs to read at a time."""
STAGED_ROW_TILES = ((512, 128), (256, 256), (128, 512), (64, 512), (32, 512))
"""The same for short rows of the output, which are written whole: a line that is split goes to memory twice."""
UNSHARED_TRANSPOSE_ELEMENTS = 16384
"""Elements of a transposition below which threads do not share it, since all of them stay in the inner caches."""
CONCURRENT_SUM_ROWS = (4, 2)
"""Numbers of rows that are summed at once if they come from memory: several streams in different pages are faster than
one.
"""
MAX_PERMUTED_ROWS = 16
"""Maximum rows of the tile of a permutation in each dimension other than the lanes."""
MAX_PERMUTED_ELEMENTS = 16384
"""Maximum elements of such a tile."""
REDUCTION_VECTORS = 4
"""Vectors in flight at once in the loop of a reduction: enough to hide the latency of an addition."""
POINTWISE_VECTORS = 2
"""The same without a reduction."""
COLUMN_SUM_VECTORS = 4
"""The same for a column sum."""
LONG_COLUMN_SUM_VECTORS = 16
"""The same for a column sum with long rows."""
WHOLE_RUN_VECTORS = 64
"""Minimum vectors of a part of a row that a column sum reads from end to end."""
COLUMN_SUM_ROWS = 8
"""Rows that a column sum adds before it continues along them. Each is a stream from memory."""
STAGE_ROWS = 32
"""Rows of a buffer for transposed reads."""
STAGE_ROW_BYTES = 512
"""Bytes of a row of this buffer, which takes half of a usual L1."""
STAGE_PREFETCH_LINES = 16
"""How many lines ahead reads into this buffer are prefetched if L2 does not hold them."""
MAX_NONTEMPORAL_STAGE = 512
"""Maximum rows and maximum lanes of a buffer that is written out with non-temporal stores."""
REDUCTION_ACCUMULATORS = (4, 8, 2, 1)
"""Vectors of partial sums in the schedule of an unfused reduction, in order of preference."""
TRANSPOSE_BLOCKS = ((32, 512), (64, 64), (16, 128), (16, 256), (128, 32))
"""Tiles of an unfused transposition that a search tries: (runs that are written, runs that are read)."""
TRANSPOSE_STAGE = (512, 128)
"""The tile of an unfused transposition through a buffer: (runs that are read, runs that are written)."""

# --- gathers and subscripts -------------------------------------------------------------------------------------------

MIN_PREFETCHED_ROW_BYTES = 32
"""Minimum bytes of a row of a table that is prefetched."""
MAX_PREFETCHED_ROW_BYTES = 4096
"""Maximum bytes of a row that is prefetched: the hardware prefetches longer rows by itself."""
GATHER_PREFETCH_BYTES = 4096
"""Prefetch distance: the latency of memory at the speed of a sum of rows. Half or twice as much is as good."""
MAX_GATHER_PREFETCH_ROWS = 32
"""Maximum rows of the prefetch distance."""
FEW_SUBSCRIPTS = 64
"""Maximum subscripts that are checked one by one."""
CHECKED_VECTORS = 4
"""Vectors of subscripts that one iteration checks."""
SUBSCRIPTS_PER_OPERATION = 4
"""Subscripts that are checked in the time of a scalar operation."""
MAX_CHECK_CHUNKS = 64
"""Maximum chunks of subscripts, so that their results fit a cache line."""

# --- sparse operands --------------------------------------------------------------------------------------------------

MAX_FIXED_EXTENT = 512
"""Largest extent that is constant in a kernel, of an index that no sparse tensor has: it decides the register tile."""
SPARSE_CHUNK_ITERATIONS = 64
"""Iterations in a chunk of a loop if their work is unknown."""
MAX_SPARSE_CHUNKS = 1_024
"""Maximum chunks of a loop over stored elements."""
CHUNK_END_SEARCH_PART = 8
"""The end of a chunk is first searched within the chunk's average iterations divided by this, around a guess."""
ROW_CHUNK_MULTIPLE = 4
"""Factor on the size of chunks that each allocate and clear a row."""
ADDED_PRODUCTS = 4
"""Products per iteration of the innermost loop that adds to a row."""
APPENDED_ELEMENTS = 4
"""Elements that are appended at once."""
MAX_ARRAY_ROW = 2**21
"""Maximum coordinates of a row of a sparse result that is combined in an array, of 9 bytes for each coordinate."""
REFILLED_PRODUCTS = 4
"""Products per iteration of the innermost loop that refills a row: they add to different elements, so none waits."""
JAMMED_ELEMENTS = 4
"""Stored elements whose sums over dense rows are computed at once, so that rows that they share are loaded once."""
FILL_THREAD_ELEMENTS = 32_768
"""Minimum elements of a dense result that a thread fills."""
PREFETCHED_ROWS_AHEAD = 4
"""How many iterations of a loop over rows ahead the operands of a row are prefetched."""
MAX_PREFETCHED_ROW_LINES = 16
"""Maximum cache lines of a row that are prefetched; the hardware prefetches the rest of a longer one by itself."""
COMPARED_COORDINATES = 4
"""Coordinates that are compared at once if two operands store the same ones."""
STAGED_PART_CHUNKS = 32
"""Maximum chunks of rows that a thread writes in a round. The staging buffer of a round should fit the last cache."""
STAGED_ROUND_CHUNKS = 256
"""Maximum chunks of a round, which limits the memory for staging to 50 MB for 12 bytes an element."""
UNKNOWN_LOOP_ITERATIONS = 10_000.0
"""Iterations assumed for a loop whose extent is known only at run time."""
COMPRESSED_FANOUT, ROOT_FANOUT = 10.0, 1_000.0
"""Coordinates assumed below a parent of a compressed level, and below the root."""
CONVERSION_COST = 30.0 * 100_000
"""Cost of converting an operand: 30 for each of the elements assumed."""
SORTED_ELEMENT_COST = 30.0
"""Cost of an element of a result that is not appended in order."""

# --- GPUs -------------------------------------------------------------------------------------------------------------

GPU_BLOCK_THREADS = 256
"""Default number of threads of a block."""
GPU_SERIAL_TERMS = 16
"""Maximum terms that one thread sums alone, however few threads are busy."""
GPU_WARP_ROW = 1024
"""Maximum elements of a row that one warp reduces, if there are enough rows."""
GPU_REREAD_BYTES = 16 << 20
"""Maximum bytes that blocks may read again from L2 to save a kernel."""
GPU_LIGHT_BLOCK_ELEMENTS = 1 << 14
"""Maximum elements per block for which fusion may leave fewer blocks, instead of a second kernel with more blocks."""
GPU_MIN_TILE_TERMS = 4
"""Minimum terms of a tile of a contraction."""
GPU_CONTRACTION_TILES = ((128, 16), (64, 16), (32, 32), (16, 32))
"""Tiles of a contraction: (side, terms)."""
GPU_BLOCK_SIDE = 16
"""Threads along a side of such a tile."""
GPU_NEIGHBOR_TERMS = 4
"""Adjacent terms of a reduction that a thread with elements in registers reads together."""
GPU_MAX_INNER_ELEMENTS = 256
"""Maximum elements that one thread may have in flight in registers."""
GPU_MAX_ELEMENT_REGISTERS = 160
"""Maximum registers of a thread that hold elements."""
GPU_RESIDENCY_REGISTERS = 128
"""Registers per thread above which a multiprocessor holds less than a quarter of its most resident threads."""
GPU_UNROLLED_COPY_TRIPS = 16
"""Maximum iterations of a copy's loop that `unroll_copy_shared` unrolls, so that as many loads are in flight."""
GPU_MAX_DUPLICATED_STATEMENTS = 400
"""Maximum statements of a body that is duplicated, with and without guards."""
GPU_CHECK_THREADS = 256
"""Threads of a block that checks subscripts."""
GPU_MAX_CHECK_BLOCKS = 4096
"""Maximum blocks that check subscripts."""
GPU_SPLIT_GAIN = 3 / 4
"""Maximum time of a split sum, relative to the unsplit one: estimates are rough, and two kernels cost more than one."""
GPU_SPLIT_TIE = 1.01
"""Among numbers of parts whose times differ by less than this factor, the one with the most blocks is used."""
GPU_MIN_PART_TERMS = 128
"""Minimum terms of a part: as many as a small tile waits for at once."""
GPU_PART_ALIGNMENT = 4
"""Parts start at multiples of this many terms if possible, so that contiguous operands are loaded in vectors."""
GPU_MAX_SPLIT_BLOCKS_PER_SM = 2
"""Maximum blocks per multiprocessor in the numbers of parts that are tried: while one block waits, the other runs."""
GPU_SPARSE_BLOCK_THREADS = 128
"""Threads per block of sparse kernels: few, so that rows of different lengths leave few threads idle."""
