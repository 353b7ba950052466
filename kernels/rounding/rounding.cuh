// Stochastic rounding on the device: a thread draws the words of four elements at once.
#pragma once

#include "common/device.cuh"
#include "rounding/rounding.h"

// The words of elements 4 q .. 4 q + 3.
__device__ __forceinline__ void rounding_words(const RoundingKey& key, u64 q, u32* words) {
    const Philox4 r = rounding_draw(key, q);
    words[0] = r.x, words[1] = r.y, words[2] = r.z, words[3] = r.w;
}

// Calls f(i, word) for every element i < count. A thread takes four neighbours.
template <class F>
__device__ __forceinline__ void each_rounded(u64 count, const RoundingKey& key, F f) {
    for (u64 q = grid_thread(); 4 * q < count; q += grid_threads()) {
        u32 words[4];
        rounding_words(key, q, words);
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            if (4 * q + j < count) f(4 * q + j, words[j]);
    }
}
