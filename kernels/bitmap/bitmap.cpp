// Bitmaps.
//
//     section:  bit i is 1 where element i is kept; numel bits, to a whole byte
#include "common/cpu.h"

// out: ceil(numel / 8) bytes of zeros.
DR_API void dr_bitmap_encode(const u32* indices, u64 count, u8* out) {
    for (u64 i = 0; i < count; ++i) out[indices[i] >> 3] |= (u8)(1u << (indices[i] & 7));
}

// Returns 0; ERR_TRUNCATED if the bitmap is shorter than numel bits; ERR_INDEX if it does not have exactly `count`
// ones, or has one at numel or after it.
DR_API i64 dr_bitmap_decode(const u8* in, u64 bytes, u64 numel, u64 count, u32* indices) {
    if (bytes < (numel + 7) / 8) return ERR_TRUNCATED;
    u64 found = 0;
    for (u64 base = 0; base < bytes; base += 8) {
        u64 word = base + 8 <= bytes ? load64(in + base) : load64_tail(in + base, in + bytes);
        if (found + (u64)__builtin_popcountll(word) > count) return ERR_INDEX;
        for (; word; word &= word - 1) {
            const u64 index = base * 8 + (u64)__builtin_ctzll(word);
            if (index >= numel) return ERR_INDEX;
            indices[found++] = (u32)index;
        }
    }
    return found == count ? 0 : (i64)ERR_INDEX;
}
