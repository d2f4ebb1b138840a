"""Limits of the CPU's and the GPU's heuristics: from which size on a transformation pays.

The values for CPUs were chosen by interleaved runs of the benchmarks of the operators concerned (`benchmarks.kernels`,
`structured`, `contractions`, `random_contractions`, `sparse`) on AMD Zen 4 and Intel Sapphire Rapids; those for GPUs by
the time model and the reports of NVRTC, without a device. Numbers of the hardware are in `machine`. Limits of
correctness and of the compiler's own time and memory stay beside the code that needs them.
"""

from __future__ import annotations

# --- threads ----------------------------------------------------------------------------------------------------------

THREAD_FMAS = 1 << 18
"""Multiply-adds of a contraction worth a thread."""
SHARED_FMAS = 1 << 19
"""Multiply-adds of a contraction alone that several threads share."""
ALWAYS_SHARED_FMAS = 4 * THREAD_FMAS
"""Multiply-adds from which on threads always pay; below, the model compares."""
TWO_THREADS_GAIN = 0.85
"""Most cycles of two threads relative to one, for which two run: the load on the second processor is unknown."""
DEPTHWISE_THREAD_FMAS = 1 << 16
"""Multiply-adds of a depthwise convolution worth a thread: fewer than of a product, because memory slows them down."""
AMX_THREAD_PAIRS = 1 << 22
"""Products of bfloat16 pairs worth a thread."""
COPY_THREAD_ELEMENTS = 1 << 15
"""Elements that a thread copies at least when threads share a copy."""
BALANCED_CHUNKS = 16
"""Iterations that a parallel loop should have at least, so that threads finish together."""
FEW_CHUNKS = 4
"""The same where more chunks would cost reuse: operands are transposed or rows stay in L2 for all chunks."""
ENOUGH_PARALLELISM = 32
"""Independent iterations that feed the threads of a usual machine; fusion does not leave fewer."""
SERIAL_CHAIN_BATCHES = 4
"""Batches of a chain of products that are left to share if the tiles of each run one after another."""
ENOUGH_MEMORY_BOUND_ITERATIONS = 32
"""The same for a reduction or a copy alone."""

# --- register tiles of contractions -----------------------------------------------------------------------------------

MAX_TILE_VECTORS = 8
"""Vectors along the lanes of a register tile."""
TILE_ROW_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28)
"""Rows of register tiles that are tried."""
CONVOLUTION_TILE_ROWS = (4, 6, 8, 12, 14)
"""Output positions in a register tile of a convolution that a search offers."""
CONVOLUTION_TILE_VECTORS = (1, 2, 3)
"""Vectors in it."""
MUCH_LARGER_FACTOR = 16
"""Size of one factor, relative to the other, from which on its memory decides the order of the sums."""
MAX_ACCUMULATOR_MULTIPLE = 4
"""Accumulators that a register tile may have, in multiples of the machine's vector registers."""
MIN_LANES = 4
"""Lanes that a vector has at least."""
MAX_LANE_SUM_BITS = 512
"""Bits of the lanes of a sum that are one vector."""
NEARLY_BEST_TILE = 1.15
"""Cycles of a register tile, relative to the best one, that still count as good."""
COMPARED_TILES = 6
"""Register tiles whose plans are compared."""
OFFERED_TILES = 4
"""Register tiles that heuristics offer a search as alternatives."""
PRICED_TILES = 3
"""Register tiles around which rival plans are priced for reports."""
BETTER_TILE = 0.97
"""A later register tile is better if it takes less than this share of the cycles of those before."""
BETTER_TILE_IN_L2 = 0.9
"""The same if all data is in L2, where order and copies change less than predicted."""
SHORT_SUM_TERMS = 32
"""Terms of sums that take no longer than to write them beyond L2."""
SHORT_SUM_FACTOR = 2.0
"""Cycles of multiply-adds along the lanes, relative to the best, up to which short sums try other vectors."""
SHORT_LANE_RUN = 48
"""Points along the lanes below which tiles that continue beyond the output's runs are tried."""
UNROLLED_REDUCTION = 4
"""Innermost reductions up to this long are unrolled completely."""
MAX_UNROLLED_STEPS = 8
"""Steps of a sum per iteration: more gain little and take long to compile."""
MAX_UNROLLED_PANEL_STEPS = 4
"""The same beside packed panels."""
MANY_STEPS = 64
"""Steps of a sum from which on several per iteration pay."""
ADDED_SUM_STEPS = 16
"""Steps of a sum for which it pays to load and store the sums of a register tile."""

# --- packing ----------------------------------------------------------------------------------------------------------

PACKED_USES = 96
"""Uses of an element that pay for each of its copies."""
PACKED_TRANSPOSED_USES = 192
"""The same if the copy is transposed."""
PACKED_SCALARS_PANELS = 4
"""Panels of the other factor that a row of scalars meets, from which on it may be copied, too."""
OWN_PACKED_USES = 24
"""Uses for a panel that every thread makes once for all of its rows."""
OWN_PACKED_TRANSPOSED_USES = 48
"""The same, transposed."""
REPACKED_USES = 512
"""Uses if every block of the other factor packs all of this one again."""
AMX_PACKED_ROWS = 512
"""Rows that pay for packing the columns' factor once more for AMX."""
PACKED_BLOCK_STEPS = 768
"""Steps of a sum in a packed block that many panels use."""
PANELS_IN_L2 = 4
"""Panels that half of L2 should hold."""
IN_PLACE_ROW_BYTES = 1024
"""Length of a row from which on it is read in place; shorter ones are packed."""
MAX_USES_IN_PLACE = 256
"""Uses of an element up to which rows are read in place, however far apart, if they can be prefetched in time."""
IN_PLACE_STRIDE_BYTES = 1024
"""Bytes between rows below which all are read in place."""
PACKED_STRIDE_BYTES = 1024
"""Least stride of rows that are packed, of data beyond L2."""
PACKED_STRIDE_BYTES_IN_L2 = 2048
"""The same of data in L2."""
PREFETCHED_ROW_SETS = 16
"""Sets of L1 that rows have to fall into to be prefetched in time, unless it has room for all of them."""
SHORT_RUN_BYTES = 1536
"""Contiguous memory below which hardware prefetching does not get going."""
MAX_WORKSPACE_BYTES = 1 << 30
"""Copies of whole operands."""

# --- transposition in registers ---------------------------------------------------------------------------------------

TRANSPOSE_BITS = 256
"""Vectors that are transposed in registers: square blocks of them fit any register file. They take fewer shuffles than
the widest ones, and fewer operations on processors that cut wide operations in two.
"""
MAX_TRANSPOSE_SIDE = 16
"""Lanes beyond which a square block needs more registers than there are."""
TRANSPOSE_RUN = 256
"""Elements of a line that are transposed before the next lines' turn."""
SHORT_TRANSPOSED_LINE = 16
"""Elements of a line below which the lines after it in memory are transposed with it."""
LOOPED_ROW_VECTORS = 16
"""Vectors of a row from which on they are copied in a loop."""
MAX_INTERLEAVED_STRIDE = 4
"""Largest stride of elements that are gathered from whole vectors by shuffles; others are transposed or gathered."""
TRANSPOSED_OPERAND_USES = 1024
"""Uses that pay for transposing operands of register tiles."""
TRANSPOSED_STORE_STEPS = 128
"""Steps of a sum that pay for transposed stores."""
SHORT_OUTPUT_RUN = 128
"""Points of a contiguous run of the output below which lanes across such runs may be better."""
SHORT_STRIDED_RUN = 512
"""The same for a run along which its factor is not contiguous, and so is transposed, for sums in one block."""

# --- stores -----------------------------------------------------------------------------------------------------------

SHARED_LINE_OUTPUT_BYTES = 1 << 20
"""An output from which on lines that two register tiles share cost `machine.SHARED_LINE_CYCLES`."""
NONTEMPORAL_RUN_BYTES = 256
"""A run of the output that is stored past a mesh cache although it begins or ends in the middle of a line."""
NONTEMPORAL_OUTPUT_FACTOR = 1.5
"""Size of results, in L2 sizes, above which they are stored past the caches even if they are read soon."""

# --- depthwise convolutions -------------------------------------------------------------------------------------------

MAX_DEPTHWISE_TAPS = 7
"""Steps of a window that are unrolled."""
MAX_DEPTHWISE_FMAS = 512
"""Multiply-adds of the unrolled code."""

# --- reordered contractions and lanes along sums ----------------------------------------------------------------------

REORDERED_SHORT_RUN = 8
"""Elements of a run from which on square blocks of elements are full."""
MAX_REORDERED_L2_SIZES = 16
"""Largest working set of a contraction to reorder, in sizes of L2. Beyond it, plans that pack are better, whose copies
go to memory and back.
"""
MAX_COPIED_L2_SIZES = 4
"""The same of a copied tensor."""
REORDER_GAIN = 0.9
"""Most cycles of a reordered contraction relative to the original one, by the model."""
REORDERINGS_PLANNED = 2
"""Best orders by a quick estimate that are planned."""
LANE_SUM_TERMS = 64
"""Neighboring terms of a sum that fill vectors, where register tiles have too few rows."""
MIN_REORDERED_SIDE = 2
"""Rows, columns and terms that a contraction to reorder has at least."""
MIN_LANE_SUM_TERMS = 8
"""Terms of a sum whose lanes run along it."""
MIN_FILLED_LANES = 0.7
"""Part of the lanes of vectors that such sums fill."""

# --- long sums in parts -----------------------------------------------------------------------------------------------

FEW_RESULTS = 16
"""Results that leave threads idle if there are no more."""
FACTOR_PAIRS_GAIN = 2.0
"""Times as many multiplications in a sum of products of several factors from which on it is done in steps of two."""
MIN_PAIRED_PRODUCTS = 1 << 14
"""Multiplications at once below which steps of two do not pay: each is a loop nest of its own."""
STORED_ELEMENT_PRODUCTS = 4
"""Multiplications that take as long as storing an element of a step and loading it again."""
SPLIT_SUM_TERMS = 1 << 17
"""Terms in all from which on a sum is split: fewer are summed before another thread wakes."""
SUM_PARTS = 64
"""Parts of such a sum."""
MIN_PART_TERMS = 16
"""Terms of a part if parts are requested."""
COLUMN_SUM_BYTES = 1 << 21
"""A matrix whose columns are summed by threads with rows of their own, in the order of memory: no cache holds it."""
COLUMN_SUM_MESH_FACTOR = 2
"""The same beside a mesh cache, in sizes of the private caches."""
COLUMN_SUM_PARTS = 8
"""Parts of a sum of columns."""
MIN_COLUMN_SUM_ROWS = 16
"""Rows of a part, at least."""
MIN_PRODUCT_PART_TERMS = 2048
"""Terms of a part of a matrix product: storing a part and adding it up cost as much as a few dozen."""
MIN_PRODUCT_PARTS = 4
"""Parts of a matrix product that feed the threads."""
MAX_PRODUCT_PARTS = 16
"""Parts of a matrix product."""
MIN_PRODUCT_SIDE = 4
"""Rows and columns of a matrix product whose sum is split."""

# --- fusion -----------------------------------------------------------------------------------------------------------

MEMORY_READ_SHARE = 4
"""A tensor comes from memory from this part of the last cache on: other data uses the cache too."""
SMALL_RESULT_FACTOR = 16
"""A result counts as small if its operands are larger by this factor."""
CONTRACTION_TILE_ROWS = 64
"""Rows that a register-tiled contraction inside a fused group handles at a time."""
CHAIN_TILE_ROWS = (64, 48, 32, 16)
"""Rows of a tile of a chain of contractions: the first that leaves enough tiles."""
MANY_CHAIN_TILE_ROWS = 128
"""Preferred where it leaves enough tiles."""
MAX_WHOLE_CHAIN_ROWS = 96
"""Rows that a tile takes whole."""
CHAIN_L2_SHARE = 2
"""Temporaries of a tile take at most L2 divided by this."""

# --- loop nests -------------------------------------------------------------------------------------------------------

MAX_ROW_CHUNK = 4096
"""Elements of a row that one iteration takes: they amortize the loop around it, and temporaries stay in L1."""
COLUMN_CHUNK_VECTORS = 16
"""Vectors of an iteration of a sum of columns."""
MIN_COLUMN_CHUNKS = 8
"""Iterations that it leaves, else it takes fewer vectors."""
HEAVY_SHARE = 16
"""A nest with less than this fraction of a group's work does not influence its tiles."""
LONG_TRANSPOSED_TILES = ((32, 512), (16, 512), (16, 256), (16, 128))
"""Tiles of a transposition (along the unit strides, along the lanes): few runs to write at a time, but long ones;
shorter where there would be too few tiles to share.
"""
TRANSPOSED_TILE = (64, 64)
"""The same where several nests use the tile."""
STAGED_TILES = ((512, 128), (128, 512), (256, 128), (128, 128))
"""Tiles that go through a buffer in L2 on their way past the last cache: long runs to read at a time."""
STAGED_ROW_TILES = ((512, 128), (256, 256), (128, 512), (64, 512), (32, 512))
"""The same for short rows of the output, which are written whole: a line that is cut goes to memory twice."""
UNSHARED_TRANSPOSE_ELEMENTS = 16384
"""Elements of a transposition below which threads do not share it: all of them stay in the first caches."""
SUMMED_ROWS = (4, 2)
"""Rows that are summed at once if they come from memory: a processor follows several runs faster than one, each in
pages of its own.
"""
MAX_PERMUTED_ROWS = 16
"""Rows beyond the lanes that the tile of a permutation covers."""
MAX_PERMUTED_ELEMENTS = 16384
"""Elements of such a tile."""
REDUCTION_VECTORS = 4
"""Iterations of a vector loop that are in flight at once: enough to hide the latency of an addition."""
POINTWISE_VECTORS = 2
"""The same without a reduction."""
COLUMN_SUM_VECTORS = 4
"""The same of a sum of columns."""
LONG_COLUMN_SUM_VECTORS = 16
"""The same where rows are long."""
WHOLE_RUN_VECTORS = 64
"""Vectors of a part of a row that is worth walking from end to end."""
COLUMN_SUM_ROWS = 8
"""Rows that a sum of columns adds before it continues along them: a stream of memory each."""
STAGE_ROWS = 32
"""Rows of a buffer for transposed reads."""
STAGE_ROW_BYTES = 512
"""Bytes of a row: the buffer takes half of a usual L1."""
STAGE_PREFETCH_LINES = 16
"""Lines that are prefetched for it if L2 has not got them."""
MAX_NONTEMPORAL_STAGE = 512
"""Rows and lanes of a buffer on the way past the caches."""
REDUCTION_ACCUMULATORS = (4, 8, 2, 1)
"""Vectors of partial sums that the schedule of a reduction alone has, in order of preference."""
TRANSPOSE_BLOCKS = ((32, 512), (64, 64), (16, 128), (16, 256), (128, 32))
"""Tiles of a transposition alone that a search offers: runs that are written, and runs that are read."""
TRANSPOSE_STAGE = (512, 128)
"""Points of its tile that goes through a buffer: runs that are read, and runs that are written."""

# --- gathers and subscripts -------------------------------------------------------------------------------------------

MIN_PREFETCHED_ROW_BYTES = 32
"""Rows of a table below which nothing is prefetched."""
MAX_PREFETCHED_ROW_BYTES = 4096
"""The same above: the processor itself predicts how a longer row continues."""
GATHER_PREFETCH_BYTES = 4096
"""Distance of prefetching: the latency of memory at the speed of a sum of rows. Half or twice as much is as good."""
MAX_GATHER_PREFETCH_ROWS = 32
"""The same in rows."""
FEW_SUBSCRIPTS = 64
"""Subscripts that are checked one by one."""
CHECKED_VECTORS = 4
"""Vectors of subscripts that one iteration checks."""
SUBSCRIPTS_PER_OPERATION = 4
"""Subscripts that are checked in the time of a scalar operation."""
MAX_CHECK_CHUNKS = 64
"""Chunks of subscripts: their results fit a cache line."""

# --- sparse operands --------------------------------------------------------------------------------------------------

MAX_FIXED_EXTENT = 512
"""Extents up to this of indices that no sparse tensor has are part of the kernel: they decide its register tiles."""
SPARSE_CHUNK_ITERATIONS = 64
"""Iterations in a chunk of a loop if their work is unknown."""
MAX_SPARSE_CHUNKS = 1_024
"""Chunks that a loop over stored elements has at most."""
CHUNK_END_SEARCH_PART = 8
"""The part of a chunk's iterations around a guess in which its end is searched first."""
ROW_CHUNK_MULTIPLE = 4
"""How many times as large chunks are for which a row is allocated and cleared."""
ADDED_PRODUCTS = 4
"""Products in a trip of the innermost loop that adds to a row."""
APPENDED_ELEMENTS = 4
"""Elements that are appended at once."""
REFILLED_PRODUCTS = 4
"""Products in a trip of the innermost loop that fills a row again: they go to different places, so that none waits."""
FILL_THREAD_ELEMENTS = 32_768
"""Elements of a dense result that a thread fills at least."""
PREFETCHED_ROWS_AHEAD = 4
"""Iterations of a loop over rows after which the operands of its row are needed."""
MAX_PREFETCHED_ROW_LINES = 16
"""Cache lines of a row that are asked for; the processor itself guesses how a longer one goes on."""
COMPARED_COORDINATES = 4
"""Coordinates that are compared at once where two operands store the same ones."""
COUNTING_THREADS = 3
"""Threads from which on the elements of sums are counted first: that takes half as long as writing them."""
UNKNOWN_LOOP_ITERATIONS = 10_000.0
"""Iterations assumed of a loop whose extent only the run decides."""
COMPRESSED_FANOUT, ROOT_FANOUT = 10.0, 1_000.0
"""Coordinates assumed below a parent of a compressed level, and below the root."""
CONVERSION_COST = 30.0 * 100_000
"""The cost of an operand that is converted first: 30 for each of the elements assumed."""
SORTED_ELEMENT_COST = 30.0
"""The cost of an element of a result that is not appended in its order."""

# --- GPUs -------------------------------------------------------------------------------------------------------------

GPU_BLOCK_THREADS = 256
"""Default number of threads of a block."""
GPU_SERIAL_TERMS = 16
"""Terms that one thread sums alone, however few threads there are."""
GPU_WARP_ROW = 1024
"""Elements of a row up to which a warp reduces it alone, if there are enough rows."""
GPU_REREAD_BYTES = 16 << 20
"""Bytes that blocks may read again from L2 to save a kernel."""
GPU_LIGHT_BLOCK_ELEMENTS = 1 << 14
"""Elements that a block may process rather than leave them to another kernel with more blocks."""
GPU_MIN_TILE_TERMS = 4
"""Terms of a tile of a contraction."""
GPU_CONTRACTION_TILES = ((128, 16), (64, 16), (32, 32), (16, 32))
"""Side of the tile of a contraction, and its terms."""
GPU_BLOCK_SIDE = 16
"""Threads along a side of such a tile."""
GPU_NEIGHBOR_TERMS = 4
"""Terms of a reduction that a thread with elements in registers reads together."""
GPU_MAX_INNER_ELEMENTS = 256
"""Elements that one thread may have in flight in registers."""
GPU_MAX_ELEMENT_REGISTERS = 160
"""Registers of a thread that hold elements."""
GPU_RESIDENCY_REGISTERS = 128
"""Registers of a thread above which fewer than a quarter of the threads that a processor can hold have room."""
GPU_UNROLLED_COPY_TRIPS = 16
"""Trips of a copy's loop that is unrolled on request, so that as many loads are in flight."""
GPU_MAX_DUPLICATED_STATEMENTS = 400
"""Statements of a body that is worth having twice, with and without conditions."""
GPU_CHECK_THREADS = 256
"""Threads of a block that checks subscripts."""
GPU_MAX_CHECK_BLOCKS = 4096
"""Blocks that check subscripts."""
GPU_SPLIT_GAIN = 3 / 4
"""Most time of a sum in parts, relative to the whole: estimates are rough, and two kernels cost more than one."""
GPU_SPLIT_TIE = 1.01
"""Of numbers of parts whose times differ by less than this factor, the one with most blocks is taken."""
GPU_MIN_PART_TERMS = 128
"""Terms of a part: as many as a small tile waits for at once."""
GPU_PART_ALIGNMENT = 4
"""Parts start at multiples of this many terms if possible, so that contiguous operands are loaded in vectors."""
GPU_MAX_SPLIT_BLOCKS_PER_SM = 2
"""Blocks per multiprocessor of the tried numbers of parts: while one waits, the other runs."""
GPU_SPARSE_BLOCK_THREADS = 128
"""Threads of a block of sparse kernels: few, because rows of different lengths then leave few of them idle."""
