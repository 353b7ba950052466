// Canonical Huffman codes of up to 12 bits (Huffman, "A method for the construction of minimum-redundancy codes", Proc.
// IRE 1952; Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", J. ACM 1990), and the
// index codec with a code fixed by the number of elements.
//
// The coder of symbols:
//
//     section:  | lengths, to a whole byte | bytes of streams 0, 1, 2 (u32 each; from 1024 symbols on) | streams |
//     lengths:  for each symbol from 0 up, until the sum of 2^-length is 1:   length, 1 .. 12 (4 bits) |
//               or, for a run of n symbols that do not occur:                 0 (4 bits) | n - 1 (4 bits) |
//               or, for the only symbol that occurs, whose code is empty:     15 (4 bits) |
//
// A stream is its symbols' code words, one behind the other, to a whole byte. From 1024 symbols on there are four
// streams, of ceil(count / 4) symbols each and the last of what is left, so that a decoder follows four chains at once.
#include <algorithm>

#include "entropy.h"

static const u32 LONGEST = HUFFMAN_LONGEST;
static const u32 ONLY = 15;
static const u64 FOUR_STREAMS = 1024;

// Package-merge: `merged` of level l holds the leaves, by (count, symbol), merged with the pairs of level l - 1, leaves
// first among equals. Of the last level the 2n - 2 cheapest items are taken, of a level before that the items in the
// taken pairs; a symbol's length is the number of levels that its leaf is taken of.
void huffman_lengths(const u64* counts, u8* length) {
    u8 order[256];
    u32 n = 0;
    for (u32 s = 0; s < 256; ++s) {
        length[s] = 0;
        if (counts[s]) order[n++] = (u8)s;
    }
    if (n < 2) return;
    std::stable_sort(order, order + n, [&](u8 a, u8 b) { return counts[a] < counts[b]; });
    bool leaf[LONGEST][512];
    u64 merged[512], pairs[256];
    u32 pair_count = 0, size = 0;
    for (u32 level = 0; level < LONGEST; ++level) {
        u32 a = 0, b = 0;
        for (size = 0; a < n || b < pair_count; ++size) {
            leaf[level][size] = b == pair_count || (a < n && counts[order[a]] <= pairs[b]);
            merged[size] = leaf[level][size] ? counts[order[a++]] : pairs[b++];
        }
        pair_count = size / 2;
        for (u32 i = 0; i < pair_count; ++i) pairs[i] = merged[2 * i] + merged[2 * i + 1];
    }
    u32 taken = 2 * n - 2;
    for (u32 level = LONGEST; level-- > 0 && taken;) {
        u32 leaves = 0;
        for (u32 i = 0; i < taken; ++i) leaves += leaf[level][i];
        for (u32 i = 0; i < leaves; ++i) ++length[order[i]];
        taken = 2 * (taken - leaves);
    }
}

static u32 reversed(u32 word, u32 bits) {
    u32 out = 0;
    for (u32 i = 0; i < bits; ++i) out |= (word >> i & 1) << (bits - 1 - i);
    return out;
}

void huffman_words(HuffmanCode& code) {
    u32 of_length[LONGEST + 1] = {}, next[LONGEST + 2] = {};
    for (u32 s = 0; s < 256; ++s) ++of_length[code.length[s]];
    of_length[0] = 0;
    for (u32 l = 1; l <= LONGEST; ++l) next[l + 1] = (next[l] + of_length[l]) << 1;
    for (u32 s = 0; s < 256; ++s)
        code.bits[s] = code.length[s] ? (u16)reversed(next[code.length[s]]++, code.length[s]) : (u16)0;
}

bool huffman_table(const HuffmanCode& code, u16* table) {
    u32 sum = 0;
    for (u32 s = 0; s < 256; ++s) sum += code.length[s] ? 1u << (LONGEST - code.length[s]) : 0;
    if (sum != 1u << LONGEST) return false;
    for (u32 s = 0; s < 256; ++s)
        if (const u32 l = code.length[s])
            for (u32 i = code.bits[s]; i < 1u << LONGEST; i += 1u << l) table[i] = (u16)(s | l << 8);
    return true;
}

u8* huffman_write_lengths(const u8* length, int only, u8* out) {
    BitWriter writer{out};
    u32 sum = 0;
    for (int s = 0; sum < 1u << LONGEST;) {
        if (s == only || length[s]) {
            writer.put(s == only ? ONLY : length[s], 4);
            sum += s == only ? 1u << LONGEST : 1u << (LONGEST - length[s]);
            ++s;
            continue;
        }
        u32 run = 1;
        while (run < 16 && length[s + run] == 0 && s + (int)run != only) ++run;
        writer.put((run - 1) << 4, 8);
        s += (int)run;
    }
    return writer.finish();
}

i64 huffman_read_lengths(const u8* in, u64 bytes, u8* length, int* only) {
    BitReader reader{in, bytes};
    u32 sum = 0;
    *only = -1;
    std::memset(length, 0, 256);
    for (u32 s = 0; sum < 1u << LONGEST;) {
        const u32 l = (u32)reader.get(4);
        const u32 run = l ? 1 : 1 + (u32)reader.get(4);
        if ((l > LONGEST && (l != ONLY || sum)) || s + run > 256 || reader.overrun()) return ERR_VALUE;
        if (l == ONLY) *only = (int)s;
        if (l && l != ONLY) length[s] = (u8)l;
        sum += l == ONLY ? 1u << LONGEST : l ? 1u << (LONGEST - l) : 0;
        s += run;
    }
    return sum == 1u << LONGEST ? (i64)reader.used() : (i64)ERR_VALUE;
}

static u8* encode_stream(const u8* symbols, u64 count, const u32* words, u8* out) {
    BitWriter writer{out};
    u64 i = 0;
    for (; i + 4 <= count; i += 4) {
        u64 field = 0;
        u32 bits = 0;
        for (u32 j = 0; j < 4; ++j) {
            const u32 word = words[symbols[i + j]];
            field |= (u64)(word & 0xFFFF) << bits;
            bits += word >> 16;
        }
        writer.put(field, bits);
    }
    for (; i < count; ++i) writer.put(words[symbols[i]] & 0xFFFF, words[symbols[i]] >> 16);
    return writer.finish();
}

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

// 0, or ERR_VALUE where a stream does not end with its last symbol.
static i64 decode_streams(CodeStream* streams, u32 n, const u16* table) {
    u64 i = 0;
    if (n == 4) {
        u64 position[4] = {}, shortest = ~0ull;
        for (u32 k = 0; k < 4; ++k) shortest = std::min(shortest, streams[k].reader.bytes);
        // Up to this byte of each stream, eight bytes are there.
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
        if (reader.overrun() || reader.used() != reader.bytes) return ERR_VALUE;
    }
    return 0;
}

// Room for a section: lengths, sizes, streams of up to 12 bits a symbol, and for eight-byte stores.
DR_API u64 dr_huffman_bound(u64 count) { return HUFFMAN_LENGTHS_BYTES + 12 + (count * LONGEST + 7) / 8 + 16; }

// Writes the section from out[0] on; the result is its number of bytes.
DR_API u64 dr_huffman_encode(const u8* symbols, u64 count, u8* out) {
    if (count == 0) return 0;
    u64 counts[256];
    HuffmanCode code;
    histogram(symbols, count, counts);
    const bool single = counts[symbols[0]] == count;
    huffman_lengths(counts, code.length);
    u8* at = huffman_write_lengths(code.length, single ? symbols[0] : -1, out);
    if (single) return (u64)(at - out);
    huffman_words(code);
    u32 words[256];
    for (u32 s = 0; s < 256; ++s) words[s] = code.bits[s] | (u32)code.length[s] << 16;
    const u64 part = count < FOUR_STREAMS ? count : (count + 3) / 4;
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

// ERR_TRUNCATED, or ERR_VALUE where the lengths or the length of the section are no encoder's.
DR_API i64 dr_huffman_decode(const u8* in, u64 bytes, u64 count, u8* symbols) {
    if (count == 0) return bytes ? (i64)ERR_VALUE : 0;
    HuffmanCode code;
    int only;
    const i64 length_bytes = huffman_read_lengths(in, bytes, code.length, &only);
    if (length_bytes < 0) return length_bytes;
    in += length_bytes;
    bytes -= (u64)length_bytes;
    if (only >= 0) {
        std::memset(symbols, only, count);
        return bytes ? (i64)ERR_VALUE : 0;
    }
    u16 table[1 << LONGEST];
    huffman_words(code);
    if (!huffman_table(code, table)) return ERR_VALUE;
    if (bytes * 8 < count) return ERR_TRUNCATED;
    CodeStream streams[4];
    if (count < FOUR_STREAMS) {
        streams[0] = {{in, bytes}, symbols, count};
        return decode_streams(streams, 1, table);
    }
    u32 sizes[3];
    if (bytes < 12) return ERR_TRUNCATED;
    std::memcpy(sizes, in, 12);
    const u64 part = (count + 3) / 4, sum = (u64)sizes[0] + sizes[1] + sizes[2];
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
//     section:  | words of byte 0, 1, 2, 3 of index 0 | of index 1 | ... |, to a whole byte
//
// In place p, the byte v stands in the indices whose remainder by 256^(p + 1) lies in [v 256^p, (v + 1) 256^p).
static void byte_code(u64 numel, HuffmanCode& code) {
    u64 counts[256] = {};
    for (u32 place = 0; place < 4; ++place) {
        const u64 unit = 1ull << (8 * place), period = unit << 8;
        const u64 rest = numel % period;
        for (u64 v = 0; v < 256; ++v) {
            const u64 over = rest > v * unit ? rest - v * unit : 0;
            counts[v] += numel / period * unit + std::min(over, unit);
        }
    }
    huffman_lengths(counts, code.length);
    huffman_words(code);
}

// Needs room for 6 bytes an index and 8 more; the result is the number of bytes.
DR_API u64 dr_huffman_indices_encode(const u32* indices, u64 count, u64 numel, u8* out) {
    HuffmanCode code;
    byte_code(numel, code);
    u32 words[256];
    for (u32 s = 0; s < 256; ++s) words[s] = code.bits[s] | (u32)code.length[s] << 16;
    BitWriter writer{out};
    for (u64 i = 0; i < count; ++i) {
        u64 field = 0;
        u32 bits = 0;
        for (u32 place = 0; place < 4; ++place) {
            const u32 word = words[indices[i] >> (8 * place) & 255];
            field |= (u64)(word & 0xFFFF) << bits;
            bits += word >> 16;
        }
        writer.put(field, bits);
    }
    return (u64)(writer.finish() - out);
}

DR_API i64 dr_huffman_indices_decode(const u8* in, u64 bytes, u64 count, u64 numel, u32* indices) {
    u16 table[1 << LONGEST] = {};  // of one element, whose index is 0 and takes no bits
    HuffmanCode code;
    byte_code(numel, code);
    huffman_table(code, table);
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
    return reader.overrun() ? (i64)ERR_TRUNCATED : reader.used() != bytes ? (i64)ERR_VALUE : 0;
}
