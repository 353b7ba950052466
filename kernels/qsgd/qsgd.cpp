// QSGD: buckets of values with one float32 norm each, stochastically rounded to 2 s + 1 levels.
#include "qsgd/qsgd.h"

#include "buckets/buckets_cpu.h"
#include "rounding/rounding_cpu.h"

DR_CLONES static void qsgd_codes(const float* values, u64 count, u64 bucket_size, u32 s, const RoundingKey& key,
                                 const float* norms, u8* codes) {
    rounded_runs(count, bucket_size, key, [=](u64 b, u64 at, u64 size, const u32* words) {
        const float norm = norms[b];
        for (u64 i = 0; i < size; ++i) codes[at + i] = (u8)qsgd_level(values[at + i], norm, s, uniform24(words[i]));
    });
}

// codes[count]: one byte each, 0 .. 2 s. norms: one for each bucket.
DR_API void dr_qsgd_quantize(const float* values, u64 count, u64 bucket_size, u32 s, u32 seed, u32 parameter, u32 step,
                             u32 rank, const float* norms, u8* codes) {
    qsgd_codes(values, count, bucket_size, s, {seed, parameter, step, rank}, norms, codes);
}

DR_CLONES static u32 values_of_run(const u8* codes, u64 count, float norm, u32 s, float* values) {
    u32 largest = 0;
    for (u64 i = 0; i < count; ++i) {
        largest = codes[i] > largest ? codes[i] : largest;
        values[i] = qsgd_value(codes[i], norm, s);
    }
    return largest;
}

// values[count]. ERR_VALUE if a code is above 2 s, or a norm is negative or not finite.
DR_API i64 dr_qsgd_dequantize(const u8* codes, const float* norms, u64 count, u64 bucket_size, u32 s, float* values) {
    if (s == 0 || s > 127 || bucket_size == 0) return ERR_VALUE;
    u32 largest = 0;
    for (u64 begin = 0, b = 0; begin < count; begin += bucket_size, ++b) {
        if (!valid_scale(norms[b])) return ERR_VALUE;
        const u64 size = run_end(begin, bucket_size, count) - begin;
        const u32 of_run = values_of_run(codes + begin, size, norms[b], s, values + begin);
        largest = of_run > largest ? of_run : largest;
    }
    return largest > 2 * s ? (i64)ERR_VALUE : 0;
}

DR_CLONES static float fit_norm(const float* values, const u8* codes, u64 count, u32 s, float norm) {
    u64 squares = 0;  // of integers: exact in any order
    const double products = sum_in_lanes(count, [&](u64 i) {
        const i32 c = (i32)codes[i] - (i32)s;
        squares += (u64)(u32)(c * c);
        return (double)values[i] * (double)c;
    });
    return fitted_norm(norm, products, (double)squares, s);
}

// fitted[bucket_count]: the norms that fit the codes best.
DR_API void dr_qsgd_fit_norms(const float* values, const u8* codes, u64 count, u64 bucket_size, u32 s,
                              const float* norms, float* fitted) {
    for (u64 begin = 0, b = 0; begin < count; begin += bucket_size, ++b)
        fitted[b] = fit_norm(values + begin, codes + begin, run_end(begin, bucket_size, count) - begin, s, norms[b]);
}

// For the host's side of a GPU's encode and decode.
DR_API u32 dr_qsgd_levels(u32 bits) { return qsgd_levels(bits); }
