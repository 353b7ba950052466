// Sums over a bucket on the host.
#pragma once

#include "buckets/buckets.h"

// term(0) + ... + term(count - 1), added in float64 in eight lanes (term j in lane j % 8), then lanes 0+4, 1+5, 2+6, 3+7,
// then 0+2, 1+3, then 0+1: an order that the device can follow (buckets.cuh). Always inlined, so that `term` is compiled
// for the machine of the caller's clone.
template <class F>
__attribute__((always_inline)) inline double sum_in_lanes(u64 count, F term) {
    double lane[8] = {};
    u64 i = 0;
    for (; i + 8 <= count; i += 8)
        for (u64 j = 0; j < 8; ++j) lane[j] += term(i + j);
    for (u64 j = 0; i < count; ++i, ++j) lane[j] += term(i);
    for (int half = 4; half; half /= 2)
        for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
    return lane[0];
}
