// Quantile buckets: the CUDA side of kernels/quantile/quantile.cpp.
#include "quantile/quantile.h"

#include "common/device.cuh"

// Words that sort as: zeros, positive values, negative values by their magnitudes.
KERNEL quantile_words(const float* values, u64 count, u64* words) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 bits = bits_of(values[i]);
        words[i] = bits == SIGN ? 0 : bits;
    }
}

// The magnitudes of the sorted words. bounds: | the first word that is not zero | the first negative one |, both
// `count` before the launch.
KERNEL quantile_bounds(const u64* words, u64 count, u32* magnitudes, u64* bounds) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 word = (u32)words[i];
        magnitudes[i] = word & ~SIGN;
        if (word != 0 && (i == 0 || (u32)words[i - 1] == 0)) bounds[0] = i;
        if (word > SIGN && (i == 0 || (u32)words[i - 1] <= SIGN)) bounds[1] = i;
    }
}

// Words that sort as the values; and their low halves.
KERNEL ordered_words(const float* values, u64 count, u64* words) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) words[i] = ordered_word(bits_of(values[i]));
}
KERNEL low_halves(const u64* words, u64 count, u32* halves) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) halves[i] = (u32)words[i];
}

// The splits of n sorted words, at most `buckets`: each different value of rank floor(j n / buckets) and, if it
// has two such ranks, the next float, unless that is a split anyway. *end: their number.
KERNEL find_splits(const u32* sorted, u64 n, u32 buckets, u64* status, u64* end, u32* splits) {
    const u32 largest = sorted[n - 1];
    const auto at = [=](u64 j) { return sorted[j * n / buckets]; };
    const auto first = [=](u64 j) { return j == 0 || at(j - 1) != at(j); };
    const auto twice = [=](u64 j) { return j + 1 < buckets && at(j + 1) == at(j) && at(j) < largest; };
    const auto alone = [=](u64 j) {  // whether it is not the next float of the split before, which is written with it
        return j < 2 || at(j - 1) + 1 != at(j) || at(j - 2) != at(j - 1);
    };
    each_place(
        buckets, 0, status, end,
        [=](u64 j) { return first(j) ? (u64)alone(j) + (u64)twice(j) : 0ull; },
        [=](u64 j, u64 place) {
            if (!first(j)) return;
            if (alone(j)) splits[place++] = at(j);
            if (twice(j)) splits[place] = at(j) + 1;
        });
}

// codes[i] = the bucket of values[i]. below, above: the splits of negative and of other values; counts: their numbers.
// With `zero`, above[0] is 0 and counts[1] does not count it.
KERNEL quantile_codes(const float* values, u64 count, const u32* below, const u32* above, const u64* counts, u32 zero,
                      u32* codes) {
    const u32 n_below = (u32)counts[0], n_above = (u32)counts[1] + zero;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 bits = bits_of(values[i]), magnitude = bits & ~SIGN;
        codes[i] = bits > SIGN ? (u32)last_at_most(below, n_below, magnitude)
                               : (u32)last_at_most(above, n_above, magnitude) + n_below;
    }
}

KERNEL ordered_codes(const float* values, u64 count, const u32* splits, const u64* found, u32* codes) {
    const u32 n = (u32)*found;
    for (u64 i = grid_thread(); i < count; i += grid_threads())
        codes[i] = (u32)last_at_most(splits, n, ordered_word(bits_of(values[i])));
}

__device__ u64 first_at_least(const u32* a, u64 count, u32 value) {
    return first_not(count, [=](u64 i) { return a[i] < value; });
}

// The value of a word: a magnitude, or without separate signs an ordered word.
template <bool SEPARATE>
__device__ __forceinline__ float value_of(u32 word) {
    return __uint_as_float(SEPARATE ? word : bits_of_ordered(word));
}

// The mean of bucket j of `buckets`, computed by a warp.
template <bool SEPARATE>
__device__ float bucket_mean(const u32* sorted, u64 n, const u32* splits, u64 buckets, u64 j, bool middle) {
    const bool last = j + 1 == buckets;
    const u32 low = splits[j], high = last ? sorted[n - 1] : splits[j + 1];
    const u64 begin = j ? first_at_least(sorted, n, low) : 0, end = last ? n : first_at_least(sorted, n, high);
    const float first = value_of<SEPARATE>(low);
    if (begin == end || high - low <= 1) return first;
    if (middle) return middle_of(first, value_of<SEPARATE>(high));
    const float least = value_of<SEPARATE>(sorted[begin]), most = value_of<SEPARATE>(sorted[end - 1]);
    const u32 below = magnitude_bits(least), above = magnitude_bits(most);
    const double unit = magnitude_unit(below > above ? below : above), scale = 1.0 / unit;
    i64 sum = 0;
    for (u64 i = begin + lane_number(); i < end; i += 32) sum += in_units(value_of<SEPARATE>(sorted[i]), scale);
    return mean_of_units((double)warp_sum(sum), end - begin, unit, least, most);
}

// The means of one sign's buckets; a warp takes a bucket. *count: the number of splits. The means of negative values
// begin at means[0], those of positive values at means[*negatives + zero].
KERNEL quantile_means(const u32* sorted, u64 n, const u32* splits, const u64* count, u32 middle, u32 negative,
                      const u64* negatives, u32 zero, float* means) {
    for (u64 j = grid_thread() / 32; j < *count; j += grid_threads() / 32) {
        const float mean = bucket_mean<true>(sorted, n, splits, *count, j, middle);
        if (lane_number() == 0) means[negative ? j : *negatives + zero + j] = negative ? -mean : mean;
    }
}
KERNEL ordered_means(const u32* sorted, u64 n, const u32* splits, const u64* count, u32 middle, float* means) {
    for (u64 j = grid_thread() / 32; j < *count; j += grid_threads() / 32) {
        const float mean = bucket_mean<false>(sorted, n, splits, *count, j, middle);
        if (lane_number() == 0) means[j] = mean;
    }
}

// As dr_quantile_bins.
KERNEL quantile_bins(const float* values, u64 count, u64* counts, u64* sums) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 bits = bits_of(values[i]), bin = bin_of(bits);
        atomicAdd(counts + bin, 1ull);
        atomicAdd(sums + bin, (u64)significand_of(bits));
    }
}

// values[i] = means[codes[i]].
KERNEL quantile_decode(const u32* codes, u64 count, const float* means, u32 buckets, float* values, i32* error) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        if (codes[i] >= buckets) atomicMin(error, ERR_VALUE);
        values[i] = codes[i] < buckets ? means[codes[i]] : 0.0f;
    }
}
