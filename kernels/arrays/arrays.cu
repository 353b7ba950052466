// Arrays of float32 and float64: the CUDA side of arrays.cpp; and index lists: offset and delete.
//
// `bad` (or null): if *bad is not 0, the gradient is not finite, and the residual must stay as it is.
#include "arrays/finite.cuh"
#include "arrays/sum.cuh"

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
FLOAT_KERNEL(subtract, (T* dense, const u32* indices, u64 count, const T* values, const i32* bad,
                        const u64* zeros),
    if ((bad && *bad) || (zeros && *zeros)) return;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) dense[indices ? indices[i] : i] -= values[i])

// ---- Sum: out = scale * (the sum of up to eight parts, in their order).

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

// The arguments of eight parts.
#define PARTS(T)                                                                                                      \
    const u32 *i0, const T *v0, u64 c0, const u32 *i1, const T *v1, u64 c1, const u32 *i2, const T *v2, u64 c2,       \
        const u32 *i3, const T *v3, u64 c3, const u32 *i4, const T *v4, u64 c4, const u32 *i5, const T *v5, u64 c5,   \
        const u32 *i6, const T *v6, u64 c6, const u32 *i7, const T *v7, u64 c7
#define PART_LIST                                                                                                     \
    {{i0, v0, c0}, {i1, v1, c1}, {i2, v2, c2}, {i3, v3, c3}, {i4, v4, c4}, {i5, v5, c5}, {i6, v6, c6}, {i7, v7, c7}}

KERNEL sum_starts_f32(u64 n, u32 parts, PARTS(float), u64 tiles, u32* starts) {
    const Part<float> part[8] = PART_LIST, of = chosen(part, blockIdx.x % parts);
    if (of.indices) sum_starts(parts, blockIdx.x % parts, of.indices, of.count, 0, tiles, starts);
}
KERNEL sum_starts_f64(u64 n, u32 parts, PARTS(double), u64 tiles, u32* starts) {
    const Part<double> part[8] = PART_LIST, of = chosen(part, blockIdx.x % parts);
    if (of.indices) sum_starts(parts, blockIdx.x % parts, of.indices, of.count, 0, tiles, starts);
}
KERNEL sum_f32(float* out, u64 n, float scale, u32 more, u32 parts, PARTS(float), const u32* starts) {
    const Part<float> part[8] = PART_LIST;
    sum<true>(out, n, scale, more, parts, part, starts, [] { return false; });
}
KERNEL sum_f64(double* out, u64 n, double scale, u32 more, u32 parts, PARTS(double), const u32* starts) {
    const Part<double> part[8] = PART_LIST;
    sum<true>(out, n, scale, more, parts, part, starts, [] { return false; });
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
