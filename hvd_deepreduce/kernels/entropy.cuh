// Codes of varying length on the device: Huffman's tables, and a bit string of such codes read in parallel.
#ifndef HVD_DEEPREDUCE_ENTROPY_CUH
#define HVD_DEEPREDUCE_ENTROPY_CUH

#include "device.cuh"

// ---- Reading. Where a code word begins hangs on all before it. So a string is cut into chunks, and a thread for each
// place where a first word may begin in its chunk (the `entries`: bits behind the chunk's first, times phases) walks
// to the chunk's end (walk_all). One thread then follows the right ones from chunk to chunk (walk_join), and a thread
// for each chunk walks once more and writes what it reads.
const u64 CHUNK_BITS = 2048;

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
        u64 position = chunk * CHUNK_BITS + (u32)starts[chunk] / phases, number = starts[chunk] >> 32;
        u32 phase = (u32)starts[chunk] % phases;
        for (; position < end && position < bits; ++number) {
            const u64 at = position;
            const u32 was = phase;
            step(position, phase);
            f(number, at, position, was);
        }
    }
}

// ---- Huffman codes, as in kernels/cpu/huffman.cpp.
const u32 LONGEST = 12, ONLY = 15;

struct HuffmanRoom {
    u64 merged[512], pairs[256];
    u8 leaf[LONGEST][512], order[256];
};

// Lengths of the least total cost, by package-merge. The whole block calls it; one thread does the merging.
__device__ inline void huffman_lengths(const u64* counts, u8* length, HuffmanRoom& room) {
    const u32 symbol = threadIdx.x;
    u32 rank = 0, total;
    for (u32 other = 0; other < 256; ++other)
        rank += counts[other] &&
                (counts[other] < counts[symbol] || (counts[other] == counts[symbol] && other < symbol));
    length[symbol] = 0;
    if (counts[symbol]) room.order[rank] = (u8)symbol;
    block_scan((u32)(counts[symbol] != 0), &total);
    __syncthreads();
    if (threadIdx.x == 0 && total >= 2) {
        const u32 n = total;
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
    __syncthreads();
}

// words[s] = the code word, its first bit lowest | its length << 16. The whole block calls it.
__device__ inline void huffman_words(const u8* length, u32* words) {
    const u32 symbol = threadIdx.x, own = length[symbol];
    u32 of_length[LONGEST + 1] = {}, before = 0;
    for (u32 other = 0; other < 256; ++other) {
        ++of_length[length[other]];
        before += other < symbol && length[other] == own;
    }
    u32 next = 0;
    of_length[0] = 0;
    for (u32 l = 1; l <= own; ++l) next = (next + of_length[l - 1]) << 1;
    u32 word = 0;
    for (u32 i = 0; i < own; ++i) word |= ((next + before) >> i & 1) << (own - 1 - i);
    words[symbol] = own ? word | own << 16 : 0;
    __syncthreads();
}

// table[next LONGEST bits] = symbol | length << 8. The whole block calls it.
__device__ inline void huffman_table(const u32* words, u16* table) {
    const u32 word = words[threadIdx.x] & 0xFFFF, length = words[threadIdx.x] >> 16;
    if (length)
        for (u32 i = word; i < 1u << LONGEST; i += 1u << length) table[i] = (u16)(threadIdx.x | length << 8);
    __syncthreads();
}

// One thread: the lengths as drawn in huffman.cpp, from bit `at` on; the bit behind their last byte. `out` null: only
// that is wanted.
__device__ inline u64 huffman_write_lengths(const u8* length, i32 only, u32* out, u64 at) {
    u32 sum = 0;
    for (i32 s = 0; sum < 1u << LONGEST;) {
        if (s == only || length[s]) {
            if (out) put_bits(out, at, s == only ? ONLY : length[s]);
            sum += s == only ? 1u << LONGEST : 1u << (LONGEST - length[s]);
            at += 4;
            ++s;
            continue;
        }
        u32 run = 1;
        while (run < 16 && length[s + run] == 0 && s + (i32)run != only) ++run;
        if (out) put_bits(out, at + 4, run - 1);
        at += 8;
        s += (i32)run;
    }
    return (at + 7) / 8 * 8;
}

// One thread: the number of bytes that the lengths took, or ERR_VALUE where they make no complete code.
__device__ inline i64 huffman_read_lengths(const u8* in, u64 bytes, u8* length, i32* only) {
    u64 at = 0;
    u32 sum = 0;
    *only = -1;
    for (u32 s = 0; s < 256; ++s) length[s] = 0;
    for (u32 s = 0; sum < 1u << LONGEST;) {
        const u32 l = load_field(in, bytes, at, 4), run = l ? 1 : 1 + load_field(in, bytes, at + 4, 4);
        at += l ? 4 : 8;
        if ((l > LONGEST && (l != ONLY || sum)) || s + run > 256 || at > 8 * bytes) return ERR_VALUE;
        if (l == ONLY) *only = (i32)s;
        if (l && l != ONLY) length[s] = (u8)l;
        sum += l == ONLY ? 1u << LONGEST : l ? 1u << (LONGEST - l) : 0;
        s += run;
    }
    return sum == 1u << LONGEST ? (i64)((at + 7) / 8) : ERR_VALUE;
}

#endif
