// Bit strings: what the host and the device share.
//
// Bit b of a bit string is bit b % 8 of byte b / 8. A field of w bits begins with its lowest bit. A section ends with a
// whole byte, filled with zero bits.
//
// The code tables in other headers are written and read through two types, which host (bits_cpu.h) and device
// (bits.cuh) define each for themselves:
//
//     Writer   put(value, bits)   appends a field
//     Reader   get(bits)          reads a field; bits past the end are zero
//              used()             the number of bytes that have been read, the last one perhaps in part
//              overrun()          whether a read has passed the end
//              padded()           whether zeros fill the last byte that has been read; only without an overrun
#pragma once

#include "common/common.h"

// The bits of x without its leading zeros: floor(log2 x) + 1, or 0 for 0.
DR_HD u32 bit_length(u64 x) {
#ifdef DR_CUDA
    return 64u - (u32)__clzll((i64)x);
#else
    return x ? 64u - (u32)__builtin_clzll(x) : 0u;
#endif
}
DR_HD u32 bit_length(u32 x) {
#ifdef DR_CUDA
    return 32u - (u32)__clz((i32)x);
#else
    return x ? 32u - (u32)__builtin_clz(x) : 0u;
#endif
}

// Bytes of `count` fields of `width` bits.
DR_HD u64 field_bytes(u64 count, u32 width) { return (count * width + 7) / 8; }

// Whether zeros fill the last byte of a string of `bits` bits, all of which are there.
DR_HD bool zeros_follow(const u8* in, u64 bits) { return bits % 8 == 0 || in[bits / 8] >> (bits % 8) == 0; }

// Whether `bytes` bytes hold exactly a bit string of `bits` bits, with zeros after its last bit.
DR_HD bool ends_at(const u8* in, u64 bytes, u64 bits) { return bytes == (bits + 7) / 8 && zeros_follow(in, bits); }

// A Writer that only counts.
struct BitCount {
    u64 bits;
    DR_HD void put(u64, u32 width) { bits += width; }
    DR_HD u64 bytes() const { return (bits + 7) / 8; }
};
