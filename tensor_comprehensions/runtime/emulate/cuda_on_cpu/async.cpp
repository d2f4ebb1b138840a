// Barriers in memory, copies of boxes (TMA) and products of warpgroups (wgmma). Part of `machine.cpp`.
//
// Asynchronous operations have vector clocks beside those of the warps: the copies of each barrier, the products of
// each warpgroup, the stores of boxes of each warp. Their accesses are spans of shared memory.

const int MOST_BARRIERS = 64, MOST_GROUPS = 8, GROUP = 128;

struct Mbarrier {
    const char *at = nullptr;
    int block = 0;  // of the cluster
    int count = 0, pending = 0, phase = 0;  // phase: how many have ended
    int64_t bytes = 0;                      // expected, but not copied yet
    int thread = -1, fence_turn = -1;       // which initialized it, and in which turn it fenced it; -1: not yet
    std::vector<int> clock, ended;          // of the arrivals and copies: of this phase, of ended ones
    std::vector<int> arrivers, before;
    std::vector<int> seen;  // by thread: the last phase that it waited for
};

struct Box { char *to; const TensorMap *map; int x[5]; int barrier, block, turn; std::vector<int> clock; };

struct Sums {  // accumulators of products in flight
    void *places[GROUP];
    const MachineProduct *row;
    std::vector<double> total;
    int group;
};

struct Warpgroup {
    std::vector<Sums> sums;
    int closed = 0;       // groups of products
    bool fenced = false;  // since the last wait
};

std::vector<Mbarrier> barriers;
std::vector<Box> boxes;
std::vector<Warpgroup> warpgroups;
uint64_t lot = 1;
const uint32_t POISON = 0x7fb5c0deu;  // a NaN

int clock_of_barrier(int b) { return warp_count + b; }
int clock_of_group(int g) { return warp_count + MOST_BARRIERS * (int)blocks.size() + g; }
int clock_of_stores(int w) { return clock_of_group(MOST_GROUPS * (int)blocks.size()) + w; }

void join(std::vector<int> &to, const std::vector<int> &from) {
    if (to.size() < from.size()) to.resize(from.size(), 0);
    for (size_t k = 0; k < from.size(); k++)
        if (from[k] > to[k]) to[k] = from[k];
}

// End the current turn of a warp; returns its clock, which covers all that it has done.
const std::vector<int> &publish(int warp) {
    known[warp][warp] = ++turns[warp];
    return known[warp];
}

void begin_asynchronous() {
    barriers.clear();
    boxes.clear();
    spans.clear();
    warpgroups.assign((fibers.size() + GROUP - 1) / GROUP, Warpgroup());
    lot = 1;
}

// --- failures ----------------------------------------------------------------------------------------------------

void fail_at(Kind kind, const void *place, int line, int other, const char *text) {
    Failure &f = start_failure(kind, current, nullptr);
    f.region = -1;
    f.offset = (const char *)place - memories.back().begin;
    f.line = line;
    f.other_thread = other;
    snprintf(f.text, sizeof f.text, "%s", text);
    stop();
}

void name_actor(Failure &f, int clock) {
    f.other_thread = -1;
    if (clock < clock_of_group(0)) {
        snprintf(f.text, sizeof f.text, "the copies that end on ");
        f.other_block = barriers[clock - warp_count].at - memories.back().begin;
    } else if (clock < clock_of_stores(0)) {
        snprintf(f.text, sizeof f.text, "the products of warpgroup %d", clock - clock_of_group(0));
    } else {
        snprintf(f.text, sizeof f.text, "the stores of boxes of warp %d", clock - clock_of_stores(0));
    }
}

// --- accesses of shared memory -----------------------------------------------------------------------------------

// Check that no asynchronous access conflicts with one that a warp makes or starts. True after a failure.
bool meets_span(int warp, const char *p, int64_t bytes, Action action, const void *address, int line) {
    for (const Span &s : spans) {
        if (p >= s.end || p + bytes <= s.begin || (action == READ && s.action == READ)) continue;
        if (s.turn < known[warp][s.clock]) continue;
        Failure &f = start_failure(RACE, current, address);
        f.region = -1;
        f.offset = (p > s.begin ? p : s.begin) - memories.back().begin;
        f.line = line;
        f.action = action;
        f.other_action = s.action;
        name_actor(f, s.clock);
        stop();
        return true;
    }
    return false;
}

// Record an access; drop earlier ones that it covers.
void add_span(const Span &s) {
    size_t kept = 0;
    for (const Span &old : spans) {
        bool covered = s.begin <= old.begin && old.end <= s.end;
        if (!(covered && (s.action == WRITE || (old.clock == s.clock && old.action == READ)))) spans[kept++] = old;
    }
    spans.resize(kept);
    spans.push_back(s);
}

// A cell that is read asynchronously for warps must be defined, its write known to them, and fenced by the writer.
bool read_cell(const Cell &c, const char *p, int first_warp, int last_warp, int line) {
    if (!c.defined) {
        fail_at(UNDEFINED, p, line, -1, "");
        return false;
    }
    if (c.writer < 0) return true;
    int thread = c.writer % (int)fibers.size(), warp = thread / WARP;
    const std::vector<int> &fences = fibers[thread].fences;
    for (int w = first_warp; w <= last_warp; w++) {
        if (thread != current && c.write_turn >= known[w][warp]) {
            Failure &f = start_failure(RACE, current, nullptr);
            f.region = -1, f.offset = p - memories.back().begin, f.line = line;
            f.action = READ, f.other_action = WRITE, f.other_thread = thread, f.other_block = block_number;
            stop();
            return false;
        }
        bool fenced = (int)fences.size() > c.fences && (thread == current || fences[c.fences] < known[w][warp]);
        if (!fenced) {
            fail_at(FENCE, p, line, thread, "");
            return false;
        }
    }
    return true;
}

bool inside_shared(const void *place, int64_t bytes, int line) {
    const Memory &m = memories.back();
    const char *p = (const char *)place;
    if (p >= m.begin && p + bytes <= m.end) return true;
    fail_at(OUTSIDE, place, line, -1, "");
    return false;
}

// --- barriers ----------------------------------------------------------------------------------------------------

// The barrier at an address of `block`; null after a failure.
Mbarrier *barrier_at(const void *at, int block, int line, bool by_copy) {
    int warp = current / WARP;
    for (Mbarrier &b : barriers) {
        if (b.at != at || b.block != block) continue;
        bool mine = b.thread == current && !by_copy;
        if (!mine && (b.fence_turn < 0 || (b.thread != current && b.fence_turn >= known[warp][b.thread / WARP]))) {
            fail_at(FENCE, at, line, b.thread, "");
            return nullptr;
        }
        return &b;
    }
    fail_at(NOT_MADE, at, line, -1, "");
    return nullptr;
}

void end_phase(Mbarrier &b, int line) {
    if (b.pending || b.bytes > 0) return;
    if (b.bytes < 0) return fail_at(BYTES, b.at, line, -1, "");
    std::sort(b.arrivers.begin(), b.arrivers.end());
    if (b.phase && b.arrivers != b.before) {
        int other = -1;
        for (int t : b.arrivers)
            if (std::find(b.before.begin(), b.before.end(), t) == b.before.end()) other = t;
        return fail_at(ARRIVERS, b.at, line, other, "");
    }
    b.before.swap(b.arrivers);
    b.arrivers.clear();
    b.pending = b.count;
    b.phase++;
    join(b.ended, b.clock);
    for (size_t t = 0; t < fibers.size(); t++) {
        Fiber &f = fibers[t];
        if (f.state != AT_PHASE || f.places[0] != b.at || rank_of((int)t) != b.block) continue;
        f.state = READY;
        b.seen[t] = f.lane;
        join(known[t / WARP], b.ended);
    }
}

void arrive_at(const void *at, int64_t bytes, int block, int line) {
    Mbarrier *b = barrier_at(at, block, line, bytes > 0);
    if (!b->pending) return fail_at(ARRIVALS, at, line, -1, "");
    b->arrivers.push_back(current);
    join(b->clock, publish(current / WARP));
    b->pending--;
    b->bytes += bytes;
    end_phase(*b, line);
}

// --- boxes -------------------------------------------------------------------------------------------------------

// For each row of a box: its offset in the box, the address in the tensor of its element `low`, and `low` and `high`,
// between which it is inside of the tensor.
template <class F> void each_row(const TensorMap &m, const int *x, F act) {
    int index[5] = {0, 0, 0, 0, 0};
    int64_t row = 0, bytes = (int64_t)m.box[0] * m.size;
    for (;;) {
        bool inside = true;
        int64_t offset = 0;
        for (int d = 1; d < m.rank; d++) {
            int64_t i = (int64_t)x[d] + index[d];
            inside = inside && i >= 0 && i < m.extent[d];
            offset += i * m.stride[d];
        }
        int low = x[0] < 0 ? -x[0] : 0, high = m.extent[0] - x[0] < m.box[0] ? m.extent[0] - x[0] : m.box[0];
        if (!inside || high < low) low = high = 0;
        act(row * bytes, m.base + offset + ((int64_t)x[0] + low) * m.size, low, high);
        row++;
        int d = 1;
        while (d < m.rank && ++index[d] == m.box[d]) index[d++] = 0;
        if (d >= m.rank) return;
    }
}

int64_t box_bytes(const TensorMap &m) {
    int64_t bytes = m.size;
    for (int d = 0; d < m.rank; d++) bytes *= m.box[d];
    return bytes;
}

// The address of a byte of a box after swizzling: bits of the address permute chunks of 16 bytes.
int64_t swizzled(int64_t address, int width) {
    return width ? address ^ ((address >> 7 & (width / 16 - 1)) << 4) : address;
}

void round_to_tf32(char *place) {
    uint32_t bits;
    memcpy(&bits, place, sizeof bits);
    if ((bits & 0x7f800000) != 0x7f800000) bits = (bits + 0x1000) & 0xffffe000;
    memcpy(place, &bits, sizeof bits);
}

bool is_box_aligned(const void *place, const TensorMap &m, int line) {
    int64_t offset = (const char *)place - memories.back().begin;
    if (offset % (m.swizzle ? 8 * m.swizzle : 128)) return fail_at(MISALIGNED, place, line, -1, ""), false;
    return inside_shared(place, box_bytes(m), line);
}

// Start a copy of a box to the shared memory of `block`, which is active.
void load_box(char *to, const TensorMap *map, const int *x, const void *done, int block, int line) {
    if (!is_box_aligned(to, *map, line)) return;
    Mbarrier *b = barrier_at(done, block, line, true);
    int number = (int)(b - barriers.data()), clock = clock_of_barrier(number), warp = current / WARP;
    int64_t bytes = box_bytes(*map);
    Memory &m = memories.back();
    if (meets_span(warp, to, bytes, WRITE, nullptr, line)) return;
    int64_t first = (to - m.begin) / m.grain, last = (to + bytes - 1 - m.begin) / m.grain;
    for (int64_t c = first; c <= last; c++) {
        visit((int)memories.size() - 1, c, WRITE, nullptr);
        Cell fresh;
        m.cells[c] = fresh;
    }
    memset(to, 0xff, bytes);
    int region = find(map->base);
    each_row(*map, x, [&](int64_t, const char *from, int low, int high) {
        Memory &source = memories[region];
        for (int k = low; k < high; k++) visit(region, (from - source.begin) / source.grain + (k - low), READ, nullptr);
    });
    add_span({to, to + bytes, clock, turns[clock], WRITE});
    Box box{to, map, {x[0], x[1], x[2], x[3], x[4]}, number, block, turns[clock]++, publish(warp)};
    boxes.push_back(box);
}

// Complete a random copy in flight; called only when no thread can run. False: there is none.
bool land_box() {
    if (boxes.empty()) return false;
    lot = lot * 6364136223846793005ull + 1442695040888963407ull;
    size_t chosen = (lot >> 33) % boxes.size();
    Box box = boxes[chosen];
    boxes.erase(boxes.begin() + chosen);
    enter_block(box.block);
    Memory &m = memories.back();
    int64_t start = box.to - m.begin, bytes = box_bytes(*box.map);
    int size = box.map->size;
    each_row(*box.map, box.x, [&](int64_t row, const char *from, int low, int high) {
        for (int k = 0; k < box.map->box[0]; k++) {
            char *to = m.begin + swizzled(start + row + (int64_t)k * size, box.map->swizzle);
            if (k >= low && k < high) memcpy(to, from + (int64_t)(k - low) * size, size);
            else memset(to, 0, size);
            if (box.map->rounds) round_to_tf32(to);
        }
    });
    for (int64_t c = start / m.grain; c <= (start + bytes - 1) / m.grain; c++) m.cells[c].defined = true;
    Mbarrier &b = barriers[box.barrier];
    join(b.clock, box.clock);
    int &mine = b.clock[clock_of_barrier(box.barrier)];
    if (box.turn + 1 > mine) mine = box.turn + 1;
    b.bytes -= bytes;
    end_phase(b, 0);
    return true;
}

void store_box(const TensorMap *map, const int *x, const char *from, int line) {
    if (!is_box_aligned(from, *map, line)) return;
    Memory &m = memories.back();
    int warp = current / WARP, clock = clock_of_stores(warp);
    int64_t bytes = box_bytes(*map), start = from - m.begin;
    if (meets_span(warp, from, bytes, READ, nullptr, line)) return;
    for (int64_t c = start / m.grain; c <= (start + bytes - 1) / m.grain; c++)
        if (!read_cell(m.cells[c], m.begin + c * m.grain, warp, warp, line)) return;
    int region = find(map->base), size = map->size;
    each_row(*map, x, [&](int64_t row, const char *to, int low, int high) {
        Memory &target = memories[region];
        for (int k = low; k < high; k++) {
            char *place = (char *)to + (int64_t)(k - low) * size;
            visit(region, (place - target.begin) / target.grain, WRITE, nullptr);
            memcpy(place, m.begin + swizzled(start + row + (int64_t)k * size, map->swizzle), size);
        }
    });
    add_span({from, from + bytes, clock, turns[clock], READ});
}

// --- products of warpgroups --------------------------------------------------------------------------------------

// Wait for the warpgroup. True in the thread that arrives last, which acts for all.
bool last_of_group(const void *what, int line) {
    int first = current / GROUP * GROUP, waiting = 0;
    Fiber &f = fibers[current];
    f.row = what;
    f.line = line;
    if (first + GROUP > (int)fibers.size()) return fail_waiting(LANE, current, -1), stop(), false;
    for (int k = first; k < first + GROUP; k++) {
        if (fibers[k].state != IN_GROUP) continue;
        waiting++;
        if (fibers[k].line != line || fibers[k].row != what) return fail_waiting(DIVERGED, current, k), stop(), false;
    }
    if (waiting + 1 < GROUP) return wait_at(IN_GROUP, line), false;
    for (int k = first; k < first + GROUP; k++)
        if (k != current) fibers[k].state = READY;
    return true;
}

// Read the matrix that a descriptor points to, rows of M or N by columns of K. False after a failure.
bool read_matrix(const MachineOperand &o, uint64_t descriptor, bool across, int first_warp, int clock, int line,
                 std::vector<double> &to) {
    static const int widths[] = {0, 128, 64, 32};
    Memory &m = memories.back();
    int width = widths[descriptor >> 62], size = o.bits / 8;
    int64_t start = (descriptor & 0x3fff) << 4 | (descriptor >> 52 & 0x3ff) << 18, leading = (descriptor >> 16 & 0x3fff) << 4;
    int64_t stride = (descriptor >> 32 & 0x3fff) << 4, low = INT64_MAX, high = -1;
    to.resize((size_t)o.rows * o.columns);
    for (int row = 0; row < o.rows; row++)
        for (int k = 0; k < o.columns; k++) {
            int64_t plain = across ? start + row * size / width * leading + k / 8 * stride + k % 8 * width + row * size % width
                                   : start + row / 8 * stride + row % 8 * width + k * size;
            int64_t at = swizzled(plain, width);
            if (!inside_shared(m.begin + at, size, line)) return false;
            if (!read_cell(m.cells[at / m.grain], m.begin + at, first_warp, first_warp + 3, line)) return false;
            Number n = number_at(o, m.begin + at, 0);
            to[(size_t)row * o.columns + k] = n.real + (double)n.whole;
            if (at < low) low = at;
            if (at + size > high) high = at + size;
        }
    for (int w = first_warp; w < first_warp + 4; w++)
        if (meets_span(w, m.begin + low, high - low, READ, nullptr, line)) return false;
    add_span({m.begin + low, m.begin + high, clock, turns[clock], READ});
    return true;
}

// across: the factors whose M or N is contiguous: 1 for the left one, 2 for the right one, 3 for both.
void multiply_group(const MachineProduct &row, int across, int line) {
    int first = current / GROUP * GROUP, number = first / GROUP, clock = clock_of_group(number);
    Warpgroup &g = warpgroups[number];
    Fiber &mine = fibers[current];
    if (!g.fenced) return fail_at(MISUSE, memories.back().begin, line, -1, "products follow a wait without wgmma_fence");
    for (int t = 0; t < GROUP; t++)
        for (int n = 0; n < 3; n++)
            if (fibers[first + t].words[n] != mine.words[n]) return fail_waiting(DIVERGED, current, first + t), stop();
    std::vector<double> left, right;
    int m = row.total.rows, n = row.total.columns, depth = row.left.columns;
    if (mine.places[1]) {
        left.resize((size_t)m * depth);
        for (int t = 0; t < GROUP; t++)
            for (int v = 0; v < value_count(row.left); v++) {
                Number x = number_at(row.left, fibers[first + t].places[1], v);
                int at = offset_of(row.left, t, v);
                left[(size_t)(at % m) * depth + at / m] = x.real + (double)x.whole;
            }
    } else if (!read_matrix(row.left, mine.words[0], across & 1, first / WARP, clock, line, left)) {
        return;
    }
    if (!read_matrix(row.right, mine.words[1], across & 2, first / WARP, clock, line, right)) return;
    size_t found = 0;
    while (found < g.sums.size() && g.sums[found].places[current - first] != mine.places[0]) found++;
    bool fresh = found == g.sums.size();
    if (fresh) {
        g.sums.push_back(Sums());
        g.sums[found].row = &row;
        for (int t = 0; t < GROUP; t++) g.sums[found].places[t] = (void *)fibers[first + t].places[0];
    }
    Sums &s = g.sums[found];
    if (!mine.words[2]) {
        s.total.assign((size_t)m * n, 0.0);
    } else if (fresh) {
        s.total.resize((size_t)m * n);
        for (int t = 0; t < GROUP; t++)
            for (int v = 0; v < value_count(row.total); v++) {
                Number x = number_at(row.total, s.places[t], v);
                int at = offset_of(row.total, t, v);
                s.total[(size_t)(at % m) * n + at / m] = x.real + (double)x.whole;
            }
    }
    std::vector<double> across_k((size_t)depth * n);
    for (int j = 0; j < n; j++)
        for (int k = 0; k < depth; k++) across_k[(size_t)k * n + j] = right[(size_t)j * depth + k];
    bool whole = row.total.format == INTEGER;
    for (int i = 0; i < m; i++) {
        double *to = &s.total[(size_t)i * n];
        for (int k = 0; k < depth; k++) {
            double a = left[(size_t)i * depth + k];
            const double *b = &across_k[(size_t)k * n];
            for (int j = 0; j < n; j++) to[j] += a * b[j];
        }
        for (int j = 0; j < n; j++) to[j] = whole ? (double)(int32_t)(int64_t)to[j] : (double)(float)to[j];
    }
    s.group = g.closed;
    for (int t = 0; t < GROUP; t++)
        for (int r = 0; r < row.total.registers; r++) memcpy((char *)s.places[t] + 4 * r, &POISON, 4);
    for (int t = 0; t < GROUP; t++) {
        Fiber &f = fibers[first + t];
        bool known_place = false;
        for (const Held &h : f.held) known_place |= h.begin == s.places[t];
        if (!known_place) f.held.push_back({(char *)s.places[t], 4 * row.total.registers, g.closed, true});
        if (mine.places[1]) f.held.push_back({(char *)f.places[1], 4 * row.left.registers, g.closed, false});
    }
}

void wait_for_group(int left) {
    int first = current / GROUP * GROUP, number = first / GROUP, clock = clock_of_group(number);
    Warpgroup &g = warpgroups[number];
    g.fenced = false;
    int done = g.closed - left;  // groups with smaller numbers are complete
    for (int w = first / WARP; w < first / WARP + 4; w++)
        if (known[w][clock] < done) known[w][clock] = done;
    for (size_t k = 0; k < g.sums.size();) {
        Sums &s = g.sums[k];
        if (s.group >= done) { k++; continue; }
        for (int t = 0; t < GROUP; t++)
            for (int v = 0; v < value_count(s.row->total); v++) {
                int at = offset_of(s.row->total, t, v);
                double x = s.total[(size_t)(at % s.row->total.rows) * s.row->total.columns + at / s.row->total.rows];
                set_number(s.row->total, s.places[t], v, {x, s.row->total.format == INTEGER ? (int64_t)x : 0});
            }
        for (int t = 0; t < GROUP; t++) {
            std::vector<Held> &held = fibers[first + t].held;
            for (size_t h = 0; h < held.size();)
                if (held[h].begin == s.places[t]) held.erase(held.begin() + h);
                else h++;
        }
        g.sums.erase(g.sums.begin() + k);
    }
    for (int t = 0; t < GROUP; t++) {
        std::vector<Held> &held = fibers[first + t].held;
        for (size_t h = 0; h < held.size();)
            if (!held[h].sums && held[h].group < done) held.erase(held.begin() + h);
            else h++;
    }
}
