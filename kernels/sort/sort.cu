// A stable radix sort of 64-bit words, eight bits per pass, and the pairs that are sorted with it: the CUDA side of
// radix.h and sort.cpp. One launch counts the digits of all passes, and each pass is one more (Adinets and Merrill,
// "Onesweep: a faster least significant digit radix sort for GPUs", arXiv:2206.01784, 2022).
#include "common/device.cuh"
#include "sort/pairs.h"

const u32 DIGITS = 256, ROWS = 8;  // ROWS as in ops/sort.py
const u32 SORT_TILE = ROWS * THREADS;
const u32 MOST_PASSES = 4;
static_assert(DIGITS == THREADS, "thread d of a block has digit d");

// counts[pass][DIGITS], zeros before the launch: how often each digit occurs. status[size]: becomes zeros.
KERNEL radix_count(const u64* words, u64 count, u32 low, u32 passes, u32* counts, u64* status, u64 size) {
    __shared__ u32 local[MOST_PASSES][DIGITS];
    for (u64 i = grid_thread(); i < size; i += grid_threads()) status[i] = 0;
    for (u32 pass = 0; pass < passes; ++pass) local[pass][threadIdx.x] = 0;
    __syncthreads();
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u64 word = words[i] >> low;
        for (u32 pass = 0; pass < passes; ++pass) atomicAdd(&local[pass][word >> 8 * pass & (DIGITS - 1)], 1u);
    }
    __syncthreads();
    for (u32 pass = 0; pass < passes; ++pass)
        if (local[pass][threadIdx.x]) atomicAdd(counts + pass * DIGITS + threadIdx.x, local[pass][threadIdx.x]);
}

// A pass. counts: of its digits. A tile's words are ordered in shared memory, so that those of a digit are stored in a
// row; where they go, tell the counts of smaller digits and the tiles before, as in tiles_before:
//
//     status:  | word of tile 0, digit 0 | word of tile 0, digit 1 | ... | number of the next tile |      zeros before
KERNEL radix_pass(const u64* words, u64 count, u32 shift, const u32* counts, u64* status, u64* out) {
    __shared__ u32 of_warp[WARPS][DIGITS];  // how many a warp has of a digit; then, their places among the tile's
    __shared__ u32 to[DIGITS];              // place in `out`, less that in the tile
    __shared__ u64 ordered[SORT_TILE];
    const u32 tiles = (u32)((count + SORT_TILE - 1) / SORT_TILE), digit = threadIdx.x;
    u32 total;
    const u32 smaller = block_scan(counts[digit], &total);
    const auto digit_of = [=](u64 word) { return (u32)(word >> shift) & (DIGITS - 1); };
    for (u32 tile; (tile = next_tile(status + (u64)tiles * (DIGITS - 1), tiles)) < tiles;) {
        const u64 tile_begin = (u64)tile * SORT_TILE;
        const u32 size = (u32)(count - tile_begin < SORT_TILE ? count - tile_begin : SORT_TILE);
        const u32 begin = warp_number() * ROWS * 32 + lane_number();
        u64 word[ROWS];
        u32 place[ROWS];  // among those of the warp that have the digit
#pragma unroll
        for (u32 row = 0; row < ROWS; ++row)
            word[row] = begin + 32 * row < size ? words[tile_begin + begin + 32 * row] : 0;
        for (u32 warp = 0; warp < WARPS; ++warp) of_warp[warp][digit] = 0;
        __syncthreads();
        // In each row, the lanes that have the same digit find each other.
#pragma unroll
        for (u32 row = 0; row < ROWS; ++row) {
            const bool there = begin + 32 * row < size;
            const u32 own = digit_of(word[row]), same = __match_any_sync(WHOLE_WARP, there ? own : DIGITS);
            const u32 before = (u32)__popc(same & ((1u << lane_number()) - 1));
            place[row] = there ? of_warp[warp_number()][own] + before : 0;
            __syncwarp();
            if (there && before == 0) of_warp[warp_number()][own] += (u32)__popc(same);
            __syncwarp();
        }
        __syncthreads();
        u32 of_tile = 0;
        for (u32 warp = 0; warp < WARPS; ++warp) {
            const u32 of_this = of_warp[warp][digit];
            of_warp[warp][digit] = of_tile;
            of_tile += of_this;
        }
        const u32 in_tile = block_scan(of_tile, &total);
        for (u32 warp = 0; warp < WARPS; ++warp) of_warp[warp][digit] += in_tile;
        u64 before = 0;
        u64* const of_digit = status + digit;
        atomicExch(of_digit + (u64)tile * DIGITS, (tile ? AGGREGATE : PREFIX) | of_tile);
        bool open = tile > 0;
        for (u64 at = tile; __any_sync(WHOLE_WARP, open);) {
            --at;
            u64 seen = open ? observed(of_digit + at * DIGITS) : PREFIX;
            while (__any_sync(WHOLE_WARP, seen < AGGREGATE))
                if (seen < AGGREGATE) seen = observed(of_digit + at * DIGITS);
            before += seen & SUM;
            open = seen < PREFIX;
        }
        if (tile) atomicExch(of_digit + (u64)tile * DIGITS, PREFIX | (before + of_tile));
        to[digit] = smaller + (u32)before - in_tile;
        __syncthreads();
#pragma unroll
        for (u32 row = 0; row < ROWS; ++row)
            if (begin + 32 * row < size)
                ordered[of_warp[warp_number()][digit_of(word[row])] + place[row]] = word[row];
        __syncthreads();
        for (u32 i = threadIdx.x; i < size; i += THREADS) out[to[digit_of(ordered[i])] + i] = ordered[i];
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
