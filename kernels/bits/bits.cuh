// Bit strings on the device: the Writer and the Reader of bits.h. A single thread uses them.
#pragma once

#include "bits/bits.h"
#include "common/device.cuh"

// Appends fields to words that were zero.
struct BitWriter {
    u32* out;
    u64 position;
    __device__ void put(u64 value, u32 bits) {
        put_bits(out, position, value);
        position += bits;
    }
};

struct BitReader {
    const u8* in;
    u64 bytes, position;
    __device__ u32 get(u32 bits) {
        position += bits;
        return load_field(in, bytes, position - bits, bits);
    }
    __device__ u64 used() const { return (position + 7) / 8; }
    __device__ bool overrun() const { return position > 8 * bytes; }
    __device__ bool padded() const { return zeros_follow(in, position); }
};
