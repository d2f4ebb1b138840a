// An emulator that runs CUDA kernels on the CPU: threads of a block are fibers, which are switched at barriers and
// shuffles. Every access to memory is checked in shadow cells, which record who touched an element last and when.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
extern "C" void machine_copy(void *shared, const void *global, int bytes, int given);
#include "atoms.h"

struct Coordinates { unsigned x, y, z; };
struct Place { Coordinates thread, block, threads, blocks; };

// --- what Python passes and gets ---------------------------------------------------------------------------------

struct Region {  // a tensor
    char *begin;
    int64_t bytes;
    int64_t grain;    // bytes of an element
    int64_t defined;  // whether its contents are defined
    int64_t free;     // whether races are not reported
};

enum Kind {
    NONE, RACE, UNDEFINED, OUTSIDE, SUBSCRIPT, DIVERGED, DEADLOCK, EXITED, MISALIGNED, LANE,
    ARRIVALS, ARRIVERS, LAPPED, STUCK, FENCE, TOUCHED, NOT_MADE, BYTES, MISUSE, ENDED
};
enum Action { READ, WRITE, ATOMIC };

struct Failure {
    int64_t kind, region, offset;         // region -1: shared memory, -2: none
    int64_t action, other_action;         // of a race
    int64_t thread, block, other_thread;  // linear numbers; -1: unknown
    int64_t other_block, line, other_line;
    int64_t address;  // in the kernel's code, relative to where it is loaded; 0: `line` tells
    char text[96];  // SUBSCRIPT: a type; else an asynchronous operation, or what is missing
};

extern "C" {
Place machine_place;
Failure machine_failure;
int machine_asynchronous;  // whether there are asynchronous operations, which barriers of the block do not wait for
int machine_parts;  // whether parts of a block have barriers of their own
int64_t machine_counts[3];  // accesses to tensors, accesses to shared memory, threads that waited at barriers
}

namespace {

struct Cell {
    int32_t writer = -1, write_epoch = -1, write_turn = -1;
    int32_t reader = -1, read_epoch = -1, read_turn = -1, read_block = -1;
    int32_t fences = 0;  // of the writer, before it wrote
    int32_t list = -1;  // of readers by warp, if several warps read and parts of the block have barriers
    bool atomic = false, defined = false;
};
const int MANY = -2;
const int SOME = -3;  // less a number: several readers, all in the warp with that number

struct Reader { int thread, turn; };

struct Memory {
    char *begin = nullptr, *end = nullptr;
    int64_t grain = 1;
    bool free = false;
    std::vector<Cell> cells;
};

struct Copy { char *shared; const char *global; int bytes, given; };

// Registers that products in flight read or accumulate into, which the thread may not touch.
struct Held { char *begin; int bytes, group; bool sums; };

// An asynchronous access to shared memory, with its clock and turn.
struct Span { const char *begin, *end; int clock, turn; Action action; };

enum State { READY, AT_BARRIER, AT_CLUSTER, AT_PART, IN_WARP, AT_PHASE, IN_GROUP, DONE };
struct Fiber {
    void *stack = nullptr;
#if !defined(__x86_64__)
    ucontext_t context;
#endif
    State state = DONE;
    int line = 0, down = 0, lane = 0, width = 0;  // of what it waits for; width 0: the warp's barrier
    uint64_t value = 0;
    void (*act)(int first) = nullptr;  // of an atom: what its row does, and the operands of this lane
    const void *row = nullptr, *places[3] = {};
    std::vector<std::vector<Copy>> groups;
    uint64_t words[3] = {0, 0, 0};  // of a product: descriptors, and whether it adds
    std::vector<Held> held;
    std::vector<int> fences;      // the turns of its warp in which it fenced stores for asynchronous reads
    std::vector<int> box_groups;  // the turns that end its groups of stores of boxes
};

// A block of a cluster: its shared memory while another block is active, and the accesses of other blocks to it.
struct Block {
    std::vector<char> bytes;
    std::vector<Cell> cells;
    std::vector<Span> spans;
    std::vector<int> reached;  // by warp of other blocks: its turn when it last reached this one's memory; -1: never
    int left = 0;              // threads that have not ended
};

std::vector<Memory> memories;  // shared memory last
std::vector<Block> blocks;     // of the cluster that runs
int active_block;              // whose shared memory is at the address for it
int block_threads;             // of each block of the cluster; fibers are those of all
std::vector<Fiber> fibers;
std::vector<int> turns;  // of each warp: how often its threads have met
std::vector<Reader> readers;  // the lists of this epoch: a reader of each warp, or SOME
std::vector<std::vector<int>> known;  // the vector clock of each warp: how many turns of others it knows
std::vector<Span> spans;  // of the active block
int current, block_number, epoch, warp_count;
bool scheduling;  // whether the scheduler runs, not a thread
void *main_stack;
#if !defined(__x86_64__)
ucontext_t main_context;
#endif
char *stacks;
size_t stack_bytes, stacks_bytes;
void (*entry)(void **);
void **arguments;
int argument_count;
char *code_base;
const int WARP = 32;

// --- fibers ------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
extern "C" void machine_switch(void **from, void *to);
asm(R"(
.text
.globl machine_switch
.type machine_switch, @function
machine_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
void resume(Fiber &f) { machine_switch(&main_stack, f.stack); }
void leave(Fiber &f) { machine_switch(&f.stack, main_stack); }
void prepare(Fiber &f, char *top, void (*start)()) {
    void **sp = (void **)((uintptr_t)top & ~(uintptr_t)15);
    *--sp = nullptr;  // where `start` would return to
    *--sp = (void *)start;
    for (int k = 0; k < 6; k++) *--sp = nullptr;
    f.stack = sp;
}
#else
void resume(Fiber &f) { swapcontext(&main_context, &f.context); }
void leave(Fiber &f) { swapcontext(&f.context, &main_context); }
void prepare(Fiber &f, char *top, void (*start)()) {
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = top - stack_bytes;
    f.context.uc_stack.ss_size = stack_bytes;
    f.context.uc_link = nullptr;
    makecontext(&f.context, start, 0);
}
#endif

// The rank in the cluster of the block of a thread.
int rank_of(int thread) { return thread / block_threads; }

// Make a block active: swap in its shared memory, which all blocks have at the same address.
void enter_block(int rank) {
    if (rank == active_block) return;
    Memory &shared = memories.back();
    Block &old = blocks[active_block], &next = blocks[rank];
    size_t size = shared.end - shared.begin;
    old.bytes.assign(shared.begin, shared.end);
    if (size) memcpy(shared.begin, next.bytes.data(), size);
    old.cells.swap(shared.cells);
    shared.cells.swap(next.cells);
    old.spans.swap(spans);
    spans.swap(next.spans);
    active_block = rank;
}

void run_thread() {
    entry(arguments);
    fibers[current].state = DONE;
    leave(fibers[current]);
    abort();  // it is not resumed
}

// --- failures ----------------------------------------------------------------------------------------------------

Failure &start_failure(Kind kind, int thread, const void *address) {
    Failure &f = machine_failure;
    f = Failure{};
    f.kind = kind;
    f.region = -2;
    f.thread = thread;
    f.block = block_number;
    f.other_thread = f.other_block = -1;
    f.address = address ? (char *)address - code_base - 1 : 0;
    return f;
}

// Leave the current thread for good, after a failure; returns only to the scheduler.
void stop() {
    if (!scheduling) leave(fibers[current]);
}

void fail_access(Kind kind, int region, int64_t cell, const void *address, Action action) {
    Failure &f = start_failure(kind, current, address);
    f.region = region == (int)memories.size() - 1 ? -1 : region;
    f.offset = cell * memories[region].grain;
    f.action = action;
    stop();
}

// --- memory ------------------------------------------------------------------------------------------------------

int block_of(int thread) { return thread / (int)fibers.size(); }

// The warp of a thread, or of several that are `SOME` of it.
int warp_of(int thread) { return thread <= SOME ? SOME - thread : thread % (int)fibers.size() / WARP; }

// Whether an access of another thread in this epoch happened before the current one, because their warps met since.
bool in_order(int thread, int turn) {
    return thread != MANY && thread != -1 && turn < known[current / WARP][warp_of(thread)];
}

// Record that `me` reads: alone, with others of its warp, or with other warps.
void note_reader(Cell &c, int me) {
    int mine = current / WARP, turn = turns[mine];
    if (c.read_epoch == epoch && c.reader == MANY) {
        if (c.list >= 0) {
            Reader &r = readers[c.list + mine];
            bool together = r.thread != -1 && r.thread != me && r.turn == turn;
            r = {together ? SOME - mine : me, turn};
        }
    } else if (c.read_epoch == epoch && c.reader != -1 && c.reader != me && !in_order(c.reader, c.read_turn)) {
        int theirs = warp_of(c.reader);
        if (theirs != mine && machine_parts) {
            c.list = (int)readers.size();
            readers.resize(readers.size() + warp_count, {-1, 0});
            readers[c.list + theirs] = {c.reader, c.read_turn};
            readers[c.list + mine] = {me, turn};
        }
        c.reader = theirs == mine ? SOME - mine : MANY;
    } else {
        c.reader = me;
        c.list = -1;
    }
    c.read_epoch = epoch;
    c.read_turn = turn;
}

// Whether a read in this epoch is not ordered before the access of `me`.
bool is_read_apart(const Cell &c, int me) {
    if (c.read_epoch != epoch || c.reader == me || c.reader == -1) return false;
    if (c.reader != MANY || c.list < 0) return !in_order(c.reader, c.read_turn);
    for (int w = 0; w < warp_count; w++) {
        const Reader &r = readers[c.list + w];
        if (r.thread != -1 && r.thread != me && !in_order(r.thread, r.turn)) return true;
    }
    return false;
}

void fail_race(int region, int64_t cell, const void *address, Action action, Action before, int other) {
    Failure &f = start_failure(RACE, current, address);
    f.region = region == (int)memories.size() - 1 ? -1 : region;
    f.offset = cell * memories[region].grain;
    f.action = action;
    f.other_action = before;
    f.other_thread = other < 0 ? -1 : other % (int)fibers.size();
    f.other_block = other < 0 ? -1 : block_of(other);
    stop();
}

void visit(int region, int64_t index, Action action, const void *address) {
    Memory &m = memories[region];
    Cell &c = m.cells[index];
    int me = block_number * (int)fibers.size() + current;
    if (action != WRITE && !c.defined) return fail_access(UNDEFINED, region, index, address, action);
    if (!m.free && c.writer >= 0 && c.writer != me && !(action == ATOMIC && c.atomic)) {
        bool apart = block_of(c.writer) != block_number;
        if (apart || (c.write_epoch == epoch && !in_order(c.writer, c.write_turn)))
            return fail_race(region, index, address, action, c.atomic ? ATOMIC : WRITE, c.writer);
    }
    if (action == READ) {
        note_reader(c, me);
        c.read_block = c.read_block == -1 || c.read_block == block_number ? block_number : MANY;
        return;
    }
    if (!m.free) {
        if (c.read_block != -1 && c.read_block != block_number) {
            int other = c.reader >= 0 && block_of(c.reader) != block_number ? c.reader : -1;
            return fail_race(region, index, address, action, READ, other);
        }
        if (is_read_apart(c, me)) return fail_race(region, index, address, action, READ, c.reader);
    }
    c.writer = me;
    c.fences = (int32_t)fibers[current].fences.size();
    c.write_epoch = epoch;
    c.write_turn = turns[current / WARP];
    c.atomic = action == ATOMIC;
    c.defined = true;
}

bool meets_span(int warp, const char *p, int64_t bytes, Action action, const void *address, int line);

// Check an access to the thread's own memory: it may not touch registers that products in flight use.
void touch_own(const char *p, int bytes, Action action, const void *address) {
    for (const Held &h : fibers[current].held) {
        if (p >= h.begin + h.bytes || p + bytes <= h.begin || (action == READ && !h.sums)) continue;
        Failure &f = start_failure(TOUCHED, current, address);
        f.action = action;
        f.offset = (p - h.begin) / 4;
        return stop();
    }
}

int find(const char *p) {
    for (int k = (int)memories.size() - 1; k >= 0; k--)
        if (p >= memories[k].begin && p < memories[k].end) return k;
    return -1;
}

void touch(const void *place, int bytes, Action action, const void *address) {
    const char *p = (const char *)place;
    if (p >= stacks && p < stacks + stacks_bytes) {
        if (!fibers[current].held.empty()) touch_own(p, bytes, action, address);
        return;
    }
    if (p >= (char *)&machine_place && p < (char *)(&machine_place + 1)) return;
    if (p >= (char *)arguments && p < (char *)(arguments + argument_count)) return;
    int k = find(p);
    if (k < 0 || p + bytes > memories[k].end) {
        Failure &f = start_failure(OUTSIDE, current, address);
        f.action = action;
        int64_t nearest = INT64_MAX;
        for (int n = 0; n < (int)memories.size(); n++) {  // the one whose end or beginning is closest
            int64_t apart = p < memories[n].begin ? memories[n].begin - p : p + bytes - memories[n].end;
            if (memories[n].begin != memories[n].end && apart < nearest && apart < (1 << 20)) {
                nearest = apart;
                f.region = n == (int)memories.size() - 1 ? -1 : n;
                f.offset = p - memories[n].begin;
            }
        }
        return stop();
    }
    Memory &m = memories[k];
    machine_counts[k == (int)memories.size() - 1]++;
    int64_t first = (p - m.begin) / m.grain, last = (p + bytes - 1 - m.begin) / m.grain;
    if ((bytes & (bytes - 1)) == 0 && (uintptr_t)p % bytes) return fail_access(MISALIGNED, k, first, address, action);
    for (int64_t c = first; c <= last; c++) visit(k, c, action, address);
    if (!spans.empty() && k == (int)memories.size() - 1) meets_span(current / WARP, p, bytes, action, address, 0);
}

// --- blocks ------------------------------------------------------------------------------------------------------

void fail_waiting(Kind kind, int thread, int other) {
    Failure &f = start_failure(kind, thread, nullptr);
    f.line = fibers[thread].line;
    f.other_thread = other;
    f.other_line = other < 0 || fibers[other].state == DONE ? 0 : fibers[other].line;
}

void wait_at(State state, int line) {
    Fiber &f = fibers[current];
    f.state = state;
    f.line = line;
    leave(f);
}

#include "atoms.cpp"
#include "async.cpp"

// Execute the shuffle, atom or barrier that all lanes of a warp have reached. False after a failure.
bool execute_warp_step(int first, int count) {
    enter_block(rank_of(first));
    for (int k = 1; k < count; k++)
        if (fibers[first + k].line != fibers[first].line) return fail_waiting(DIVERGED, first, first + k), false;
    if (fibers[first].act) return act_together(first, count);
    std::vector<uint64_t> values;
    for (int k = 0; k < count; k++) values.push_back(fibers[first + k].value);
    for (int k = 0; k < count; k++) {
        Fiber &f = fibers[first + k];
        f.state = READY;
        if (f.width == 0) continue;
        int source = f.down == 1 ? k + f.lane : k ^ f.lane;
        if (f.down == 2) source = k / f.width * f.width + (f.lane % f.width + f.width) % f.width;
        if (source / f.width != k / f.width) source = k;
        if (source >= count) return fail_waiting(LANE, first + k, -1), false;
        f.value = values[source];
    }
    if (fibers[first].width == 0) known[first / WARP][first / WARP] = ++turns[first / WARP];
    return true;
}

// Release a warp whose lanes all wait at the same line. True if it was released.
bool advance_warp(int first) {
    int count = 0, waiting = 0;
    for (int k = first; k < (int)fibers.size() && k < first + WARP; k++, count++) waiting += fibers[k].state == IN_WARP;
    return waiting == count && execute_warp_step(first, count);
}

// Release `n` threads if all wait at the same barrier, of their block or of the cluster. True if they were released.
bool advance_together(State state, int first, int n) {
    for (int k = first; k < first + n; k++)
        if (fibers[k].state != state) return false;
    for (int k = first + 1; k < first + n; k++)
        if (fibers[k].line != fibers[first].line) return fail_waiting(DIVERGED, first, k), false;
    if (machine_asynchronous) {
        std::vector<int> all;
        for (int w = first / WARP; w < (first + n + WARP - 1) / WARP; w++) all.push_back(w);
        join_warps(all);
    } else {
        epoch++;
        readers.clear();
    }
    machine_counts[2] += n;
    for (int k = first; k < first + n; k++) fibers[k].state = READY;
    return true;
}

// Check that the current thread may access shared memory of a block of its cluster, and record the access.
void reach_block(int rank, int line) {
    bool exists = rank >= 0 && rank < (int)blocks.size();
    if (!exists || !blocks[rank].left) {
        char text[80];
        snprintf(text, sizeof text, "reaches block %d of its cluster, which %s", rank, exists ? "has ended" : "does not exist");
        return fail_at(ENDED, memories.back().begin, line, -1, text);
    }
    if (rank != rank_of(current)) blocks[rank].reached[current / WARP] = turns[current / WARP];
}

// Check, once all threads of a block have ended, that they knew of the accesses of others to its shared memory.
void end_block(int rank) {
    for (int w = 0; w < warp_count; w++) {
        int knows = 0;
        for (int v = rank * block_threads / WARP; v < (rank + 1) * block_threads / WARP; v++)
            if (known[v][w] > knows) knows = known[v][w];
        if (blocks[rank].reached[w] < knows) continue;
        char text[80];
        snprintf(text, sizeof text, "ends, and its block does not know that warp %d has reached its memory", w);
        return fail_at(ENDED, memories.back().begin, 0, -1, text);
    }
}

// No thread can run: report one that waits, and for what.
void fail_deadlock() {
    for (int round = 0; round < 3; round++)  // phases that lack only bytes, then those with arrivals, then all
        for (int k = 0; k < (int)fibers.size(); k++) {
            if (fibers[k].state != AT_PHASE) continue;
            for (const Mbarrier &b : barriers) {
                if (b.at != fibers[k].places[0] || b.block != rank_of(k) || (round == 0 && b.pending) ||
                    (round == 1 && b.pending == b.count && !b.bytes))
                    continue;
                current = k;
                fail_at(STUCK, b.at, fibers[k].line, -1, "");
                snprintf(machine_failure.text, sizeof machine_failure.text, "phase %d lacks %d arrivals and %lld bytes",
                         b.phase, b.pending, (long long)b.bytes);
                return;
            }
        }
    int waiting = -1, other = -1;
    for (int k = 0; k < (int)fibers.size(); k++)
        if (fibers[k].state != DONE) { waiting = k; break; }
    for (int k = 0; k < (int)fibers.size(); k++)
        if (fibers[k].state != fibers[waiting].state) { other = k; break; }
    fail_waiting(other >= 0 && fibers[other].state == DONE ? EXITED : DEADLOCK, waiting, other);
}

// Run the blocks of a cluster, or a single block. place: the coordinates of the first.
void run_cluster(Coordinates threads, Coordinates place) {
    int n = (int)fibers.size(), done = 0;
    Memory &shared = memories.back();
    memset(shared.begin, 0xff, shared.end - shared.begin);
    std::fill(shared.cells.begin(), shared.cells.end(), Cell());
    active_block = 0;
    for (Block &b : blocks) {
        if (blocks.size() > 1) b.bytes.assign(shared.begin, shared.end), b.cells = shared.cells;
        b.spans.clear();
        b.reached.assign(warp_count, -1);
        b.left = block_threads;
    }
    std::fill(turns.begin(), turns.end(), 0);
    known.assign(turns.size(), std::vector<int>(turns.size(), 0));
    begin_asynchronous();
    epoch++;
    readers.clear();
    for (int k = 0; k < n; k++) {
        prepare(fibers[k], stacks + (k + 1) * stack_bytes, run_thread);
        fibers[k].state = READY;
        fibers[k].groups.clear();
        fibers[k].held.clear();
        fibers[k].fences.clear();
        fibers[k].box_groups.clear();
    }
    while (done < n) {
        bool moved = false;
        for (int k = 0; k < n; k++) {
            if (fibers[k].state != READY) continue;
            current = k;
            int rank = rank_of(k), t = k % block_threads;
            enter_block(rank);
            machine_place.block = {place.x + rank, place.y, place.z};
            machine_place.thread = {t % threads.x, t / threads.x % threads.y, t / threads.x / threads.y};
            scheduling = false;
            resume(fibers[k]);
            scheduling = true;
            if (machine_failure.kind) return;
            if (fibers[k].state == DONE) {
                done++;
                if (!--blocks[rank].left && blocks.size() > 1) end_block(rank);
                if (machine_failure.kind) return;
            }
            moved = true;
        }
        for (int first = 0; first < n; first += WARP) moved |= advance_warp(first);
        for (int first = 0; first < n; first += block_threads) {
            moved |= advance_together(AT_BARRIER, first, block_threads);
            moved |= advance_parts(first);
        }
        if (blocks.size() > 1) moved |= advance_together(AT_CLUSTER, 0, n);
        if (machine_failure.kind) return;
        if (!moved && done < n && !land_box()) return fail_deadlock();
        if (machine_failure.kind) return;
    }
    if (!boxes.empty()) fail_at(MISUSE, boxes[0].to, 0, -1, "a copy is under way when the block ends");
}

// Find the thread-local variables, which shared arrays are, of the library that contains the address `code`.
struct Search { const char *code; char *begin; size_t bytes; char *base; };
int look(dl_phdr_info *info, size_t, void *data) {
    Search *s = (Search *)data;
    bool inside = false;
    size_t bytes = 0;
    for (int k = 0; k < info->dlpi_phnum; k++) {
        const auto &h = info->dlpi_phdr[k];
        const char *begin = (const char *)info->dlpi_addr + h.p_vaddr;
        if (h.p_type == PT_LOAD && s->code >= begin && s->code < begin + h.p_memsz) inside = true;
        if (h.p_type == PT_TLS) bytes = h.p_memsz;
    }
    if (!inside) return 0;
    s->base = (char *)info->dlpi_addr;
    s->begin = (char *)info->dlpi_tls_data;
    s->bytes = s->begin ? bytes : 0;
    return 1;
}

}  // namespace

// --- what the kernel calls ---------------------------------------------------------------------------------------

#define CALLER __builtin_return_address(0)

extern "C" {

void machine_barrier(int line) { wait_at(AT_BARRIER, line); }

void machine_cluster_barrier(int line) { wait_at(AT_CLUSTER, line); }

void machine_warp_barrier(int line) {
    fibers[current].width = 0;
    wait_at(IN_WARP, line);
}

uint64_t machine_shuffle(int down, int lane, int width, uint64_t value, int line) {
    Fiber &f = fibers[current];
    f.down = down;
    f.lane = lane;
    f.width = width;
    f.value = value;
    wait_at(IN_WARP, line);
    return f.value;
}

uint64_t machine_atomic(void *place, int bytes) {
    touch(place, bytes, ATOMIC, CALLER);
    uint64_t value = 0;
    memcpy(&value, place, bytes);
    return value;
}

void machine_set(void *place, int bytes, uint64_t value) { memcpy(place, &value, bytes); }

void machine_barrier_part(int number, int threads, int line) {
    fibers[current].lane = number;
    fibers[current].width = threads;
    wait_at(AT_PART, line);
}

void machine_product(const MachineProduct *row, void *total, const void *left, const void *right, int line) {
    Fiber &f = fibers[current];
    f.places[0] = total, f.places[1] = left, f.places[2] = right;
    wait_at_atom(multiply, row, line);
}

void machine_matrices(const MachineMove *row, unsigned *to, const void *from, int line) {
    Fiber &f = fibers[current];
    if (current % WARP < row->from.rows) touch(from, 16, READ, CALLER);
    f.places[0] = to, f.places[1] = from;
    wait_at_atom(move_matrices, row, line);
}

void machine_matrix_store(const MachineMove *row, void *to, const unsigned *from, int line) {
    Fiber &f = fibers[current];
    if (current % WARP < row->to.rows) touch(to, 16, WRITE, CALLER);
    f.places[0] = to, f.places[1] = from;
    wait_at_atom(move_matrices, row, line);
}

void machine_transposition(const MachineMove *row, unsigned *to, unsigned from, int line) {
    Fiber &f = fibers[current];
    f.places[0] = to, f.places[1] = &from;
    wait_at_atom(move_matrices, row, line);
}

void machine_copy(void *shared, const void *global, int bytes, int given) {
    if (given) touch(global, given, READ, CALLER);
    touch(shared, bytes, WRITE, CALLER);
    Memory &m = memories.back();
    int64_t first = ((char *)shared - m.begin) / m.grain;
    for (int64_t c = first; c < first + bytes / m.grain; c++) m.cells[c].defined = false;  // until it is waited for
    memset(shared, 0xff, bytes);
    auto &groups = fibers[current].groups;
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back({(char *)shared, (const char *)global, bytes, given});
}

void machine_commit() {
    auto &groups = fibers[current].groups;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}

void machine_wait(int left) {
    auto &groups = fibers[current].groups;
    Memory &m = memories.back();
    while ((int)groups.size() > left + 1) {
        for (const Copy &copy : groups.front()) {
            memset(copy.shared, 0, copy.bytes);
            memcpy(copy.shared, copy.global, copy.given);
            int64_t first = (copy.shared - m.begin) / m.grain;
            for (int64_t c = first; c < first + copy.bytes / m.grain; c++) m.cells[c].defined = true;
        }
        groups.erase(groups.begin());
    }
}

// --- asynchronous operations

void machine_barrier_init(const void *at, int arrivals, int line) {
    if (!inside_shared(at, 8, line)) return;
    if ((int)barriers.size() == MOST_BARRIERS * (int)blocks.size()) return fail_at(MISUSE, at, line, -1, "there are too many barriers");
    Mbarrier b;
    b.at = (const char *)at;
    b.count = b.pending = arrivals;
    b.thread = current;
    b.block = rank_of(current);
    b.seen.assign(fibers.size(), -1);
    for (Mbarrier &old : barriers)
        if (old.at == at && old.block == b.block) { old = b; return; }
    barriers.push_back(b);
}

void machine_barrier_arrive(const void *at, long long bytes, int line) { arrive_at(at, bytes, rank_of(current), line); }

void machine_barrier_arrive_cluster(const void *at, unsigned block, int line) {
    reach_block((int)block, line);
    arrive_at(at, 0, (int)block, line);
}

void machine_barrier_wait(const void *at, unsigned parity, int line) {
    Mbarrier *b = barrier_at(at, rank_of(current), line, false);
    int phase = b->seen[current];
    if ((phase & 1) != (int)(parity & 1)) phase++;
    if (b->phase >= phase + 2) return fail_at(LAPPED, at, line, -1, "");
    Fiber &f = fibers[current];
    if (b->phase > phase) {
        b->seen[current] = phase;
        return join(known[current / WARP], b->ended);
    }
    f.places[0] = at;
    f.lane = phase;
    wait_at(AT_PHASE, line);
}

void machine_fence(int line) {
    fibers[current].fences.push_back(turns[current / WARP]);
    for (Mbarrier &b : barriers)
        if (b.thread == current && b.fence_turn < 0) b.fence_turn = turns[current / WARP];
}

void machine_fence_barriers(int line) {
    for (Mbarrier &b : barriers)
        if (b.thread == current && b.fence_turn < 0) b.fence_turn = turns[current / WARP];
}

void machine_load_box(void *to, const void *map, const int *x, const void *done, int line) {
    load_box((char *)to, (const TensorMap *)map, x, done, rank_of(current), line);
}

void machine_load_box_multicast(void *to, const void *map, const int *x, const void *done, unsigned to_blocks, int line) {
    for (int rank = 0; rank < 16; rank++) {
        if (!(to_blocks >> rank & 1)) continue;
        reach_block(rank, line);
        enter_block(rank);
        load_box((char *)to, (const TensorMap *)map, x, done, rank, line);
    }
    enter_block(rank_of(current));
}

void machine_store_box(const void *map, const int *x, const void *from, int line) {
    store_box((const TensorMap *)map, x, (const char *)from, line);
}

void machine_close_boxes() { fibers[current].box_groups.push_back(++turns[clock_of_stores(current / WARP)]); }

void machine_wait_boxes(int left) {
    const std::vector<int> &groups = fibers[current].box_groups;
    if ((int)groups.size() <= left) return;
    int &mine = known[current / WARP][clock_of_stores(current / WARP)], done = groups[groups.size() - 1 - left];
    if (mine < done) mine = done;
}

void machine_group_product(const MachineProduct *row, void *total, const void *left, unsigned long long a,
                           unsigned long long b, unsigned more, int across, int line) {
    Fiber &f = fibers[current];
    f.places[0] = total, f.places[1] = left;
    f.words[0] = a, f.words[1] = b, f.words[2] = more != 0;
    if (last_of_group(row, line)) multiply_group(*row, across, line);
}

void machine_group_fence(int line) {
    if (last_of_group(nullptr, line)) warpgroups[current / GROUP].fenced = true;
}

void machine_group_commit(int line) {
    if (!last_of_group(nullptr, line)) return;
    warpgroups[current / GROUP].closed++;
    turns[clock_of_group(current / GROUP)]++;
}

void machine_group_wait(int left, int line) {
    if (last_of_group(nullptr, line)) wait_for_group(left);
}

unsigned machine_elect() { return current % WARP == 0; }

unsigned machine_shared_offset(const void *at) { return (const char *)at - memories.back().begin; }

// Static arrays of other kernels of this library may come first: bits of the offset beyond a block's memory are kept.
unsigned long long machine_descriptor(unsigned long long offset, int leading, int stride, int mode) {
    return (offset & 0x3ffff) >> 4 | (unsigned long long)leading << 16 | (unsigned long long)stride << 32 |
           (offset >> 18 & 0x3ff) << 52 | (unsigned long long)mode << 62;
}

#define ACCESS(n) \
    void __tsan_read##n(void *p) { touch(p, n, READ, CALLER); } \
    void __tsan_write##n(void *p) { touch(p, n, WRITE, CALLER); } \
    void __tsan_unaligned_read##n(void *p) { touch(p, n, READ, CALLER); } \
    void __tsan_unaligned_write##n(void *p) { touch(p, n, WRITE, CALLER); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void *p, long n) { touch(p, (int)n, READ, CALLER); }
void __tsan_write_range(void *p, long n) { touch(p, (int)n, WRITE, CALLER); }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() {}

struct SourceLocation { const char *file; uint32_t line, column; };
struct TypeDescriptor { uint16_t kind, info; char name[1]; };
struct OutOfBounds { SourceLocation where; const TypeDescriptor *array, *index; };
void __ubsan_handle_out_of_bounds(OutOfBounds *data, unsigned long index) {
    Failure &f = start_failure(SUBSCRIPT, current, nullptr);
    f.line = data->where.line;
    f.offset = (int64_t)index;
    snprintf(f.text, sizeof f.text, "%s", data->array->name);
    stop();
}
void __ubsan_handle_out_of_bounds_abort(OutOfBounds *data, unsigned long index) {
    __ubsan_handle_out_of_bounds(data, index);
}

// Set the tensors of the module whose kernels `machine_run` runs next.
void machine_load(const Region *regions, int count) {
    memset(machine_counts, 0, sizeof machine_counts);
    memories.assign(count + 1, Memory());
    for (int k = 0; k < count; k++) {
        Memory &m = memories[k];
        m.begin = regions[k].begin;
        m.end = m.begin + regions[k].bytes;
        m.grain = regions[k].grain;
        m.free = regions[k].free;
        m.cells.assign(regions[k].bytes / m.grain, Cell());
        if (regions[k].defined)
            for (Cell &c : m.cells) c.defined = true;
    }
}

// Convert numbers of threads, which count over all blocks of a cluster, to those in their blocks.
static void number_by_block(Failure &f) {
    int size = (int)blocks.size();
    if (size == 1 || f.block < 0) return;
    f.block = f.block * size + rank_of((int)f.thread);
    f.thread %= block_threads;
    if (f.other_thread < 0) return;
    f.other_block = (f.other_block < 0 ? block_number : f.other_block) * size + rank_of((int)f.other_thread);
    f.other_thread %= block_threads;
}

// Run a kernel on all blocks, `cluster` neighbors along x at a time. Returns the kind of failure, 0 for none;
// `machine_failure` has the rest.
int machine_run(void (*kernel)(void **), void **addresses, int count, const unsigned *grid, const unsigned *block,
                int cluster, int64_t shared_grain, int64_t stack) {
    machine_failure = Failure{};
    entry = kernel;
    arguments = addresses;
    argument_count = count;
    for (Memory &m : memories)
        for (Cell &c : m.cells) {  // forget who touched it in the kernel before
            bool defined = c.defined;
            c = Cell();
            c.defined = defined;
        }
    Search search{(const char *)kernel, nullptr, 0, nullptr};
    dl_iterate_phdr(look, &search);
    code_base = search.base;
    Memory &shared = memories.back();
    shared.begin = search.begin;
    shared.end = search.begin + search.bytes;
    shared.grain = shared_grain;
    shared.cells.assign(search.bytes / shared_grain + 1, Cell());

    block_threads = (int)(block[0] * block[1] * block[2]);
    unsigned n = block_threads * cluster;
    blocks.assign(cluster, Block());
    fibers.assign(n, Fiber());
    warp_count = (int)(n + WARP - 1) / WARP;
    turns.assign(machine_asynchronous ? 2 * warp_count + (MOST_BARRIERS + MOST_GROUPS) * cluster : warp_count, 0);
    stack_bytes = (size_t)stack;
    stacks_bytes = stack_bytes * n;
    void *room = mmap(nullptr, stacks_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return -1;
    stacks = (char *)room;
    machine_place.threads = {block[0], block[1], block[2]};
    machine_place.blocks = {grid[0], grid[1], grid[2]};
    block_number = epoch = 0;
    for (unsigned z = 0; z < grid[2] && !machine_failure.kind; z++)
        for (unsigned y = 0; y < grid[1] && !machine_failure.kind; y++)
            for (unsigned x = 0; x < grid[0] && !machine_failure.kind; x += cluster, block_number++)
                run_cluster({block[0], block[1], block[2]}, {x, y, z});
    munmap(room, stacks_bytes);
    if (machine_failure.kind) number_by_block(machine_failure);
    return (int)machine_failure.kind;
}
}
