// Run lengths of a bitmap: the choice of the fields and the sizes. rle.cpp draws the section.
#pragma once

#include "bits/bits.h"

// Fields for the lengths of all runs of zeros, or of all runs of ones.
struct RunFields {
    u32 width;
    u64 bits;  // of all fields together, with their escapes
};

// The width of the fewest bits, the smallest of equal ones. lengths[l]: the number of values v for which v + 1 has l
// bits; a value with v + 1 >= 2^width takes an escape of `escape` bits.
DR_HD RunFields best_fields(const u64* lengths, u32 escape) {
    u64 count = 0;
    for (u32 l = 1; l <= 33; ++l) count += lengths[l];
    u64 escaped = count;
    RunFields best = {1, ~0ull};
    for (u32 w = 1; w <= 32; ++w) {
        escaped -= lengths[w];
        const u64 bits = count * w + escaped * escape;
        if (bits < best.bits) best = {w, bits};
    }
    return best;
}

// Bits of a length after an escape.
DR_HD u32 run_escape(u64 numel) { return bit_length(numel - 1); }

// Room for a section. With fields of 32 bits no length needs an escape, so an index takes at most two of them, one for
// zeros and one for ones. 16 bytes more are for the widths and for the eight-byte stores of the host's BitWriter.
DR_HD u64 rle_bound(u64 count) { return 8 * count + 16; }
