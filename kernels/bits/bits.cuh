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

// Reads fields of at most 32 bits. It keeps 64 bits, so that most fields need no load.
struct BitReader {
    const u8* in;
    u64 bytes, position, word = 0, end = 0;  // end: of the bits in `word`
    __device__ u32 get(u32 bits) {
        if (position + bits > end) {
            word = load64(in, bytes, position / 8) >> position % 8;
            end = position / 8 * 8 + 64;
        }
        const u64 value = word & ((1ull << bits) - 1);
        word >>= bits;
        position += bits;
        return (u32)value;
    }
    __device__ u64 used() const { return (position + 7) / 8; }
    __device__ bool overrun() const { return position > 8 * bytes; }
    __device__ bool padded() const { return zeros_follow(in, position); }
};
