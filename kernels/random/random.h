// Random-k: r distinct random indices, the images of 0 .. r-1 under a keyed permutation of the indices.
#pragma once

#include "common/common.h"

// A keyed bijection of [0, domain): a balanced Feistel network of six rounds over the next even number of bits,
// repeated until the result is below `domain` (under 4 steps on average).
struct Feistel {
    u64 domain;
    u32 half_bits, mask, word[6];
};

DR_HD Feistel feistel(u64 domain, u32 k0, u32 k1, u32 k2) {
    Feistel key;
    key.domain = domain;
    key.half_bits = domain > 1 ? (bits_for(domain) + 1) / 2 : 1;
    key.mask = (u32)(((u64)1 << key.half_bits) - 1);
    for (u32 round = 0; round < 6; ++round)
        key.word[round] = fmix32(k0 + round * 0x9E3779B9u) ^ fmix32(k1 ^ (round << 28)) ^ k2;
    return key;
}

// One pass through the network. The halves take turns instead of swapping.
DR_HD u32 feistel_step(u32 value, const Feistel& key) {
    const u32 mask = key.mask;
    u32 left = value >> key.half_bits & mask, right = value & mask;
    left ^= fmix32(right ^ key.word[0]) & mask;
    right ^= fmix32(left ^ key.word[1]) & mask;
    left ^= fmix32(right ^ key.word[2]) & mask;
    right ^= fmix32(left ^ key.word[3]) & mask;
    left ^= fmix32(right ^ key.word[4]) & mask;
    right ^= fmix32(left ^ key.word[5]) & mask;
    return left << key.half_bits | right;
}

DR_HD u32 feistel_permute(u32 value, const Feistel& key) {
    do value = feistel_step(value, key);
    while (value >= key.domain);
    return value;
}

// The permutation of [0, numel) for a key.
DR_HD Feistel random_permutation(u64 numel, u32 seed, u32 parameter, u32 step) {
    const Philox4 k = philox4x32(seed, parameter, 0, step, STREAM_RANDOMK, 0);
    return feistel(numel, k.x, k.y, k.z);
}
