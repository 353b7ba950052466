// Fixed-width bit fields.
//
// Field i of width w fills bits [i*w, (i+1)*w) of a little-endian bit string: bit b is bit b%8 of byte b/8.
//
//     w = 5:   byte 0        byte 1        byte 2
//              [2..0 of 1][0]  [0 of 3][2][4..3 of 1]  ...
//
#include "cpu.h"

// ceil(count * width / 8) bytes. Bits past the last field are zero.
template <class T>
static void pack(const T* values, u64 count, u32 width, u8* out) {
    if (width == 0) return;
    u64 word = 0;
    u32 filled = 0;
    for (u64 i = 0; i < count; ++i) {
        const u64 value = values[i];
        word |= value << filled;
        filled += width;
        if (filled >= 64) {
            std::memcpy(out, &word, 8);
            out += 8;
            filled -= 64;
            // The part of the value that did not fit; a shift by 64 is undefined, hence the test.
            word = filled ? value >> (width - filled) : 0;
        }
    }
    std::memcpy(out, &word, (filled + 7) / 8);
}

template <class T>
static void unpack(const u8* in, u64 bytes, u64 count, u32 width, T* values) {
    const u64 mask = width == 64 ? ~0ull : (1ull << width) - 1;
    // A field of up to 57 bits lies within the eight bytes that begin at its first byte.
    const u64 safe = bytes < 8 ? 0 : ((bytes - 8) * 8) / (width ? width : 1);
    const u64 fast = safe < count ? safe : count;
    u64 i = 0;
    for (; i < fast; ++i) values[i] = (T)((load64(in + (i * width >> 3)) >> (i * width & 7)) & mask);
    for (; i < count; ++i)
        values[i] = (T)((load64_tail(in + (i * width >> 3), in + bytes) >> (i * width & 7)) & mask);
}

DR_API void dr_pack32(const u32* values, u64 count, u32 width, u8* out) { pack(values, count, width, out); }

DR_CLONES static void unpack32(const u8* in, u64 bytes, u64 count, u32 width, u32* values) {
    unpack(in, bytes, count, width, values);
}
DR_CLONES static void unpack8(const u8* in, u64 bytes, u64 count, u32 width, u8* values) {
    unpack(in, bytes, count, width, values);
}

// 0, or ERR_TRUNCATED where `bytes` cannot hold `count` fields.
DR_API i64 dr_unpack32(const u8* in, u64 bytes, u64 count, u32 width, u32* values) {
    if (width > 32 || bytes < (count * width + 7) / 8) return ERR_TRUNCATED;
    unpack32(in, bytes, count, width, values);
    return 0;
}

DR_API void dr_pack8(const u8* values, u64 count, u32 width, u8* out) { pack(values, count, width, out); }

DR_API i64 dr_unpack8(const u8* in, u64 bytes, u64 count, u32 width, u8* values) {
    if (width > 8 || bytes < (count * width + 7) / 8) return ERR_TRUNCATED;
    unpack8(in, bytes, count, width, values);
    return 0;
}

// 0, or ERR_INDEX where the indices are not strictly increasing or the last is not below numel.
DR_API i64 dr_check_indices(const u32* indices, u64 count, u64 numel) {
    u32 bad = 0;
    for (u64 i = 1; i < count; ++i) bad |= indices[i] <= indices[i - 1];
    return bad || (count && indices[count - 1] >= numel) ? (i64)ERR_INDEX : 0;
}

// A bitmap of numel bits: bit i is set where i is kept.
DR_API void dr_bitmap_encode(const u32* indices, u64 count, u8* out) {
    for (u64 i = 0; i < count; ++i) out[indices[i] >> 3] |= (u8)(1u << (indices[i] & 7));
}

// 0; ERR_TRUNCATED where the bitmap is short, ERR_INDEX where it holds another number of set bits than `count`, or one
// at or past numel.
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
