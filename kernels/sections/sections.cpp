// The checksum of a container; docs/container.md defines it.
#include "common/cpu.h"

DR_CLONES static u32 checksum(const u8* bytes, u64 words) {
    u32 sum = 0;
    for (u64 i = 0; i < words; ++i) {
        u32 word;
        std::memcpy(&word, bytes + 4 * i, 4);
        sum += checksum_word(word, (u32)i);
    }
    return sum;
}

// The sum modulo 2^32 of checksum_word over all 32-bit words of a container except word 3, where the checksum is kept.
// size: a multiple of 4, at least 16.
DR_API u32 dr_checksum(const u8* bytes, u64 size) {
    u32 kept;
    std::memcpy(&kept, bytes + 12, 4);
    return checksum(bytes, size / 4) - checksum_word(kept, 3);
}
