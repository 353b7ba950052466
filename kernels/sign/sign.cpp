// Signs of values, a bit each, and values of one magnitude per bucket. Bit i % 8 of byte i / 8 is set if value i is
// below zero. Bits past the last value are zero.
#include "sign/sign.h"

#include "buckets/buckets.h"
#include "common/cpu.h"

// A multiplication turns eight bytes of 0 or 1 into one byte: it adds byte j to bit j of the top byte, and no other
// partial product reaches that byte.
// out: ceil(count / 8) bytes.
DR_API DR_CLONES void dr_sign_encode(const float* values, u64 count, u8* out) {
    const u64 chunk = 512;
    u8 below[chunk];
    for (u64 begin = 0; begin < count; begin += chunk) {
        const u64 size = begin + chunk < count ? chunk : count - begin;
        for (u64 i = 0; i < size; ++i) below[i] = values[begin + i] < 0.0f;
        for (u64 i = size; i % 8; ++i) below[i] = 0;
        for (u64 i = 0; i < size; i += 8) *out++ = (u8)((load64(below + i) * 0x0102040810204080ull) >> 56);
    }
}

// Elements begin .. end - 1, all of one bucket: +scale, or -scale if the element's bit of `signs` is set.
DR_CLONES static void signed_scale(const u8* signs, float scale, u64 begin, u64 end, float* values) {
    u32 bits;
    std::memcpy(&bits, &scale, 4);
    const auto store = [&](u64 i) {
        const u32 word = bits | sign_bit(signs, i);
        std::memcpy(values + i, &word, 4);
    };
    u64 i = begin;
    for (; i < end && i % 8; ++i) store(i);
    for (; i + 8 <= end; i += 8) {
        const u32 eight = signs[i >> 3];
        u32 words[8];
        for (u32 j = 0; j < 8; ++j) words[j] = bits | (eight >> j) << 31;
        std::memcpy(values + i, words, 32);
    }
    for (; i < end; ++i) store(i);
}

// values[count]. ERR_VALUE if a scale is negative or not finite, or the bits after the last sign are not zeros.
DR_API i64 dr_sign_decode(const u8* signs, const float* scales, u64 count, u64 bucket_size, float* values) {
    if (bucket_size == 0 || !zeros_follow(signs, count)) return ERR_VALUE;
    for (u64 begin = 0, b = 0; begin < count; begin += bucket_size, ++b) {
        if (!valid_scale(scales[b])) return ERR_VALUE;
        signed_scale(signs, scales[b] + 0.0f, begin, run_end(begin, bucket_size, count), values);  // -0.0 becomes 0.0
    }
    return 0;
}
