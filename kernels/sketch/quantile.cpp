// Quantile buckets: which interval of its sign's quantiles a value lies in (SketchML; SKCompress, section 4.1).
//
// Buckets are numbered by sign, and within a sign by magnitude:
//
//     | negative, small to large magnitude | zero (where there are zeros) | positive, small to large |
//       0 .. negative - 1                    negative ..
//
// A magnitude is its float32's bits without the sign, an unsigned word of the same order. A sign with n values and b
// buckets has the splits s_j = the value of rank floor(j * n / b), j = 0 .. b-1; bucket j is [s_j, s_{j+1}), the last
// one up to the largest value. Equal splits become two, c and the next float after c: a value that fills a bucket
// alone then has one to itself, whose mean is exact.
#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "sort/radix.h"

static const u32 SIGN = 0x80000000u;

static float as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// The splits of n sorted magnitudes, at most `buckets`. Result: how many.
static u32 find_splits(const u32* sorted, u64 n, u32 buckets, u32* splits) {
    u32 found = 0;
    u32 before = 0;
    for (u32 j = 0; j < buckets; ++j) {
        const u32 split = sorted[j * n / buckets];
        if (found == 0 || split > splits[found - 1])
            splits[found++] = split;
        else if (split == before && split == splits[found - 1] && split < sorted[n - 1])
            splits[found++] = split + 1;
        before = split;
    }
    return found;
}

// The mean of the values in [begin, end), or the middle of the bucket [low, high). The sum is one of integers, in units
// of 2^-30 of the largest value's power of two, so that any order gives the same bits.
static float bucket_mean(const u32* begin, const u32* end, u32 low, u32 high, bool middle) {
    if (begin == end || high - low <= 1) return as_float(low);
    if (middle) return (float)(((double)as_float(low) + (double)as_float(high)) / 2);
    const u32 largest = end[-1], exponent = largest >> 23 ? largest >> 23 : 1;
    const double unit = std::ldexp(1.0, (int)exponent - 127 - 30), scale = 1.0 / unit;
    u64 sum = 0;
    for (const u32* bits = begin; bits != end; ++bits) sum += (u64)((double)as_float(*bits) * scale);
    const float mean = (float)((double)sum / (double)(end - begin) * unit);
    return std::min(std::max(mean, as_float(*begin)), as_float(largest));
}

// codes[i] = the bucket of values[i]. `table` holds the splits of the values that are not negative and, `half` further,
// of the negative ones, each filled up with ones to the power of two `half`.
DR_CLONES static void find_codes(const float* values, u64 count, const u32* table, u32 half, u32 negative, u32* codes) {
    const u64 block = 256;
    u32 magnitudes[block], at[block];
    for (u64 begin = 0; begin < count; begin += block) {
        const u32 size = (u32)(count - begin < block ? count - begin : block);
        for (u32 i = 0; i < size; ++i) {
            u32 bits;
            std::memcpy(&bits, values + begin + i, 4);
            magnitudes[i] = bits & ~SIGN;
            at[i] = bits > SIGN ? half : 0;
        }
        for (u32 step = half / 2; step; step /= 2)
            for (u32 i = 0; i < size; ++i) at[i] += table[at[i] + step] <= magnitudes[i] ? step : 0;
        for (u32 i = 0; i < size; ++i) codes[begin + i] = at[i] >= half ? at[i] - half : at[i] + negative;
    }
}

// The means of one sign's buckets.
static void find_means(const u32* sorted, u64 n, const u32* splits, u32 buckets, bool middle, float* means) {
    const u32* begin = sorted;
    for (u32 j = 0; j < buckets; ++j) {
        const bool last = j + 1 == buckets;
        const u32* end = last ? sorted + n : std::lower_bound(begin, sorted + n, splits[j + 1]);
        means[j] = bucket_mean(begin, end, splits[j], last ? sorted[n - 1] : splits[j + 1], middle);
        begin = end;
    }
}

// Result: the number of buckets, at most `buckets` (2 .. 65536); 0 where there is no memory. means: theirs. *negative:
// how many of them are of negative values. count >= 1; the values are finite.
DR_API u32 dr_quantile_encode(const float* values, u64 count, u32 buckets, int middle, float* means, u32* codes,
                              u32* negative) {
    const std::unique_ptr<u32[]> memory(new (std::nothrow) u32[2 * count]);
    if (!memory) return 0;
    // Sorted as words: zeros, positive values, negative ones by their magnitudes.
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
    u64 positives = (u64)(below - above);
    for (u32* word = below; word != end; ++word) *word &= ~SIGN;
    // Zeros have a bucket of their own, but where two buckets must hold both signs and zeros.
    u32 zero = above != sorted;
    if (zero && buckets == 2 && positives && negatives) {
        above = sorted;
        positives = (u64)(below - above);
        zero = 0;
    }
    // The rest is shared out by the number of values of each sign, at least one to each that there is.
    const u64 others = positives + negatives;
    const u64 shared = std::min<u64>(buckets - zero, others);
    u64 for_negative = others ? (2 * shared * negatives + others) / (2 * others) : 0;
    if (positives && for_negative == shared) --for_negative;
    if (negatives && for_negative == 0) for_negative = 1;
    const u64 for_positive = shared - for_negative;
    u32 half = 1;
    while (half < for_negative || half < for_positive + zero) half *= 2;
    const std::unique_ptr<u32[]> room(new (std::nothrow) u32[2 * (u64)half]);
    if (!room) return 0;
    u32* const table = room.get();
    std::fill(table, table + 2 * (u64)half, ~0u);
    if (zero) table[0] = 0;
    const u32 n_below = find_splits(below, negatives, (u32)for_negative, table + half);
    const u32 n_above = find_splits(above, positives, (u32)for_positive, table + zero);
    find_codes(values, count, table, half, n_below, codes);
    find_means(below, negatives, table + half, n_below, middle != 0, means);
    for (u32 j = 0; j < n_below; ++j) means[j] = -means[j];
    if (zero) means[n_below] = 0.0f;
    find_means(above, positives, table + zero, n_above, middle != 0, means + n_below + zero);
    *negative = n_below;
    return n_below + zero + n_above;
}

// values[i] = means[codes[i]]; ERR_VALUE where a code is not below `buckets`.
DR_API i64 dr_quantile_decode(const u32* codes, u64 count, const float* means, u32 buckets, float* values) {
    u32 bad = buckets == 0;
    for (u64 i = 0; i < count; ++i) {
        const u32 code = codes[i] < buckets ? codes[i] : 0;
        bad |= codes[i] >= buckets;
        values[i] = means[code];
    }
    return bad ? (i64)ERR_VALUE : 0;
}
