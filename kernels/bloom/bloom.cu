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

// Filters of several containers, as the host knows them. Places are bytes of `data`, words of `words` and of `scratch`,
// and elements of `indices`. Each filter has `each` blocks of every grid. The same in ops/bloom.py.
struct Filter {
    u64 at, bytes, hashes, count;
    u64 words;   // | the filter and its first 12 bytes again, so that a window is read as words |
    u64 first;   // of its indices
    u64 found;   // | positives | positives |: zeros before the launches
    u64 status;  // of each_one
};
__device__ __forceinline__ const Filter& filter_of(const u64* filters, u64 each) {
    return ((const Filter*)filters)[blockIdx.x / each];
}

// The address of a filter may be any.
KERNEL bloom_wrap(const u8* data, const u64* filters, u64 each, u32* words) {
    const Filter& filter = filter_of(filters, each);
    const u8* from = data + filter.at;
    const u64 total = (filter.bytes + 15) / 4;
    for (u64 w = blockIdx.x % each * THREADS + threadIdx.x; w < total; w += each * THREADS) {
        u32 word = 0;
        for (u32 j = 0; j < 4; ++j) {
            u64 byte = 4 * w + j;
            while (byte >= filter.bytes) byte -= filter.bytes;
            word |= (u32)from[byte] << (8 * j);
        }
        words[filter.words + w] = word;
    }
}

// Bit i of a filter's `positives`, one u64 per 64 elements: whether the filter holds element i.
KERNEL bloom_query(const u32* words, const u64* filters, u64 each, u32 seed, u32 parameter, u32 step, u64 numel,
                   u64* positives, u64* scratch) {
    const Filter& filter = filter_of(filters, each);
    const u32 bytes = (u32)filter.bytes, hashes = (u32)filter.hashes;
    const BloomSalts salts = bloom_salts(seed, parameter, step, bytes);
    const u64 blocks = (numel + 63) / 64;
    words += filter.words, positives += blockIdx.x / each * blocks;
    u32 count = 0;
    for (u64 b = blockIdx.x % each * THREADS + threadIdx.x; b < blocks; b += each * THREADS) {
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
    if (threadIdx.x == 0 && count) atomicAdd(scratch + filter.found, (u64)count);
}

// The indices of the positives, of filters whose `count` is that of all positives. Sets *error to ERR_INDEX for another
// number of them.
KERNEL bloom_find(const u64* positives, const u64* filters, u64 each, u64 numel, u64* scratch, u32* indices,
                  i32* error) {
    const Filter& filter = filter_of(filters, each);
    const u64 bytes = (numel + 63) / 64 * 8;
    if (blockIdx.x % each == 0 && threadIdx.x == 0 && scratch[filter.found] != filter.count) atomicMin(error, ERR_INDEX);
    each_one((const u8*)positives + blockIdx.x / each * bytes, bytes, filter.count, scratch + filter.status,
             scratch + filter.found + 1,
             [=](u64 number, u64 place) { indices[filter.first + number] = (u32)place; });
}
