// How often each symbol occurs, on the host.
#pragma once

#include "common/cpu.h"

// counts: [256]. Four tables, so that equal symbols in a row do not wait for each other's count.
inline void histogram(const u8* symbols, u64 count, u64* counts) {
    u64 table[4][256] = {};
    u64 i = 0;
    for (; i + 4 <= count; i += 4)
        for (int t = 0; t < 4; ++t) ++table[t][symbols[i + t]];
    for (; i < count; ++i) ++table[0][symbols[i]];
    for (int s = 0; s < 256; ++s) counts[s] = table[0][s] + table[1][s] + table[2][s] + table[3][s];
}
