// Uniform levels between the least and the largest value of each bucket, with stochastic rounding.
#include "uniform/uniform.h"

#include "rounding/rounding_cpu.h"

// The least and the largest value. A float's bits, with all but the sign inverted if the sign is set, are signed
// integers in the order of the floats. + 0.0f turns -0.0 into 0.0.
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
__attribute__((always_inline)) inline void uniform_codes_of(const float* values, u64 count, u64 bucket_size, u32 s,
                                                            const RoundingKey& key, const float* ranges, Code* codes) {
    rounded_runs(count, bucket_size, key, [=](u64 b, u64 at, u64 size, const u32* words) {
        const float low = ranges[2 * b];
        const double scale = uniform_scale(low, ranges[2 * b + 1], s);
        for (u64 i = 0; i < size; ++i)
            codes[at + i] = (Code)uniform_level(values[at + i], low, scale, s, uniform24(words[i]));
    });
}
DR_CLONES static void uniform_codes(const float* values, u64 count, u64 bucket_size, u32 s, const RoundingKey& key,
                                    const float* ranges, u8* codes) {
    uniform_codes_of(values, count, bucket_size, s, key, ranges, codes);
}
DR_CLONES static void uniform_codes(const float* values, u64 count, u64 bucket_size, u32 s, const RoundingKey& key,
                                    const float* ranges, u32* codes) {
    uniform_codes_of(values, count, bucket_size, s, key, ranges, codes);
}

template <class Code>
static void uniform_encode(const float* values, u64 count, u64 bucket_size, u32 s, const RoundingKey& key,
                           float* ranges, Code* codes) {
    for (u64 begin = 0, b = 0; begin < count; begin += bucket_size, ++b)
        bucket_range(values + begin, run_end(begin, bucket_size, count) - begin, ranges + 2 * b);
    uniform_codes(values, count, bucket_size, s, key, ranges, codes);
}

// ranges: (least, largest) of each bucket. codes[count]: 0 .. s, s below 256.
DR_CODES(void, uniform_encode, (const float* values, u64 count, u64 bucket_size, u32 s, u32 seed, u32 parameter,
                                u32 step, u32 rank, float* ranges, T* codes),
    uniform_encode(values, count, bucket_size, s, {seed, parameter, step, rank}, ranges, codes))

// Distances and products are added in float64 in eight lanes (element j in lane j % 8), then the lanes by halves.
template <class Code>
__attribute__((always_inline)) inline UniformSums sums_of(const float* values, const Code* codes, u64 count,
                                                          float least) {
    UniformSums sums = {};
    double distances[8] = {}, products[8] = {};
    const auto add = [&](u64 i, u64 j) {
        const double d = (double)values[i] - (double)least;
        const i32 c = (i32)codes[i];
        distances[j] += d;
        products[j] += d * (double)c;
        sums.codes += (u64)(u32)c;
        sums.squares += (u64)(u32)c * (u32)c;
    };
    u64 i = 0;
    for (; i + 8 <= count; i += 8)
        for (u64 j = 0; j < 8; ++j) add(i + j, j);
    for (u64 j = 0; i < count; ++i, ++j) add(i, j);
    for (int half = 4; half; half /= 2)
        for (int j = 0; j < half; ++j) distances[j] += distances[j + half], products[j] += products[j + half];
    sums.distances = distances[0], sums.products = products[0];
    return sums;
}
DR_CLONES static UniformSums uniform_sums(const float* values, const u8* codes, u64 count, float least) {
    return sums_of(values, codes, count, least);
}
DR_CLONES static UniformSums uniform_sums(const float* values, const u32* codes, u64 count, float least) {
    return sums_of(values, codes, count, least);
}

template <class Code>
static void uniform_fit(const float* values, const Code* codes, const float* ranges, u64 count, u64 bucket_size, u32 s,
                        float* fitted) {
    for (u64 begin = 0, b = 0; begin < count; begin += bucket_size, ++b) {
        const u64 size = run_end(begin, bucket_size, count) - begin;
        const UniformSums sums = uniform_sums(values + begin, codes + begin, size, ranges[2 * b]);
        fitted_range(ranges[2 * b], sums, (double)(i64)size, s, fitted + 2 * b);
    }
}

// fitted: the range of each bucket that fits its codes best.
DR_CODES(void, uniform_fit, (const float* values, const T* codes, const float* ranges, u64 count, u64 bucket_size,
                             u32 s, float* fitted), uniform_fit(values, codes, ranges, count, bucket_size, s, fitted))

DR_CLONES static void uniform_values(const u8* codes, u64 count, float low, double step, float* values) {
    for (u64 i = 0; i < count; ++i) values[i] = uniform_value(codes[i], low, step);
}
DR_CLONES static void uniform_values(const u32* codes, u64 count, float low, double step, float* values) {
    for (u64 i = 0; i < count; ++i) values[i] = uniform_value(codes[i], low, step);
}

template <class Code>
static i64 uniform_decode(const Code* codes, const float* ranges, u64 count, u64 bucket_size, u32 s, float* values) {
    if (bucket_size == 0 || s == 0) return ERR_VALUE;
    for (u64 begin = 0, b = 0; begin < count; begin += bucket_size, ++b) {
        const float low = ranges[2 * b], high = ranges[2 * b + 1];
        if (!valid_uniform_range(low, high)) return ERR_VALUE;
        const u64 size = run_end(begin, bucket_size, count) - begin;
        uniform_values(codes + begin, size, low, uniform_step(low, high, s), values + begin);
    }
    return 0;
}

// values[count]; codes: 0 .. s. ERR_VALUE if a range is not finite or upside down.
DR_CODES(i64, uniform_decode, (const T* codes, const float* ranges, u64 count, u64 bucket_size, u32 s, float* values),
    return uniform_decode(codes, ranges, count, bucket_size, s, values))
