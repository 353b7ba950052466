// The coders of symbol streams that several kernels share: bit strings, the fields of bits.cpp, the keys of delta.cpp,
// the rANS coder of rans.cpp and the canonical Huffman codes of huffman.cpp. A bit string runs from the low bit of each
// byte up.
#ifndef HVD_DEEPREDUCE_ENTROPY_H
#define HVD_DEEPREDUCE_ENTROPY_H

#include "entropy/codes.h"
#include "common/cpu.h"

// Appends fields to a bit string. Every put() and finish() stores eight bytes from `out` on.
struct BitWriter {
    u8* out;
    u64 word = 0;
    u32 filled = 0;

    // `bits` up to 56; `value` has no higher bit set.
    void put(u64 value, u32 bits) {
        word |= value << filled;
        filled += bits;
        std::memcpy(out, &word, 8);
        out += filled >> 3;
        word >>= filled & 56;
        filled &= 7;
    }
    // The first byte behind the string.
    u8* finish() {
        std::memcpy(out, &word, 8);
        return out + (filled > 0);
    }
};

// Reads fields of up to 57 bits from a bit string of `bytes` bytes; behind its end it reads zeros.
struct BitReader {
    const u8* in;
    u64 bytes;
    u64 position = 0;

    u64 peek() const {
        const u64 byte = position >> 3;
        const u64 word = byte + 8 <= bytes ? load64(in + byte) : byte < bytes ? load64_tail(in + byte, in + bytes) : 0;
        return word >> (position & 7);
    }
    u64 get(u32 bits) {
        const u64 value = peek() & ((1ull << bits) - 1);
        position += bits;
        return value;
    }
    u64 used() const { return (position + 7) >> 3; }
    bool overrun() const { return position > bytes * 8; }
};

// How often each symbol occurs. Four tables, so that equal neighbours do not wait for each other's count.
inline void histogram(const u8* symbols, u64 count, u64* counts) {
    u64 table[4][256] = {};
    u64 i = 0;
    for (; i + 4 <= count; i += 4)
        for (int t = 0; t < 4; ++t) ++table[t][symbols[i + t]];
    for (; i < count; ++i) ++table[0][symbols[i]];
    for (int s = 0; s < 256; ++s) counts[s] = table[0][s] + table[1][s] + table[2][s] + table[3][s];
}

// ---- bits.cpp

DR_API void dr_pack8(const u8* values, u64 count, u32 width, u8* out);
DR_API i64 dr_unpack8(const u8* in, u64 bytes, u64 count, u32 width, u8* values);

// ---- delta.cpp

const u64 DELTA_ROOM = 160;  // that dr_delta_encode needs beside 5 bytes a key
DR_API u64 dr_delta_encode(const u32* keys, u64 count, u8* out);
DR_API i64 dr_delta_decode(const u8* in, u64 bytes, u64 count, u64 numel, u8* bits, u32* keys);

// ---- rans.cpp

const u32 RANS_TABLE_BYTES = 640;  // 256 frequencies of up to 16 bits, and room for eight-byte stores

// Room that rans_encode needs.
inline u64 rans_bound(u64 count) { return 2 * count + 4 * rans_lanes(count) + RANS_TABLE_BYTES; }

// Writes the section so that it ends with out[rans_bound(count) - 1]; its first byte's place is the result.
u64 rans_encode(const u8* symbols, u64 count, u8* out);

// The number of bytes that the section took, which may be fewer than `bytes`; or an Error.
i64 rans_decode(const u8* in, u64 bytes, u64 count, u8* symbols);

// ---- huffman.cpp

// Lengths of the least total cost among those of up to LONGEST bits, by package-merge.
void huffman_lengths(const u64* counts, u8* length);

// words[symbol] of a code of these lengths.
void huffman_words(const u8* length, u32* words);

// table[next LONGEST bits] = symbol | length << 8.
void huffman_table(const u32* words, u16* table);

const u32 HUFFMAN_LENGTHS_BYTES = 200;  // where every other symbol occurs, and room for eight-byte stores

DR_API u64 dr_huffman_bound(u64 count);
DR_API u64 dr_huffman_encode(const u8* symbols, u64 count, u8* out);
DR_API i64 dr_huffman_decode(const u8* in, u64 bytes, u64 count, u8* symbols);

#endif
