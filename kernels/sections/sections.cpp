// The checksum of a container; docs/container.md defines it.
#include "sections/checksum.h"

DR_CLONES static u32 sum_of_words(const u8* bytes, u64 begin, u64 end) {
    u32 sum = 0, step = (u32)begin * CHECKSUM_STEP;  // added up: the compiler would widen a position to 64 bits
    for (u64 i = begin; i < end; ++i, step += CHECKSUM_STEP) {
        u32 word;
        std::memcpy(&word, bytes + 4 * i, 4);
        sum += fmix32(word ^ step);
    }
    return sum;
}
u32 checksum_words(const u8* bytes, u64 begin, u64 end) { return sum_of_words(bytes, begin, end); }

// The sum modulo 2^32 of checksum_word over all 32-bit words of a container except word `kept`, where the checksum is
// kept. Zeros fill the bytes to a multiple of 8. size: at least 4 * kept + 4.
DR_API u32 dr_checksum(const u8* bytes, u64 size, u64 kept) {
    u32 word;
    std::memcpy(&word, bytes + 4 * kept, 4);
    const u64 whole = size / 8 * 8;
    u32 sum = sum_of_words(bytes, 0, whole / 4) - (4 * kept < whole ? checksum_word(word, (u32)kept) : 0);
    if (whole < size) {
        const u64 tail = load64_tail(bytes + whole, bytes + size);
        const u64 at = whole / 4;
        if (at != kept) sum += checksum_word((u32)tail, (u32)at);
        if (at + 1 != kept) sum += checksum_word((u32)(tail >> 32), (u32)(at + 1));
    }
    return sum;
}
