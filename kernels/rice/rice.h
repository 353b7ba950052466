// Golomb-Rice code: the choice of the parameter and the sizes. rice.cpp draws the section.
#pragma once

#include "bits/bits.h"

// The parameter for gaps of a geometric distribution with the mean numel / count: the greatest b with
// 2^b <= ln 2 * numel / count, within 0 .. 31.
DR_HD u32 rice_first_parameter(u64 count, u64 numel) {
    u32 b = 0;
    while (b < 31 && (double)(2u << b) <= 0.6931471805599453 * (double)numel / (double)count) ++b;
    return b;
}

// The parameter of the fewest bits, found downhill from b. sums_of(b, sums) gives the sums of the gaps' high bits,
// gap >> b, for b - 1, b and b + 1, as far as these are within 0 .. 31.
template <class F>
DR_HD u32 rice_downhill(u32 b, u64 count, F sums_of) {
    for (int way = 0;;) {
        u64 sums[3];
        sums_of(b, sums);
        const bool up = b < 31 && sums[2] + count < sums[1];
        const bool down = b > 0 && sums[0] < sums[1] + count;
        // The cost is convex in b, so the walk never turns.
        if (up && way >= 0) {
            ++b, way = 1;
        } else if (down && way <= 0) {
            --b, way = -1;
        } else {
            return b;
        }
    }
}

template <class F>
DR_HD u32 rice_parameter(u64 count, u64 numel, F sums_of) {
    return rice_downhill(rice_first_parameter(count, numel), count, sums_of);
}

// Bytes of a section with the parameter b whose gaps' high bits sum to `highs`.
DR_HD u64 rice_bytes(u64 count, u32 b, u64 highs) { return 1 + field_bytes(count, b) + (highs + count + 7) / 8; }

// The most bytes of a section of count >= 1 indices: with the first parameter, from which an encoder only moves to
// smaller sections, the highs have at most (numel - count) >> b zeros.
DR_HD u64 rice_bound(u64 count, u64 numel) {
    const u32 b = rice_first_parameter(count, numel);
    return rice_bytes(count, b, (numel > count ? numel - count : 0) >> b);
}

// ---- A parameter for each block of gaps: blocks.cpp draws the section.
const u32 RICE_BLOCK = 64;  // gaps of a block: its lows are whole bytes, whatever its parameter is
const u32 RICE_FIELD = 5;   // bits of a parameter

DR_HD u64 rice_block_count(u64 count) { return (count + RICE_BLOCK - 1) / RICE_BLOCK; }
DR_HD u64 rice_block_fields(u64 count) { return field_bytes(rice_block_count(count), RICE_FIELD); }
// The gaps of block j.
DR_HD u32 rice_block_size(u64 count, u64 j) {
    const u64 left = count - j * RICE_BLOCK;
    return left < RICE_BLOCK ? (u32)left : RICE_BLOCK;
}

// Where the search for a block's parameter begins: floor(log2(x)) for x = ln 2 * span / size, or 0. span: the sum of
// the block's gaps and of its size.
DR_HD u32 rice_block_first(u32 size, u64 span) {
    const u64 x = (span * 45426 >> 16) / size;
    return x ? bit_length(x) - 1 : 0;
}

// The most bytes of a section: each block takes no more bits than with the one parameter of rice_bound.
DR_HD u64 rice_blocks_bound(u64 count, u64 numel) { return rice_block_fields(count) + rice_bound(count, numel); }
