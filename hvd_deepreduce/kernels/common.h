// Arithmetic that the cpu and the cuda backend share, once: hashing, random numbers, quantizing and bit fields of
// one element. Plain functions of integers and floats, accepted alike by g++, nvcc and NVRTC (which has no standard
// headers, hence the integer names below). Both backends are compiled without contraction of a*b+c into one
// rounding, so equal inputs give equal bits.
#ifndef HVD_DEEPREDUCE_COMMON_H
#define HVD_DEEPREDUCE_COMMON_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define DR_HD __host__ __device__ __forceinline__
#else
#define DR_HD inline
#endif

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

// What a random number is for. It stands in the counter, so no two uses of one key share numbers.
enum RandomStream { STREAM_SAMPLE = 1, STREAM_RANDOMK = 2, STREAM_ROUNDING = 3, STREAM_POLICY = 4 };

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

// One word's share of a container's checksum. For a fixed position it is a bijection of the word, so any change of
// one word changes the sum; and a sum can be taken in any order, by any number of threads.
DR_HD u32 checksum_word(u32 word, u32 position) { return fmix32(word ^ (position * 0x9E3779B1u)); }

// QSGD's stochastic rounding of one value: |value| / norm lies in [0, 1], times s, rounded up with the probability
// of its fraction (Alistarh et al. 2017, section 3.1). Result: 0 .. 2s, where s stands for zero.
// The division comes first: s / norm overflows where the norm is denormal.
DR_HD u32 qsgd_level(float value, float norm, u32 s, float uniform) {
    const float magnitude = value < 0.0f ? -value : value;
    const float ratio = norm > 0.0f ? magnitude / norm : 0.0f;
    u32 level = (u32)(ratio * (float)s + uniform);
    level = level > s ? s : level;
    return value < 0.0f ? s - level : s + level;
}

DR_HD float qsgd_value(u32 code, float norm, u32 s) { return ((float)((i32)code - (i32)s) / (float)s) * norm; }

// Bits that hold 0 .. n-1: ceil(log2 n).
DR_HD u32 bits_for(u64 n) {
    u32 width = 0;
    while (width < 64 && ((u64)1 << width) < n) ++width;
    return width;
}

// A keyed bijection of [0, domain): a balanced Feistel network of six rounds over the next even number of bits, walked
// until it lands inside the domain (under 4 steps on average). The first r images are r distinct random indices.
DR_HD u32 feistel_permute(u32 value, u64 domain, u32 half_bits, u32 k0, u32 k1, u32 k2) {
    const u32 mask = (u32)(((u64)1 << half_bits) - 1);
    u64 x = value;
    do {
        u32 left = (u32)(x >> half_bits) & mask, right = (u32)x & mask;
        for (u32 round = 0; round < 6; ++round) {
            const u32 f = fmix32(right ^ fmix32(k0 + round * 0x9E3779B9u) ^ fmix32(k1 ^ (round << 28))  ^ k2) & mask;
            const u32 next = left ^ f;
            left = right;
            right = next;
        }
        x = ((u64)left << half_bits) | right;
    } while (x >= domain);
    return (u32)x;
}

#endif
