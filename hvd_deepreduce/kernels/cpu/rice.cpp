// Golomb-Rice code of the gaps between sorted indices, highs and lows apart.
//
// gap_i = index_i - index_{i-1} - 1 (index_{-1} = -1). With the parameter b, low_i is gap_i's b low bits and
// high_i = gap_i >> b.
//
//     section:  | b (1 byte) | lows: count fields of b bits, to a whole byte | highs, to a whole byte |
//     highs:    for each i, high_i zero bits and then a one, from the low bit of each byte up
//
// Kept apart, the lows unpack without a dependency, and the highs need no shift of the lows: the one of element i
// stands at bit P_i, so high_0 + ... + high_i = P_i - i.
#include "cpu.h"

DR_CLONES static u64 sum_highs(const u32* indices, u64 count, u32 b) {
    u64 sum = indices[0] >> b;
    for (u64 i = 1; i < count; ++i) sum += (indices[i] - indices[i - 1] - 1) >> b;
    return sum;
}

// The parameter of the least bits, found downhill from the geometric distribution's; *highs gets its sum of highs.
DR_API u32 dr_rice_parameter(const u32* indices, u64 count, u64 numel, u64* highs) {
    u32 b = 0;
    while (b < 31 && (double)(2u << b) <= 0.6931471805599453 * (double)numel / (double)count) ++b;
    u64 best = sum_highs(indices, count, b), cost = best + count * b;
    const auto walk = [&](int step) {
        bool moved = false;
        while (b + step <= 31u) {
            const u64 sum = sum_highs(indices, count, b + step);
            if (sum + count * (b + step) >= cost) break;
            b += step, best = sum, cost = sum + count * b, moved = true;
        }
        return moved;
    };
    if (!walk(+1)) walk(-1);
    *highs = best;
    return b;
}

// Writes the section behind its first byte, into zeroed memory.
DR_API void dr_rice_encode(const u32* indices, u64 count, u32 b, u8* out) {
    u8* lows = out;
    u8* highs = out + (count * b + 7) / 8;
    const u32 mask = (1u << b) - 1;
    u64 word = 0, position = 0, high_word = 0;
    u32 filled = 0, next = 0;
    for (u64 i = 0; i < count; ++i) {
        const u32 gap = indices[i] - next;
        next = indices[i] + 1;
        const u64 low = gap & mask;
        word |= low << filled;
        filled += b;
        if (filled >= 64) {
            std::memcpy(lows, &word, 8);
            lows += 8;
            filled -= 64;
            word = filled ? low >> (b - filled) : 0;
        }
        position += gap >> b;
        while (position >= 64) {
            std::memcpy(highs, &high_word, 8);
            highs += 8;
            high_word = 0;
            position -= 64;
        }
        high_word |= 1ull << position;
        if (++position == 64) {
            std::memcpy(highs, &high_word, 8);
            highs += 8;
            high_word = 0;
            position = 0;
        }
    }
    std::memcpy(highs, &high_word, (position + 7) / 8);
    if (b) std::memcpy(lows, &word, (filled + 7) / 8);
}

// Reads what follows the section's first byte. ERR_TRUNCATED where it holds fewer than `count` gaps, ERR_INDEX where
// an index reaches numel.
DR_CLONES static i64 rice_decode(const u8* in, u64 bytes, u64 count, u32 b, u64 numel, u32* indices) {
    const u64 low_bytes = (count * b + 7) / 8;
    if (bytes < low_bytes) return ERR_TRUNCATED;
    const u8* highs = in + low_bytes;
    const u8* end = in + bytes;
    const u64 high_bytes = bytes - low_bytes, mask = (1ull << b) - 1;
    // Eight whole bytes can be loaded for the lows of all elements before `safe`: the highs stand behind them.
    u64 i = 0, sum = 0;
    u64 out_of_range = 0;
    for (u64 base = 0; base < high_bytes && i < count; base += 8) {
        u64 word = base + 8 <= high_bytes ? load64(highs + base) : load64_tail(highs + base, end);
        for (; word && i < count; word &= word - 1, ++i) {
            const u8* at = in + (i * b >> 3);
            const u64 low = (at + 8 <= end ? load64(at) : load64_tail(at, end)) >> (i * b & 7) & mask;
            sum += low;
            const u64 high = base * 8 + (u64)__builtin_ctzll(word) - i;
            const u64 index = (high << b) + sum + i;
            out_of_range |= (u64)(index >= numel) | (high >> 32);
            indices[i] = (u32)index;
        }
    }
    if (i < count) return ERR_TRUNCATED;
    return out_of_range ? (i64)ERR_INDEX : 0;
}

DR_API i64 dr_rice_decode(const u8* in, u64 bytes, u64 count, u32 b, u64 numel, u32* indices) {
    if (b > 31) return ERR_INDEX;
    return rice_decode(in, bytes, count, b, numel, indices);
}
