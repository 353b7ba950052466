// Ternary digits on the device: a thread takes a byte.
#pragma once

#include "common/device.cuh"
#include "ternary/trits.h"

// digit(i): digit i, i < count. out: trit_bytes(count) bytes.
template <class F>
__device__ __forceinline__ void pack_trits(u64 count, u8* out, F digit) {
    const u64 m = trit_bytes(count);
    for (u64 j = grid_thread(); j < m; j += grid_threads()) {
        u32 byte = 0;
        for (u64 i = j; i < 5 * m; i += m) byte = 3 * byte + (i < count ? digit(i) : 1u);
        out[j] = (u8)byte;
    }
}

// Calls store(i, digit) for every i < count. *error: ERR_VALUE if pack_trits writes no such bytes.
template <class F>
__device__ __forceinline__ void unpack_trits(const u8* in, u64 count, i32* error, F store) {
    const u64 m = trit_bytes(count);
    bool bad = false;
    for (u64 j = grid_thread(); j < m; j += grid_threads()) {
        u32 byte = in[j], power = 81;
        bad |= byte > LARGEST_BYTE;
        for (u64 i = j; i < 5 * m; i += m, power /= 3) {
            const u32 digit = byte / power % 3;
            if (i < count) store(i, digit);
            else bad |= digit != 1;
        }
    }
    if (bad) atomicMin(error, ERR_VALUE);
}
