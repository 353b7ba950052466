// How sparse elements become blocks on the host.
#pragma once

#include "common/cpu.h"
#include "densestream/densestream.h"

// Writes the blocks of sorted indices; the elements between two indices of a block become zero. Returns the number of
// blocks; *covered: of the values. No branch could predict whether an element begins a block, so there is none: `gap`
// zeros are written after every value, and the next value overwrites one of them or follows them. `starts` and `lengths`
// have room for the blocks, `out` for `gap` values more than are covered.
template <class T>
inline u64 encode_blocks(const u32* indices, const T* values, u64 count, u32 gap, u32* starts, u32* lengths, T* out,
                         u64* covered) {
    *covered = 0;
    if (!count) return 0;
    u64 block = 0;
    u32 start = indices[0], next = start;
    T* to = out;
    starts[0] = start;
    for (u64 i = 0; i < count; ++i) {
        const u32 between = indices[i] - next;
        const bool cut = ends_block(between, gap);
        lengths[block] = next - start;
        block += cut;
        start = cut ? indices[i] : start;
        starts[block] = start;
        to += cut ? 0 : between;
        *to++ = values[i];
        for (u32 j = 0; j < gap; ++j) to[j] = 0;
        next = indices[i] + 1;
    }
    lengths[block] = next - start;
    *covered = (u64)(to - out);
    return block + 1;
}
