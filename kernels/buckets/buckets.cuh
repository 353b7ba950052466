// Buckets on the device.
#pragma once

#include "buckets/buckets.h"
#include "common/device.cuh"

const u32 CHUNK = 16 * THREADS;  // elements of a block's turn

// Cuts every bucket into chunks, a block's turn each, and calls f(bucket, begin, end) with all threads of the block.
template <class F>
__device__ void each_chunk(u64 count, u64 bucket_size, F f) {
    const u64 per_bucket = bucket_count(bucket_size, CHUNK), chunks = bucket_count(count, bucket_size) * per_bucket;
    for (u64 c = blockIdx.x; c < chunks; c += gridDim.x) {
        const u64 b = c / per_bucket, begin = b * bucket_size + c % per_bucket * CHUNK;
        const u64 end = run_end(begin, CHUNK, run_end(b * bucket_size, bucket_size, count));
        if (begin < end) f(b, begin, end);
    }
}

// The largest magnitude of elements begin .. end - 1, found by a warp.
__device__ __forceinline__ float largest_magnitude(const float* values, u64 begin, u64 end) {
    u32 largest = 0;
    for (u64 i = begin + lane_number(); i < end; i += 32) {
        const u32 bits = magnitude_bits(values[i]);
        largest = bits > largest ? bits : largest;
    }
    return __uint_as_float(warp_max(largest));
}

// term(begin) + ... + term(end - 1) in the order of buckets_cpu.h, found by a warp; the sum is lane 0's. All 32 lanes
// call `term`, each for its own elements; each group of eight lanes then computes the same eight sums.
template <class F>
__device__ double sum_in_lanes(u64 begin, u64 end, F term) {
    double sum = 0.0;
    for (u64 base = begin; base < end; base += 32) {
        const double own = base + lane_number() < end ? term(base + lane_number()) : 0.0;
        for (u32 part = 0; part < 32; part += 8) sum += __shfl_sync(WHOLE_WARP, own, (lane_number() & 7) + part);
    }
    for (u32 half = 4; half; half /= 2) sum += __shfl_down_sync(WHOLE_WARP, sum, half);
    return sum;
}
