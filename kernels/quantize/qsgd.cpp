// QSGD: buckets of values, one float32 norm a bucket, stochastic rounding to 2s+1 levels.
#include <cfloat>
#include <cmath>

#include "quantize/rounding.h"

// The largest magnitude. For finite floats the bits below the sign order as the magnitudes do.
DR_CLONES static float largest_magnitude(const float* values, u64 count) {
    u32 largest = 0;
    for (u64 i = 0; i < count; ++i) {
        u32 bits;
        std::memcpy(&bits, values + i, 4);
        bits &= 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    float magnitude;
    std::memcpy(&magnitude, &largest, 4);
    return magnitude;
}

// The l2 norm. Squares are summed in float64 in eight lanes (element j in lane j % 8), then lanes 0+4, 1+5, 2+6, 3+7,
// then 0+2, 1+3, then 0+1: an order that every backend can follow. A norm beyond float32 becomes the largest float32.
DR_CLONES static float l2_norm(const float* values, u64 count) {
    double lane[8] = {};
    u64 i = 0;
    for (; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; ++j) lane[j] += (double)values[i + j] * (double)values[i + j];
    for (int j = 0; i < count; ++i, ++j) lane[j] += (double)values[i] * (double)values[i];
    for (int half = 4; half; half /= 2)
        for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
    const double norm = std::sqrt(lane[0]);
    return norm > FLT_MAX ? FLT_MAX : (float)norm;
}

// norms: ceil(count / bucket).
DR_API void dr_qsgd_norms(const float* values, u64 count, u64 bucket, int l2, float* norms) {
    for (u64 begin = 0; begin < count; begin += bucket) {
        const u64 size = begin + bucket < count ? bucket : count - begin;
        *norms++ = l2 ? l2_norm(values + begin, size) : largest_magnitude(values + begin, size);
    }
}

// codes: count bytes, each 0 .. 2s.
DR_CLONES static void qsgd_codes(const float* values, u64 count, u64 bucket, u32 s, const RoundingKey& key,
                                 const float* norms, u8* codes) {
    rounded_runs(count, bucket, key, [=](u64 b, u64 at, u64 size, const u32* words) {
        const float norm = norms[b];
        for (u64 i = 0; i < size; ++i) codes[at + i] = (u8)qsgd_level(values[at + i], norm, s, uniform24(words[i]));
    });
}

DR_API void dr_qsgd_codes(const float* values, u64 count, u64 bucket, u32 s, u32 seed, u32 parameter, u32 step,
                          u32 rank, const float* norms, u8* codes) {
    qsgd_codes(values, count, bucket, s, {seed, parameter, step, rank}, norms, codes);
}

// ERR_VALUE where a code is above 2s or a norm is negative or not finite.
DR_API i64 dr_qsgd_decode(const u8* codes, const float* norms, u64 count, u64 bucket, u32 s, float* values) {
    if (s == 0 || s > 127 || bucket == 0) return ERR_VALUE;
    float table[256];
    for (u32 code = 0; code < 256; ++code) table[code] = qsgd_value(code, 1.0f, s);
    u32 largest = 0;
    for (u64 begin = 0, b = 0; begin < count; begin += bucket, ++b) {
        const u64 end = begin + bucket < count ? begin + bucket : count;
        const float norm = norms[b];
        if (!(norm >= 0.0f && norm <= FLT_MAX)) return ERR_VALUE;
        for (u64 i = begin; i < end; ++i) {
            largest = codes[i] > largest ? codes[i] : largest;
            values[i] = table[codes[i]] * norm;
        }
    }
    return largest > 2 * s ? (i64)ERR_VALUE : 0;
}
