// Codes of varying length on the device: Huffman's tables, and a bit string of such codes read in parallel.
#ifndef HVD_DEEPREDUCE_ENTROPY_CUH
#define HVD_DEEPREDUCE_ENTROPY_CUH

#include "entropy/codes.h"
#include "common/device.cuh"

// ---- Reading. Where a code word begins hangs on all before it. So a string is cut into chunks, and a thread for each
// place where a first word may begin in its chunk (the `entries`: bits behind the chunk's first, times phases) walks
// to the chunk's end (walk_all). One thread then follows the right ones from chunk to chunk (walk_join), and a thread
// for each chunk walks once more and writes what it reads.
const u64 CHUNK_BITS = 2048;
const u32 ENTRY_BITS = 8;  // a string may have more than 2^32 words: starts[chunk] is | first word << 8 | entry |

// step(position, phase) moves both behind the next word; a word has up to `longest` bits.
// exits[chunk * longest * phases + offset * phases + phase]: | words << 32 | the entry of the next chunk |
template <class F>
__device__ void walk_all(u64 bits, u32 longest, u32 phases, u64 chunks, u64* exits, F step) {
    const u32 entries = longest * phases;
    for (u64 t = grid_thread(); t < chunks * entries; t += grid_threads()) {
        const u64 end = (t / entries + 1) * CHUNK_BITS;
        u64 position = t / entries * CHUNK_BITS + t % entries / phases, words = 0;
        u32 phase = (u32)(t % phases);
        while (position < end && position < bits) step(position, phase), ++words;
        exits[t] = words << 32 | (position < end ? 0 : (position - end) * phases + phase);
    }
}

// f(number, position, phase) for each word of the string, in chunks: before its step.
template <class F, class G>
__device__ void walk_again(u64 bits, u32 phases, u64 chunks, const u64* starts, F step, G f) {
    for (u64 chunk = grid_thread(); chunk < chunks; chunk += grid_threads()) {
        const u64 end = (chunk + 1) * CHUNK_BITS;
        const u32 entry = (u32)starts[chunk] & ((1u << ENTRY_BITS) - 1);
        u64 position = chunk * CHUNK_BITS + entry / phases, number = starts[chunk] >> ENTRY_BITS;
        u32 phase = entry % phases;
        for (; position < end && position < bits; ++number) {
            const u64 at = position;
            const u32 was = phase;
            step(position, phase);
            f(number, at, position, was);
        }
    }
}

// ---- What codes.h calls a Writer, into words that were zero, and a Reader.
struct BitWriter {
    u32* out;
    u64 position;
    __device__ void put(u64 value, u32 bits) {
        put_bits(out, position, value);
        position += bits;
    }
};

struct BitReader {
    const u8* in;
    u64 bytes, position;
    __device__ u32 get(u32 bits) {
        position += bits;
        return load_field(in, bytes, position - bits, bits);
    }
    __device__ u64 used() const { return (position + 7) / 8; }
    __device__ bool overrun() const { return position > 8 * bytes; }
};

// ---- Huffman codes. The whole block calls each of these.

// Lengths of the least total cost. One thread does the merging.
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

__device__ inline void huffman_words(const u8* length, u32* words) {
    const u32 symbol = threadIdx.x, own = length[symbol];
    u32 of_length[LONGEST + 1] = {}, before = 0;
    for (u32 other = 0; other < 256; ++other) {
        ++of_length[length[other]];
        before += other < symbol && length[other] == own;
    }
    words[symbol] = own ? huffman_word(first_code(of_length, own) + before, own) : 0;
    __syncthreads();
}

__device__ inline void huffman_table(const u32* words, u16* table) {
    fill_table(threadIdx.x, words[threadIdx.x], table);
    __syncthreads();
}

#endif
