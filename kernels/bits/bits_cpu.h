// Bit strings on the host: the Writer and the Reader of bits.h, and the fields of bits.cpp.
#pragma once

#include "bits/bits.h"
#include "common/cpu.h"

// Appends fields. put() and finish() store eight bytes at `out`, so the array needs that much room after its last
// byte.
struct BitWriter {
    u8* out;
    u64 word = 0;
    u32 filled = 0;

    // `bits` is at most 56, and `value` has no higher bit set.
    void put(u64 value, u32 bits) {
        word |= value << filled;
        filled += bits;
        std::memcpy(out, &word, 8);
        out += filled >> 3;
        word >>= filled & 56;
        filled &= 7;
    }
    // Returns the first byte after the string.
    u8* finish() {
        std::memcpy(out, &word, 8);
        return out + (filled > 0);
    }
};

// Reads fields of at most 57 bits from `bytes` bytes.
struct BitReader {
    const u8* in;
    u64 bytes;
    u64 position = 0;

    u64 peek() const {
        const u64 byte = position >> 3;
        const u64 word = byte + 8 <= bytes ? load64(in + byte) : byte < bytes ? load64_tail(in + byte, in + bytes) : 0;
        return word >> (position & 7);
    }
    u64 get(u32 bits) {
        const u64 value = peek() & ((1ull << bits) - 1);
        position += bits;
        return value;
    }
    u64 used() const { return (position + 7) >> 3; }
    bool overrun() const { return position > bytes * 8; }
    bool padded() const { return zeros_follow(in, position); }
    bool ended() const { return ends_at(in, bytes, position); }
};

DR_API void dr_pack8(const u8* values, u64 count, u32 width, u8* out);
DR_API i64 dr_unpack8(const u8* in, u64 bytes, u64 count, u32 width, u8* values);
