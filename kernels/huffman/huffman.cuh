// Huffman codes on the device. A whole block calls each function; thread s works on symbol s.
#pragma once

#include "bits/bits.cuh"
#include "huffman/huffman.h"

// Of package-merge, as huffman.cpp explains it. Leaves and pairs are sorted, and so is each list.
struct PackageMerge {
    u64 leaves[THREADS], pairs[THREADS], merged[2 * THREADS];
    u16 place[LONGEST][THREADS];  // of a leaf in the list of each level
};

// Lengths of the least total cost among those of up to LONGEST bits. Symbols from `symbols` on do not occur. An item's
// place in a list is its place among its own kind, and the number of items of the other kind that precede it.
__device__ inline void huffman_lengths(const u64* counts, u32 symbols, u8* length, PackageMerge& room) {
    const u32 s = threadIdx.x;
    const u64 own = s < symbols ? counts[s] : 0;
    u32 rank = 0, leaves, pairs = 0, bits = 0;
    block_scan((u32)(own != 0), &leaves);
    if (own)
        for (u32 other = 0; other < symbols; ++other) {
            const u64 count = counts[other];
            rank += count && (count < own || (count == own && other < s));
        }
    if (own) room.leaves[rank] = own;
    __syncthreads();
    for (u32 level = 0; level < LONGEST; ++level) {
        if (own) {
            const u32 at = rank + (u32)first_not(pairs, [&](u64 i) { return room.pairs[i] < own; });
            room.merged[at] = own;
            room.place[level][rank] = (u16)at;
        }
        if (s < pairs) {
            const u64 price = room.pairs[s];
            room.merged[s + first_not(leaves, [&](u64 i) { return room.leaves[i] <= price; })] = price;
        }
        __syncthreads();
        pairs = (leaves + pairs) / 2;
        if (s < pairs) room.pairs[s] = room.merged[2 * s] + room.merged[2 * s + 1];
        __syncthreads();
    }
    // The cheapest items hold the cheapest leaves, so this needs no other thread.
    u32 taken = leaves < 2 ? 0 : 2 * leaves - 2;
    for (u32 level = LONGEST; level-- > 0 && taken;) {
        const u32 of_leaves = (u32)first_not(leaves, [&](u64 i) { return room.place[level][i] < taken; });
        bits += own && rank < of_leaves;
        taken = 2 * (taken - of_leaves);
    }
    length[s] = (u8)bits;
    __syncthreads();
}

// words[symbol] of the code with these lengths.
__device__ inline void huffman_words(const u8* length, u32* words) {
    __shared__ u32 of_warp[WARPS][LONGEST + 1], of_length[LONGEST + 1];
    const u32 s = threadIdx.x, bits = length[s];
    const u32 same = __match_any_sync(WHOLE_WARP, bits), before = (u32)__popc(same & ((1u << lane_number()) - 1));
    if (s < WARPS * (LONGEST + 1)) of_warp[s / (LONGEST + 1)][s % (LONGEST + 1)] = 0;
    __syncthreads();
    if (before == 0) of_warp[warp_number()][bits] = (u32)__popc(same);
    __syncthreads();
    if (s <= LONGEST) {
        u32 sum = 0;
        for (u32 warp = 0; warp < WARPS; ++warp) {
            const u32 own = of_warp[warp][s];
            of_warp[warp][s] = sum;
            sum += own;
        }
        of_length[s] = sum;
    }
    __syncthreads();
    words[s] = bits ? huffman_word(first_code(of_length, bits) + of_warp[warp_number()][bits] + before, bits) : 0;
    __syncthreads();
}

// table[next LONGEST bits] = symbol | length << 8, for the code of these words.
__device__ inline void huffman_table(const u32* words, u16* table) {
    fill_table(threadIdx.x, words[threadIdx.x], table);
    __syncthreads();
}

// The number of bits of the code lengths, as write_lengths of huffman_cpu.h writes them; and writes them to words of
// zeros from bit `at` on, unless `out` is null. only: the symbol if only one occurs, else -1.
__device__ inline u32 put_lengths(const u8* length, i32 only, u32* out, u64 at) {
    __shared__ u32 occur[WARPS];
    const u32 s = threadIdx.x, own = (i32)s == only ? ONLY : length[s];
    const u32 of_warp = __ballot_sync(WHOLE_WARP, own != 0);
    if (lane_number() == 0) occur[warp_number()] = of_warp;
    __syncthreads();
    // The run of symbols that do not occur around this one: where it begins, and the symbol after it (THREADS: none).
    u32 begin = 0, end = THREADS;
    for (u32 warp = 0; warp < WARPS; ++warp) {
        const u32 low = (1u << lane_number()) - 1;
        const u32 below = occur[warp] & (warp < warp_number() ? ~0u : warp == warp_number() ? low : 0);
        const u32 above = occur[warp] & (warp > warp_number() ? ~0u : warp == warp_number() ? ~low : 0);
        if (below) begin = 32 * warp + 32 - (u32)__clz((i32)below);
        if (above && end == THREADS) end = 32 * warp + (u32)__ffs((i32)above) - 1;
    }
    u32 field = own, width = own ? 4 : 0, total;
    if (!own && end < THREADS && (s - begin) % 16 == 0) field = ((end - s < 16 ? end - s : 16) - 1) << 4, width = 8;
    const u32 before = block_scan(width, &total);
    if (out && width) put_bits(out, at + before, field);
    return total;
}

// How the symbols of a section are written.
struct HuffmanPlan {
    u64 head, bytes;    // of the code lengths; of the section
    u64 sums[4];        // bits of each stream
    i32 only;           // the symbol if only one occurs, else -1
    u32 words[THREADS];
    u8 length[THREADS];
};

// Plans the section of `count` > 0 symbols. counts[stream * THREADS + symbol].
__device__ inline void plan_symbols(const u64* counts, u64 count, HuffmanPlan* plan) {
    __shared__ PackageMerge room;
    __shared__ u64 all[THREADS];
    __shared__ i32 only;
    const u32 s = threadIdx.x;
    if (s == 0) only = -1;
    u64 sum = 0;
    for (u32 k = 0; k < 4; ++k) sum += counts[k * THREADS + s];
    all[s] = sum;
    __syncthreads();
    if (sum == count) only = (i32)s;
    huffman_lengths(all, THREADS, plan->length, room);
    huffman_words(plan->length, plan->words);
    u64 sums[4], bytes = (put_lengths(plan->length, only, nullptr, 0) + 7) / 8;
    for (u32 k = 0; k < 4; ++k) sums[k] = block_sum(counts[k * THREADS + s] * plan->length[s]);
    if (s) return;
    plan->only = only;
    plan->head = bytes;
    if (only < 0 && count >= FOUR_STREAMS) bytes += 12;
    for (u32 k = 0; k < 4; ++k) {
        plan->sums[k] = sums[k];
        bytes += (sums[k] + 7) / 8;
    }
    plan->bytes = bytes;
}

// Calls f(symbol's number, stream) for the symbols of block number `block` of `blocks`.
template <class F>
__device__ void each_symbol(u64 count, u64 block, u64 blocks, F f) {
    const u64 part = part_of(count);
    for (u64 i = block * THREADS + threadIdx.x; i < count; i += blocks * THREADS)
        f(i, (u32)(i >= part) + (u32)(i >= 2 * part) + (u32)(i >= 3 * part));
}

// Counts the symbols symbol(i) of each stream, by block number `block` of `blocks`. counts: as for plan_symbols, zeros
// before the launch.
template <class F>
__device__ void count_symbols(u64 count, u64 block, u64 blocks, u64* counts, F symbol) {
    __shared__ u32 local[4 * THREADS];
    for (u32 k = 0; k < 4; ++k) local[k * THREADS + threadIdx.x] = 0;
    __syncthreads();
    each_symbol(count, block, blocks, [&](u64 i, u32 k) { atomicAdd(local + k * THREADS + symbol(i), 1u); });
    __syncthreads();
    for (u32 k = 0; k < 4; ++k) {
        const u32 own = local[k * THREADS + threadIdx.x];
        if (own) atomicAdd(counts + k * THREADS + threadIdx.x, (u64)own);
    }
    __syncthreads();
}

// Writes the section of `plan` from byte `at` of `out`, words of zeros, on, by several blocks; first: this is one of
// them and the only one for which it is true.
__device__ inline void write_symbols(const u8* symbols, u64 count, const HuffmanPlan* plan, bool first, u64* status,
                                     u64* places_end, u32* out, u64 at) {
    const u64 part = part_of(count);
    u64 to[4], before[4];  // of each stream: its first bit, and the number of bits of all streams before it
    u64 sum = 0, next = 8 * (at + plan->head) + (part < count ? 96 : 0);
    for (u32 k = 0; k < 4; ++k) {
        to[k] = next, before[k] = sum;
        sum += plan->sums[k];
        next += (plan->sums[k] + 7) / 8 * 8;
    }
    if (first) put_lengths(plan->length, plan->only, out, 8 * at);
    if (plan->only >= 0) return;
    if (first && part < count && threadIdx.x < 3)
        put_bits(out, 8 * (at + plan->head) + 32 * threadIdx.x, (plan->sums[threadIdx.x] + 7) / 8);
    each_place(
        count, 0, status, places_end, [=](u64 i) { return (u64)(plan->words[symbols[i]] >> 16); },
        [=](u64 i, u64 place) {
            const u32 k = (u32)(i >= part) + (u32)(i >= 2 * part) + (u32)(i >= 3 * part);
            put_bits(out, to[k] + (place - before[k]), plan->words[symbols[i]] & 0xFFFF);
        });
}
