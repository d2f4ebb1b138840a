// Atoms, which are executed for a whole warp once all of its lanes have reached them. Part of `machine.cpp`.

int offset_of(const MachineOperand &o, int thread, int value) {
    int offset = 0;
    for (const MachineMode &m : o.threads) offset += thread % m.size * m.stride, thread /= m.size;
    for (const MachineMode &m : o.values) offset += value % m.size * m.stride, value /= m.size;
    return offset;
}

int value_count(const MachineOperand &o) { return o.values[0].size * o.values[1].size * o.values[2].size; }

// A number in registers: floats are exact in `real`, integers in `whole`.
struct Number { double real; int64_t whole; };

Number number_at(const MachineOperand &o, const void *registers, int value) {
    const char *p = (const char *)registers + value * (o.bits / 8);
    uint32_t word = 0;
    float real = 0;
    switch (o.format) {
    case HALF: { _Float16 x; memcpy(&x, p, 2); return {(double)x, 0}; }
    case BFLOAT: memcpy((char *)&word + 2, p, 2); break;
    case TENSOR_FLOAT: memcpy(&word, p, 4); word &= 0xffffe000u; break;
    case FLOAT: memcpy(&word, p, 4); break;
    case DOUBLE: { double x; memcpy(&x, p, 8); return {x, 0}; }
    case BYTE: return {0, *(const int8_t *)p};
    case UNSIGNED_BYTE: return {0, *(const uint8_t *)p};
    default: { int32_t x; memcpy(&x, p, 4); return {0, x}; }
    }
    memcpy(&real, &word, 4);
    return {real, 0};
}

void set_number(const MachineOperand &o, void *registers, int value, Number n) {
    char *p = (char *)registers + value * (o.bits / 8);
    switch (o.format) {
    case HALF: { _Float16 x = (_Float16)n.real; memcpy(p, &x, 2); break; }
    case FLOAT: { float x = (float)n.real; memcpy(p, &x, 4); break; }
    case DOUBLE: memcpy(p, &n.real, 8); break;
    default: { int32_t x = (int32_t)(uint32_t)n.whole; memcpy(p, &x, 4); }
    }
}

int lane_of(const MachineProduct &row, int thread) {
    return thread % row.lane[0].size * row.lane[0].stride + thread / row.lane[0].size * row.lane[1].stride;
}

std::vector<Number> gather(const MachineProduct &row, const MachineOperand &o, int first, int place) {
    std::vector<Number> matrix(o.rows * o.columns);
    for (int t = 0; t < row.lanes; t++)
        for (int v = 0; v < value_count(o); v++)
            matrix[offset_of(o, t, v)] = number_at(o, fibers[first + lane_of(row, t)].places[place], v);
    return matrix;
}

// The products of a warp: one, or one for each group of lanes.
void multiply(int first) {
    const MachineProduct &row = *(const MachineProduct *)fibers[first].row;
    for (int group = first; group < first + (row.lanes < WARP ? WARP / 2 : 1); group += 4) {
        std::vector<Number> total = gather(row, row.total, group, 0), left = gather(row, row.left, group, 1);
        std::vector<Number> right = gather(row, row.right, group, 2);
        int m = row.total.rows, n = row.total.columns;
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++)
                for (int k = 0; k < row.left.columns; k++) {
                    const Number &a = left[i + k * m], &b = right[j + k * n];
                    total[i + j * m].real += a.real * b.real;
                    total[i + j * m].whole += a.whole * b.whole;
                }
        for (int t = 0; t < row.lanes; t++)
            for (int v = 0; v < value_count(row.total); v++)
                set_number(row.total, (void *)fibers[group + lane_of(row, t)].places[0], v,
                           total[offset_of(row.total, t, v)]);
    }
}

// Move matrices of 16-bit elements between registers, or between registers and the rows that lanes point at.
void move_matrices(int first) {
    const MachineMove &row = *(const MachineMove *)fibers[first].row;
    std::vector<uint16_t> matrix(row.from.rows * row.from.columns);
    bool rows = row.from.registers == 0;
    for (int t = 0; t < (rows ? row.from.rows : WARP); t++)
        for (int v = 0; v < value_count(row.from); v++)
            matrix[offset_of(row.from, t, v)] = ((const uint16_t *)fibers[first + t].places[1])[v];
    for (int t = 0; t < (row.to.registers ? WARP : row.to.rows); t++)
        for (int v = 0; v < value_count(row.to); v++)
            ((uint16_t *)fibers[first + t].places[0])[v] = matrix[offset_of(row.to, t, v)];
}

// Wait for the warp at an atom.
void wait_at_atom(void (*act)(int), const void *row, int line) {
    Fiber &f = fibers[current];
    f.act = act;
    f.row = row;
    f.width = 0;
    wait_at(IN_WARP, line);
    f.act = nullptr;
}

// Execute the atom that all lanes of a warp have reached. False after a failure.
bool act_together(int first, int count) {
    if (count != WARP) return fail_waiting(LANE, first, -1), false;
    for (int k = 1; k < count; k++)
        if (fibers[first + k].row != fibers[first].row) return fail_waiting(DIVERGED, first, first + k), false;
    fibers[first].act(first);
    for (int k = 0; k < count; k++) fibers[first + k].state = READY;
    return true;
}

// Join the clocks of warps that have met: each then knows what the others did before.
void join_warps(const std::vector<int> &warps) {
    for (int w : warps) known[w][w] = ++turns[w];
    std::vector<int> all(turns.size(), 0);
    for (int w : warps)
        for (size_t v = 0; v < all.size(); v++)
            if (known[w][v] > all[v]) all[v] = known[w][v];
    for (int w : warps) known[w] = all;
}

// Release the threads of the block from thread `first` on that wait at a barrier of a part of the block which all
// threads of the part have reached. True if any were released.
bool advance_parts(int first) {
    bool moved = false;
    for (int number = 1; number < 16; number++) {
        std::vector<int> waiting, warps;
        for (int k = first; k < first + block_threads; k++)
            if (fibers[k].state == AT_PART && fibers[k].lane == number) waiting.push_back(k);
        if (waiting.empty() || (int)waiting.size() < fibers[waiting[0]].width) continue;
        for (int k : waiting)
            if (fibers[k].width != (int)waiting.size()) return fail_waiting(DIVERGED, waiting[0], k), true;
        for (int k : waiting) {
            fibers[k].state = READY;
            if (warps.empty() || warps.back() != k / WARP) warps.push_back(k / WARP);
        }
        join_warps(warps);
        machine_counts[2] += (int64_t)waiting.size();
        moved = true;
    }
    return moved;
}
