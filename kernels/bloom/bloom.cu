// A Bloom filter whose universe is queried 64 elements at a time: the CUDA side of kernels/bloom/bloom.cpp.
#include "common/device.cuh"

struct Salts {
    u32 s0, s1;
};

__device__ __forceinline__ Salts salts_of(u32 seed, u32 parameter, u32 step, u32 bytes) {
    const Philox4 salt = philox4x32(seed, parameter, bytes, step, STREAM_POLICY, 1);
    return {salt.x, salt.y};
}

// A thread an index and hash function. filter: zeros.
KERNEL bloom_insert(const u32* indices, u64 count, u32 hashes, u32 seed, u32 parameter, u32 step, u32 bytes,
                    u32* filter) {
    const Salts salts = salts_of(seed, parameter, step, bytes);
    for (u64 t = grid_thread(); t < count * hashes; t += grid_threads()) {
        const u32 index = indices[t / hashes];
        const u32 first = bloom_first(index >> 6, salts.s0), second = bloom_second(first, salts.s1);
        const u32 bit = bloom_bit(index, bloom_probe(first, second, (u32)(t % hashes)), bytes);
        atomicOr(filter + (bit >> 5), 1u << (bit & 31));
    }
}

// The filter, whose bytes may begin anywhere, as words with the first 12 bytes again behind the last.
KERNEL bloom_wrap(const u8* filter, u32 bytes, u32* words) {
    const u64 total = ((u64)bytes + 15) / 4;
    for (u64 w = grid_thread(); w < total; w += grid_threads()) {
        u32 word = 0;
        for (u32 j = 0; j < 4; ++j) word |= (u32)filter[(4 * w + j) % bytes] << (8 * j);
        words[w] = word;
    }
}

// Bit i of `positives` (a word for 64 elements): whether the filter holds element i. *found: how many it holds.
KERNEL bloom_query(const u32* words, u32 bytes, u32 hashes, u32 seed, u32 parameter, u32 step, u64 numel,
                   u64* positives, u64* found) {
    const Salts salts = salts_of(seed, parameter, step, bytes);
    const u64 blocks = (numel + 63) / 64;
    u32 own = 0;
    for (u64 b = grid_thread(); b < blocks; b += grid_threads()) {
        const u32 first = bloom_first((u32)b, salts.s0), second = bloom_second(first, salts.s1);
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
        own += (u32)__popcll(held);
    }
    own = block_sum(own);
    if (threadIdx.x == 0 && own) atomicAdd(found, (u64)own);
}

// Those of `from` whose places have no bit in `dropped`, in order.
KERNEL keep_others(const u32* from, u64 count, const u32* dropped, u64* status, u64* kept, u32* out, u64 room) {
    const auto keeps = [=](u64 i) { return (u64)(~dropped[i >> 5] >> (i & 31) & 1); };
    each_place(count, 0, status, kept, keeps, [=](u64 i, u64 place) {
        if (keeps(i) && place < room) out[place] = from[i];
    });
}
