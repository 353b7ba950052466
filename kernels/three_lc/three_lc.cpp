// Ternary digits, five to a byte, and runs of all-zero bytes (3LC, sections 3.2 and 3.3).
//
// The n digits 0, 1, 2 (for -1, 0, 1) are cut into five parts of m = ceil(n / 5); byte j holds the digits at place j
// of each, and ones where a part has ended:
//
//     byte j = 81 * digit[j] + 27 * digit[m + j] + 9 * digit[2m + j] + 3 * digit[3m + j] + digit[4m + j]
//
// 0 .. 242; 121 is five zeros. 2 to 14 bytes of 121 in a row then become one byte: 243 + (run - 2). A longer run is cut
// into runs of 14 and a rest.
#include <cfloat>

#include "common/cpu.h"

const u8 ALL_ZERO = 121;
const u32 POWER[5] = {81, 27, 9, 3, 1};
const u64 BLOCK = 4096;  // bytes that stay in the first-level cache while the five parts pass

template <class F>
__attribute__((always_inline)) inline void pack_trits(u64 count, u8* out, F digit) {
    const u64 m = (count + 4) / 5;
    for (u64 base = 0; base < m; base += BLOCK) {
        const u64 stop = base + BLOCK < m ? base + BLOCK : m;
        std::memset(out + base, ALL_ZERO, stop - base);
        for (u64 part = 0; part < 5; ++part) {
            const u64 first = part * m;
            const u64 end = first + stop < count ? stop : count > first ? count - first : 0;
            const u32 power = POWER[part];
            for (u64 j = base; j < end; ++j) out[j] = (u8)(out[j] + (digit(first + j) - 1) * power);
        }
    }
}

DR_CLONES static void trits_pack(const u8* digits, u64 count, u8* out) {
    pack_trits(count, out, [=](u64 i) { return (u32)digits[i]; });
}
// digits: 0, 1 or 2. out: ceil(count / 5) bytes.
DR_API void dr_trits_pack(const u8* digits, u64 count, u8* out) { trits_pack(digits, count, out); }

DR_CLONES static void three_lc_pack(const float* values, u64 count, float m, u8* out) {
    pack_trits(count, out, [=](u64 i) { return three_lc_digit(values[i], m); });
}
// The packed digits of round(value / m). out: ceil(count / 5) bytes.
DR_API void dr_three_lc_pack(const float* values, u64 count, float m, u8* out) {
    three_lc_pack(values, count, m, out);
}

// Whether every byte is below 243 and the places behind the last digit hold ones.
DR_CLONES static bool trits_valid(const u8* in, u64 count) {
    const u64 m = (count + 4) / 5;
    u32 largest = 0;
    for (u64 j = 0; j < m; ++j) largest = in[j] > largest ? in[j] : largest;
    u32 bad = largest > 242;
    for (u64 i = count; i < 5 * m; ++i) bad |= (u32)(in[i % m] / POWER[i / m] % 3 != 1);
    return !bad;
}

template <u32 power, class F>
__attribute__((always_inline)) inline void unpack_part(const u8* in, u64 base, u64 stop, u64 first, u64 count,
                                                       F store) {
    const u64 end = first + stop < count ? stop : count > first ? count - first : 0;
    for (u64 j = base; j < end; ++j) store(first + j, (u32)in[j] / power % 3u);
}

template <class F>
__attribute__((always_inline)) inline void unpack_trits(const u8* in, u64 count, F store) {
    const u64 m = (count + 4) / 5;
    for (u64 base = 0; base < m; base += BLOCK) {
        const u64 stop = base + BLOCK < m ? base + BLOCK : m;
        unpack_part<81>(in, base, stop, 0, count, store);
        unpack_part<27>(in, base, stop, m, count, store);
        unpack_part<9>(in, base, stop, 2 * m, count, store);
        unpack_part<3>(in, base, stop, 3 * m, count, store);
        unpack_part<1>(in, base, stop, 4 * m, count, store);
    }
}

DR_CLONES static void trits_unpack(const u8* in, u64 count, u8* digits) {
    unpack_trits(in, count, [=](u64 i, u32 digit) { digits[i] = (u8)digit; });
}
// in: ceil(count / 5) bytes. ERR_VALUE where dr_trits_pack writes no such bytes.
DR_API i64 dr_trits_unpack(const u8* in, u64 count, u8* digits) {
    if (!trits_valid(in, count)) return ERR_VALUE;
    trits_unpack(in, count, digits);
    return 0;
}

DR_CLONES static void three_lc_unpack(const u8* in, u64 count, float m, float* values) {
    unpack_trits(in, count, [=](u64 i, u32 digit) { values[i] = m * (float)((i32)digit - 1); });
}
// ERR_VALUE where dr_three_lc_pack writes no such bytes, or m is negative or not finite.
DR_API i64 dr_three_lc_unpack(const u8* in, u64 count, float m, float* values) {
    if (!(m >= 0.0f && m <= FLT_MAX) || !trits_valid(in, count)) return ERR_VALUE;
    three_lc_unpack(in, count, m, values);
    return 0;
}

// How many bytes from `in` on are ALL_ZERO, at most 14.
static inline u64 zero_run(const u8* in, const u8* end) {
    const u64 zeros = 0x0101010101010101ull * ALL_ZERO;
    u64 run = 0;
    if (end - in >= 16) {
        u64 other = load64(in) ^ zeros;
        if (other) return (u64)__builtin_ctzll(other) / 8;
        other = load64(in + 8) ^ zeros;
        run = other ? 8 + (u64)__builtin_ctzll(other) / 8 : 16;
        return run < 14 ? run : 14;
    }
    while (run < 14 && in + run < end && in[run] == ALL_ZERO) ++run;
    return run;
}

// Packed digits with their runs in one byte each; out has room for `count` bytes. Returns how many were written.
DR_API u64 dr_zero_runs_encode(const u8* in, u64 count, u8* out) {
    const u8* end = in + count;
    u8* at = out;
    while (in < end) {
        const u64 run = zero_run(in, end);
        if (run < 2) {
            *at++ = *in++;
        } else {
            *at++ = (u8)(241 + run);
            in += run;
        }
    }
    return (u64)(at - out);
}

// ERR_TRUNCATED where `bytes` bytes give fewer than `count`, ERR_VALUE where they give more.
DR_API i64 dr_zero_runs_decode(const u8* in, u64 bytes, u64 count, u8* out) {
    u64 at = 0;
    for (u64 i = 0; i < bytes; ++i) {
        const u64 run = in[i] > 242 ? in[i] - 241u : 1;
        if (count - at < run) return ERR_VALUE;
        if (count - at >= 16)
            std::memset(out + at, in[i] > 242 ? ALL_ZERO : in[i], 16);  // the next run overwrites what is too much
        else
            std::memset(out + at, in[i] > 242 ? ALL_ZERO : in[i], run);
        at += run;
    }
    return at == count ? 0 : (i64)ERR_TRUNCATED;
}
