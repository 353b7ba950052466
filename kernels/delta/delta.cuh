// Delta-binary code on the device: the encoder.
#pragma once

#include "delta/delta.h"
#include "huffman/huffman.cuh"

__device__ __forceinline__ u32 delta_of(const u32* keys, u64 i) { return i ? keys[i] - keys[i - 1] : keys[0]; }

// lengths[l]: the number of deltas of l bits, 0 .. 32; zeros before the launch. By block number `block` of `blocks`.
__device__ inline void count_deltas(const u32* keys, u64 count, u64 block, u64 blocks, u64* lengths) {
    __shared__ u32 local[33];
    if (threadIdx.x < 33) local[threadIdx.x] = 0;
    __syncthreads();
    for (u64 i = block * THREADS + threadIdx.x; i < count; i += blocks * THREADS)
        atomicAdd(local + delta_length(delta_of(keys, i)), 1u);
    __syncthreads();
    if (threadIdx.x < 33 && local[threadIdx.x]) atomicAdd(lengths + threadIdx.x, (u64)local[threadIdx.x]);
}

// How the keys of a section are written.
struct DeltaPlan {
    u64 prefixes, deltas;  // the bits where they begin
    u64 bits;              // of the whole section
    u32 word[33];          // delta_word of a delta of so many bits
    u32 first;             // the first byte
    i32 only;              // the prefix if only one occurs, else -1
    u8 length[THREADS];    // of the prefixes' code words, if they are Huffman coded
};
static_assert(sizeof(DeltaPlan) == 53 * sizeof(u64), "the size that ops/delta.py and ops/sketch.py allocate");

// Plans the smallest section, as delta.cpp chooses it, for `count` deltas of which lengths[l] have l bits. A whole block
// calls it.
__device__ inline void plan_deltas(const u64* lengths, u64 count, DeltaPlan* plan) {
    __shared__ PackageMerge room;
    __shared__ u64 counts[THREADS];
    __shared__ u32 words[THREADS];
    __shared__ u8 length[THREADS];
    __shared__ i32 only;
    const u32 s = threadIdx.x;
    const u64 of_length = s >= 1 && s <= 32 ? lengths[s] : 0;
    u64 best = NOWHERE, prefixes = 0, deltas = 0;
    u32 log2_m = 0;
    bool coded = false;
    u8 own_length = 0;
    i32 best_only = -1;
    for (u32 way = 1; way <= 4; ++way) {
        counts[s] = 0;
        if (s == 0) only = -1;
        __syncthreads();
        const u32 n = s >= 1 && s <= 32 ? intervals(s, way) : 1;
        if (of_length) atomicAdd(counts + n - 1, of_length);
        const u64 delta_bits = (block_sum(of_length * n << (5 - way)) + 7) / 8 * 8;
        if (counts[s] == count) only = (i32)s;
        huffman_lengths(counts, 16, length, room);
        const u64 coded_bits = (block_sum(counts[s] * length[s]) + 7) / 8 * 8;
        const u64 head = 8 + (put_lengths(length, only, nullptr, 0) + 7) / 8 * 8;
        const u64 plain = 8 + (count * way + 7) / 8 * 8;
        if (plain + delta_bits < best || (plain + delta_bits == best && coded))
            best = plain + delta_bits, prefixes = 8, deltas = plain, log2_m = way, coded = false;
        if (head + coded_bits + delta_bits < best) {
            best = head + coded_bits + delta_bits, prefixes = head, deltas = head + coded_bits;
            log2_m = way, coded = true, own_length = length[s], best_only = only;
        }
        __syncthreads();
    }
    length[s] = coded ? own_length : 0;
    __syncthreads();
    huffman_words(length, words);
    plan->length[s] = length[s];
    if (s >= 1 && s <= 32) plan->word[s] = delta_word(s, log2_m, coded ? words : nullptr);
    if (s) return;
    plan->prefixes = prefixes, plan->deltas = deltas, plan->bits = best;
    plan->first = log2_m | (coded ? 16 : 0), plan->only = best_only;
}

// Writes the prefixes or the deltas of a section from byte `at` of `out`, words of zeros, on, by several blocks; first:
// this is one of them, and writes the head, too.
__device__ inline void write_deltas(const u32* keys, u64 count, const DeltaPlan* plan, bool prefixes, bool first,
                                    u64* status, u64* end, u32* out, u64 at) {
    if (first) {
        if (plan->first & 16) put_lengths(plan->length, plan->only, out, 8 * at + 8);
        if (threadIdx.x == 0) put_bits(out, 8 * at, plan->first);
    }
    const auto word = [=](u64 i) { return plan->word[delta_length(delta_of(keys, i))]; };
    if (prefixes)
        each_place(
            count, 8 * at + plan->prefixes, status, end, [=](u64 i) { return (u64)(word(i) >> 16 & 255); },
            [=](u64 i, u64 place) { put_bits(out, place, word(i) & 0xFFFF); });
    else
        each_place(
            count, 8 * at + plan->deltas, status, end, [=](u64 i) { return (u64)(word(i) >> 24); },
            [=](u64 i, u64 place) { put_bits(out, place, delta_of(keys, i)); });
}
