// Whether floats are finite, by their bits; and a copy that finds it out on the way.
#pragma once

#include <algorithm>
#include <vector>

#include "common/cpu.h"
#include "common/stream_copy.h"

static const u64 RUN = 1 << 20;  // no thread is started for fewer elements

// The largest bits below the sign. They are those of infinity or above if a number is infinite or NaN.
DR_CLONES static u32 largest_bits(const u32* words, u64 begin, u64 end) {
    u32 largest = 0;
    for (u64 i = begin; i < end; ++i) largest = std::max(largest, words[i] & 0x7FFFFFFFu);
    return largest;
}
DR_CLONES static u64 largest_bits(const u64* words, u64 begin, u64 end) {
    u64 largest = 0;
    for (u64 i = begin; i < end; ++i) largest = std::max<u64>(largest, words[i] & 0x7FFFFFFFFFFFFFFFull);
    return largest;
}

static const u64 BLOCK = 1 << 14;       // bytes; a block is looked at and copied while it is in the cache

template <class Bits>
static int copy_finite(Bits* out, const Bits* words, u64 n, Bits infinity, int threads) {
    std::vector<Bits> largest((size_t)(threads < 1 ? 1 : threads));
    const bool streamed = n * sizeof(Bits) >= STREAMED;
    parallel_runs(n, threads, RUN, [&](int t, u64 begin, u64 end) {
        const u64 step = BLOCK / sizeof(Bits);
        Bits found = 0;
        for (u64 i = begin; i < end; i += step) {
            const u64 until = std::min(end, i + step);
            found = std::max(found, largest_bits(words, i, until));
            if (streamed)
                stream_copy(out + i, words + i, (until - i) * sizeof(Bits));
            else
                std::memcpy(out + i, words + i, (until - i) * sizeof(Bits));
        }
        if (streamed) stream_fence();
        largest[(size_t)t] = found;
    });
    for (Bits bits : largest)
        if (bits >= infinity) return 0;
    return 1;
}
