// The 64-bit hash of hash.cpp, of bytes that come in pieces.
#pragma once

#include "common/cpu.h"
#include "hash/lanes.h"

struct Hash64 {
    u64 sums[HASH_LANES], keys[HASH_LANES];
    u64 size = 0;

    Hash64();
    // Every piece but the last has a multiple of HASH_STRIPE bytes.
    void add(const u8* bytes, u64 count);
    u64 finish(u64 seed) const;
};
