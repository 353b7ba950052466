// QSGD's codes as values, on the device.
#pragma once

#include "common/device.cuh"
#include "qsgd/qsgd.h"

// values[count] of codes: four_codes(i) has those of the elements i .. i + 3, norm(b) that of a bucket. This thread is
// number `thread` of `threads`, which may be all of the grid. Returns whether it has seen a code above 2 s, or a norm
// that is negative or not finite. A whole block calls it.
template <class C, class N>
__device__ bool qsgd_open(u64 count, u32 bucket_size, u32 s, u64 thread, u64 threads, float* values, C four_codes,
                          N norm) {
    __shared__ float of_code[THREADS];  // the value of a code whose norm is 1
    of_code[threadIdx.x] = qsgd_value(threadIdx.x, 1.0f, s);
    __syncthreads();
    bool bad = false;
    for (u64 i = 4 * thread; i < count; i += 4 * threads) {
        const Four<u8> codes = four_codes(i);
        const u32 bucket = (u32)i / bucket_size, in_bucket = (u32)i % bucket_size;
        Four<float> four;
        float of_bucket = norm(bucket);
        for (u32 j = 0, next = bucket_size - in_bucket, b = bucket; j < 4 && i + j < count; ++j) {
            if (j == next) of_bucket = norm(++b), next += bucket_size;
            bad |= codes.x[j] > 2 * s || !valid_scale(of_bucket);
            four.x[j] = of_code[codes.x[j]] * of_bucket;
        }
        store_four(values, i, count, four);
    }
    return bad;
}
