// Uniform levels: the ranges of buckets. A bucket's range is (least, largest) of its values, with s steps between.
// common.h has the arithmetic of one value: uniform_level and uniform_value.
#ifndef HVD_DEEPREDUCE_UNIFORM_H
#define HVD_DEEPREDUCE_UNIFORM_H

#include "buckets/buckets.h"

// Levels per unit; 0 if all values of the bucket are equal.
DR_HD double uniform_scale(float low, float high, u32 s) {
    const double width = (double)high - (double)low;
    return width > 0.0 ? (double)s / width : 0.0;
}

// The distance of two levels.
DR_HD double uniform_step(float low, float high, u32 s) { return ((double)high - (double)low) / (double)s; }

// What a decoder accepts as a range: finite, and not upside down.
DR_HD bool valid_uniform_range(float low, float high) {
    return low >= -LARGEST_FLOAT && low <= high && high <= LARGEST_FLOAT;
}

#endif
