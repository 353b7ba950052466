// Huffman codes of up to 12 bits: lengths, words and tables. huffman.cpp draws the sections.
//
// A word of a code is kept as | code word, its first bit lowest | length << 16 |, and is 0 for a symbol that does not
// occur.
#pragma once

#include "bits/bits.h"

const u32 LONGEST = 12;            // the most bits of a code word
const u32 ONLY = 15;               // written in place of the length if only one symbol occurs
const u64 FOUR_STREAMS = 1024;     // from so many symbols on there are four streams
const u32 LENGTHS_BYTES = 200;     // room for the code lengths and for eight-byte stores

DR_HD u32 stream_count(u64 count) { return count < FOUR_STREAMS ? 1 : 4; }

// Symbols of one stream; the last stream may have fewer.
DR_HD u64 part_of(u64 count) { return count < FOUR_STREAMS ? count : (count + 3) / 4; }

// Room for a section of `count` symbols: code lengths, sizes of three streams, streams of at most LONGEST bits a
// symbol, and 16 bytes for eight-byte stores.
DR_HD u64 huffman_bound(u64 count) { return LENGTHS_BYTES + 12 + field_bytes(count, LONGEST) + 16; }

// Room for a section of indices: four words of at most LONGEST bits each, and 8 bytes for eight-byte stores.
DR_HD u64 huffman_indices_bound(u64 count) { return field_bytes(4 * count, LONGEST) + 8; }

// The code is canonical: shorter words come first, and words of equal length are in the symbols' order. Returns the
// first word of `length` bits. of_length[l]: the number of words of l bits.
DR_HD u32 first_code(const u32* of_length, u32 length) {
    u32 code = 0;
    for (u32 l = 1; l < length; ++l) code = (code + of_length[l]) << 1;
    return code;
}

// | code word, its first bit lowest | length << 16 |
DR_HD u32 huffman_word(u32 code, u32 length) {
    u32 word = 0;
    for (u32 i = 0; i < length; ++i) word |= (code >> i & 1) << (length - 1 - i);
    return word | length << 16;
}

// Fills one symbol's entries of a decoder's table: table[next LONGEST bits] = symbol | length << 8.
DR_HD void fill_table(u32 symbol, u32 word, u16* table) {
    const u32 length = word >> 16;
    if (length)
        for (u32 i = word & 0xFFFF; i < 1u << LONGEST; i += 1u << length) table[i] = (u16)(symbol | length << 8);
}

// The code words of four symbols in a row.
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

// Returns the number of bytes of the lengths, or ERR_VALUE if they make no complete code or bits after
// them are not zeros. *only: as for write_lengths.
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
    return sum == 1u << LONGEST && reader.padded() ? (i64)reader.used() : (i64)ERR_VALUE;
}

// How often `byte` occurs in the four bytes of the indices 0 .. numel - 1. It is byte p of those indices whose
// remainder by 256^(p + 1) is in [byte 256^p, (byte + 1) 256^p).
DR_HD u64 count_byte(u64 byte, u64 numel) {
    u64 sum = 0;
    for (u32 place = 0; place < 4; ++place) {
        const u64 unit = 1ull << (8 * place), period = unit << 8, rest = numel % period;
        const u64 over = rest > byte * unit ? rest - byte * unit : 0;
        sum += numel / period * unit + (over < unit ? over : unit);
    }
    return sum;
}
