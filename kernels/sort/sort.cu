// A stable radix sort of 64-bit words, eight bits per pass, and the pairs that are sorted with it: the CUDA side of
// radix.h and sort.cpp.
//
// A pass has three launches:
//     radix_count   each tile counts its digits
//     scan_counts   the counts, all tiles of digit 0 first, become places
//     radix_move    each tile moves its words to the places of their digits, in their order
#include "common/device.cuh"
#include "sort/pairs.h"

const u32 DIGITS = 256, ROWS = 8;  // ROWS as in ops/sort.py
const u64 SORT_TILE = (u64)ROWS * THREADS;

// counts[digit * tiles + tile]. A block takes a tile.
KERNEL radix_count(const u64* words, u64 count, u32 shift, u32* counts) {
    __shared__ u32 local[DIGITS];
    local[threadIdx.x] = 0;
    __syncthreads();
    for (u32 row = 0; row < ROWS; ++row) {
        const u64 i = blockIdx.x * SORT_TILE + row * THREADS + threadIdx.x;
        if (i < count) atomicAdd(local + (words[i] >> shift & (DIGITS - 1)), 1u);
    }
    __syncthreads();
    counts[(u64)threadIdx.x * gridDim.x + blockIdx.x] = local[threadIdx.x];
}

// Each count becomes the sum of all counts before it.
KERNEL scan_counts(u32* counts, u64 count, u64* status, u64* end) {
    each_place(
        count, 0, status, end, [=](u64 i) { return (u64)counts[i]; },
        [=](u64 i, u64 place) { counts[i] = (u32)place; });
}

// places: the scanned counts. For each row of a tile, the lanes of a warp that have the same digit find each other;
// then thread d gives each warp its places of digit d.
KERNEL radix_move(const u64* words, u64 count, u32 shift, const u32* places, u64* out) {
    __shared__ u32 of_warp[WARPS][DIGITS];
    u32 next = places[(u64)threadIdx.x * gridDim.x + blockIdx.x];
    for (u32 row = 0; row < ROWS; ++row) {
        const u64 i = blockIdx.x * SORT_TILE + row * THREADS + threadIdx.x;
        const u64 word = i < count ? words[i] : 0;
        const u32 digit = i < count ? (u32)(word >> shift & (DIGITS - 1)) : DIGITS;
        for (u32 warp = 0; warp < WARPS; ++warp) of_warp[warp][threadIdx.x] = 0;
        const u32 same = __match_any_sync(WHOLE_WARP, digit);
        const u32 before = (u32)__popc(same & ((1u << lane_number()) - 1));
        __syncthreads();
        if (before == 0 && digit < DIGITS) of_warp[warp_number()][digit] = (u32)__popc(same);
        __syncthreads();
        for (u32 warp = 0; warp < WARPS; ++warp) {
            const u32 size = of_warp[warp][threadIdx.x];
            of_warp[warp][threadIdx.x] = next;
            next += size;
        }
        __syncthreads();
        if (digit < DIGITS) out[of_warp[warp_number()][digit] + before] = word;
        __syncthreads();
    }
}

// Pairs of values, as pairs.h defines them.
KERNEL value_pairs(const float* values, u64 count, u64* pairs) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) pairs[i] = value_pair(values[i], i);
}
KERNEL value_unpair(const u64* pairs, u64 count, float* sorted, u32* order) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        sorted[i] = value_of_pair(pairs[i]);
        order[i] = (u32)pairs[i];
    }
}

// Pairs of keys: | key | the value's bits |. key_unpair sets *error to ERR_INDEX if the keys are not strictly
// increasing or not below numel.
KERNEL key_pairs(const u32* keys, const float* values, u64 count, u64* pairs) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) pairs[i] = (u64)keys[i] << 32 | bits_of(values[i]);
}
KERNEL key_unpair(const u64* pairs, u64 count, u64 numel, u32* keys, float* values, i32* error) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u64 key = pairs[i] >> 32;
        keys[i] = (u32)key;
        values[i] = __uint_as_float((u32)pairs[i]);
        if (key >= numel || (i && key <= pairs[i - 1] >> 32)) atomicMin(error, ERR_INDEX);
    }
}

// Pairs of indices: | index | its place |.
KERNEL index_pairs(const u32* indices, u64 count, u64* pairs) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) pairs[i] = (u64)indices[i] << 32 | i;
}
KERNEL index_unpair(const u64* pairs, u64 count, u32* indices, u32* places) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        indices[i] = (u32)(pairs[i] >> 32);
        places[i] = (u32)pairs[i];
    }
}
