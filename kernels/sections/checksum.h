// The checksum of a container, on the host; docs/container.md defines it.
#pragma once

#include "common/cpu.h"

// The sum of checksum_word over the 32-bit words begin to end - 1 of these bytes.
u32 checksum_words(const u8* bytes, u64 begin, u64 end);

// dr_checksum of a container that is written or read piece by piece, while each piece is in the cache. The checksum is
// kept in its word 0.
struct RunningChecksum {
    const u8* container;
    u64 first, done;  // words: where the pieces begin, and how far they have come
    u32 sum = 0;

    // at: where the first piece begins; what is before it is counted by `whole`.
    RunningChecksum(const u8* container, const u8* at)
        : container(container), first((u64)(at - container + 3) / 4), done(first) {}

    void advance(const u8* at) {
        const u64 words = (u64)(at - container) / 4;
        if (words > done) sum += checksum_words(container, done, words), done = words;
    }
    u32 whole(u64 size) {
        advance(container + size);
        for (; done < (size + 7) / 8 * 2; ++done)
            sum += checksum_word((u32)load64_tail(container + 4 * done, container + size), (u32)done);
        return sum + checksum_words(container, 1, first);
    }
};
