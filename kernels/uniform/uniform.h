// Uniform levels: the ranges of buckets, and the rounding of one value. A bucket's range is (least, largest) of its
// values, with s steps between, 1 to 65535.
#pragma once

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

// Stochastic rounding to s + 1 uniform levels from `low` up; `scale` is s / (high - low), 0 where they are equal (Zhang
// et al. 2017, section 2). In float64: high - low can be beyond float32, and 16 bits leave float32 none to round with.
DR_HD u32 uniform_level(float value, float low, double scale, u32 s, float uniform) {
    const i32 level = (i32)(((double)value - (double)low) * scale + (double)uniform);
    return level > (i32)s ? s : (u32)level;
}

// Sums over a bucket of a code c and of the value's distance d to the bucket's least value.
struct UniformSums {
    u64 codes, squares;          // of c: exact in any order
    double distances, products;  // of d, and of c * d
};

// The range with the least sum of squared errors of a bucket of `count` values: the line a + b c through the distances,
// b = cov(c, d) / var(c), or the mean where b would be negative or all codes are equal.
DR_HD void fitted_range(float least, const UniformSums& sums, double count, u32 s, float* range) {
    const double codes = (double)sums.codes, spread = count * (double)sums.squares - codes * codes;
    const double rising = count * sums.products - codes * sums.distances;
    const double b = spread > 0.0 && rising > 0.0 ? rising / spread : 0.0;
    const double low = (double)least + (sums.distances - b * codes) / count;
    range[0] = limited_float(low);
    range[1] = limited_float(low + b * (double)s);
}

// The float nearest to low + code * step never passes `high`, which is finite.
DR_HD float uniform_value(u32 code, float low, double step) { return (float)((double)low + (double)(i32)code * step); }
