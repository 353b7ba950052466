// Arrays of float32 and float64: the CUDA side of arrays.cpp; and index lists: offset and delete.
//
// `bad` (or null): if *bad is not 0, the gradient is not finite, and the residual must stay as it is.
#include "arrays/finite.cuh"

FLOAT_KERNEL(finite, (const T* x, u64 n, i32* bad), find_nonfinite(x, n, blockIdx.x, gridDim.x, bad))

// ---- Add: dense += gradient, as `accumulated`.

template <class T>
__device__ void add(T* dense, const T* gradient, u64 n) {
    const u32 size = Vector<T>::SIZE;
    const u64 vectors = aligned16(dense) && aligned16(gradient) ? n / size : 0;
    for (u64 v = grid_thread(); v < vectors; v += grid_threads()) {
        Vector<T> x = *(const Vector<T>*)(dense + v * size);
        const Vector<T> g = *(const Vector<T>*)(gradient + v * size);
        for (u32 j = 0; j < size; ++j) x.x[j] = accumulated(x.x[j], g.x[j]);
        *(Vector<T>*)(dense + v * size) = x;
    }
    for (u64 i = vectors * size + grid_thread(); i < n; i += grid_threads())
        dense[i] = accumulated(dense[i], gradient[i]);
}
FLOAT_KERNEL(add, (T* dense, const T* gradient, u64 n, const i32* bad), if (!bad || !*bad) add(dense, gradient, n))

// ---- Scale: dense *= factor.

FLOAT_KERNEL(scale, (T* dense, u64 n, T factor),
    for (u64 i = grid_thread(); i < n; i += grid_threads()) dense[i] *= factor)

// ---- Gather: values = dense[indices]. Scatter: out[places] = values. Subtract: dense[indices] -= values, or all of
// dense if indices is null.

FLOAT_KERNEL(gather, (const T* dense, const u32* indices, u64 count, T* values),
    for (u64 i = grid_thread(); i < count; i += grid_threads()) values[i] = dense[indices[i]])
FLOAT_KERNEL(scatter, (const T* values, const u32* places, u64 count, T* out),
    for (u64 i = grid_thread(); i < count; i += grid_threads()) out[places[i]] = values[i])
FLOAT_KERNEL(subtract, (T* dense, const u32* indices, u64 count, const T* values, const i32* bad),
    if (bad && *bad) return;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) dense[indices ? indices[i] : i] -= values[i])

// ---- Sum: out = scale * (the sum of up to eight parts, in their order).

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
#define PARTS(T)                                                                                                      \
    const u32 *i0, const T *v0, u64 c0, const u32 *i1, const T *v1, u64 c1, const u32 *i2, const T *v2, u64 c2,       \
        const u32 *i3, const T *v3, u64 c3, const u32 *i4, const T *v4, u64 c4, const u32 *i5, const T *v5, u64 c5,   \
        const u32 *i6, const T *v6, u64 c6, const u32 *i7, const T *v7, u64 c7
#define PART_LIST                                                                                                     \
    {{i0, v0, c0}, {i1, v1, c1}, {i2, v2, c2}, {i3, v3, c3}, {i4, v4, c4}, {i5, v5, c5}, {i6, v6, c6}, {i7, v7, c7}}

KERNEL sum_starts_f32(u64 n, u32 parts, PARTS(float), u64 tiles, u32* starts) {
    const Part<float> part[8] = PART_LIST;
    sum_starts(n, parts, part, tiles, starts);
}
KERNEL sum_starts_f64(u64 n, u32 parts, PARTS(double), u64 tiles, u32* starts) {
    const Part<double> part[8] = PART_LIST;
    sum_starts(n, parts, part, tiles, starts);
}
KERNEL sum_f32(float* out, u64 n, float scale, u32 more, u32 parts, PARTS(float), const u32* starts) {
    const Part<float> part[8] = PART_LIST;
    sum(out, n, scale, more, parts, part, starts);
}
KERNEL sum_f64(double* out, u64 n, double scale, u32 more, u32 parts, PARTS(double), const u32* starts) {
    const Part<double> part[8] = PART_LIST;
    sum(out, n, scale, more, parts, part, starts);
}

// float64 rounded to float32; a value beyond float32's range becomes the largest float32 of its sign.
KERNEL narrow(const double* values, u64 count, float* out) {
    const double most = 3.4028234663852886e38;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const double x = values[i];
        out[i] = (float)(x > most ? most : x < -most ? -most : x);
    }
}

// ---- Index lists.

// out = indices + by.
KERNEL offset(const u32* indices, u64 count, u32 by, u32* out) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) out[i] = indices[i] + by;
}

// found[i]: how many of the sorted indices are below bounds[i].
KERNEL places(const u32* indices, u64 count, const u64* bounds, u64 n, u64* found) {
    for (u64 i = grid_thread(); i < n; i += grid_threads())
        found[i] = first_not(count, [=](u64 at) { return indices[at] < bounds[i]; });
}

// out: the elements of `from` whose bit in the bitmap `deleted` is 0, in their order; the first `room` of them.
KERNEL delete_places(const u32* from, u64 count, const u32* deleted, u64* status, u64* kept, u32* out, u64 room) {
    const auto keeps = [=](u64 i) { return (u64)(~deleted[i >> 5] >> (i & 31) & 1); };
    each_place(count, 0, status, kept, keeps, [=](u64 i, u64 place) {
        if (keeps(i) && place < room) out[place] = from[i];
    });
}
