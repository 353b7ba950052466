// Huffman codes on the device. A whole block calls each function; thread s works on symbol s.
#ifndef HVD_DEEPREDUCE_HUFFMAN_CUH
#define HVD_DEEPREDUCE_HUFFMAN_CUH

#include "bits/bits.cuh"
#include "huffman/huffman.h"

// Lengths of the least total cost among those of up to LONGEST bits. One thread does the merging.
__device__ inline void huffman_lengths(const u64* counts, u8* length, PackageMerge& room) {
    const u32 symbol = threadIdx.x;
    u32 rank = 0, total;
    for (u32 other = 0; other < 256; ++other)
        rank += counts[other] &&
                (counts[other] < counts[symbol] || (counts[other] == counts[symbol] && other < symbol));
    length[symbol] = 0;
    if (counts[symbol]) room.order[rank] = (u8)symbol;
    block_scan((u32)(counts[symbol] != 0), &total);
    __syncthreads();
    if (symbol == 0) package_merge(counts, total, room, length);
    __syncthreads();
}

// words[symbol] of the code with these lengths.
__device__ inline void huffman_words(const u8* length, u32* words) {
    const u32 symbol = threadIdx.x, bits = length[symbol];
    u32 of_length[LONGEST + 1] = {}, before = 0;
    for (u32 other = 0; other < 256; ++other) {
        ++of_length[length[other]];
        before += other < symbol && length[other] == bits;
    }
    words[symbol] = bits ? huffman_word(first_code(of_length, bits) + before, bits) : 0;
    __syncthreads();
}

// table[next LONGEST bits] = symbol | length << 8, for the code of these words.
__device__ inline void huffman_table(const u32* words, u16* table) {
    fill_table(threadIdx.x, words[threadIdx.x], table);
    __syncthreads();
}

#endif
