// A 64-bit hash that finds faults, as fast as memory is read. It is no protection from an attacker.
#include "hash/hash.h"

constexpr int LANES = HASH_LANES;

// The compiler vectorizes over the lanes.
DR_CLONES static void accumulate(const u8* bytes, u64 stripes, u64* sums, u64* keys) {
    u64 sum[LANES], key[LANES];
    for (int l = 0; l < LANES; ++l) sum[l] = sums[l], key[l] = keys[l];
    for (u64 s = 0; s < stripes; ++s)
        for (int l = 0; l < LANES; ++l) {
            u64 word;
            std::memcpy(&word, bytes + 8 * (LANES * s + l), 8);
            sum[l] += hash_term(word, key[l]);
            key[l] += HASH_STEP;
        }
    for (int l = 0; l < LANES; ++l) sums[l] = sum[l], keys[l] = key[l];
}

Hash64::Hash64() : sums{} {
    for (int l = 0; l < LANES; ++l) keys[l] = hash_key((u64)l);
}

void Hash64::add(const u8* bytes, u64 count) {
    const u64 stripes = count / HASH_STRIPE, rest = count % HASH_STRIPE;
    size += count;
    accumulate(bytes, stripes, sums, keys);
    if (rest) {
        u8 last[HASH_STRIPE] = {};
        std::memcpy(last, bytes + HASH_STRIPE * stripes, rest);
        accumulate(last, 1, sums, keys);
    }
}

u64 Hash64::finish(u64 seed) const {
    u64 hash = fmix64(seed + HASH_STEP) ^ size;
    for (int l = 0; l < LANES; ++l) hash = fmix64(hash * HASH_STEP + sums[l]);
    return hash;
}

// The hash of `size` bytes at any address, of the size and of the seed.
DR_API u64 dr_hash64(const u8* bytes, u64 size, u64 seed) {
    Hash64 hash;
    hash.add(bytes, size);
    return hash.finish(seed);
}

// The hash of `size` bytes, of the size and of the seed, from the sums of the lanes.
DR_API u64 dr_hash64_of_sums(const u64* sums, u64 size, u64 seed) {
    Hash64 hash;
    for (int l = 0; l < LANES; ++l) hash.sums[l] = sums[l];
    hash.size = size;
    return hash.finish(seed);
}
