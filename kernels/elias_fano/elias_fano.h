// Elias-Fano code: the number of low bits and the sizes. elias_fano.cpp draws the section.
#pragma once

#include "bits/bits.h"

// l: the least of those with the smallest count * l + ((numel - 1) >> l), within 0 .. 31.
DR_HD u32 elias_fano_low_bits(u64 count, u64 numel) {
    u32 best = 0;
    for (u32 l = 1; l < 32; ++l)
        if (count * l + ((numel - 1) >> l) < count * best + ((numel - 1) >> best)) best = l;
    return best;
}

// Bytes of the section of `count` indices, the last of which is `last`. `last` has no effect if count is 0.
DR_HD u64 elias_fano_bytes(u64 last, u64 count, u64 numel) {
    if (count == 0) return 0;
    const u32 l = elias_fano_low_bits(count, numel);
    return field_bytes(count, l) + ((last >> l) + count + 7) / 8;
}
