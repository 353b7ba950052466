// What both curve fits share on the device. Eight lanes compute the sum of a FIT block (curves.h), four FIT blocks a warp;
// one thread then adds the sums of the blocks in order.
#pragma once

#include "common/device.cuh"
#include "curve_fit/curves.h"

// How many of `count` sorted values are above zero; with `zero`, how many are not below zero. All threads of the block
// call it: they look at as many places at a time.
__device__ u64 values_above(const float* sorted, u64 count, bool zero) {
    u64 low = 0, high = count;
    while (low < high) {
        const u64 step = (high - low + THREADS - 1) / THREADS, at = low + threadIdx.x * step;
        const bool above = at < high && (sorted[at] > 0.0f || (zero && sorted[at] == 0.0f));
        const u32 found = block_sum((u32)above);
        if (found == 0) break;
        if (low + found * step < high) high = low + found * step;
        low += (found - 1) * step + 1;
    }
    return low;
}

// N sums over each of the FIT blocks first .. last - 1, by eight lanes a block. f(block, i, sums) adds element i of the
// block to sums[N]; size(block): its number of elements. Result: partial[block * N + n]. All threads of the block call it.
template <u32 N, class S, class F>
__device__ void block_sums(u64 first, u64 last, double* partial, S size, F f) {
    for (u64 base = first; base < last; base += THREADS / 8) {
        const u64 block = base + threadIdx.x / 8;
        double sums[N];
        for (u32 n = 0; n < N; ++n) sums[n] = 0.0;
        if (block < last)
            for (u64 i = threadIdx.x % 8; i < size(block); i += 8) f(block, i, sums);
        for (u32 n = 0; n < N; ++n) {
            for (u32 half = 4; half; half /= 2) sums[n] += __shfl_down_sync(WHOLE_WARP, sums[n], half);
            if (block < last && threadIdx.x % 8 == 0) partial[block * N + n] = sums[n];
        }
    }
}

// A 4-byte word of a section, which need not be aligned; zeros past `bytes`.
__device__ __forceinline__ u32 word_at(const u8* section, u64 bytes, u64 word) {
    return load_field(section, bytes, 32 * word, 32);
}
__device__ __forceinline__ float float_at(const u8* section, u64 bytes, u64 word) {
    return __uint_as_float(word_at(section, bytes, word));
}
