#pragma once

#include "common/cpu.h"

struct FloatStream {
    const u32* starts;
    const u32* lengths;
    const float* values;
    u64 blocks;
};

// Streams that together have about this share of the elements, where they have any, are summed by merge_avx512.
constexpr double MERGE_SHARE = 0.05;

#ifdef DR_X86
bool worth_merge_avx512(const FloatStream& a, u64 a_count, const FloatStream& b, u64 b_count);

// The sum of two streams without zeros inside their blocks; each has a block. It is that of `merge` in densestream.cpp,
// bit by bit; false if there is a NaN, for which that depends on the order of the two. `starts` and `lengths` have room
// for the blocks of both, `out` for the values of both, and each for 16 more.
bool merge_avx512(FloatStream a, FloatStream b, u32* starts, u32* lengths, float* out, u64* blocks, u64* count);
#endif
