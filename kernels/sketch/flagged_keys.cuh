// Keys as gaps of whole bytes, written on the device.
#pragma once

#include "common/device.cuh"
#include "sketch/flagged_keys.h"

__device__ __forceinline__ u32 gap_of(const u32* keys, u64 i) { return i ? keys[i] - keys[i - 1] - 1 : keys[0]; }

// Writes the section of keys, by several blocks. *end: the number of bytes written.
__device__ inline void write_flagged(const u32* keys, u64 count, u64* status, u64* end, u8* out) {
    each_place(
        count, length_bytes(count), status, end, [=](u64 i) { return (u64)gap_bytes(gap_of(keys, i)); },
        [=](u64 i, u64 place) {
            const u32 gap = gap_of(keys, i);
            for (u32 j = 0; j < gap_bytes(gap); ++j) out[place + j] = (u8)(gap >> (8 * j));
            if (i % 4) return;
            u32 lengths = 0;
            for (u32 j = 0; j < 4 && i + j < count; ++j) lengths |= (gap_bytes(gap_of(keys, i + j)) - 1) << (2 * j);
            out[i / 4] = (u8)lengths;
        });
}
