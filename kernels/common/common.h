// Arithmetic that the host and the device share: hashing, random numbers and quantizing of one element. Functions of
// integers and floats that g++, nvcc and NVRTC accept. NVRTC has no standard headers, hence the integer types below.
// Host and device code are compiled without contraction of a*b+c into one rounding, so equal inputs give equal bits.
#ifndef HVD_DEEPREDUCE_COMMON_H
#define HVD_DEEPREDUCE_COMMON_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// Functions marked DR_HD are compiled for the host in a .cpp file and for the device in a .cu file.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define DR_CUDA 1
#define DR_HD __device__ __forceinline__
#else
#define DR_HD inline
#endif

// Errors of decoders, the only negative results; ops/library.py has their sentences. A kernel on the device that finds
// several errors keeps the smallest number.
const i32 ERR_TRUNCATED = -1, ERR_INDEX = -2, ERR_VALUE = -3, ERR_MEANS = -4, ERR_SIZES = -5;
const i32 ERR_CHECKSUM = -6, ERR_NOT_FINITE = -7, ERR_ORDER = -8;

// Philox4x32-10, a counter-based generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011). No state: the same key and counter give the same four words on every machine and in every order.
struct Philox4 {
    u32 x, y, z, w;
};

DR_HD Philox4 philox4x32(u32 k0, u32 k1, u32 c0, u32 c1, u32 c2, u32 c3) {
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = (u64)0xD2511F53u * c0;
        const u64 p1 = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(p1 >> 32) ^ c1 ^ k0;
        c1 = (u32)p1;
        c2 = (u32)(p0 >> 32) ^ c3 ^ k1;
        c3 = (u32)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Philox4 out = {c0, c1, c2, c3};
    return out;
}

// What random numbers are for. It is part of the counter, so that no two uses of one key share numbers.
enum RandomStream { STREAM_SAMPLE = 1, STREAM_RANDOMK = 2, STREAM_ROUNDING = 3, STREAM_POLICY = 4, STREAM_SKETCH = 5 };

// residual + gradient, limited to the finite range: two finite numbers can sum to infinity, which no codec takes.
DR_HD float accumulated(float residual, float gradient) {
    const float most = 3.4028234663852886e38f, sum = residual + gradient, low = sum < most ? sum : most;
    return low > -most ? low : -most;
}
DR_HD double accumulated(double residual, double gradient) {
    const double most = 1.7976931348623157e308, sum = residual + gradient, low = sum < most ? sum : most;
    return low > -most ? low : -most;
}

// [0, 1) with 24 bits: every value is exact in float32.
DR_HD float uniform24(u32 word) { return (float)(word >> 8) * 5.9604644775390625e-08f; }

// MurmurHash3's 32-bit finalizer: a bijection of the 32-bit words.
DR_HD u32 fmix32(u32 h) {
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    h ^= h >> 16;
    return h;
}

// One word's term of a container's checksum. For a fixed position it is a bijection of the word, so any change of one
// word changes the sum; and a sum can be computed in any order, by any number of threads.
DR_HD u32 checksum_word(u32 word, u32 position) { return fmix32(word ^ (position * 0x9E3779B1u)); }

// QSGD's stochastic rounding of one value: |value| / norm lies in [0, 1], times s, rounded up with the probability
// of its fraction (Alistarh et al. 2017, section 3.1). Result: 0 .. 2s, where s stands for zero.
// The division comes first: s / norm overflows where the norm is denormal.
DR_HD u32 qsgd_level(float value, float norm, u32 s, float uniform) {
    const float magnitude = value < 0.0f ? -value : value;
    float ratio = norm > 0.0f ? magnitude / norm : 0.0f;
    ratio = ratio < 1.0f ? ratio : 1.0f;
    // A signed conversion: AVX2 has no other.
    u32 level = (u32)(i32)(ratio * (float)s + uniform);
    level = level > s ? s : level;
    return value < 0.0f ? s - level : s + level;
}

DR_HD float qsgd_value(u32 code, float norm, u32 s) { return ((float)((i32)code - (i32)s) / (float)s) * norm; }

// Stochastic rounding to s + 1 uniform levels from `low` up; `scale` is s / (high - low), 0 where they are equal (Zhang
// et al. 2017, section 2). In float64: high - low can be beyond float32, and 16 bits leave float32 none to round with.
DR_HD u32 uniform_level(float value, float low, double scale, u32 s, float uniform) {
    const i32 level = (i32)(((double)value - (double)low) * scale + (double)uniform);
    return level > (i32)s ? s : (u32)level;
}

// The float nearest to low + code * step never passes `high`, which is finite.
DR_HD float uniform_value(u32 code, float low, double step) { return (float)((double)low + (double)(i32)code * step); }

// Natural compression (Horvath et al. 2019, section 2): the power of two below or above a magnitude, as its float32
// exponent field, 0 .. 254. The mantissa over 2^23 is the probability of the one above, so adding 23 random bits to the
// magnitude's bits carries into the exponent just so often. 2^128 is no float: the top binade rounds down.
DR_HD u32 natural_exponent(u32 bits, u32 random) {
    const u32 exponent = ((bits & 0x7FFFFFFFu) + (random >> 9)) >> 23;
    return exponent > 254u ? 254u : exponent;
}

// 3LC's three-value quantization, round(value / m) + 1, a half away from zero (Lim et al. 2019, section 3.1). Written
// without the division: |value| / m >= 1/2 where |value| >= m - |value|, which is exact at the border.
DR_HD u32 three_lc_digit(float value, float m) {
    const float magnitude = value < 0.0f ? -value : value;
    const i32 sign = value < 0.0f ? -1 : 1;
    const i32 level = magnitude >= m - magnitude ? sign : 0;
    return (u32)(1 + (magnitude > 0.0f ? level : 0));
}

// The bin of a key in one row of a MinMaxSketch: the hash, scaled from [0, 2^32) to [0, columns).
DR_HD u32 sketch_column(u32 key, u32 row_seed, u32 columns) {
    return (u32)(((u64)fmix32(key ^ row_seed) * columns) >> 32);
}

// The number of bits that hold 0 .. n-1: ceil(log2 n).
DR_HD u32 bits_for(u64 n) {
    u32 width = 0;
    while (width < 64 && ((u64)1 << width) < n) ++width;
    return width;
}

// e^x for finite x, in float64 operations alone (no library's exp, whose last bit differs between machines):
// x = n ln 2 + r with n an integer and |r| <= 0.347, e^r by its Taylor series to r^13, times 2^n. Relative error below
// 4e-16. x is clamped to [-708, 709].
DR_HD double exp64(double x) {
    x = x < -708.0 ? -708.0 : x;
    x = x > 709.0 ? 709.0 : x;
    union {
        double value;
        u64 bits;
    } power;
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: a sum with it holds the rounded integer in its low bits
    power.value = x * 1.4426950408889634 + magic;
    const double n = power.value - magic;
    // ln 2 in two parts, the first of 33 bits: n times it is exact.
    const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    double e = 1.0 / 6227020800.0;
    e = e * r + 1.0 / 479001600.0;
    e = e * r + 1.0 / 39916800.0;
    e = e * r + 1.0 / 3628800.0;
    e = e * r + 1.0 / 362880.0;
    e = e * r + 1.0 / 40320.0;
    e = e * r + 1.0 / 5040.0;
    e = e * r + 1.0 / 720.0;
    e = e * r + 1.0 / 120.0;
    e = e * r + 1.0 / 24.0;
    e = e * r + 1.0 / 6.0;
    e = e * r + 0.5;
    e = e * r + 1.0;
    e = e * r + 1.0;
    power.bits = (power.bits + 1023u) << 52;
    return e * power.value;
}

// Gram's polynomials, orthogonal on m points at even steps of t in [-1, 1]: P_0 = 1, P_1 = t,
// P_k+1 = t P_k - gram_ratio(k) P_k-1. gram_ratio(k) is also <P_k, P_k> / <P_k-1, P_k-1>, and <P_0, P_0> = m.
DR_HD double gram_ratio(u32 k, u64 m) {
    const double square = (double)k * (double)k, points = (double)m, steps = (double)(m - 1);
    return square * (points * points - square) / ((4.0 * square - 1.0) * (steps * steps));
}

// One step of Clenshaw's sum of c_k P_k, from the highest k down: b_k from b_k+1, b_k+2 and ratio = gram_ratio(k + 1).
DR_HD double gram_step(double c, double t, double b1, double ratio, double b2) { return (c + t * b1) - ratio * b2; }

// A fitted magnitude (a share of `largest`), brought within [least, largest], with its sign, 1 or -1.
DR_HD float fitted_value(double share, double least, double largest, double sign) {
    double magnitude = share * largest;
    magnitude = magnitude < least ? least : magnitude;
    magnitude = magnitude > largest ? largest : magnitude;
    return (float)(sign * magnitude);
}

// One exponential of fit_dexp at x in [0, 1]. A growing one is written from x = 1 back, so that none exceeds 1.
DR_HD double dexp_term(double rate, double x) { return exp64(rate * (x - (rate > 0.0 ? 1.0 : 0.0))); }

#endif
