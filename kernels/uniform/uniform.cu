// Uniform levels between the least and the largest value of each bucket: the CUDA side of kernels/uniform/uniform.cpp.
#include "buckets/buckets.cuh"
#include "rounding/rounding.cuh"
#include "uniform/uniform.h"

// A float's bits as an unsigned word, so that the words have the order of the floats; and back.
__device__ __forceinline__ u32 ordered_bits(float x) {
    const u32 bits = bits_of(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(u32 word) {
    return __uint_as_float(word >> 31 ? word & 0x7FFFFFFFu : ~word);
}

// extremes: for each bucket, the ordered bits of (the least value, complemented; the largest value), so that both come
// from a maximum; zeros before the launch.
KERNEL uniform_extremes(const float* values, u64 count, u64 bucket_size, u32* extremes) {
    each_chunk(count, bucket_size, [=](u64 b, u64 begin, u64 end) {
        u32 low = 0, high = 0;
        for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
            const u32 bits = ordered_bits(values[i]);
            low = ~bits > low ? ~bits : low;
            high = bits > high ? bits : high;
        }
        low = block_max(low);
        high = block_max(high);
        if (threadIdx.x == 0) {
            atomicMax(extremes + 2 * b, low);
            atomicMax(extremes + 2 * b + 1, high);
        }
    });
}

// ranges: (least, largest) of each bucket; + 0.0f turns -0.0 into 0.0.
template <class Code>
__device__ void uniform_codes(const float* values, u64 count, u64 bucket_size, u32 s, const RoundingKey& key,
                              const u32* extremes, float* ranges, Code* codes) {
    const u64 buckets = bucket_count(count, bucket_size);
    const u32 size = (u32)bucket_size;
    for (u64 b = grid_thread(); b < buckets; b += grid_threads()) {
        ranges[2 * b] = from_ordered(~extremes[2 * b]) + 0.0f;
        ranges[2 * b + 1] = from_ordered(extremes[2 * b + 1]) + 0.0f;
    }
    each_rounded(count, key, [=](u64 i, u32 word) {
        const u32 b = (u32)i / size;
        const float low = from_ordered(~extremes[2 * b]) + 0.0f, high = from_ordered(extremes[2 * b + 1]) + 0.0f;
        codes[i] = (Code)uniform_level(values[i], low, uniform_scale(low, high, s), s, uniform24(word));
    });
}
KERNEL uniform_encode8(const float* values, u64 count, u64 bucket_size, u32 seed, u32 parameter, u32 step, u32 rank,
                       const u32* extremes, float* ranges, u8* codes) {
    uniform_codes(values, count, bucket_size, 255, {seed, parameter, step, rank}, extremes, ranges, codes);
}
KERNEL uniform_encode16(const float* values, u64 count, u64 bucket_size, u32 seed, u32 parameter, u32 step, u32 rank,
                        const u32* extremes, float* ranges, u16* codes) {
    uniform_codes(values, count, bucket_size, 65535, {seed, parameter, step, rank}, extremes, ranges, codes);
}

template <class Code>
__device__ void uniform_values(const Code* codes, const float* ranges, u64 count, u64 bucket_size, u32 s, float* values,
                               i32* error) {
    const u32 size = (u32)bucket_size;
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const float low = ranges[2 * ((u32)i / size)], high = ranges[2 * ((u32)i / size) + 1];
        bad |= !valid_uniform_range(low, high);
        values[i] = uniform_value(codes[i], low, uniform_step(low, high, s));
    }
    if (bad) atomicMin(error, ERR_VALUE);
}
KERNEL uniform_decode8(const u8* codes, const float* ranges, u64 count, u64 bucket_size, float* values, i32* error) {
    uniform_values(codes, ranges, count, bucket_size, 255, values, error);
}
KERNEL uniform_decode16(const u16* codes, const float* ranges, u64 count, u64 bucket_size, float* values, i32* error) {
    uniform_values(codes, ranges, count, bucket_size, 65535, values, error);
}
