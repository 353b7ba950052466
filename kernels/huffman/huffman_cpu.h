// Huffman codes on the host, for the kernels that have one in their sections.
#pragma once

#include "bits/bits_cpu.h"
#include "huffman/huffman.h"

// Lengths of the least total cost among those of up to LONGEST bits. counts, length: [256].
void huffman_lengths(const u64* counts, u8* length);

// words[symbol] of the code with these lengths.
void huffman_words(const u8* length, u32* words);

// table[next LONGEST bits] = symbol | length << 8, for the code of these words.
void huffman_table(const u32* words, u16* table);

// only: the symbol if only one occurs, else -1.
template <class Writer>
inline void write_lengths(const u8* length, i32 only, Writer& writer) {
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

DR_API u64 dr_huffman_bound(u64 count);
DR_API u64 dr_huffman_encode(const u8* symbols, u64 count, u8* out);
DR_API i64 dr_huffman_decode(const u8* in, u64 bytes, u64 count, u8* symbols);
