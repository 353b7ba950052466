// QSGD's section (codecs/value/qsgd.py), where no entropy coder is used:
//
//     | header, 8 bytes | norms float32 [buckets] | codes, `bits` bits each |
//
// A code is s + sign * level, 0 .. 2 s.
#pragma once

#include "buckets/buckets.h"

// s: levels of a sign, so that the codes of both signs and zero fit into `bits` bits.
DR_HD u32 qsgd_levels(u32 bits) { return (1u << (bits - 1)) - 1; }

// QSGD's stochastic rounding of one value: |value| / norm lies in [0, 1], times s, rounded up with the probability
// of its fraction (Alistarh et al. 2017, section 3.1). Result: 0 .. 2s, where s stands for zero.
// The division comes first: s / norm overflows where the norm is denormal.
DR_HD u32 qsgd_level(float value, float norm, u32 s, float uniform) {
    const float magnitude = value < 0.0f ? -value : value;
    float ratio = norm > 0.0f ? magnitude / norm : 0.0f;
    ratio = ratio < 1.0f ? ratio : 1.0f;
    // A signed conversion: AVX2 has no other.
    u32 level = (u32)(i32)(ratio * (float)s + uniform);
    level = level > s ? s : level;
    return value < 0.0f ? s - level : s + level;
}

// The norm n with the least sum of (x - n * c / s)^2 over a bucket, where c = code - s: s * sum(x c) / sum(c^2). A bucket
// whose codes are all zero keeps its norm.
DR_HD float fitted_norm(float norm, double products, double squares, u32 s) {
    const double fitted = squares > 0.0 ? (double)(i32)s * products / squares : (double)norm;
    return fitted < (double)LARGEST_FLOAT ? (float)fitted : LARGEST_FLOAT;
}

DR_HD float qsgd_value(u32 code, float norm, u32 s) { return ((float)((i32)code - (i32)s) / (float)s) * norm; }
