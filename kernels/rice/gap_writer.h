// Writes gaps one after the other: the low bits to one string, the high bits to another. rice.cpp draws both.
#pragma once

#include <cstring>

#include "bits/bits.h"

struct GapWriter {
    u8 *lows, *highs;
    u32 next = 0;    // the least index that may come
    u32 filled = 0;  // bits of `word`, the lows that are not written yet; below 64
    u64 word = 0;
    u64 high_word = 0, position = 0;  // the highs that are not written yet, and their bits; below 64 after a gap

    void put(u32 index, u32 b) {
        const u32 gap = index - next;
        next = index + 1;
        const u64 low = gap & (u32)((1ull << b) - 1);
        word |= low << filled;
        filled += b;
        if (filled >= 64) {
            std::memcpy(lows, &word, 8);
            lows += 8;
            filled -= 64;
            word = filled ? low >> (b - filled) : 0;
        }
        position += gap >> b;
        while (position >= 64) {
            std::memcpy(highs, &high_word, 8);
            highs += 8;
            high_word = 0;
            position -= 64;
        }
        high_word |= 1ull << position;
        if (++position == 64) {
            std::memcpy(highs, &high_word, 8);
            highs += 8;
            high_word = 0;
            position = 0;
        }
    }

    // The lows end with a whole byte.
    void end_lows() {
        std::memcpy(lows, &word, (filled + 7) / 8);
        lows += (filled + 7) / 8;
        word = filled = 0;
    }
};
