// What both curve fits share. Values come sorted from the largest down: a run of positives, zeros, a run of negatives.
// A curve is fitted to the magnitudes of each sign, called a side; zeros are only counted.
#pragma once

#include "common/common.h"

#ifndef DR_CUDA
#include <cmath>
#endif

// A sum over a side is computed in float64, in blocks of this many elements (the last one filled up with zeros). Within
// a block, element j is added to lane j % 8, in order; then lanes 0+4, 1+5, 2+6, 3+7, then 0+2, 1+3, then 0+1. The sums
// of the blocks are added in order.
const u64 FIT_BLOCK = 256;

// A decoder can clamp to 0 < least <= largest < infinity, and the result is finite and has the right sign.
DR_HD bool valid_range(float least, float largest) {
    return 0.0f < least && least <= largest && largest <= 3.402823466e+38f;
}

// A fitted magnitude (a share of `largest`), brought within [least, largest], with its sign, 1 or -1.
DR_HD float fitted_value(double share, double least, double largest, double sign) {
    double magnitude = share * largest;
    magnitude = magnitude < least ? least : magnitude;
    magnitude = magnitude > largest ? largest : magnitude;
    return (float)(sign * magnitude);
}
