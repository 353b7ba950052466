// MinMaxSketch: the CUDA side of kernels/sketch/sketch.cpp.
#include "sketch/sketch.h"

#include "bits/pack.cuh"
#include "delta/delta.cuh"
#include "sketch/flagged_keys.cuh"

// A minimum does not depend on the order of the insertions, and the minimum of numbers is the maximum of depths, which
// can begin with zeros. depths[rows * columns]: width - 1 minus the number of each bin; zeros before the launch.
KERNEL sketch_insert(const u32* keys, const u8* numbers, u64 count, u32 rows, u32 columns, u32 width, u32 seed,
                     u32 parameter, u32 step, u32* depths) {
    // The grid is a multiple of `rows` blocks: one for each row of each part of the keys.
    const u32 row = blockIdx.x % rows, row_seed = sketch_row_seed(row, seed, parameter, step);
    const u64 part = blockIdx.x / rows, parts = gridDim.x / rows;
    for (u64 i = part * THREADS + threadIdx.x; i < count; i += parts * THREADS)
        atomicMax(depths + (u64)row * columns + sketch_column(keys[i], row_seed, columns), width - 1 - numbers[i]);
}
KERNEL sketch_bins(const u32* depths, u64 count, u32 width, u8* bins) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) bins[i] = (u8)(width - 1 - depths[i]);
}

// values[i] = means[the number of keys[i]]. *error: ERR_VALUE if a bin is not below `width`, the number of means.
KERNEL sketch_query(const u32* keys, u64 count, u32 rows, u32 columns, u32 width, u32 seed, u32 parameter, u32 step,
                    const u8* bins, const float* means, float* values, i32* error) {
    __shared__ u32 seeds[MAX_ROWS];
    if (threadIdx.x < rows) seeds[threadIdx.x] = sketch_row_seed(threadIdx.x, seed, parameter, step);
    __syncthreads();
    for (u64 i = grid_thread(); i < (u64)rows * columns; i += grid_threads())
        if (bins[i] >= width) atomicMin(error, ERR_VALUE);
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        u32 number = 0;
        for (u32 row = 0; row < rows; ++row) {
            const u32 bin = bins[(u64)row * columns + sketch_column(keys[i], seeds[row], columns)];
            number = bin > number ? bin : number;
        }
        values[i] = number < width ? means[number] : 0.0f;
    }
}

// Words that sort by group: | group | element |. counts[group]: its number of elements; zeros before the launch.
KERNEL group_words(const u32* codes, u64 count, const u32* group_of, u64* words, u32* counts) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 group = group_of[codes[i]];
        words[i] = (u64)group << 32 | i;
        atomicAdd(counts + group, 1u);
    }
}

// keys, numbers: of the elements of the sorted words. first[group]: its first bucket.
KERNEL group_take(const u64* words, u64 count, const u32* indices, const u32* codes, const u32* first, u32* keys,
                  u8* numbers) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 from = (u32)words[i];
        keys[i] = indices[from];
        numbers[i] = (u8)(codes[from] - first[words[i] >> 32]);
    }
}

// ---- The sketches of all groups of a section at once, for ops/sketch.py, which makes the table of the groups. A group
// has the blocks `group`, `group` + groups, ... of a grid.
struct Group {
    u64 first, count;          // its elements
    u64 bins, columns, width;  // its first bin; bins in a row; buckets
    u64 of_keys, of_bins;      // words of `out` where its keys and its bins begin
    u64 group;                 // its number among all groups, those without elements, too
};
static_assert(sizeof(Group) == 8 * sizeof(u64), "the table that ops/sketch.py makes");

KERNEL groups_insert(const u32* keys, const u8* numbers, const Group* table, u32 groups, u32 rows, u32 seed,
                     u32 parameter, u32 step, u32* depths) {
    __shared__ u32 seeds[MAX_ROWS];
    if (threadIdx.x < rows) seeds[threadIdx.x] = sketch_row_seed(threadIdx.x, seed, parameter, step);
    __syncthreads();
    const Group group = table[blockIdx.x % groups];
    const u64 threads = gridDim.x / groups * THREADS;
    for (u64 i = blockIdx.x / groups * THREADS + threadIdx.x; i < group.count; i += threads) {
        const u32 key = keys[group.first + i], depth = (u32)group.width - 1 - numbers[group.first + i];
        for (u32 row = 0; row < rows; ++row)
            atomicMax(depths + group.bins + row * group.columns + sketch_column(key, seeds[row], (u32)group.columns),
                      depth);
    }
}

// counts[group][4 * THREADS], zeros before the launch: how often each bin occurs, for plan_symbols; or null.
KERNEL groups_bins(const u32* depths, const Group* table, u32 groups, u32 rows, u8* bins, u64* counts) {
    const u32 number = blockIdx.x % groups;
    const Group group = table[number];
    const u64 size = rows * group.columns, block = blockIdx.x / groups, blocks = gridDim.x / groups;
    const auto bin = [=](u64 i) { return bins[group.bins + i] = (u8)(group.width - 1 - depths[group.bins + i]); };
    if (counts) count_symbols(size, block, blocks, counts + 4ull * THREADS * number, bin);
    else
        for (u64 i = block * THREADS + threadIdx.x; i < size; i += blocks * THREADS) bin(i);
}

// lengths[group][33], zeros before the launch: as delta_count.
KERNEL groups_count(const u32* keys, const Group* table, u32 groups, u64* lengths) {
    const u32 number = blockIdx.x % groups;
    const Group group = table[number];
    count_deltas(keys + group.first, group.count, blockIdx.x / groups, gridDim.x / groups, lengths + 33 * number);
}

// Two blocks for each group. sizes[group][2]: the bytes of its keys and of its bins.
KERNEL groups_plan(const Group* table, u32 groups, u32 rows, const u64* lengths, const u64* counts, DeltaPlan* of_keys,
                   HuffmanPlan* of_bins, u64* sizes) {
    const u32 number = blockIdx.x % groups;
    const Group group = table[number];
    if (blockIdx.x < groups) {
        plan_deltas(lengths + 33 * number, group.count, of_keys + number);
        if (threadIdx.x == 0) sizes[2 * number] = of_keys[number].bits / 8;
    } else {
        plan_symbols(counts + 4ull * THREADS * number, rows * group.columns, of_bins + number);
        if (threadIdx.x == 0) sizes[2 * number + 1] = of_bins[number].bytes;
    }
}

// out: zeros before the launch. A third of the blocks writes the prefixes of the keys, a third the deltas, and a third
// the bins. tiles: of the words of `status` of each of these. ends: 3 for each group.
KERNEL groups_write_coded(const u32* keys, const u8* bins, const Group* table, u32 groups, u32 rows,
                          const DeltaPlan* of_keys, const HuffmanPlan* of_bins, u64 tiles, u64* status, u64* ends,
                          u32* out) {
    const u32 number = blockIdx.x % groups, part = blockIdx.x / groups % 3;
    const Group group = table[number];
    const bool first = blockIdx.x < 3 * groups;
    u64* own = status + (number * 3 + part) * tiles;
    u64* end = ends + number * 3 + part;
    if (part < 2)
        write_deltas(keys + group.first, group.count, of_keys + number, part == 0, first && part == 0, own, end,
                     out + group.of_keys, 0);
    else
        write_symbols(bins + group.bins, rows * group.columns, of_bins + number, first, own, end, out + group.of_bins,
                      0);
}

// As groups_write_coded, for gaps of whole bytes and bins of equal width: half of the blocks for each.
KERNEL groups_write_plain(const u32* keys, const u8* bins, const Group* table, u32 groups, u32 rows, u64 tiles,
                          u64* status, u64* sizes, u32* out) {
    const u32 number = blockIdx.x % groups;
    const Group group = table[number];
    if (blockIdx.x / groups % 2 == 0) {
        write_flagged(keys + group.first, group.count, status + number * tiles, sizes + 2 * number,
                      (u8*)(out + group.of_keys));
        return;
    }
    const u32 bits = bit_length((u32)group.width - 1);
    const u64 size = rows * group.columns, block = blockIdx.x / groups / 2, blocks = gridDim.x / groups / 2;
    pack(bins + group.bins, size, bits, out + group.of_bins, block * THREADS + threadIdx.x, blocks * THREADS);
    if (block == 0 && threadIdx.x == 0) sizes[2 * number + 1] = field_bytes(size, bits);
}
