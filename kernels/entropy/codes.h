// What the two backends' entropy coders have in common: the choices that a code rests on, its tables, and one word of
// it. The sections are drawn in kernels/cpu/*.cpp.
//
// A Writer has put(value, bits). A Reader has get(bits), which gives zeros behind its end; used(), the bytes that it
// has read of; and overrun(), whether these were too many.
#ifndef HVD_DEEPREDUCE_CODES_H
#define HVD_DEEPREDUCE_CODES_H

#include "common/common.h"

// Bits that hold x: 0 for 0.
DR_HD u32 bit_length(u64 x) {
#ifdef DR_CUDA
    return 64u - (u32)__clzll((i64)x);
#else
    return x ? 64u - (u32)__builtin_clzll(x) : 0u;
#endif
}
DR_HD u32 bit_length(u32 x) {
#ifdef DR_CUDA
    return 32u - (u32)__clz((i32)x);
#else
    return x ? 32u - (u32)__builtin_clz(x) : 0u;
#endif
}

// Whether a bit string of `bits` bits, filled with zeros to a whole byte, is what stands in these bytes.
DR_HD bool ends_at(const u8* in, u64 bytes, u64 bits) {
    return bytes == (bits + 7) / 8 && (bits % 8 == 0 || in[bits / 8] >> (bits % 8) == 0);
}

// A Writer that only measures.
struct BitCount {
    u64 bits;
    DR_HD void put(u64, u32 width) { bits += width; }
    DR_HD u64 bytes() const { return (bits + 7) / 8; }
};

// ---- Rice: the parameter of the least bits, found downhill from the geometric distribution's. sums_of(b, sums) gives
// the sums of the gaps' high bits with the parameters b - 1, b and b + 1, as far as these are 0 .. 31.
template <class F>
DR_HD u32 rice_parameter(u64 count, u64 numel, F sums_of) {
    u32 b = 0;
    while (b < 31 && (double)(2u << b) <= 0.6931471805599453 * (double)numel / (double)count) ++b;
    for (int way = 0;;) {
        u64 sums[3];
        sums_of(b, sums);
        const bool up = b < 31 && sums[2] + count < sums[1];
        const bool down = b > 0 && sums[0] < sums[1] + count;
        // Once uphill on both sides it is the least: the cost is convex in b.
        if (up && way >= 0) {
            ++b, way = 1;
        } else if (down && way <= 0) {
            --b, way = -1;
        } else {
            return b;
        }
    }
}

// ---- RLE: the width of a field of the least bits, of equals the least.
struct RunFields {
    u32 width;
    u64 bits;  // of all of them
};

// lengths[l]: how many v have v + 1 of l bits; v + 1 >= 2^width takes an escape.
DR_HD RunFields best_fields(const u64* lengths, u32 escape) {
    u64 count = 0;
    for (u32 l = 1; l <= 33; ++l) count += lengths[l];
    u64 escaped = count;
    RunFields best = {1, ~0ull};
    for (u32 w = 1; w <= 32; ++w) {
        escaped -= lengths[w];
        const u64 bits = count * w + escaped * escape;
        if (bits < best.bits) best = {w, bits};
    }
    return best;
}

// ---- Huffman. A word is | code word, its first bit lowest | length << 16 |.
const u32 LONGEST = 12, ONLY = 15;  // bits of a code word, and what stands for the length of the only symbol
const u64 FOUR_STREAMS = 1024;

// Symbols of one stream; the last may have fewer.
DR_HD u64 part_of(u64 count) { return count < FOUR_STREAMS ? count : (count + 3) / 4; }

// Package-merge: `merged` of level l holds the leaves, by (count, symbol), merged with the pairs of level l - 1, leaves
// first among equals. Of the last level the 2n - 2 cheapest items are taken, of a level before that the items in the
// taken pairs; a symbol's length is the number of levels that its leaf is taken of.
struct PackageMerge {
    u64 merged[512], pairs[256];
    u8 leaf[LONGEST][512];
    u8 order[256];  // the symbols that occur, by (count, symbol)
};

// Lengths, which are zeros before, of the least total cost for the n symbols of room.order.
DR_HD void package_merge(const u64* counts, u32 n, PackageMerge& room, u8* length) {
    if (n < 2) return;
    u32 pair_count = 0;
    for (u32 level = 0; level < LONGEST; ++level) {
        u32 a = 0, b = 0, size = 0;
        for (; a < n || b < pair_count; ++size) {
            const bool leaf = b == pair_count || (a < n && counts[room.order[a]] <= room.pairs[b]);
            room.leaf[level][size] = leaf;
            room.merged[size] = leaf ? counts[room.order[a++]] : room.pairs[b++];
        }
        pair_count = size / 2;
        for (u32 i = 0; i < pair_count; ++i) room.pairs[i] = room.merged[2 * i] + room.merged[2 * i + 1];
    }
    u32 taken = 2 * n - 2;
    for (u32 level = LONGEST; level-- > 0 && taken;) {
        u32 leaves = 0;
        for (u32 i = 0; i < taken; ++i) leaves += room.leaf[level][i];
        for (u32 i = 0; i < leaves; ++i) ++length[room.order[i]];
        taken = 2 * (taken - leaves);
    }
}

// The code is canonical: shorter words first, equal lengths in the symbols' order. The first word of `length` bits:
DR_HD u32 first_code(const u32* of_length, u32 length) {
    u32 code = 0;
    for (u32 l = 1; l < length; ++l) code = (code + of_length[l]) << 1;
    return code;
}

DR_HD u32 huffman_word(u32 code, u32 length) {
    u32 word = 0;
    for (u32 i = 0; i < length; ++i) word |= (code >> i & 1) << (length - 1 - i);
    return word | length << 16;
}

// table[next LONGEST bits] = symbol | length << 8
DR_HD void fill_table(u32 symbol, u32 word, u16* table) {
    const u32 length = word >> 16;
    if (length)
        for (u32 i = word & 0xFFFF; i < 1u << LONGEST; i += 1u << length) table[i] = (u16)(symbol | length << 8);
}

// The code words of four symbols, one behind the other.
struct FourWords {
    u64 field;
    u32 bits;
};

DR_HD FourWords four_words(const u32* words, const u8* symbols) {
    FourWords four = {0, 0};
    for (u32 j = 0; j < 4; ++j) {
        const u32 word = words[symbols[j]];
        four.field |= (u64)(word & 0xFFFF) << four.bits;
        four.bits += word >> 16;
    }
    return four;
}

// `only` is the symbol where just one occurs, else -1.
template <class Writer>
DR_HD void write_lengths(const u8* length, i32 only, Writer& writer) {
    u32 sum = 0;
    for (i32 s = 0; sum < 1u << LONGEST;) {
        if (s == only || length[s]) {
            writer.put(s == only ? ONLY : length[s], 4);
            sum += s == only ? 1u << LONGEST : 1u << (LONGEST - length[s]);
            ++s;
            continue;
        }
        u32 run = 1;
        while (run < 16 && length[s + run] == 0 && s + (i32)run != only) ++run;
        writer.put((run - 1) << 4, 8);
        s += (i32)run;
    }
}

// The number of bytes that the lengths took, or ERR_VALUE where they make no complete code.
template <class Reader>
DR_HD i64 read_lengths(Reader reader, u8* length, i32* only) {
    u32 sum = 0;
    *only = -1;
    for (u32 s = 0; s < 256; ++s) length[s] = 0;
    for (u32 s = 0; sum < 1u << LONGEST;) {
        const u32 l = (u32)reader.get(4), run = l ? 1 : 1 + (u32)reader.get(4);
        if ((l > LONGEST && (l != ONLY || sum)) || s + run > 256 || reader.overrun()) return ERR_VALUE;
        if (l == ONLY) *only = (i32)s;
        if (l && l != ONLY) length[s] = (u8)l;
        sum += l == ONLY ? 1u << LONGEST : l ? 1u << (LONGEST - l) : 0;
        s += run;
    }
    return sum == 1u << LONGEST ? (i64)reader.used() : (i64)ERR_VALUE;
}

// How often a byte stands in the four bytes of the indices 0 .. numel - 1. In place p it stands in those whose
// remainder by 256^(p + 1) lies in [byte 256^p, (byte + 1) 256^p).
DR_HD u64 count_byte(u64 byte, u64 numel) {
    u64 sum = 0;
    for (u32 place = 0; place < 4; ++place) {
        const u64 unit = 1ull << (8 * place), period = unit << 8, rest = numel % period;
        const u64 over = rest > byte * unit ? rest - byte * unit : 0;
        sum += numel / period * unit + (over < unit ? over : unit);
    }
    return sum;
}

// ---- rANS.
const u32 LOWEST = 1u << 16;  // of the states between two symbols

DR_HD u32 share_bits(u64 count) {
    const u32 p = bit_length(count);
    return p < 5 ? 5 : p > 12 ? 12 : p;
}
DR_HD u32 rans_lanes(u64 count) { return count < 2048 ? 1 : count < 32768 ? 4 : 32; }

// A symbol's share of 2^p, rounded; at least one where it occurs. What is over or missing in the sum of all is taken
// from, or given to, the largest share (the first of equals), one unit at a time.
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

// The number of bytes that the shares took, or ERR_VALUE.
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
    return sum == 1u << p && !reader.overrun() ? (i64)reader.used() : (i64)ERR_VALUE;
}

// What a decoder needs of a slot: symbol | place in the symbol's share << 8 | (share - 1) << 20. And a state behind it.
DR_HD u32 rans_slot(u32 symbol, u32 place, u32 share) { return symbol | place << 8 | (share - 1) << 20; }
DR_HD u32 rans_behind(u32 slot, u32 x) { return ((slot >> 20) + 1) * (x >> 12) + (slot >> 8 & 4095); }

// Gaps of indices as tokens and low bits, of which there are: for a gap, and in a token. With e + t > 31 no gap has the
// token.
DR_HD u32 fraction_bits(u64 count) { return count < 512 ? 1 : count < 8192 ? 2 : 3; }
DR_HD u32 gap_lows(u32 gap, u32 t) { return bit_length(gap | 1u << t) - 1 - t; }
DR_HD u32 token_of(u32 gap, u32 low, u32 t) { return (low << t) + (gap >> low); }
DR_HD u32 token_lows(u32 token, u32 t) { return token >> t ? (token >> t) - 1 : 0; }
DR_HD u32 token_gap(u32 token, u32 low, u32 t) { return (token - (low << t)) << low; }

// ---- SKCompress's deltas, of up to 32 bits, in 2^log2_m intervals.
DR_HD u32 delta_length(u32 delta) { return bit_length(delta | 1u); }
DR_HD u32 intervals(u32 length, u32 log2_m) { return (length * (1u << log2_m) + 31) / 32; }

// counts[prefix], which are zeros before, of deltas of which lengths[l] have l bits. The result is the deltas' bits.
DR_HD u64 count_prefixes(const u64* lengths, u32 log2_m, u64* counts) {
    u64 bits = 0;
    for (u32 length = 1; length <= 32; ++length) {
        const u32 n = intervals(length, log2_m);
        counts[n - 1] += lengths[length];
        bits += lengths[length] * n << (5 - log2_m);
    }
    return bits;
}

// Of a delta of so many bits: its prefix | the prefix's bits << 16 | the delta's bits << 24. words: null where the
// prefix is not Huffman coded.
DR_HD u32 delta_word(u32 length, u32 log2_m, const u32* words) {
    const u32 n = intervals(length, log2_m);
    return n << (5 - log2_m) << 24 | (words ? words[n - 1] : (n - 1) | log2_m << 16);
}

#endif
