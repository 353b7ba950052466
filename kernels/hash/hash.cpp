// A 64-bit hash that finds faults, as fast as memory is read. It is no protection from an attacker.
#include "hash/hash.h"

constexpr int LANES = HASH_LANES;
constexpr u64 STEP = 0x9E3779B97F4A7C15u;

// XXH3's accumulation (Collet, xxHash 0.8, xxh3_accumulate_512): a word is added, and so is the product of the halves of
// the word and its key. Keys differ by position, so words that change places are found. Each lane is a sum, which the
// compiler vectorizes.
DR_CLONES static void accumulate(const u8* bytes, u64 stripes, u64* sums, u64* keys) {
    u64 sum[LANES], key[LANES];
    for (int l = 0; l < LANES; ++l) sum[l] = sums[l], key[l] = keys[l];
    for (u64 s = 0; s < stripes; ++s)
        for (int l = 0; l < LANES; ++l) {
            u64 word;
            std::memcpy(&word, bytes + 8 * (LANES * s + l), 8);
            const u64 mixed = word ^ key[l];
            sum[l] += word + (mixed & 0xFFFFFFFFu) * (mixed >> 32);
            key[l] += STEP;
        }
    for (int l = 0; l < LANES; ++l) sums[l] = sum[l], keys[l] = key[l];
}

// MurmurHash3's final mix (Appleby): a bijection in which every bit of the input changes about half of the result.
static u64 fmix64(u64 h) {
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCDu;
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53u;
    return h ^ (h >> 33);
}

Hash64::Hash64() : sums{} {
    for (int l = 0; l < LANES; ++l) keys[l] = fmix64(STEP * (u64)(l + 1));
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
    u64 hash = fmix64(seed + STEP) ^ size;
    for (int l = 0; l < LANES; ++l) hash = fmix64(hash * STEP + sums[l]);
    return hash;
}

// The hash of `size` bytes at any address, of the size and of the seed.
DR_API u64 dr_hash64(const u8* bytes, u64 size, u64 seed) {
    Hash64 hash;
    hash.add(bytes, size);
    return hash.finish(seed);
}
