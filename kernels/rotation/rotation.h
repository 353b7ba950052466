// Random rotation of each bucket: z = H D x / sqrt(P), with random signs D and the Walsh-Hadamard matrix H of P = 2^p rows
// (Suresh, Yu, Kumar, McMahan, "Distributed mean estimation with limited communication", ICML 2017, section 3). A bucket
// has P = bucket_size values, a power of two; the last one is filled with zeros up to the next power of two.
//
//     level 0:  (a_0, a_1) -> (a_0 + a_1, a_0 - a_1), (a_2, a_3) -> ...
//     level 1:  (a_0, a_2) -> (a_0 + a_2, a_0 - a_2), (a_1, a_3) -> ...        pairs at the distance 2^level
//
// In float64. H is symmetric and H H = P, so D H z / sqrt(P) is x again.
//
// The sign of place i, counted over all buckets with their zeros, is bit i % 32 of word i / 32 % 4 of the Philox counter
// (i / 128, step, STREAM_ROTATION, 0) under the key (seed, parameter): set for a minus.
#pragma once

#include "buckets/buckets.h"

struct RotationKey {
    u32 seed, parameter, step;
};

// The places of a bucket of `count` >= 1 values.
DR_HD u64 rotation_places(u64 count) { return (u64)1 << bits_for(count); }

// The places of all buckets.
DR_HD u64 rotated_count(u64 count, u64 bucket_size) {
    const u64 rest = count % bucket_size;
    return count - rest + (rest ? rotation_places(rest) : 0);
}

// The signs of place i and its neighbours: that of place i is in bit i % 32.
DR_HD u32 rotation_signs(const RotationKey& key, u64 i) {
    const Philox4 r = philox4x32(key.seed, key.parameter, (u32)(i / 128), key.step, STREAM_ROTATION, 0);
    const u32 which = (u32)(i / 32 % 4);
    return which < 2 ? (which ? r.y : r.x) : which == 2 ? r.z : r.w;
}

// 1 / sqrt(places).
DR_HD double rotation_scale(u64 places) { return 1.0 / sqrt((double)(i64)places); }
