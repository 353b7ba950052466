// Norms, sums, means and clipped scales of buckets of float32 values.
#include "buckets/buckets_cpu.h"

#include "common/cpu.h"

// For finite floats, the bits below the sign have the order of the magnitudes.
DR_CLONES static float largest_magnitude(const float* values, u64 count) {
    u32 largest = 0;
    for (u64 i = 0; i < count; ++i) {
        u32 bits;
        std::memcpy(&bits, values + i, 4);
        bits &= 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    float magnitude;
    std::memcpy(&magnitude, &largest, 4);
    return magnitude;
}

DR_CLONES static float l2_norm(const float* values, u64 count) {
    return l2_of_squares(sum_in_lanes(count, [=](u64 i) { return (double)values[i] * (double)values[i]; }));
}

// norms[bucket_count]: the largest magnitude, or the l2 norm, of each bucket.
DR_API void dr_bucket_norms(const float* values, u64 count, u64 bucket_size, int l2, float* norms) {
    for (u64 begin = 0; begin < count; begin += bucket_size) {
        const u64 size = run_end(begin, bucket_size, count) - begin;
        *norms++ = l2 ? l2_norm(values + begin, size) : largest_magnitude(values + begin, size);
    }
}

static inline double fold_lanes(double* lane) {
    for (u64 half = FOLD_LANES / 2; half; half /= 2)
        for (u64 j = 0; j < half; ++j) lane[j] += lane[j + half];
    return lane[0];
}

DR_CLONES static double fold_values(const float* values, u64 count, bool squares) {
    double lane[FOLD_LANES] = {};
    u64 i = 0;
    if (squares) {
        for (; i + FOLD_LANES <= count; i += FOLD_LANES)
            for (u64 j = 0; j < FOLD_LANES; ++j) lane[j] += (double)values[i + j] * (double)values[i + j];
        for (u64 j = 0; i < count; ++i, ++j) lane[j] += (double)values[i] * (double)values[i];
    } else {
        for (; i + FOLD_LANES <= count; i += FOLD_LANES)
            for (u64 j = 0; j < FOLD_LANES; ++j) lane[j] += (double)__builtin_fabsf(values[i + j]);
        for (u64 j = 0; i < count; ++i, ++j) lane[j] += (double)__builtin_fabsf(values[i]);
    }
    return fold_lanes(lane);
}

// span: the number of values in one term, FOLD^level; count <= FOLD * span.
static double fold(const float* values, u64 count, bool squares, u64 span) {
    if (span == 1) return fold_values(values, count, squares);
    double lane[FOLD_LANES] = {};
    for (u64 term = 0; term * span < count; ++term) {
        const u64 left = count - term * span;
        lane[term % FOLD_LANES] += fold(values + term * span, left < span ? left : span, squares, span / FOLD);
    }
    return fold_lanes(lane);
}

// sums[bucket_count]: of |value|, or of value * value.
DR_API void dr_bucket_sums(const float* values, u64 count, u64 bucket_size, int squares, double* sums) {
    for (u64 begin = 0; begin < count; begin += bucket_size) {
        const u64 size = run_end(begin, bucket_size, count) - begin;
        u64 span = 1;
        while (span * FOLD < size) span *= FOLD;
        *sums++ = fold(values + begin, size, squares != 0, span);
    }
}

// For the loop over levels on the device.
DR_API u64 dr_folded_terms(u64 count, u64 terms) { return folded_terms(count, terms); }

// means[bucket_count]; sums: of the magnitudes.
DR_API void dr_bucket_means(const double* sums, u64 count, u64 bucket_size, float* means) {
    for (u64 b = 0; b * bucket_size < count; ++b)
        means[b] = (float)(sums[b] / values_in_bucket(b, count, bucket_size));
}

// clipped[bucket_count]; squares: sums of the squares.
DR_API void dr_clip_scales(const float* scales, const double* squares, u64 count, u64 bucket_size, double clip,
                           float* clipped) {
    for (u64 b = 0; b * bucket_size < count; ++b)
        clipped[b] = clipped_scale(scales[b], squares[b], values_in_bucket(b, count, bucket_size), clip);
}
