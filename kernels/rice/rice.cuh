// Reading a Rice section on the device: for one section (rice.cu), and for those of many containers (fused.cu).
#pragma once

#include "bits/unary.cuh"
#include "rice/rice.h"

// in: the section with its first byte. *ones: how many ones its highs have; it stays 0 if the first byte is no
// parameter or the section is too short for the lows.
__device__ inline void find_rice_highs(const u8* in, u64 bytes, u64 count, u64* status, u32* highs, u64* ones) {
    const u32 b = in[0];
    const u64 lows = 1 + field_bytes(count, b);
    if (b > 31 || bytes < lows) return;
    find_highs(in + lows, bytes - lows, count, status, highs, ones);
}

// The indices, from their high bits, of a section that has a parameter and at least `count` ones. Sets *error to
// ERR_INDEX if an index is not below numel, ERR_VALUE if the section continues after the last one, or bits after the
// lows or the highs are not zeros.
__device__ inline void join_rice(const u8* in, u64 bytes, u64 count, u64 numel, const u32* highs, u64* status, u64* end,
                                 u32* indices, i32* error) {
    const u32 b = in[0];
    const u64 low_bytes = field_bytes(count, b);
    const auto low = [=](u64 i) { return (u64)load_field(in + 1, bytes - 1, i * b, b); };
    each_place(count, 0, status, end, low, [=](u64 i, u64 before) {
        const u64 index = ((u64)highs[i] << b) + before + low(i) + i;
        indices[i] = (u32)index;
        if (index >= numel || highs[i] == 0xFFFFFFFFu) atomicMin(error, ERR_INDEX);
        if (i + 1 < count) return;
        if (!zeros_follow(in + 1, count * b) || !highs_end(in + 1 + low_bytes, bytes - 1 - low_bytes, count, highs))
            atomicMin(error, ERR_VALUE);
    });
}
