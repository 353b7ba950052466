// Norms, sums, means and clipped scales of buckets: the CUDA side of kernels/buckets/buckets.cpp.
#include "buckets/buckets.cuh"

// norms[b]: the bits of bucket b's largest magnitude; zeros before the launch. For finite floats, the bits below the
// sign have the order of the magnitudes, so blocks combine them with an integer maximum.
KERNEL max_norms(const float* values, u64 count, u64 bucket_size, u32* norms) {
    each_chunk(count, bucket_size, [=](u64 b, u64 begin, u64 end) {
        u32 largest = 0;
        for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
            const u32 bits = magnitude_bits(values[i]);
            largest = bits > largest ? bits : largest;
        }
        largest = block_max(largest);
        if (threadIdx.x == 0) atomicMax(norms + b, largest);
    });
}

// A warp computes a bucket.
KERNEL l2_norms(const float* values, u64 count, u64 bucket_size, float* norms) {
    const u64 buckets = bucket_count(count, bucket_size);
    for (u64 b = grid_thread() / 32; b < buckets; b += grid_threads() / 32) {
        const u64 begin = b * bucket_size, end = run_end(begin, bucket_size, count);
        const double squares = sum_in_lanes(begin, end, [=](u64 i) { return (double)values[i] * (double)values[i]; });
        if (lane_number() == 0) norms[b] = l2_of_squares(squares);
    }
}

// One level of the sum that buckets.h describes: a warp adds FOLD terms. A bucket has `terms` terms, the last one what
// is left of `count`. sums: folded_terms(count, terms), bucket by bucket.
template <class F>
__device__ void fold(u64 count, u64 terms, double* sums, F term) {
    const u64 sums_per_bucket = bucket_count(terms, FOLD), total = folded_terms(count, terms);
    for (u64 s = grid_thread() / 32; s < total; s += grid_threads() / 32) {
        const u64 b = s / sums_per_bucket, begin = b * terms + s % sums_per_bucket * FOLD;
        const u64 end = run_end(begin, FOLD, run_end(b * terms, terms, count));
        double sum = 0.0;
        for (u64 i = begin + lane_number(); i < end; i += FOLD_LANES) sum += term(i);
        for (u32 half = FOLD_LANES / 2; half; half /= 2) sum += __shfl_down_sync(WHOLE_WARP, sum, half);
        if (lane_number() == 0) sums[s] = sum;
    }
}
KERNEL fold_magnitudes(const float* values, u64 count, u64 terms, double* sums) {
    fold(count, terms, sums, [=](u64 i) { return (double)__uint_as_float(magnitude_bits(values[i])); });
}
KERNEL fold_squares(const float* values, u64 count, u64 terms, double* sums) {
    fold(count, terms, sums, [=](u64 i) { return (double)values[i] * (double)values[i]; });
}
KERNEL fold_sums(const double* partial, u64 count, u64 terms, double* sums) {
    fold(count, terms, sums, [=](u64 i) { return partial[i]; });
}

KERNEL bucket_means(const double* sums, u64 count, u64 bucket_size, float* means) {
    const u64 buckets = bucket_count(count, bucket_size);
    for (u64 b = grid_thread(); b < buckets; b += grid_threads())
        means[b] = (float)(sums[b] / values_in_bucket(b, count, bucket_size));
}

KERNEL clip_scales(const float* scales, const double* squares, u64 count, u64 bucket_size, double clip,
                   float* clipped) {
    const u64 buckets = bucket_count(count, bucket_size);
    for (u64 b = grid_thread(); b < buckets; b += grid_threads())
        clipped[b] = clipped_scale(scales[b], squares[b], values_in_bucket(b, count, bucket_size), clip);
}
