// Ternary digits on the host: the loops over the five parts, for digits from any source and to any target.
#pragma once

#include "common/cpu.h"
#include "ternary/trits.h"

const u32 POWER[5] = {81, 27, 9, 3, 1};
const u64 BLOCK = 4096;  // bytes that stay in the first-level cache during the passes over the five parts

// digit(i): digit i, i < count. out: trit_bytes(count) bytes.
template <class F>
__attribute__((always_inline)) inline void pack_trits(u64 count, u8* out, F digit) {
    const u64 m = trit_bytes(count);
    for (u64 base = 0; base < m; base += BLOCK) {
        const u64 stop = base + BLOCK < m ? base + BLOCK : m;
        std::memset(out + base, ALL_ZERO, stop - base);
        for (u64 part = 0; part < 5; ++part) {
            const u64 first = part * m;
            const u64 end = first + stop < count ? stop : count > first ? count - first : 0;
            const u32 power = POWER[part];
            for (u64 j = base; j < end; ++j) out[j] = (u8)(out[j] + (digit(first + j) - 1) * power);
        }
    }
}

// Whether every byte is at most LARGEST_BYTE and the digits past the last one are ones.
DR_CLONES static bool valid_trits(const u8* in, u64 count) {
    const u64 m = trit_bytes(count);
    u32 largest = 0;
    for (u64 j = 0; j < m; ++j) largest = in[j] > largest ? in[j] : largest;
    u32 bad = largest > LARGEST_BYTE;
    for (u64 i = count; i < 5 * m; ++i) bad |= (u32)(in[i % m] / POWER[i / m] % 3 != 1);
    return !bad;
}

template <u32 power, class F>
__attribute__((always_inline)) inline void unpack_part(const u8* in, u64 base, u64 stop, u64 first, u64 count,
                                                       F store) {
    const u64 end = first + stop < count ? stop : count > first ? count - first : 0;
    for (u64 j = base; j < end; ++j) store(first + j, (u32)in[j] / power % 3u);
}

// Calls store(i, digit) for every i < count.
template <class F>
__attribute__((always_inline)) inline void unpack_trits(const u8* in, u64 count, F store) {
    const u64 m = trit_bytes(count);
    for (u64 base = 0; base < m; base += BLOCK) {
        const u64 stop = base + BLOCK < m ? base + BLOCK : m;
        unpack_part<81>(in, base, stop, 0, count, store);
        unpack_part<27>(in, base, stop, m, count, store);
        unpack_part<9>(in, base, stop, 2 * m, count, store);
        unpack_part<3>(in, base, stop, 3 * m, count, store);
        unpack_part<1>(in, base, stop, 4 * m, count, store);
    }
}
