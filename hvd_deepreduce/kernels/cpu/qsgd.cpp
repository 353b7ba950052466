// QSGD: buckets of values, one float32 norm a bucket, stochastic rounding to 2s+1 levels.
#include <cfloat>
#include <cmath>

#include "cpu.h"

// The norm of one bucket: its largest magnitude, or its l2 norm. Squares are summed in float64 in eight lanes
// (element j in lane j % 8), then lanes 0+4, 1+5, 2+6, 3+7, then 0+2, 1+3, then 0+1: an order that every backend can
// follow. A norm beyond float32 becomes the largest float32.
static float bucket_norm(const float* values, u64 count, bool l2) {
    if (!l2) {
        float largest = 0.0f;
        for (u64 i = 0; i < count; ++i) {
            const float magnitude = std::fabs(values[i]);
            largest = magnitude > largest ? magnitude : largest;
        }
        return largest;
    }
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

// codes: count bytes, each 0 .. 2s. norms: ceil(count / bucket). Element i draws word i % 4 of the counter
// (i / 4, step, STREAM_ROUNDING, rank) under the key (seed, parameter).
DR_CLONES static void qsgd_encode(const float* values, u64 count, u64 bucket, u32 s, bool l2, u32 seed, u32 parameter,
                                  u32 step, u32 rank, float* norms, u8* codes) {
    const u64 chunk = 1024;
    float uniforms[chunk];
    float* norm = norms;
    for (u64 begin = 0; begin < count; begin += bucket) {
        const u64 end = begin + bucket < count ? begin + bucket : count;
        *norm++ = bucket_norm(values + begin, end - begin, l2);
    }
    for (u64 begin = 0; begin < count; begin += chunk) {
        const u64 size = begin + chunk < count ? chunk : count - begin;
        for (u64 q = 0; q < (size + 3) / 4; ++q) {
            const Philox4 r = philox4x32(seed, parameter, (u32)(begin / 4 + q), step, STREAM_ROUNDING, rank);
            uniforms[4 * q] = uniform24(r.x);
            uniforms[4 * q + 1] = uniform24(r.y);
            uniforms[4 * q + 2] = uniform24(r.z);
            uniforms[4 * q + 3] = uniform24(r.w);
        }
        for (u64 i = 0; i < size;) {
            const u64 b = (begin + i) / bucket;
            const u64 stop = (b + 1) * bucket - begin < size ? (b + 1) * bucket - begin : size;
            const float n = norms[b];
            for (; i < stop; ++i) codes[begin + i] = (u8)qsgd_level(values[begin + i], n, s, uniforms[i]);
        }
    }
}

DR_API void dr_qsgd_encode(const float* values, u64 count, u64 bucket, u32 s, int l2, u32 seed, u32 parameter,
                           u32 step, u32 rank, float* norms, u8* codes) {
    qsgd_encode(values, count, bucket, s, l2 != 0, seed, parameter, step, rank, norms, codes);
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
