// Huffman codes on the host, for the kernels that have one in their sections.
#ifndef HVD_DEEPREDUCE_HUFFMAN_CPU_H
#define HVD_DEEPREDUCE_HUFFMAN_CPU_H

#include "common/cpu.h"
#include "huffman/huffman.h"

// Lengths of the least total cost among those of up to LONGEST bits. counts, length: [256].
void huffman_lengths(const u64* counts, u8* length);

// words[symbol] of the code with these lengths.
void huffman_words(const u8* length, u32* words);

// table[next LONGEST bits] = symbol | length << 8, for the code of these words.
void huffman_table(const u32* words, u16* table);

DR_API u64 dr_huffman_bound(u64 count);
DR_API u64 dr_huffman_encode(const u8* symbols, u64 count, u8* out);
DR_API i64 dr_huffman_decode(const u8* in, u64 bytes, u64 count, u8* symbols);

#endif
