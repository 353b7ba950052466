// Sums of sparse and dense parts, tile by tile: for parts that a kernel is given (arrays.cu), and for those of containers
// (fused.cu).
#pragma once

#include "common/device.cuh"

// One part of a sum: values at sorted indices, or a value for each element (indices null).
template <class T>
struct Part {
    const u32* indices;
    const T* values;
    u64 count;
};

const u32 SUM_TILE = 2048;  // elements of the output that a block sums, as in ops/arrays.py

// part[p]. All places are known when this is compiled, so that the parts stay in registers and constants: an array that
// is read at a place that is not known goes to each thread's own memory, which takes longer than the sum.
template <class T>
__device__ __forceinline__ Part<T> chosen(const Part<T>* part, u32 p) {
    Part<T> one = part[0];
#pragma unroll
    for (u32 q = 1; q < 8; ++q)
        if (q == p) one = part[q];
    return one;
}

// starts[p][t], for each part with indices: its first index that is not below tile t, of the tiles 0 .. tiles. One pass
// over the indices takes the place of a search by each block. Block b is of part b % parts.
template <class T>
__device__ __forceinline__ void sum_starts(u64 n, u32 parts, const Part<T>* part, u64 tiles, u32* starts) {
    const u32 p = blockIdx.x % parts, number = blockIdx.x / parts;
    const Part<T> of = chosen(part, p);
    if (!of.indices) return;
    const u64 stride = (u64)(gridDim.x / parts) * THREADS;
    u32* of_part = starts + p * (tiles + 1);
    for (u64 i = (u64)number * THREADS + threadIdx.x; i <= of.count; i += stride) {
        const u64 first = i ? (u64)of.indices[i - 1] / SUM_TILE + 1 : 0;
        const u64 last = i < of.count ? of.indices[i] / SUM_TILE : tiles;
        for (u64 t = first; t <= last; ++t) of_part[t] = (u32)i;
    }
}

// A block sums one tile of the output in shared memory and writes it once. `more`: the sum begins with what `out`
// holds, else with zeros. starts: of sum_starts. Each thread loads an element of every part before the first sum, so
// that these wait for the memory together.
template <class T>
__device__ __forceinline__ void sum(T* out, u64 n, T scale, u32 more, u32 parts, const Part<T>* part,
                                    const u32* starts) {
    const u32 size = Vector<T>::SIZE;
    __shared__ Vector<T> vectors[SUM_TILE / size];
    T* const sums = vectors[0].x;
    const u64 begin = (u64)blockIdx.x * SUM_TILE, left = n - begin < SUM_TILE ? n - begin : SUM_TILE;
    const u64 row = (n + SUM_TILE - 1) / SUM_TILE + 1;
    const bool whole = left == SUM_TILE && aligned16(out);
    Vector<T>* const to = (Vector<T>*)(out + begin);
    u32 from[8], end[8], place[8];
    T value[8];
#pragma unroll
    for (u32 q = 0; q < 8; ++q) {
        from[q] = end[q] = 0;
        if (q < parts && part[q].indices) {
            from[q] = starts[q * row + blockIdx.x] + threadIdx.x;
            end[q] = starts[q * row + blockIdx.x + 1];
        }
    }
#pragma unroll
    for (u32 q = 0; q < 8; ++q)
        if (from[q] < end[q]) {
            place[q] = part[q].indices[from[q]];
            value[q] = part[q].values[from[q]];
        }
    if (whole) {
        for (u32 v = threadIdx.x; v < SUM_TILE / size; v += THREADS) vectors[v] = more ? to[v] : Vector<T>{};
    } else {
        for (u32 i = threadIdx.x; i < left; i += THREADS) sums[i] = more ? out[begin + i] : (T)0;
    }
#pragma unroll
    for (u32 q = 0; q < 8; ++q) {
        if (q >= parts) break;
        __syncthreads();
        if (!part[q].indices) {
            for (u32 i = threadIdx.x; i < left; i += THREADS) sums[i] += part[q].values[begin + i];
        } else if (from[q] < end[q]) {
            sums[place[q] - begin] += value[q];
            for (u32 i = from[q] + THREADS; i < end[q]; i += THREADS)
                sums[part[q].indices[i] - begin] += part[q].values[i];
        }
    }
    __syncthreads();
    if (whole) {
        for (u32 v = threadIdx.x; v < SUM_TILE / size; v += THREADS) {
            Vector<T> four = vectors[v];
#pragma unroll
            for (u32 j = 0; j < size; ++j) four.x[j] = scale != (T)1 ? four.x[j] * scale : four.x[j];
            to[v] = four;
        }
    } else {
        for (u32 i = threadIdx.x; i < left; i += THREADS) out[begin + i] = scale != (T)1 ? sums[i] * scale : sums[i];
    }
}

// The arguments of eight parts.
