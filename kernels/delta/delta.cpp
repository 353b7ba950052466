// Delta-binary code with an adaptive prefix (Jiang et al., "SKCompress", VLDB Journal 2020, sections 5.1 and 5.2).
//
// delta_i = key_i - key_{i-1} (key_{-1} = 0). With m = 2, 4, 8 or 16, delta_i is written in n_i = 1 .. m intervals of
// 32 / m bits, as few as hold it, and its prefix n_i - 1 in a field of log2 m bits or in a Huffman code of the
// prefixes.
//
//     section:  | log2 m + 16 h u8 | if h = 1: code lengths, as in huffman.cpp | prefixes, to a whole byte
//               | deltas, n_i * 32 / m bits each, to a whole byte |                       empty for no keys
//
// h is 1 if the prefixes are Huffman coded. The encoder takes the smallest of the eight sections; of equal ones the one
// with h = 0, then the one with the smallest m.
#include "bits/bits_cpu.h"
#include "delta/delta_cpu.h"
#include "huffman/huffman_cpu.h"
#include "index_sizes/sizes.h"

struct DeltaPlan {
    u64 bytes;
    u32 log2_m;
    bool coded;
    i32 only;  // the prefix if only one occurs, else -1
    u8 length[256];  // of the prefixes' code words, if coded
};

static DeltaPlan plan(const u32* keys, u64 count) {
    u64 lengths[33] = {};
    u32 previous = 0;
    for (u64 i = 0; i < count; ++i) {
        ++lengths[delta_length(keys[i] - previous)];
        previous = keys[i];
    }
    DeltaPlan best{};
    best.bytes = ~0ull;
    for (const bool coded : {false, true})
        for (u32 log2_m = 1; log2_m <= 4; ++log2_m) {
            DeltaPlan now{};
            now.log2_m = log2_m, now.coded = coded, now.only = -1;
            u64 counts[256] = {}, prefix_bits = 0;
            const u64 delta_bits = count_prefixes(lengths, log2_m, counts);
            BitCount table{};
            // The code lengths take at least a byte.
            if (coded && 2 + (delta_bits + 7) / 8 >= best.bytes) continue;
            if (coded) {
                huffman_lengths(counts, now.length);
                for (u32 s = 0; s < 16; ++s) {
                    prefix_bits += counts[s] * now.length[s];
                    if (counts[s] == count) now.only = (i32)s;
                }
                write_lengths(now.length, now.only, table);
            } else {
                prefix_bits = count * log2_m;
            }
            now.bytes = 1 + table.bytes() + (prefix_bits + 7) / 8 + (delta_bits + 7) / 8;
            if (now.bytes < best.bytes) best = now;
        }
    return best;
}

u64 delta_bytes(const u32* keys, u64 count) { return count ? plan(keys, count).bytes : 0; }

DR_API u64 dr_delta_bound(u64 count) { return delta_bound(count); }

// Writes a section into dr_delta_bound(count) bytes and returns its size.
DR_API u64 dr_delta_encode(const u32* keys, u64 count, u8* out) {
    if (count == 0) return 0;
    const DeltaPlan best = plan(keys, count);
    u32 code[256], words[33];
    huffman_words(best.length, code);
    for (u32 length = 1; length <= 32; ++length)
        words[length] = delta_word(length, best.log2_m, best.coded ? code : nullptr);
    out[0] = (u8)(best.log2_m | (best.coded ? 16 : 0));
    BitWriter head{out + 1};
    if (best.coded) write_lengths(best.length, best.only, head);
    BitWriter prefixes{head.finish()};
    u32 previous = 0;
    for (u64 i = 0; i < count; ++i) {
        const u32 word = words[delta_length(keys[i] - previous)];
        previous = keys[i];
        prefixes.put(word & 0xFFFF, word >> 16 & 255);
    }
    BitWriter deltas{prefixes.finish()};
    previous = 0;
    for (u64 i = 0; i < count; ++i) {
        const u32 delta = keys[i] - previous;
        previous = keys[i];
        deltas.put(delta, words[delta_length(delta)] >> 24);
    }
    return (u64)(deltas.finish() - out);
}

// bits: scratch, one byte per key. Returns 0; ERR_TRUNCATED if the section ends before the last key; ERR_INDEX if the
// keys are not strictly increasing or not below numel; ERR_VALUE if no encoder writes its head, it continues after the
// last key, or bits after a part are not zeros.
DR_API i64 dr_delta_decode(const u8* in, u64 bytes, u64 count, u64 numel, u8* bits, u32* keys) {
    if (count == 0) return bytes ? (i64)ERR_VALUE : 0;
    if (bytes == 0) return ERR_TRUNCATED;
    const u32 log2_m = in[0] & 15, step = 32u >> (log2_m & 7);
    const bool coded = in[0] & 16;
    if (log2_m < 1 || log2_m > 4 || in[0] > 31) return ERR_VALUE;
    u16 table[1 << LONGEST];
    u32 window = log2_m;
    i32 only = -1;
    u64 at = 1;
    if (coded) {
        u8 length[256];
        u32 words[256];
        const i64 table_bytes = read_lengths(BitReader{in + 1, bytes - 1}, length, &only);
        if (table_bytes < 0) return table_bytes;
        for (u32 s = 1u << log2_m; s < 256; ++s)
            if (length[s] || only == (int)s) return ERR_VALUE;
        huffman_words(length, words);
        if (only < 0) huffman_table(words, table);
        window = LONGEST;
        at += (u64)table_bytes;
    } else {
        for (u32 s = 0; s < 1u << log2_m; ++s) table[s] = (u16)(s | log2_m << 8);
    }
    BitReader prefixes{in + at, bytes - at};
    if (only >= 0) {
        std::memset(bits, (int)step * (only + 1), count);
    } else {
        for (u64 i = 0; i < count; ++i) {
            const u32 entry = table[prefixes.peek() & ((1u << window) - 1)];
            bits[i] = (u8)(step * ((entry & 255) + 1));
            prefixes.position += entry >> 8;
        }
    }
    if (prefixes.overrun()) return ERR_TRUNCATED;
    if (!prefixes.padded()) return ERR_VALUE;
    at += prefixes.used();
    BitReader deltas{in + at, bytes - at};
    u64 key = deltas.get(bits[0]);
    keys[0] = (u32)key;
    bool bad = false;
    for (u64 i = 1; i < count; ++i) {
        const u64 delta = deltas.get(bits[i]);
        bad |= delta == 0;
        key += delta;
        keys[i] = (u32)key;
    }
    if (deltas.overrun()) return ERR_TRUNCATED;
    return bad || key >= numel ? (i64)ERR_INDEX : deltas.ended() ? 0 : (i64)ERR_VALUE;
}
