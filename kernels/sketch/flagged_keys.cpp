// Keys as gaps of whole bytes: see flagged_keys.h.
#include "sketch/flagged_keys.h"

#include "common/cpu.h"

// The most bytes that `count` keys take.
DR_API u64 dr_flagged_bound(u64 count) { return length_bytes(count) + 4 * count; }

// out: dr_flagged_bound(count) bytes. Returns the number of bytes written.
DR_API u64 dr_flagged_encode(const u32* keys, u64 count, u8* out) {
    u8* at = out + length_bytes(count);
    u32 next = 0, lengths = 0;
    for (u64 i = 0; i < count; ++i) {
        const u32 gap = keys[i] - next;
        next = keys[i] + 1;
        const u32 bytes = gap_bytes(gap);
        lengths |= (bytes - 1) << 2 * (i & 3);
        if ((i & 3) == 3 || i + 1 == count) {
            out[i / 4] = (u8)lengths;
            lengths = 0;
        }
        std::memcpy(at, &gap, 4);  // a fixed size is faster; the next gap overwrites what is too much
        at += bytes;
    }
    return (u64)(at - out);
}

// keys[count]. ERR_TRUNCATED if `bytes` is not what the keys take, ERR_INDEX if a key is not below numel or takes more
// bytes than it needs, ERR_VALUE if the bits after the last length are not zeros.
DR_API i64 dr_flagged_decode(const u8* in, u64 bytes, u64 count, u64 numel, u32* keys) {
    static const u64 masks[4] = {0xFF, 0xFFFF, 0xFFFFFF, 0xFFFFFFFF}, least[4] = {0, 1 << 8, 1 << 16, 1 << 24};
    const u8* const end = in + bytes;
    const u8* at = in + length_bytes(count);
    if (bytes < length_bytes(count) + count) return ERR_TRUNCATED;
    u64 next = 0;
    bool bad = false;
    for (u64 i = 0; i < count; ++i) {
        const u32 length = in[i / 4] >> 2 * (i & 3) & 3;
        const u64 left = (u64)(end - at);
        if (left < 8 && left <= length) return ERR_TRUNCATED;
        const u64 gap = (left < 8 ? load64_tail(at, end) : load64(at)) & masks[length];
        next += gap;
        bad |= next >= numel || gap < least[length];
        keys[i] = (u32)next++;
        at += length + 1;
    }
    if (bad) return ERR_INDEX;
    return at != end ? (i64)ERR_TRUNCATED : zeros_follow(in, 2 * count) ? 0 : (i64)ERR_VALUE;
}
