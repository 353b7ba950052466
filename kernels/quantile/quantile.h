// Quantile buckets: a value becomes the number of the interval between two quantiles that contains it (SketchML;
// SKCompress, section 4.1). Buckets are numbered by sign, and within a sign by magnitude:
//
//     | negative, small to large magnitude | zero, if there are zeros | positive, small to large magnitude |
//       0 .. negative - 1                    negative ..
//
// A magnitude is the bits of its float32 without the sign, an unsigned word of the same order. A sign with n values and
// b buckets has the splits s_j = the value of rank floor(j * n / b), j = 0 .. b-1. Bucket j is [s_j, s_{j+1}), the last
// one up to the largest value. Equal splits become two, c and the next float after c: a value that fills a bucket alone
// then has a bucket to itself, whose mean is exact.
//
// Without separate signs (SKCompress, section 4.2, problem 1; DeepReduce, section 6.3) there is one side, from the least
// value to the largest, and a value's word of that order (ordered_word) takes the place of a magnitude.
#pragma once

#include "common/common.h"

const u32 SIGN = 0x80000000u;

// A value's bits as a word that has the order of the values, and back. -0 counts as 0.
DR_HD u32 ordered_word(u32 bits) { return bits > SIGN ? ~bits : (bits & ~SIGN) | SIGN; }
DR_HD u32 bits_of_ordered(u32 word) { return word & SIGN ? word & ~SIGN : ~word; }

// How the signs share the buckets.
struct BucketShares {
    u32 zero;                // 1 if zeros have a bucket of their own; else they count as positive values
    u32 negative, positive;  // the most buckets of each sign
};

// `buckets` >= 2. Zeros have a bucket of their own, except if two buckets must hold both signs and zeros. The signs
// share the others by their numbers of values, rounded; a sign with values has at least one bucket.
DR_HD BucketShares share_buckets(u64 negatives, u64 zeros, u64 positives, u32 buckets) {
    u32 zero = zeros > 0;
    if (zero && buckets == 2 && positives && negatives) {
        positives += zeros;
        zero = 0;
    }
    const u64 nonzero = positives + negatives;
    const u64 shared = buckets - zero < nonzero ? buckets - zero : nonzero;
    u64 negative = nonzero ? (2 * shared * negatives + nonzero) / (2 * nonzero) : 0;
    if (positives && negative == shared) --negative;
    if (negatives && negative == 0) negative = 1;
    return {zero, (u32)negative, (u32)(shared - negative)};
}

// ---- The mean of a bucket. The sum is one of integers, in units of 2^-30 of the largest magnitude's
// power of two, so every order of the terms gives the same bits.

// 2^(exponent - 127 - 30).
DR_HD double magnitude_unit(u32 largest) {
    const u32 exponent = largest >> 23 ? largest >> 23 : 1;
    union {
        u64 bits;
        double value;
    } unit;
    unit.bits = (u64)(exponent + 1023 - 127 - 30) << 52;
    return unit.value;
}

// scale: 1 / unit. Parts of a unit are cut off. Without separate signs, units are those of the bucket's largest
// magnitude, and values may be negative. A bucket has fewer than 2^32 values of less than 2^31 units.
DR_HD i64 in_units(float value, double scale) { return (i64)((double)value * scale); }

DR_HD float mean_of_units(double sum, u64 count, double unit, float least, float largest) {
    float mean = (float)(sum / (double)count * unit);
    mean = mean < least ? least : mean;
    return largest < mean ? largest : mean;
}

// ---- For the splits of least squared error: values are counted in bins of 1/32 of an octave, from which the host finds
// the splits. The significands of a bin have one exponent, so their sum is an integer, in any order.
const u32 BIN_SHIFT = 18, SIGN_BINS = 1u << (31 - BIN_SHIFT);  // as in ops/lloyd.py; -0 counts as 0
DR_HD u32 bin_of(u32 bits) { return bits == SIGN ? 0 : bits >> BIN_SHIFT; }
DR_HD u32 significand_of(u32 bits) { return (bits & 0x7FFFFFu) | (bits & 0x7F800000u ? 0x800000u : 0); }

DR_HD float middle_of(float low, float high) { return (float)(((double)low + (double)high) / 2); }
