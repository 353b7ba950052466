// Quantile buckets of float32 values: see quantile.h.
#include "quantile/quantile.h"

#include <algorithm>
#include <memory>
#include <new>

#include "sort/radix.h"

static float as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// The splits of n sorted words, at most `buckets`. Returns their number.
static u32 find_splits(const u32* sorted, u64 n, u32 buckets, u32* splits) {
    u32 count = 0;
    u32 before = 0;
    for (u32 j = 0; j < buckets; ++j) {
        const u32 split = sorted[j * n / buckets];
        if (count == 0 || split > splits[count - 1])
            splits[count++] = split;
        else if (split == before && split == splits[count - 1] && split < sorted[n - 1])
            splits[count++] = split + 1;
        before = split;
    }
    return count;
}

static u32 magnitude_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits & ~SIGN;
}

// The value of a word: a magnitude, or without separate signs an ordered word.
template <bool SEPARATE>
static float value_of(u32 word) {
    return as_float(SEPARATE ? word : bits_of_ordered(word));
}

// The mean of the values of the words in [begin, end), or the middle of the bucket [low, high).
template <bool SEPARATE>
static float bucket_mean(const u32* begin, const u32* end, u32 low, u32 high, bool middle) {
    const float first = value_of<SEPARATE>(low);
    if (begin == end || high - low <= 1) return first;
    if (middle) return middle_of(first, value_of<SEPARATE>(high));
    const float least = value_of<SEPARATE>(*begin), most = value_of<SEPARATE>(end[-1]);
    const double unit = magnitude_unit(std::max(magnitude_of(least), magnitude_of(most))), scale = 1.0 / unit;
    i64 sum = 0;
    for (const u32* word = begin; word != end; ++word) sum += in_units(value_of<SEPARATE>(*word), scale);
    return mean_of_units((double)sum, (u64)(end - begin), unit, least, most);
}

// codes[i] = the bucket of values[i], by binary search. Each half of the table is padded with ones to a power of two:
//
//     table:  | splits of zeros and positive values [half] | splits of negative values [half] |
//
// Without separate signs there is one half.
template <bool SEPARATE>
__attribute__((always_inline)) inline void find_codes_of(const float* values, u64 count, const u32* table, u32 half,
                                                         u32 negative, u32* codes) {
    const u64 block = 256;
    u32 words[block], at[block];
    for (u64 begin = 0; begin < count; begin += block) {
        const u32 size = (u32)(count - begin < block ? count - begin : block);
        for (u32 i = 0; i < size; ++i) {
            u32 bits;
            std::memcpy(&bits, values + begin + i, 4);
            words[i] = SEPARATE ? bits & ~SIGN : ordered_word(bits);
            at[i] = SEPARATE && bits > SIGN ? half : 0;
        }
        for (u32 step = half / 2; step; step /= 2)
            for (u32 i = 0; i < size; ++i) at[i] += table[at[i] + step] <= words[i] ? step : 0;
        for (u32 i = 0; i < size; ++i) codes[begin + i] = at[i] >= half ? at[i] - half : at[i] + negative;
    }
}
DR_CLONES static void find_codes(const float* values, u64 count, const u32* table, u32 half, u32 negative, u32* codes) {
    find_codes_of<true>(values, count, table, half, negative, codes);
}
DR_CLONES static void find_ordered_codes(const float* values, u64 count, const u32* table, u32 half, u32* codes) {
    find_codes_of<false>(values, count, table, half, 0, codes);
}

// The means of one side's buckets.
template <bool SEPARATE>
static void find_means(const u32* sorted, u64 n, const u32* splits, u32 buckets, bool middle, float* means) {
    const u32* begin = sorted;
    for (u32 j = 0; j < buckets; ++j) {
        const bool last = j + 1 == buckets;
        const u32* end = last ? sorted + n : std::lower_bound(begin, sorted + n, splits[j + 1]);
        means[j] = bucket_mean<SEPARATE>(begin, end, splits[j], last ? sorted[n - 1] : splits[j + 1], middle);
        begin = end;
    }
}

// The table of `size` splits, filled with ones; its size is a power of two.
static std::unique_ptr<u32[]> split_table(u64 size) {
    std::unique_ptr<u32[]> splits(new (std::nothrow) u32[size]);
    if (splits) std::fill(splits.get(), splits.get() + size, ~0u);
    return splits;
}

// Returns the number of buckets, at most `buckets` (2 .. 65536), or 0 if there is no memory. means[buckets]: one for
// each; codes[count]; *negative: the number of buckets of negative values. count >= 1; the values are finite.
DR_API u32 dr_quantile_encode(const float* values, u64 count, u32 buckets, int middle, float* means, u32* codes,
                              u32* negative) {
    const std::unique_ptr<u32[]> memory(new (std::nothrow) u32[2 * count]);
    if (!memory) return 0;
    // Sorted as words: zeros, positive values, negative values by their magnitudes.
    for (u64 i = 0; i < count; ++i) {
        u32 bits;
        std::memcpy(&bits, values + i, 4);
        memory[i] = bits == SIGN ? 0 : bits;
    }
    u32* const sorted = radix_sort(memory.get(), memory.get() + count, count, 0, 32);
    u32* const end = sorted + count;
    u32* const below = std::upper_bound(sorted, end, SIGN);
    const u32* above = std::upper_bound(sorted, below, 0u);
    const u64 negatives = (u64)(end - below);
    for (u32* word = below; word != end; ++word) *word &= ~SIGN;
    const BucketShares shares =
        share_buckets(negatives, (u64)(above - sorted), (u64)(below - above), buckets);
    const u32 zero = shares.zero;
    if (!zero) above = sorted;
    const u64 positives = (u64)(below - above);
    u32 half = 1;
    while (half < shares.negative || half < shares.positive + zero) half *= 2;
    const std::unique_ptr<u32[]> splits = split_table(2 * (u64)half);
    if (!splits) return 0;
    u32* const table = splits.get();
    if (zero) table[0] = 0;
    const u32 n_below = find_splits(below, negatives, shares.negative, table + half);
    const u32 n_above = find_splits(above, positives, shares.positive, table + zero);
    find_codes(values, count, table, half, n_below, codes);
    find_means<true>(below, negatives, table + half, n_below, middle != 0, means);
    for (u32 j = 0; j < n_below; ++j) means[j] = -means[j];
    if (zero) means[n_below] = 0.0f;
    find_means<true>(above, positives, table + zero, n_above, middle != 0, means + n_below + zero);
    *negative = n_below;
    return n_below + zero + n_above;
}

// The same with buckets of both signs, from the least value to the largest.
DR_API u32 dr_quantile_encode_ordered(const float* values, u64 count, u32 buckets, int middle, float* means,
                                      u32* codes) {
    const std::unique_ptr<u32[]> memory(new (std::nothrow) u32[2 * count]);
    if (!memory) return 0;
    for (u64 i = 0; i < count; ++i) {
        u32 bits;
        std::memcpy(&bits, values + i, 4);
        memory[i] = ordered_word(bits);
    }
    const u32* const sorted = radix_sort(memory.get(), memory.get() + count, count, 0, 32);
    if (buckets > count) buckets = (u32)count;
    u32 half = 1;
    while (half < buckets) half *= 2;
    const std::unique_ptr<u32[]> table = split_table(half);
    if (!table) return 0;
    const u32 found = find_splits(sorted, count, buckets, table.get());
    find_ordered_codes(values, count, table.get(), half, codes);
    find_means<false>(sorted, count, table.get(), found, middle != 0, means);
    return found;
}

// counts[bin] of the values of each bin, sums[bin] of their significands, both zeros before; see quantile.h.
DR_API void dr_quantile_bins(const float* values, u64 count, u64* counts, u64* sums) {
    for (u64 i = 0; i < count; ++i) {
        u32 bits;
        std::memcpy(&bits, values + i, 4);
        const u32 bin = bin_of(bits);
        ++counts[bin];
        sums[bin] += significand_of(bits);
    }
}

// codes[i] = the bucket of values[i], with the table of find_codes.
DR_API void dr_quantile_codes(const float* values, u64 count, const u32* table, u32 half, u32 negative, u32* codes) {
    find_codes(values, count, table, half, negative, codes);
}

// values[i] = means[codes[i]]. ERR_VALUE if a code is not below `buckets`. Aligned, since the loop takes almost twice as
// long at some addresses.
DR_API __attribute__((aligned(64))) i64 dr_quantile_decode(const u32* codes, u64 count, const float* means,
                                                           u32 buckets, float* values) {
    u32 bad = buckets == 0;
    for (u64 i = 0; i < count; ++i) {
        const u32 code = codes[i] < buckets ? codes[i] : 0;
        bad |= codes[i] >= buckets;
        values[i] = means[code];
    }
    return bad ? (i64)ERR_VALUE : 0;
}

// For an encode on a GPU. shares: | 1 if zeros have a bucket of their own | most negative | most positive buckets |
DR_API void dr_quantile_shares(u64 negatives, u64 zeros, u64 positives, u32 buckets, u32* shares) {
    const BucketShares of_signs = share_buckets(negatives, zeros, positives, buckets);
    shares[0] = of_signs.zero, shares[1] = of_signs.negative, shares[2] = of_signs.positive;
}
