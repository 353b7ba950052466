// Numbers in headers: groups of 7 bits, the lowest first; all bytes but the last have their high bit set.
#pragma once

#include "common/common.h"

inline u8* put_varint(u8* out, u64 number) {
    for (; number > 127; number >>= 7) *out++ = (u8)((number & 127) | 128);
    *out++ = (u8)number;
    return out;
}
inline u32 varint_bytes(u64 number) {
    u32 bytes = 1;
    for (; number > 127; number >>= 7) ++bytes;
    return bytes;
}
// Reads a varint of `put_varint`, at most nine bytes; no other spelling of a number is taken.
inline bool take_varint(const u8*& in, const u8* end, u64& number) {
    number = 0;
    for (u32 place = 0; place < 9 && in < end; ++place) {
        const u8 byte = *in++;
        number |= (u64)(byte & 127) << (7 * place);
        if (byte < 128) return byte || !place;
    }
    return false;
}
