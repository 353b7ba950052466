// MinMaxSketch: the CUDA side of kernels/sketch/sketch.cpp.
#include "sketch/sketch.h"

#include "common/device.cuh"

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
