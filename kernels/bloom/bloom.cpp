// Bloom filters that are queried 64 elements at a time, and the conflict sets of policy P2.
//
// Hash function j maps all 64 elements of block b = i / 64 to one window: 64 consecutive bits of the filter, from the
// hashed byte A_j(b) on (continued at the filter's start), rotated by the hashed amount R_j(b). bloom_bit gives the bit
// of one element:
//
//     filter:  ....[ byte A_j(b) ...... 64 bits ...... ]....        element i has bit (i % 64 + R_j(b)) % 64 of it
//
// The k bits of any one element are uniform and independent, so its false positive rate is that of a classic filter.
// The answers for a whole block are the AND of k rotated words, which takes 1/64 of the hashes and loads. The cost: the
// false positives of a block are not independent of each other, so if whole runs are kept, false positives come in runs
// too.
#include <algorithm>
#include <new>

#include "bloom/bloom.h"
#include "common/cpu.h"

struct Hash {
    BloomSalts salts;
    u32 k;
    u32 bytes;
    Hash(u64 bytes, u32 k, u32 seed, u32 parameter, u32 step)
        : salts(bloom_salts(seed, parameter, step, (u32)bytes)), k(k), bytes((u32)bytes) {}
};

static const u64 BLOCKS = 512;  // whose arrays stay in the first-level cache

DR_CLONES static void first_hashes(const Hash& hash, const u32* indices, u64 size, u32* h1, u32* h2) {
    for (u64 i = 0; i < size; ++i) {
        h1[i] = bloom_first(indices[i] >> 6, hash.salts.first);
        h2[i] = bloom_second(h1[i], hash.salts.second);
    }
}

DR_CLONES static void insert(const Hash& hash, const u32* indices, u64 count, u8* filter) {
    u32 h1[BLOCKS], h2[BLOCKS], at[BLOCKS], turn[BLOCKS];
    for (u64 begin = 0; begin < count; begin += BLOCKS) {
        const u64 size = std::min(BLOCKS, count - begin);
        first_hashes(hash, indices + begin, size, h1, h2);
        for (u32 j = 0; j < hash.k; ++j) {
            for (u64 i = 0; i < size; ++i) {
                const u32 probe = bloom_probe(h1[i], h2[i], j);
                at[i] = bloom_byte(probe, hash.bytes);
                turn[i] = (indices[begin + i] + probe) & 63;
            }
            for (u64 i = 0; i < size; ++i) filter[at[i] + (turn[i] >> 3)] |= (u8)(1u << (turn[i] & 7));
        }
    }
}

// Sets the bits of `count` indices in a filter of `bytes` (8 to 2^29 - 1) zero bytes, with 8 more after them for
// windows that pass its end.
DR_API void dr_bloom_insert(const u32* indices, u64 count, u32 k, u32 seed, u32 parameter, u32 step, u8* filter,
                            u64 bytes) {
    insert(Hash(bytes, k, seed, parameter, step), indices, count, filter);
    for (u64 i = 0; i < 8; ++i) filter[i] |= filter[bytes + i];
}

DR_CLONES static u64 query(const Hash& hash, const u8* filter, u64 numel, u64* positives) {
    u32 h1[BLOCKS], h2[BLOCKS], at[BLOCKS], turn[BLOCKS];
    const u64 blocks = (numel + 63) / 64;
    u64 found = 0;
    for (u64 begin = 0; begin < blocks; begin += BLOCKS) {
        const u64 size = std::min(BLOCKS, blocks - begin);
        u64* words = positives + begin;
        for (u64 b = 0; b < size; ++b) {
            h1[b] = bloom_first((u32)(begin + b), hash.salts.first);
            h2[b] = bloom_second(h1[b], hash.salts.second);
            words[b] = ~0ull;
        }
        for (u32 j = 0; j < hash.k; ++j) {
            for (u64 b = 0; b < size; ++b) {
                const u32 probe = bloom_probe(h1[b], h2[b], j);
                at[b] = bloom_byte(probe, hash.bytes);
                turn[b] = probe & 63;
            }
            for (u64 b = 0; b < size; ++b) {
                const u64 window = load64(filter + at[b]);
                words[b] &= window >> turn[b] | window << (-turn[b] & 63);
            }
        }
        if (begin + size == blocks && numel % 64) words[size - 1] &= (1ull << numel % 64) - 1;
        for (u64 b = 0; b < size; ++b) found += (u64)__builtin_popcountll(words[b]);
    }
    return found;
}

// Bit i of `positives`, ceil(numel / 64) words: whether the filter holds element i. filter: `bytes` bytes, and the
// first 8 of them again. Returns how many elements it holds.
DR_API u64 dr_bloom_query(const u8* filter, u64 bytes, u32 k, u32 seed, u32 parameter, u32 step, u64 numel,
                          u64* positives) {
    return query(Hash(bytes, k, seed, parameter, step), filter, numel, positives);
}

static const u32 NONE = 0xFFFFFFFFu;  // in place of a bit's number

// sizes[bit]: how many of the indices have the bit, at most 255. An index that has a bit twice counts once.
DR_CLONES static void set_sizes(const Hash& hash, const u32* indices, u64 count, u8* sizes) {
    const u64 chunk = 256;
    u32 h1[chunk], h2[chunk], bits[32][chunk];
    for (u64 begin = 0; begin < count; begin += chunk) {
        const u64 size = std::min(chunk, count - begin);
        first_hashes(hash, indices + begin, size, h1, h2);
        for (u32 j = 0; j < hash.k; ++j) {
            u32* row = bits[j];
            for (u64 i = 0; i < size; ++i)
                row[i] = bloom_bit(indices[begin + i], bloom_probe(h1[i], h2[i], j), hash.bytes);
            for (u32 before = 0; before < j; ++before)
                for (u64 i = 0; i < size; ++i) row[i] = row[i] == bits[before][i] ? NONE : row[i];
            for (u64 i = 0; i < size; ++i)
                if (row[i] != NONE) sizes[row[i]] = (u8)(sizes[row[i]] + (sizes[row[i]] < 255));
        }
    }
}

// Algorithm 1 of DeepReduce from its line 3 on: `count` of the positives, drawn from their conflict sets. Sets are
// visited by size (all from 255 on count as equal), then by bit. A set's items are in order at first; the last item
// takes the place of the one that is drawn, and if that was chosen before (line 10) another is drawn. Draw t takes word
// t % 4 of the counter (t / 4, step, STREAM_POLICY, 0).
//
// The indices that are alone in a set are chosen first, and no other set can give them again. So only the sets of the
// other indices are stored, a tenth of them at the usual rates, and each size's sets are sorted when their turn comes.
static void conflict_sets(const Hash& hash, const u32* positives, u64 found, u64 count, u32 seed, u32 parameter,
                          u32 step, u32* chosen) {
    std::vector<u8> sizes((u64)hash.bytes * 8), taken(found);
    set_sizes(hash, positives, found, sizes.data());
    u64 size = 0;
    std::vector<u64> items[256];  // [size of the set]: bit << 32 | number of the positive
    for (u64 p = 0; p < found && size < count; ++p) {
        const u32 h1 = bloom_first(positives[p] >> 6, hash.salts.first), h2 = bloom_second(h1, hash.salts.second);
        u32 bits[32], j = 0;
        for (; j < hash.k; ++j) {
            bits[j] = bloom_bit(positives[p], bloom_probe(h1, h2, j), hash.bytes);
            if (sizes[bits[j]] == 1) break;
        }
        size += taken[p] = j < hash.k;
        if (taken[p]) continue;
        for (j = 0; j < hash.k; ++j)
            if (std::find(bits, bits + j, bits[j]) == bits + j) items[sizes[bits[j]]].push_back((u64)bits[j] << 32 | p);
    }

    Philox4 words = {0, 0, 0, 0};
    u64 draws = 0;
    const auto below = [&](u64 n) {
        if (draws % 4 == 0) words = philox4x32(seed, parameter, (u32)(draws / 4), step, STREAM_POLICY, 0);
        const u32 word[4] = {words.x, words.y, words.z, words.w};
        return (u64)word[draws++ % 4] * n >> 32;
    };
    struct Set {
        u64 *begin, *end;
    };
    const auto draw = [&](Set& set) {
        while (set.begin < set.end) {
            u64* item = set.begin + below((u64)(set.end - set.begin));
            const u32 p = (u32)*item;
            *item = *--set.end;
            if (taken[p]) continue;
            taken[p] = 1;
            ++size;
            return;
        }
    };
    std::vector<Set> sets;  // without those that are known to be empty
    for (u32 s = 2; s < 256 && size < count; ++s) {
        std::sort(items[s].begin(), items[s].end());
        u64 *at = items[s].data(), *end = at + items[s].size();
        while (at < end && size < count) {
            Set set = {at, at};
            while (set.end < end && *set.end >> 32 == *at >> 32) ++set.end;
            at = set.end;
            draw(set);
            sets.push_back(set);
        }
    }
    while (size < count) {
        for (u64 s = 0; s < sets.size() && size < count; ++s) draw(sets[s]);
        sets.erase(std::remove_if(sets.begin(), sets.end(), [](const Set& s) { return s.begin == s.end; }), sets.end());
    }
    for (u64 p = 0; p < found; ++p)
        if (taken[p]) *chosen++ = positives[p];
}

// Policy P2: chooses `count` <= `found` of the positives of a filter of `bytes` bytes, in order. Returns 0, or -1 if
// memory is short.
DR_API int dr_bloom_conflict_sets(const u32* positives, u64 found, u64 count, u32 k, u32 seed, u32 parameter, u32 step,
                                  u64 bytes, u32* chosen) {
    try {
        conflict_sets(Hash(bytes, k, seed, parameter, step), positives, found, count, seed, parameter, step, chosen);
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}
