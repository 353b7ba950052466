// The 64-bit hash of hash.cpp: what both devices share. Word w of 8 bytes belongs to lane w % 8, and each lane is a sum,
// in any order, of terms that depend on the word and its place.
#pragma once

#include "common/common.h"

const int HASH_LANES = 8;
const u64 HASH_STRIPE = 8 * HASH_LANES;
const u64 HASH_STEP = 0x9E3779B97F4A7C15u;

// MurmurHash3's final mix (Appleby): a bijection in which every bit of the input changes about half of the result.
DR_HD u64 fmix64(u64 h) {
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCDu;
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53u;
    return h ^ (h >> 33);
}

// The key of a lane's first word; each next one is HASH_STEP more.
DR_HD u64 hash_key(u64 lane) { return fmix64(HASH_STEP * (lane + 1)); }

// What a word adds to the sum of its lane: XXH3's accumulation (Collet, xxHash 0.8, xxh3_accumulate_512), the word and
// the product of the halves of the word and its key. Keys differ by position, so words that change places are found.
DR_HD u64 hash_term(u64 word, u64 key) {
    const u64 mixed = word ^ key;
    return word + (mixed & 0xFFFFFFFFu) * (mixed >> 32);
}
