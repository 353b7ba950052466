// Golomb-Rice code: the choice of the parameter and the sizes. rice.cpp draws the section.
#ifndef HVD_DEEPREDUCE_RICE_H
#define HVD_DEEPREDUCE_RICE_H

#include "bits/bits.h"

// The parameter for gaps of a geometric distribution with the mean numel / count: the greatest b with
// 2^b <= ln 2 * numel / count, within 0 .. 31.
DR_HD u32 rice_first_parameter(u64 count, u64 numel) {
    u32 b = 0;
    while (b < 31 && (double)(2u << b) <= 0.6931471805599453 * (double)numel / (double)count) ++b;
    return b;
}

// The parameter of the fewest bits, found downhill from rice_first_parameter. sums_of(b, sums) gives the sums of the
// gaps' high bits, gap >> b, for b - 1, b and b + 1, as far as these are within 0 .. 31.
template <class F>
DR_HD u32 rice_parameter(u64 count, u64 numel, F sums_of) {
    u32 b = rice_first_parameter(count, numel);
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

// Bytes of a section with the parameter b whose gaps' high bits sum to `highs`.
DR_HD u64 rice_bytes(u64 count, u32 b, u64 highs) { return 1 + field_bytes(count, b) + (highs + count + 7) / 8; }

// The most bytes of a section of count >= 1 indices: with the first parameter, from which an encoder only moves to
// smaller sections, the highs have at most (numel - count) >> b zeros.
DR_HD u64 rice_bound(u64 count, u64 numel) {
    const u32 b = rice_first_parameter(count, numel);
    return rice_bytes(count, b, (numel > count ? numel - count : 0) >> b);
}

#endif
