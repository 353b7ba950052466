// Stochastic rounding: the random word of each element.
//
// Element i draws word i % 4 of the Philox counter (i / 4, step, STREAM_ROUNDING, rank) under the key (seed,
// parameter). A word depends on the element's place alone, so buckets and threads may divide the elements in any way.
#pragma once

#include "common/common.h"

struct RoundingKey {
    u32 seed, parameter, step, rank;
};

// The words of elements 4 q .. 4 q + 3.
DR_HD Philox4 rounding_draw(const RoundingKey& key, u64 q) {
    return philox4x32(key.seed, key.parameter, (u32)q, key.step, STREAM_ROUNDING, key.rank);
}
