// 3LC: values as packed ternary digits, and runs of zeros in one byte each. See three_lc.h.
#include "three_lc/three_lc.h"

#include "buckets/buckets.h"
#include "ternary/trits_cpu.h"

// The packed digits of round(value / m). out: ceil(count / 5) bytes.
DR_API DR_CLONES void dr_three_lc_pack(const float* values, u64 count, float m, u8* out) {
    pack_trits(count, out, [=](u64 i) { return three_lc_digit(values[i], m); });
}

DR_CLONES static void unpack(const u8* in, u64 count, float m, float* values) {
    unpack_trits(in, count, [=](u64 i, u32 digit) { values[i] = three_lc_value(digit, m); });
}
// values[count]; in: ceil(count / 5) bytes. ERR_VALUE if dr_three_lc_pack writes no such bytes, or m is negative or not
// finite.
DR_API i64 dr_three_lc_unpack(const u8* in, u64 count, float m, float* values) {
    if (!valid_scale(m) || !valid_trits(in, count)) return ERR_VALUE;
    unpack(in, count, m, values);
    return 0;
}

// How many bytes from `in` on are ALL_ZERO, at most LONGEST_RUN. Reads 16 bytes.
static inline u64 zero_run(const u8* in) {
    const u64 zeros = 0x0101010101010101ull * ALL_ZERO;
    u64 other = load64(in) ^ zeros;
    if (other) return (u64)__builtin_ctzll(other) / 8;
    other = load64(in + 8) ^ zeros;
    const u64 run = other ? 8 + (u64)__builtin_ctzll(other) / 8 : 16;
    return run < LONGEST_RUN ? run : LONGEST_RUN;
}

// The same for the last 15 bytes.
static inline u64 zero_run(const u8* in, const u8* end) {
    u64 run = 0;
    while (run < LONGEST_RUN && in + run < end && in[run] == ALL_ZERO) ++run;
    return run;
}

// in[count]: packed digits. out has room for `count` bytes. Returns the number of bytes written.
DR_API u64 dr_zero_runs_encode(const u8* in, u64 count, u8* out) {
    const u8* end = in + count;
    u8* at = out;
    const auto write = [&](u64 run) {
        *at++ = run < 2 ? *in : run_byte(run);
        in += run < 2 ? 1 : run;
    };
    while (end - in >= 16) write(zero_run(in));
    while (in < end) write(zero_run(in, end));
    return (u64)(at - out);
}

// out[count]: packed digits. ERR_TRUNCATED if the `bytes` bytes encode fewer than `count`, ERR_VALUE if for more.
DR_API i64 dr_zero_runs_decode(const u8* in, u64 bytes, u64 count, u8* out) {
    u64 at = 0;
    for (u64 i = 0; i < bytes; ++i) {
        const u64 run = run_length(in[i]);
        if (count - at < run) return ERR_VALUE;
        const u8 byte = in[i] > LARGEST_BYTE ? (u8)ALL_ZERO : in[i];
        // A fixed size is faster; the next run overwrites what is too much.
        if (count - at >= 16) std::memset(out + at, byte, 16);
        else std::memset(out + at, byte, run);
        at += run;
    }
    return at == count ? 0 : (i64)ERR_TRUNCATED;
}

// The most bytes of packed digits that one byte encodes.
DR_API u32 dr_zero_runs_longest() { return LONGEST_RUN; }
