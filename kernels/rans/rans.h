// Interleaved rANS: shares, slots and the tokens of gaps. rans.cpp draws the sections.
#pragma once

#include "bits/bits.h"

const u32 LOWEST = 1u << 16;    // the lowest state between two symbols
const u32 SHARES_BYTES = 640;   // room for 256 shares of up to 16 bits, and for eight-byte stores

// The shares sum to 2^p.
DR_HD u32 share_bits(u64 count) {
    const u32 p = bit_length(count);
    return p < 5 ? 5 : p > 12 ? 12 : p;
}
DR_HD u32 rans_lanes(u64 count) { return count < 2048 ? 1 : count < 32768 ? 4 : 32; }

// A section of many symbols has parts that are coded at the same time; its first byte is then PARTS, with which no
// shares begin. Part j has the symbols from part_begin(j) up to part_begin(j + 1).
const u8 PARTS = 15;
const u64 PART_SYMBOLS = 1u << 15;  // at least
DR_HD u64 rans_parts(u64 count) { return count < 2 * PART_SYMBOLS ? 1 : count / PART_SYMBOLS; }
DR_HD u64 part_begin(u64 count, u64 parts, u64 part) {
    return part == parts ? count : count * part / parts & ~31ull;
}

// Room for a section of `count` symbols: PARTS, shares, the parts' numbers of words, states, and a word of 16 bits at
// most for each symbol.
DR_HD u64 rans_bound(u64 count) {
    return 2 * count + 4 * (rans_lanes(count) + 1) * rans_parts(count) + SHARES_BYTES;
}

// Room for the low bits of `count` gaps, fewer than 32 each, and for eight-byte stores.
DR_HD u64 rans_lows_bound(u64 count) { return 4 * count + 8; }

// A symbol's share of 2^p, rounded; at least 1 if it occurs. The caller makes the shares sum to 2^p: it takes what is
// over from the largest share (the first of equal ones), one unit at a time, or gives it what is missing.
DR_HD u32 rounded_share(u64 occurs, u64 count, u32 p) {
    const u64 rounded = ((occurs << p) + count / 2) / count;
    return occurs == 0 ? 0 : rounded == 0 ? 1 : (u32)rounded;
}

template <class Writer>
DR_HD void write_shares(const u32* share, u32 p, Writer& writer) {
    u32 sum = 0;
    for (u32 s = 0; sum < 1u << p;) {
        if (share[s]) {
            const u32 length = bit_length(share[s]);
            writer.put(length | (share[s] - (1u << (length - 1))) << 4, 3 + length);
            sum += share[s++];
            continue;
        }
        u32 run = 1;
        while (run < 16 && share[s + run] == 0) ++run;
        writer.put((run - 1) << 4, 8);
        s += run;
    }
}

// Returns the number of bytes of the shares, or ERR_VALUE if they do not sum to 2^p or bits after them are
// not zeros.
template <class Reader>
DR_HD i64 read_shares(Reader reader, u32 p, u32* share) {
    u32 sum = 0;
    for (u32 s = 0; s < 256; ++s) share[s] = 0;
    for (u32 s = 0; sum < 1u << p;) {
        const u32 length = (u32)reader.get(4), run = length ? 1 : 1 + (u32)reader.get(4);
        if (length > 13 || s + run > 256 || reader.overrun()) return ERR_VALUE;
        if (length) sum += share[s] = 1u << (length - 1) | (u32)reader.get(length - 1);
        s += run;
    }
    return sum == 1u << p && !reader.overrun() && reader.padded() ? (i64)reader.used() : (i64)ERR_VALUE;
}

// A decoder's slot: | symbol | place in the symbol's share << 8 | share - 1 << 20 |. rans_advance: the state x after
// the slot's symbol, before it takes a word.
DR_HD u32 rans_slot(u32 symbol, u32 place, u32 share) { return symbol | place << 8 | (share - 1) << 20; }
DR_HD u32 rans_advance(u32 slot, u32 x) { return ((slot >> 20) + 1) * (x >> 12) + (slot >> 8 & 4095); }

// ---- The index codec. A gap is a token and low bits; t is the number of fraction bits of a token.
DR_HD u32 fraction_bits(u64 count) { return count < 512 ? 1 : count < 8192 ? 2 : 3; }
// The number of low bits of a gap.
DR_HD u32 gap_lows(u32 gap, u32 t) { return bit_length(gap | 1u << t) - 1 - t; }
DR_HD u32 token_of(u32 gap, u32 low, u32 t) { return (low << t) + (gap >> low); }
// The number of low bits after a token. If it is above 31 - t, no gap has the token.
DR_HD u32 token_lows(u32 token, u32 t) { return token >> t ? (token >> t) - 1 : 0; }
// The gap without its low bits.
DR_HD u32 token_gap(u32 token, u32 low, u32 t) { return (token - (low << t)) << low; }
