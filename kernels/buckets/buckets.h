// Buckets: runs of `bucket_size` consecutive values that share a norm, a mean or a range. The last bucket has what is
// left. Here: the arithmetic of one bucket, and the order of the sums.
#pragma once

#include "common/common.h"

#ifndef DR_CUDA
#include <cmath>
#endif

const float LARGEST_FLOAT = 3.402823466e+38f;

DR_HD u64 bucket_count(u64 count, u64 bucket_size) { return (count + bucket_size - 1) / bucket_size; }

// The end of the bucket (or of any run of `size` elements) that begins at `begin`.
DR_HD u64 run_end(u64 begin, u64 size, u64 count) { return begin + size < count ? begin + size : count; }

// The number of values in bucket b.
DR_HD double values_in_bucket(u64 b, u64 count, u64 bucket_size) {
    return (double)(i64)(run_end(b * bucket_size, bucket_size, count) - b * bucket_size);
}

// What a decoder accepts as a norm or scale: not negative, not NaN, not infinite.
DR_HD bool valid_scale(float scale) { return scale >= 0.0f && scale <= LARGEST_FLOAT; }

// Rounded to float32; beyond its range, the largest float32 of the sign.
DR_HD float limited_float(double x) {
    const double most = (double)LARGEST_FLOAT, low = x < most ? x : most;
    return (float)(low > -most ? low : -most);
}

// The l2 norm from the sum of the squares. A norm beyond float32 becomes the largest float32.
DR_HD float l2_of_squares(double squares) {
    const double norm = sqrt(squares);
    return norm > (double)LARGEST_FLOAT ? LARGEST_FLOAT : (float)norm;
}

// The smaller of a bucket's scale and `clip` standard deviations of its values, where the deviation is measured from 0.
DR_HD float clipped_scale(float scale, double squares, double values, double clip) {
    const double limit = clip * sqrt(squares / values);
    const float least = (float)(limit < (double)LARGEST_FLOAT ? limit : (double)LARGEST_FLOAT);
    return least < scale ? least : scale;
}

// ---- Sums of magnitudes or squares, in float64 and in an order that host and device can both follow.
//
// FOLD terms are added in FOLD_LANES lanes (term j in lane j % FOLD_LANES, in order), then the lanes by halves (lane j
// and j + 16, then j + 8, ..., j + 1). A bucket of more than FOLD values is folded in levels: the sums of each FOLD
// terms are the terms of the next level, until one sum is left.
//
//     level 0   | 1024 values | 1024 values | ... | rest |      each run becomes one sum
//     level 1   | 1024 sums                 | ... | rest |
//     ...
const u64 FOLD = 1024;
const u64 FOLD_LANES = 32;

// The number of sums after one level, where each bucket has `terms` terms and the last one what is left of `count` >=
// 1.
DR_HD u64 folded_terms(u64 count, u64 terms) {
    const u64 full_buckets = (count - 1) / terms, rest = count - full_buckets * terms;
    return full_buckets * bucket_count(terms, FOLD) + bucket_count(rest, FOLD);
}
