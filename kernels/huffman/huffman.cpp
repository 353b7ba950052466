// Canonical Huffman codes of up to 12 bits (Huffman, "A method for the construction of minimum-redundancy codes", Proc.
// IRE 1952; Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", J. ACM 1990), and the
// index codec, whose code follows from the number of elements.
//
// The coder of symbols:
//
//     section:  | lengths, to a whole byte | bytes of streams 0, 1, 2 (u32 each; from 1024 symbols on) | streams |
//     lengths:  for each symbol from 0 up, until the sum of 2^-length is 1:   length, 1 .. 12 (4 bits) |
//               or, for a run of n symbols that do not occur:                 0 (4 bits) | n - 1 (4 bits) |
//               or, for the only symbol that occurs, whose code is empty:     15 (4 bits) |
//
// A stream is the code words of its symbols, to a whole byte. From 1024 symbols on there are four streams of
// ceil(count / 4) symbols, the last of the rest, so that a decoder follows four independent chains.
#include <algorithm>

#include "bits/bits_cpu.h"
#include "entropy/histogram.h"
#include "huffman/huffman_cpu.h"

// Package-merge (Larmore and Hirschberg 1990). The list of level l, in `merged`, holds the leaves, sorted by (count,
// symbol), merged with the pairs of level l - 1; leaves precede pairs of equal price. From the last level the 2n - 2
// cheapest items are taken, and from each level before it the items in the taken pairs. A symbol's length is the number
// of levels from which its leaf is taken.
struct PackageMerge {
    u64 merged[512], pairs[256];
    u8 leaf[LONGEST][512];
    u8 order[256];  // the symbols that occur, sorted by (count, symbol)
};

// Sets the lengths of the n symbols of room.order, which are zeros before, to those of the least total cost.
static void package_merge(const u64* counts, u32 n, PackageMerge& room, u8* length) {
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

void huffman_lengths(const u64* counts, u8* length) {
    PackageMerge room;
    u32 n = 0;
    for (u32 s = 0; s < 256; ++s) {
        length[s] = 0;
        if (counts[s]) room.order[n++] = (u8)s;
    }
    std::stable_sort(room.order, room.order + n, [&](u8 a, u8 b) { return counts[a] < counts[b]; });
    package_merge(counts, n, room, length);
}

void huffman_words(const u8* length, u32* words) {
    u32 of_length[LONGEST + 1] = {}, next[LONGEST + 1];
    for (u32 s = 0; s < 256; ++s) ++of_length[length[s]];
    for (u32 l = 1; l <= LONGEST; ++l) next[l] = first_code(of_length, l);
    for (u32 s = 0; s < 256; ++s) words[s] = length[s] ? huffman_word(next[length[s]]++, length[s]) : 0;
}

void huffman_table(const u32* words, u16* table) {
    for (u32 s = 0; s < 256; ++s) fill_table(s, words[s], table);
}

// Compiled in clones since BMI2 has shifts of one instruction.
DR_CLONES static u8* encode_stream(const u8* symbols, u64 count, const u32* words, u8* out) {
    BitWriter writer{out};
    u64 i = 0;
    for (; i + 4 <= count; i += 4) {
        const FourWords four = four_words(words, symbols + i);
        writer.put(four.field, four.bits);
    }
    for (; i < count; ++i) writer.put(words[symbols[i]] & 0xFFFF, words[symbols[i]] >> 16);
    return writer.finish();
}

// A stream to decode: where it is read from and where its symbols go.
struct CodeStream {
    BitReader reader;
    u8* symbols;
    u64 count;
};

static inline void decode_four(u64& position, const u8* in, const u16* table, u8* symbols) {
    u64 word = load64(in + (position >> 3)) >> (position & 7);
    u32 used = 0;
    for (u32 j = 0; j < 4; ++j) {
        const u32 entry = table[word & ((1u << LONGEST) - 1)];
        symbols[j] = (u8)entry;
        word >>= entry >> 8;
        used += entry >> 8;
    }
    position += used;
}

// Returns 0, or ERR_VALUE if a stream does not end with its last symbol.
static i64 decode_streams(CodeStream* streams, u32 n, const u16* table) {
    u64 i = 0;
    if (n == 4) {
        u64 position[4] = {}, shortest = ~0ull;
        for (u32 k = 0; k < 4; ++k) shortest = std::min(shortest, streams[k].reader.bytes);
        // From this byte of a stream, or from one before it, eight bytes can be read.
        const i64 safe = (i64)shortest - 8;
        const auto furthest = [&] {
            return std::max(std::max(position[0], position[1]), std::max(position[2], position[3]));
        };
        for (; i + 4 <= streams[3].count && (i64)(furthest() >> 3) <= safe; i += 4)
            for (u32 k = 0; k < 4; ++k)
                decode_four(position[k], streams[k].reader.in, table, streams[k].symbols + i);
        for (u32 k = 0; k < 4; ++k) streams[k].reader.position = position[k];
    }
    for (u32 k = 0; k < n; ++k) {
        BitReader& reader = streams[k].reader;
        u64 j = i;
        while (j + 4 <= streams[k].count && (reader.position >> 3) + 8 <= reader.bytes) {
            decode_four(reader.position, reader.in, table, streams[k].symbols + j);
            j += 4;
        }
        for (; j < streams[k].count; ++j) {
            const u32 entry = table[reader.peek() & ((1u << LONGEST) - 1)];
            streams[k].symbols[j] = (u8)entry;
            reader.position += entry >> 8;
        }
        if (!reader.ended()) return ERR_VALUE;
    }
    return 0;
}

DR_API u64 dr_huffman_bound(u64 count) { return huffman_bound(count); }
DR_API u32 dr_huffman_streams(u64 count) { return stream_count(count); }

// Writes a section into dr_huffman_bound(count) bytes and returns its size.
DR_API u64 dr_huffman_encode(const u8* symbols, u64 count, u8* out) {
    if (count == 0) return 0;
    u64 counts[256];
    u8 length[256];
    histogram(symbols, count, counts);
    const bool single = counts[symbols[0]] == count;
    huffman_lengths(counts, length);
    BitWriter lengths{out};
    write_lengths(length, single ? symbols[0] : -1, lengths);
    u8* at = lengths.finish();
    if (single) return (u64)(at - out);
    u32 words[256];
    huffman_words(length, words);
    const u64 part = part_of(count);
    u8* sizes = at;
    if (part < count) at += 12;
    for (u64 begin = 0; begin < count; begin += part) {
        u8* end = encode_stream(symbols + begin, std::min(part, count - begin), words, at);
        const u32 size = (u32)(end - at);
        if (begin + part < count) std::memcpy(sizes + 4 * (begin / part), &size, 4);
        at = end;
    }
    return (u64)(at - out);
}

// Returns 0; ERR_TRUNCATED if the section is too short; ERR_VALUE if the code lengths make no complete code, or a
// stream does not end with its last symbol.
DR_API i64 dr_huffman_decode(const u8* in, u64 bytes, u64 count, u8* symbols) {
    if (count == 0) return bytes ? (i64)ERR_VALUE : 0;
    u8 length[256];
    i32 only;
    const i64 length_bytes = read_lengths(BitReader{in, bytes}, length, &only);
    if (length_bytes < 0) return length_bytes;
    in += length_bytes;
    bytes -= (u64)length_bytes;
    if (only >= 0) {
        std::memset(symbols, only, count);
        return bytes ? (i64)ERR_VALUE : 0;
    }
    u32 words[256];
    u16 table[1 << LONGEST];
    huffman_words(length, words);
    huffman_table(words, table);
    if (bytes * 8 < count) return ERR_TRUNCATED;
    CodeStream streams[4];
    if (count < FOUR_STREAMS) {
        streams[0] = {{in, bytes}, symbols, count};
        return decode_streams(streams, 1, table);
    }
    u32 sizes[3];
    if (bytes < 12) return ERR_TRUNCATED;
    std::memcpy(sizes, in, 12);
    const u64 part = part_of(count), sum = (u64)sizes[0] + sizes[1] + sizes[2];
    in += 12;
    bytes -= 12;
    if (sum > bytes) return ERR_TRUNCATED;
    for (u32 k = 0; k < 4; ++k) {
        const u64 size = k < 3 ? sizes[k] : bytes - sum;
        streams[k] = {{in, size}, symbols + k * part, k < 3 ? part : count - 3 * part};
        in += size;
    }
    return decode_streams(streams, 4, table);
}

// ---- The index codec: the code of DeepReduce's "Huffman" (Kostopoulou et al., arXiv:2102.03112, appendix): the four
// bytes of each index, lowest first, in the Huffman code of the bytes of all indices 0 .. numel - 1.
//
//     section:  | words of byte 0, 1, 2, 3 of index 0 | of index 1 | ..., to a whole byte |
static void byte_code(u64 numel, u32* words) {
    u64 counts[256];
    u8 length[256];
    for (u32 byte = 0; byte < 256; ++byte) counts[byte] = count_byte(byte, numel);
    huffman_lengths(counts, length);
    huffman_words(length, words);
}

DR_API u64 dr_huffman_indices_bound(u64 count) { return huffman_indices_bound(count); }

// Writes a section into dr_huffman_indices_bound(count) bytes and returns its size.
DR_API u64 dr_huffman_indices_encode(const u32* indices, u64 count, u64 numel, u8* out) {
    u32 words[256];
    byte_code(numel, words);
    return (u64)(encode_stream((const u8*)indices, 4 * count, words, out) - out);
}

// Returns 0; ERR_INDEX if the indices are not strictly increasing or not below numel; ERR_TRUNCATED if the section is
// too short; ERR_VALUE if it continues after the last index.
DR_API i64 dr_huffman_indices_decode(const u8* in, u64 bytes, u64 count, u64 numel, u32* indices) {
    u16 table[1 << LONGEST] = {};  // stays so if numel is 1: index 0 takes no bits
    u32 words[256];
    byte_code(numel, words);
    huffman_table(words, table);
    BitReader reader{in, bytes};
    i64 last = -1;
    bool bad = false;
    for (u64 i = 0; i < count; ++i) {
        u64 word = reader.peek();
        u32 index = 0, used = 0;
        for (u32 place = 0; place < 4; ++place) {
            const u32 entry = table[word & ((1u << LONGEST) - 1)];
            index |= (entry & 255) << (8 * place);
            word >>= entry >> 8;
            used += entry >> 8;
        }
        reader.position += used;
        bad |= (i64)index <= last;
        last = index;
        indices[i] = index;
    }
    if (bad || last >= (i64)numel) return ERR_INDEX;
    return reader.overrun() ? (i64)ERR_TRUNCATED : reader.ended() ? 0 : (i64)ERR_VALUE;
}
