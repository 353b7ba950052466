// What both curve fits share on the device. An encoder is one block. Eight lanes compute the sum of a FIT block
// (curves.h), four FIT blocks a warp; one thread then adds the sums of the blocks in order.
#pragma once

#include "common/device.cuh"
#include "curve_fit/curves.h"

// How many of `count` sorted values are above zero; with `zero`, how many are not below zero.
__device__ u64 values_above(const float* sorted, u64 count, bool zero) {
    return first_not(count, [=](u64 i) { return sorted[i] > 0.0f || (zero && sorted[i] == 0.0f); });
}

// N sums over each FIT block, by eight lanes a block. f(block, i, sums) adds element i of the block to sums[N];
// size(block): its number of elements. Result: partial[block * N + n]. All threads of the block call it.
template <u32 N, class S, class F>
__device__ void block_sums(u64 blocks, double* partial, S size, F f) {
    const u64 group = threadIdx.x / 8, groups = THREADS / 8;
    for (u64 base = 0; base < blocks; base += groups) {
        const u64 block = base + group;
        double sums[N];
        for (u32 n = 0; n < N; ++n) sums[n] = 0.0;
        if (block < blocks)
            for (u64 i = threadIdx.x % 8; i < size(block); i += 8) f(block, i, sums);
        for (u32 n = 0; n < N; ++n) {
            for (u32 half = 4; half; half /= 2) sums[n] += __shfl_down_sync(WHOLE_WARP, sums[n], half);
            if (block < blocks && threadIdx.x % 8 == 0) partial[block * N + n] = sums[n];
        }
    }
    __syncthreads();
}

// A 4-byte word of a section, which need not be aligned; zeros past `bytes`.
__device__ __forceinline__ u32 word_at(const u8* section, u64 bytes, u64 word) {
    return load_field(section, bytes, 32 * word, 32);
}
__device__ __forceinline__ float float_at(const u8* section, u64 bytes, u64 word) {
    return __uint_as_float(word_at(section, bytes, word));
}
