// Scales, sums and codes of the quantizers that are not QSGD: TernGrad, uniform levels, signs, natural compression.
#include <cfloat>

#include "quantize/rounding.h"

// Sums of magnitudes or squares, in float64 and in an order that every backend can follow: 1024 terms are added in 32
// lanes (term j in lane j % 32), and the lanes then by halves (j + 16, j + 8, ..., j + 1). More than 1024 elements:
// the sums of each 1024 are the terms of the next sum, until one is left.
const u64 FOLD = 1024;
const u64 LANES = 32;

static inline double fold_lanes(double* lane) {
    for (u64 half = LANES / 2; half; half /= 2)
        for (u64 j = 0; j < half; ++j) lane[j] += lane[j + half];
    return lane[0];
}

DR_CLONES static double fold_values(const float* values, u64 count, bool squares) {
    double lane[LANES] = {};
    u64 i = 0;
    if (squares) {
        for (; i + LANES <= count; i += LANES)
            for (u64 j = 0; j < LANES; ++j) lane[j] += (double)values[i + j] * (double)values[i + j];
        for (u64 j = 0; i < count; ++i, ++j) lane[j] += (double)values[i] * (double)values[i];
    } else {
        for (; i + LANES <= count; i += LANES)
            for (u64 j = 0; j < LANES; ++j) lane[j] += (double)__builtin_fabsf(values[i + j]);
        for (u64 j = 0; i < count; ++i, ++j) lane[j] += (double)__builtin_fabsf(values[i]);
    }
    return fold_lanes(lane);
}

// `span`: elements of one term, 1024^level; count <= 1024 * span.
static double fold(const float* values, u64 count, bool squares, u64 span) {
    if (span == 1) return fold_values(values, count, squares);
    double lane[LANES] = {};
    for (u64 term = 0; term * span < count; ++term) {
        const u64 left = count - term * span;
        lane[term % LANES] += fold(values + term * span, left < span ? left : span, squares, span / FOLD);
    }
    return fold_lanes(lane);
}

// sums: ceil(count / bucket), of |value| or of value * value.
DR_API void dr_bucket_sums(const float* values, u64 count, u64 bucket, int squares, double* sums) {
    for (u64 begin = 0; begin < count; begin += bucket) {
        const u64 size = begin + bucket < count ? bucket : count - begin;
        u64 span = 1;
        while (span * FOLD < size) span *= FOLD;
        *sums++ = fold(values + begin, size, squares != 0, span);
    }
}

// Uniform levels: the least and the largest value of each bucket. As signed integers, bits with those below a set sign
// turned over are in the floats' order. + 0.0f turns -0.0 into 0.0.
DR_CLONES static void bucket_range(const float* values, u64 count, float* range) {
    i32 low = 0x7FFFFFFF, high = -0x7FFFFFFF - 1;
    for (u64 i = 0; i < count; ++i) {
        i32 bits;
        std::memcpy(&bits, values + i, 4);
        bits ^= (bits >> 31) & 0x7FFFFFFF;
        low = bits < low ? bits : low;
        high = bits > high ? bits : high;
    }
    low ^= (low >> 31) & 0x7FFFFFFF;
    high ^= (high >> 31) & 0x7FFFFFFF;
    std::memcpy(range, &low, 4);
    std::memcpy(range + 1, &high, 4);
    range[0] += 0.0f;
    range[1] += 0.0f;
}

template <class Code>
__attribute__((always_inline)) inline void uniform_codes_of(const float* values, u64 count, u64 bucket, u32 s,
                                                            const RoundingKey& key, const float* ranges, Code* codes) {
    rounded_runs(count, bucket, key, [=](u64 b, u64 at, u64 size, const u32* words) {
        const float low = ranges[2 * b];
        const double width = (double)ranges[2 * b + 1] - (double)low;
        const double scale = width > 0.0 ? (double)s / width : 0.0;
        for (u64 i = 0; i < size; ++i)
            codes[at + i] = (Code)uniform_level(values[at + i], low, scale, s, uniform24(words[i]));
    });
}
DR_CLONES static void uniform_codes(const float* values, u64 count, u64 bucket, const RoundingKey& key,
                                    const float* ranges, u8* codes) {
    uniform_codes_of(values, count, bucket, 255, key, ranges, codes);
}
DR_CLONES static void uniform_codes(const float* values, u64 count, u64 bucket, const RoundingKey& key,
                                    const float* ranges, u16* codes) {
    uniform_codes_of(values, count, bucket, 65535, key, ranges, codes);
}

template <class Code>
static void uniform_encode(const float* values, u64 count, u64 bucket, const RoundingKey& key, float* ranges,
                           Code* codes) {
    for (u64 begin = 0, b = 0; begin < count; begin += bucket, ++b)
        bucket_range(values + begin, begin + bucket < count ? bucket : count - begin, ranges + 2 * b);
    uniform_codes(values, count, bucket, key, ranges, codes);
}

// ranges: (least, largest) for each of ceil(count / bucket). codes: count, of 0 .. 255 or 0 .. 65535.
DR_API void dr_uniform_encode8(const float* values, u64 count, u64 bucket, u32 seed, u32 parameter, u32 step, u32 rank,
                               float* ranges, u8* codes) {
    uniform_encode(values, count, bucket, {seed, parameter, step, rank}, ranges, codes);
}
DR_API void dr_uniform_encode16(const float* values, u64 count, u64 bucket, u32 seed, u32 parameter, u32 step, u32 rank,
                                float* ranges, u16* codes) {
    uniform_encode(values, count, bucket, {seed, parameter, step, rank}, ranges, codes);
}

DR_CLONES static void uniform_values(const u8* codes, u64 count, float low, double step, float* values) {
    for (u64 i = 0; i < count; ++i) values[i] = uniform_value(codes[i], low, step);
}
DR_CLONES static void uniform_values(const u16* codes, u64 count, float low, double step, float* values) {
    for (u64 i = 0; i < count; ++i) values[i] = uniform_value(codes[i], low, step);
}

template <class Code>
static i64 uniform_decode(const Code* codes, const float* ranges, u64 count, u64 bucket, u32 s, float* values) {
    for (u64 begin = 0, b = 0; begin < count; begin += bucket, ++b) {
        const float low = ranges[2 * b], high = ranges[2 * b + 1];
        if (!(low >= -FLT_MAX && low <= high && high <= FLT_MAX)) return ERR_VALUE;
        const u64 size = begin + bucket < count ? bucket : count - begin;
        uniform_values(codes + begin, size, low, ((double)high - (double)low) / (double)s, values + begin);
    }
    return 0;
}

// ERR_VALUE where a range is not finite or upside down.
DR_API i64 dr_uniform_decode8(const u8* codes, const float* ranges, u64 count, u64 bucket, float* values) {
    return bucket ? uniform_decode(codes, ranges, count, bucket, 255, values) : (i64)ERR_VALUE;
}
DR_API i64 dr_uniform_decode16(const u16* codes, const float* ranges, u64 count, u64 bucket, float* values) {
    return bucket ? uniform_decode(codes, ranges, count, bucket, 65535, values) : (i64)ERR_VALUE;
}

// Signs: bit i % 8 of byte i / 8 is set where value i is below zero. Bits past the last are zero.
//
// Eight bytes of 0 or 1 become one byte by a multiplication: byte j is added into the top byte at bit j, and no other
// sum reaches it.
DR_CLONES static void signs(const float* values, u64 count, u8* out) {
    const u64 chunk = 512;
    u8 below[chunk];
    for (u64 begin = 0; begin < count; begin += chunk) {
        const u64 size = begin + chunk < count ? chunk : count - begin;
        for (u64 i = 0; i < size; ++i) below[i] = values[begin + i] < 0.0f;
        for (u64 i = size; i % 8; ++i) below[i] = 0;
        for (u64 i = 0; i < size; i += 8) *out++ = (u8)((load64(below + i) * 0x0102040810204080ull) >> 56);
    }
}
DR_API void dr_signs(const float* values, u64 count, u8* out) { signs(values, count, out); }

// values: +scale, or -scale where the element's bit of `signs` is set; elements `begin` to `end`, of one bucket.
DR_CLONES static void signed_scale(const u8* signs, float scale, u64 begin, u64 end, float* values) {
    u32 bits;
    std::memcpy(&bits, &scale, 4);
    const auto one = [&](u64 i) {
        const u32 word = bits | (u32)(signs[i >> 3] >> (i & 7) & 1) << 31;
        std::memcpy(values + i, &word, 4);
    };
    u64 i = begin;
    for (; i < end && i % 8; ++i) one(i);
    for (; i + 8 <= end; i += 8) {
        const u32 eight = signs[i >> 3];
        u32 words[8];
        for (u32 j = 0; j < 8; ++j) words[j] = bits | (eight >> j) << 31;
        std::memcpy(values + i, words, 32);
    }
    for (; i < end; ++i) one(i);
}

// ERR_VALUE where a scale is negative or not finite.
DR_API i64 dr_sign_decode(const u8* signs, const float* scales, u64 count, u64 bucket, float* values) {
    if (bucket == 0) return ERR_VALUE;
    for (u64 begin = 0, b = 0; begin < count; begin += bucket, ++b) {
        if (!(scales[b] >= 0.0f && scales[b] <= FLT_MAX)) return ERR_VALUE;
        signed_scale(signs, scales[b] + 0.0f, begin, begin + bucket < count ? begin + bucket : count, values);
    }
    return 0;
}

// Natural compression: float32 exponent fields, one byte each.
DR_CLONES static void natural_exponents(const float* values, u64 count, const RoundingKey& key, u8* exponents) {
    rounded_runs(count, count, key, [=](u64, u64 at, u64 size, const u32* words) {
        for (u64 i = 0; i < size; ++i) {
            u32 bits;
            std::memcpy(&bits, values + at + i, 4);
            exponents[at + i] = (u8)natural_exponent(bits, words[i]);
        }
    });
}
DR_API void dr_natural_exponents(const float* values, u64 count, u32 seed, u32 parameter, u32 step, u32 rank,
                                 u8* exponents) {
    natural_exponents(values, count, {seed, parameter, step, rank}, exponents);
}

DR_CLONES static u32 natural_values(const u8* signs, const u8* exponents, u64 count, float* values) {
    u32 largest = 0;
    u64 i = 0;
    for (; i + 8 <= count; i += 8) {
        const u32 eight = signs[i >> 3];
        u32 words[8];
        for (u32 j = 0; j < 8; ++j) {
            const u32 exponent = exponents[i + j];
            largest = exponent > largest ? exponent : largest;
            words[j] = exponent << 23 | (eight >> j) << 31;
        }
        std::memcpy(values + i, words, 32);
    }
    for (; i < count; ++i) {
        const u32 word = (u32)exponents[i] << 23 | (u32)(signs[i >> 3] >> (i & 7) & 1) << 31;
        largest = exponents[i] > largest ? exponents[i] : largest;
        std::memcpy(values + i, &word, 4);
    }
    return largest;
}

// ERR_VALUE where an exponent is infinity's.
DR_API i64 dr_natural_decode(const u8* signs, const u8* exponents, u64 count, float* values) {
    return natural_values(signs, exponents, count, values) > 254 ? (i64)ERR_VALUE : 0;
}
