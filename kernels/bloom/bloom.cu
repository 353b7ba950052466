// Bloom filters that are queried 64 elements at a time: the CUDA side of bloom.cpp.
#include "bloom/bloom.h"
#include "common/device.cuh"

// A thread for each index and hash function. filter: zeros before the launch.
KERNEL bloom_insert(const u32* indices, u64 count, u32 hashes, u32 seed, u32 parameter, u32 step, u32 bytes,
                    u32* filter) {
    const BloomSalts salts = bloom_salts(seed, parameter, step, bytes);
    for (u64 t = grid_thread(); t < count * hashes; t += grid_threads()) {
        const u32 index = indices[t / hashes];
        const u32 first = bloom_first(index >> 6, salts.first), second = bloom_second(first, salts.second);
        const u32 bit = bloom_bit(index, bloom_probe(first, second, (u32)(t % hashes)), bytes);
        atomicOr(filter + (bit >> 5), 1u << (bit & 31));
    }
}

// words: the filter, whose address may be any, and its first 12 bytes again after it, so that a window is read as
// words.
KERNEL bloom_wrap(const u8* filter, u32 bytes, u32* words) {
    const u64 total = ((u64)bytes + 15) / 4;
    for (u64 w = grid_thread(); w < total; w += grid_threads()) {
        u32 word = 0;
        for (u32 j = 0; j < 4; ++j) word |= (u32)filter[(4 * w + j) % bytes] << (8 * j);
        words[w] = word;
    }
}

// Bit i of `positives`, one u64 per 64 elements: whether the filter holds element i. *found: how many it holds.
KERNEL bloom_query(const u32* words, u32 bytes, u32 hashes, u32 seed, u32 parameter, u32 step, u64 numel,
                   u64* positives, u64* found) {
    const BloomSalts salts = bloom_salts(seed, parameter, step, bytes);
    const u64 blocks = (numel + 63) / 64;
    u32 count = 0;
    for (u64 b = grid_thread(); b < blocks; b += grid_threads()) {
        const u32 first = bloom_first((u32)b, salts.first), second = bloom_second(first, salts.second);
        u64 held = b + 1 == blocks && numel % 64 ? (1ull << numel % 64) - 1 : ~0ull;
        for (u32 j = 0; j < hashes && held; ++j) {
            const u32 probe = bloom_probe(first, second, j), at = bloom_byte(probe, bytes), turn = probe & 63;
            const u32* word = words + at / 4;
            const u32 shift = 8 * (at & 3);
            u64 window = ((u64)word[1] << 32 | word[0]) >> shift;
            if (shift) window |= (u64)word[2] << (64 - shift);
            held &= window >> turn | window << ((64 - turn) & 63);
        }
        positives[b] = held;
        count += (u32)__popcll(held);
    }
    count = block_sum(count);
    if (threadIdx.x == 0 && count) atomicAdd(found, (u64)count);
}
