// NaN and infinity, on the device.
#pragma once

#include "common/device.cuh"

// The gradient, or null if *bad says that it is not finite: the residual must then stay as it is. `bad` may be null.
template <class T>
__device__ __forceinline__ const T* unless(const i32* bad, const T* gradient) {
    return bad && *bad ? nullptr : gradient;
}

// Sets *bad to ERR_NOT_FINITE if a number is NaN or infinite. `workers` blocks call it, each with its number; they read
// vectors of 16 bytes.
template <class T>
__device__ void find_nonfinite(const T* x, u64 n, u32 worker, u32 workers, i32* bad) {
    typedef typename BitsOf<T>::type Bits;
    const Bits infinity = sizeof(T) == 4 ? (Bits)0x7F800000u : (Bits)0x7FF0000000000000ull;
    const u32 size = Vector<T>::SIZE;
    const u64 vectors = aligned16(x) ? n / size : 0, first = (u64)worker * THREADS + threadIdx.x;
    const u64 stride = (u64)workers * THREADS;
    bool found = false;
    const u32 rows = 4;  // their loads wait for the memory together
    u64 v = first;
    for (; v + (rows - 1) * stride < vectors; v += rows * stride) {
        Vector<T> some[rows];
#pragma unroll
        for (u32 r = 0; r < rows; ++r) some[r] = *(const Vector<T>*)(x + (v + r * stride) * size);
#pragma unroll
        for (u32 r = 0; r < rows; ++r)
            for (u32 j = 0; j < size; ++j) found |= magnitude_bits(some[r].x[j]) >= infinity;
    }
    for (; v < vectors; v += stride) {
        const Vector<T> four = *(const Vector<T>*)(x + v * size);
        for (u32 j = 0; j < size; ++j) found |= magnitude_bits(four.x[j]) >= infinity;
    }
    for (u64 i = vectors * size + first; i < n; i += stride) found |= magnitude_bits(x[i]) >= infinity;
    if (__syncthreads_or(found) && threadIdx.x == 0) atomicMin(bad, ERR_NOT_FINITE);
}
