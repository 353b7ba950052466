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

// ranges: (least, largest) of each bucket; + 0.0f turns -0.0 into 0.0. scales: of each bucket.
KERNEL uniform_ranges(const u32* extremes, u64 buckets, u32 s, float* ranges, double* scales) {
    for (u64 b = grid_thread(); b < buckets; b += grid_threads()) {
        const float low = from_ordered(~extremes[2 * b]) + 0.0f, high = from_ordered(extremes[2 * b + 1]) + 0.0f;
        ranges[2 * b] = low;
        ranges[2 * b + 1] = high;
        scales[b] = uniform_scale(low, high, s);
    }
}

template <class Code>
__device__ void uniform_codes(const float* values, u64 count, u64 bucket_size, u32 s, const RoundingKey& key,
                              const float* ranges, const double* scales, Code* codes) {
    const u32 size = (u32)bucket_size;
    each_rounded(count, key, [=](u64 i, u32 word) {
        const u32 b = (u32)i / size;
        codes[i] = (Code)uniform_level(values[i], ranges[2 * (u64)b], scales[b], s, uniform24(word));
    });
}
CODE_KERNEL(uniform_encode, (const float* values, u64 count, u64 bucket_size, u32 s, u32 seed, u32 parameter, u32 step,
                             u32 rank, const float* ranges, const double* scales, T* codes),
    uniform_codes(values, count, bucket_size, s, {seed, parameter, step, rank}, ranges, scales, codes))

// A warp computes a bucket. Element j is added in lane j % 8, in order, as in uniform.cpp. All 32 lanes load; each group
// of eight lanes then computes the same eight sums.
template <class Code>
__device__ void uniform_fit(const float* values, const Code* codes, const float* ranges, u64 count, u64 bucket_size,
                            u32 s, float* fitted) {
    const u64 buckets = bucket_count(count, bucket_size);
    for (u64 b = grid_thread() / 32; b < buckets; b += grid_threads() / 32) {
        const u64 begin = b * bucket_size, end = run_end(begin, bucket_size, count);
        const float least = ranges[2 * b];
        UniformSums sums = {};
        for (u64 base = begin; base < end; base += 32) {
            const u64 i = base + lane_number();
            const u32 c = i < end ? (u32)codes[i] : 0;
            const double d = i < end ? (double)values[i] - (double)least : 0.0, product = d * (double)(i32)c;
            sums.codes += c;
            sums.squares += (u64)c * c;
            for (u32 part = 0; part < 32; part += 8) {
                sums.distances += __shfl_sync(WHOLE_WARP, d, (lane_number() & 7) + part);
                sums.products += __shfl_sync(WHOLE_WARP, product, (lane_number() & 7) + part);
            }
        }
        for (u32 half = 4; half; half /= 2) {
            sums.distances += __shfl_down_sync(WHOLE_WARP, sums.distances, half);
            sums.products += __shfl_down_sync(WHOLE_WARP, sums.products, half);
        }
        sums.codes = warp_sum(sums.codes);
        sums.squares = warp_sum(sums.squares);
        if (lane_number() == 0) fitted_range(least, sums, (double)(i64)(end - begin), s, fitted + 2 * b);
    }
}
CODE_KERNEL(uniform_fit, (const float* values, const T* codes, const float* ranges, u64 count, u64 bucket_size, u32 s,
                          float* fitted), uniform_fit(values, codes, ranges, count, bucket_size, s, fitted))

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
CODE_KERNEL(uniform_decode, (const T* codes, const float* ranges, u64 count, u64 bucket_size, u32 s, float* values,
                             i32* error), uniform_values(codes, ranges, count, bucket_size, s, values, error))
