// Delta-binary code with an adaptive prefix: intervals and sizes. delta.cpp draws the section.
//
// A delta of up to 32 bits is written in n of m = 2^log2_m intervals; its prefix is n - 1.
#pragma once

#include "bits/bits.h"

const u64 DELTA_ROOM = 160;  // room for a section beside 5 bytes a key: head, code lengths and eight-byte stores

DR_HD u64 delta_bound(u64 count) { return 5 * count + DELTA_ROOM; }

DR_HD u32 delta_length(u32 delta) { return bit_length(delta | 1u); }
// The number of intervals of 32 / 2^log2_m bits that hold a delta of `length` bits.
DR_HD u32 intervals(u32 length, u32 log2_m) { return (length * (1u << log2_m) + 31) / 32; }

// Adds up counts[prefix], zeros before, for deltas of which lengths[l] have l bits. Returns the bits of all deltas.
DR_HD u64 count_prefixes(const u64* lengths, u32 log2_m, u64* counts) {
    u64 bits = 0;
    for (u32 length = 1; length <= 32; ++length) {
        const u32 n = intervals(length, log2_m);
        counts[n - 1] += lengths[length];
        bits += lengths[length] * n << (5 - log2_m);
    }
    return bits;
}

// How a delta of `length` bits is written: | prefix | the prefix's bits << 16 | the delta's bits << 24 |. words: the
// code of the prefixes, or null if they are fields of log2_m bits.
DR_HD u32 delta_word(u32 length, u32 log2_m, const u32* words) {
    const u32 n = intervals(length, log2_m);
    return n << (5 - log2_m) << 24 | (words ? words[n - 1] : (n - 1) | log2_m << 16);
}
