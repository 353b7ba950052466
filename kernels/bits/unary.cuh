// Numbers in unary, on the device: the high bits of Rice and Elias-Fano sections, each number's zeros and then a one.
#pragma once

#include "bits/bits.h"
#include "common/device.cuh"

// highs[i]: the number of zeros before one i, or 2^32 - 1 if there are more. *ones: how many ones there are in all.
__device__ inline void find_highs(const u8* in, u64 bytes, u64 count, u64* status, u32* highs, u64* ones) {
    each_one(in, bytes, count, status, ones, [=](u64 number, u64 place) {
        const u64 high = place - number;
        highs[number] = high >> 32 ? 0xFFFFFFFFu : (u32)high;
    });
}

// Whether the string ends with its last one and zeros to a whole byte.
__device__ inline bool highs_end(const u8* in, u64 bytes, u64 count, const u32* highs) {
    return ends_at(in, bytes, (u64)highs[count - 1] + count);
}
