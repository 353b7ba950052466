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

// starts[p][t], for each part with indices: its first index that is not below tile t, of the tiles 0 .. tiles, as a
// place of a list in which this part begins at `before`. One pass over the indices takes the place of a search by each
// block. Block b is of part p = b % parts.
__device__ __forceinline__ void sum_starts(u32 parts, u32 p, const u32* indices, u64 count, u64 before, u64 tiles,
                                           u32* starts) {
    const u32 number = blockIdx.x / parts;
    const u64 stride = (u64)(gridDim.x / parts) * THREADS;
    u32* of_part = starts + p * (tiles + 1);
    for (u64 i = (u64)number * THREADS + threadIdx.x; i <= count; i += stride) {
        const u64 first = i ? (u64)indices[i - 1] / SUM_TILE + 1 : 0;
        const u64 last = i < count ? indices[i] / SUM_TILE : tiles;
        for (u64 t = first; t <= last; ++t) of_part[t] = (u32)(before + i);
    }
}

// A block sums one tile of the output in shared memory and writes it once. `more`: the sum begins with what `out`
// holds, else with zeros. starts: of sum_starts. Each thread loads an element of every part before the first sum, so
// that these wait for the memory together. DENSE: whether parts may be dense. stopped(): whether nothing is to be done;
// it is asked for while the starts are loaded.
template <bool DENSE, class T, class S>
__device__ __forceinline__ void sum(T* out, u64 n, T scale, u32 more, u32 parts, const Part<T>* part,
                                    const u32* starts, S stopped) {
    const u32 size = Vector<T>::SIZE;
    __shared__ Vector<T> vectors[SUM_TILE / size];
    T* const sums = vectors[0].x;
    const u64 begin = (u64)blockIdx.x * SUM_TILE, left = n - begin < SUM_TILE ? n - begin : SUM_TILE;
    const u32 row = (u32)((n + SUM_TILE - 1) / SUM_TILE) + 1, base = (u32)begin;  // indices are 32 bits
    const bool whole = left == SUM_TILE && aligned16(out);
    Vector<T>* const to = (Vector<T>*)(out + begin);
    u32 from[8], end[8], place[8];
    T value[8];
#pragma unroll
    for (u32 q = 0; q < 8; ++q) {
        from[q] = end[q] = 0;
        if (q < parts && (!DENSE || part[q].indices)) {
            const u32* of_tile = starts + blockIdx.x + (u64)q * row;
            from[q] = of_tile[0] + threadIdx.x, end[q] = of_tile[1];
        }
    }
    if (stopped()) return;
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
        if (DENSE && !part[q].indices) {
            for (u32 i = threadIdx.x; i < left; i += THREADS) sums[i] += part[q].values[begin + i];
        } else if (from[q] < end[q]) {
            sums[place[q] - base] += value[q];
            for (u32 i = from[q] + THREADS; i < end[q]; i += THREADS)
                sums[part[q].indices[i] - base] += part[q].values[i];
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
