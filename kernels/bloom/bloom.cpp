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
#include <utility>
#include <vector>

#include "bloom/bloom.h"
#include "common/cpu.h"
#include "sort/radix.h"

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
// other indices are stored, a tenth of them at the usual rates: as rows of | bit | number of the positive |, sorted.
// Returns false, with nothing chosen, if there are more than `most` rows.
static bool conflict_sets(const Hash& hash, const u32* positives, u64 found, u64 count, u64 most, u32 seed,
                          u32 parameter, u32 step, u32* chosen) {
    std::vector<u8> sizes((u64)hash.bytes * 8), taken(found);
    set_sizes(hash, positives, found, sizes.data());
    // The different bits of a positive, and their number; 0 if it is alone in the set of one of them.
    const auto shared_bits = [&](u64 p, u32* bits) {
        const u32 h1 = bloom_first(positives[p] >> 6, hash.salts.first), h2 = bloom_second(h1, hash.salts.second);
        u32 different = 0;
        for (u32 j = 0; j < hash.k; ++j) {
            const u32 bit = bloom_bit(positives[p], bloom_probe(h1, h2, j), hash.bytes);
            if (sizes[bit] == 1) return 0u;
            if (std::find(bits, bits + different, bit) == bits + different) bits[different++] = bit;
        }
        return different;
    };
    u32 bits[32];
    u64 size = 0, total = 0;
    for (u64 p = 0; p < found && size < count; ++p) {
        const u32 different = shared_bits(p, bits);
        size += taken[p] = different == 0;
        total += different;
    }
    if (size == count) total = 0;
    if (total > most) return false;
    std::vector<u64> rows(2 * total);
    for (u64 p = 0, row = 0; row < total; ++p) {
        if (taken[p]) continue;
        const u32 different = shared_bits(p, bits);
        for (u32 j = 0; j < different; ++j) rows[row++] = (u64)bits[j] << 32 | p;
    }
    u64* const items = radix_sort(rows.data(), rows.data() + total, total, 32, 32 + bits_for((u64)hash.bytes * 8));

    Philox4 words = {0, 0, 0, 0};
    u64 draws = 0;
    const auto below = [&](u64 n) {
        if (draws % 4 == 0) words = philox4x32(seed, parameter, (u32)(draws / 4), step, STREAM_POLICY, 0);
        const u32 word[4] = {words.x, words.y, words.z, words.w};
        return (u64)word[draws++ % 4] * n >> 32;
    };
    struct Set {
        u32 begin, end;  // of its items
    };
    const auto draw = [&](Set& set) {
        while (set.begin < set.end) {
            u64& item = items[set.begin + below(set.end - set.begin)];
            const u32 p = (u32)item;
            item = items[--set.end];
            if (taken[p]) continue;
            taken[p] = 1;
            ++size;
            return;
        }
    };
    const auto end_of_set = [&](u64 i) {
        const u64 bit = items[i] >> 32;
        while (i < total && items[i] >> 32 == bit) ++i;
        return i;
    };
    u64 places[256] = {};  // of the next set of each size, in the order in which sets are visited
    for (u64 i = 0; i < total; i = end_of_set(i)) ++places[sizes[items[i] >> 32]];
    u64 before = 0;
    for (u64& place : places) before += std::exchange(place, before);
    std::vector<Set> sets(before);
    for (u64 i = 0; i < total;) {
        const u64 end = end_of_set(i);
        sets[places[sizes[items[i] >> 32]]++] = {(u32)i, (u32)end};
        i = end;
    }
    while (size < count) {
        for (u64 s = 0; s < sets.size() && size < count; ++s) draw(sets[s]);
        sets.erase(std::remove_if(sets.begin(), sets.end(), [](const Set& s) { return s.begin == s.end; }), sets.end());
    }
    for (u64 p = 0; p < found; ++p)
        if (taken[p]) *chosen++ = positives[p];
    return true;
}

// Policy P2: chooses `count` <= `found` of the positives of a filter of `bytes` bytes, in order. Returns 0; 1 if the
// sets of the positives that are in no set alone have more than `most` members in all; -1 if memory is short.
DR_API int dr_bloom_conflict_sets(const u32* positives, u64 found, u64 count, u64 most, u32 k, u32 seed, u32 parameter,
                                  u32 step, u64 bytes, u32* chosen) {
    try {
        const Hash hash(bytes, k, seed, parameter, step);
        return !conflict_sets(hash, positives, found, count, most, seed, parameter, step, chosen);
    } catch (const std::bad_alloc&) {
        return -1;
    }
}
