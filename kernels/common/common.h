// Arithmetic that several concepts and both devices share: hashing, random numbers, the sum of residual and gradient.
// Functions of integers and floats that g++, nvcc and NVRTC accept; what one codec alone needs is in its own header.
// NVRTC has no standard headers, hence the integer types below.
// Host and device code are compiled without contraction of a*b+c into one rounding, so equal inputs give equal bits.
#pragma once

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
const i32 ERR_CHECKSUM = -6, ERR_NOT_FINITE = -7, ERR_ORDER = -8, ERR_PADDING = -9;

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
enum RandomStream {
    STREAM_SAMPLE = 1,
    STREAM_RANDOMK = 2,
    STREAM_ROUNDING = 3,
    STREAM_POLICY = 4,
    STREAM_SKETCH = 5,
    STREAM_ROTATION = 6
};

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
const u32 CHECKSUM_STEP = 0x9E3779B1u;
DR_HD u32 checksum_word(u32 word, u32 position) { return fmix32(word ^ (position * CHECKSUM_STEP)); }

// The number of bits that hold 0 .. n-1: ceil(log2 n).
DR_HD u32 bits_for(u64 n) {
    u32 width = 0;
    while (width < 64 && ((u64)1 << width) < n) ++width;
    return width;
}

// The unsigned integer that holds a float's bits.
template <class T>
struct BitsOf;
template <>
struct BitsOf<float> {
    typedef u32 type;
};
template <>
struct BitsOf<double> {
    typedef u64 type;
};

// The type of what a kernel has two of, one for each of two types: see DR_FLOATS and DR_CODES in cpu.h, FLOAT_KERNEL and
// CODE_KERNEL in device.cuh.
namespace of_f32 { typedef float T; }
namespace of_f64 { typedef double T; }
namespace of_u8 { typedef u8 T; }
namespace of_u32 { typedef u32 T; }
