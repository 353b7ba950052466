// A Bloom filter's hash functions (DeepReduce, Kostopoulou et al. 2021, section 4), by blocks of 64 elements; bloom.cpp
// draws them.
//
// Double hashing with MurmurHash3's finalizer on the number of the block. The sum is finalized again, so that the k
// results are no arithmetic progression.
#pragma once

#include "common/common.h"

// The salts of both hashes. They depend on the filter's size, so that filters of other sizes have other false
// positives.
struct BloomSalts {
    u32 first, second;
};

DR_HD BloomSalts bloom_salts(u32 seed, u32 parameter, u32 step, u32 bytes) {
    const Philox4 salt = philox4x32(seed, parameter, bytes, step, STREAM_POLICY, 1);
    return {salt.x, salt.y};
}

DR_HD u32 bloom_first(u32 block, u32 salt) { return fmix32(block ^ salt); }
DR_HD u32 bloom_second(u32 first, u32 salt) { return fmix32(first ^ salt) | 1u; }
DR_HD u32 bloom_probe(u32 first, u32 second, u32 j) { return fmix32(first + j * second); }

// The byte where the window of 64 bits begins, 0 .. bytes - 1, from the high bits of the probe; its low six bits rotate
// the window.
DR_HD u32 bloom_byte(u32 probe, u32 bytes) { return (u32)((u64)probe * bytes >> 32); }

// The filter's bit for one element. A filter has fewer than 2^29 bytes, so 32 bits hold the bit's number.
DR_HD u32 bloom_bit(u32 index, u32 probe, u32 bytes) {
    const u64 bit = (u64)bloom_byte(probe, bytes) * 8 + ((index + probe) & 63u), bits = (u64)bytes * 8;
    return (u32)(bit < bits ? bit : bit - bits);
}
