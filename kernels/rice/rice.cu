// Golomb-Rice code: the CUDA side of rice.cpp, which draws the section.
//
// The section is one bit string in words that were zero: each element sets its low bits and its one. A decoder first
// finds the ones, which give the high bits, and then adds up the low bits.
#include "bits/unary.cuh"
#include "common/index_gaps.cuh"
#include "rice/rice.h"

// sums[b] += the sum of gap >> b, for all b at once: lane b of each warp adds for b, over a run of the gaps.
KERNEL rice_sums(const u32* indices, u64 count, u64* sums) {
    const u64 warps = grid_threads() / 32, run = (count + warps - 1) / warps;
    const u64 begin = grid_thread() / 32 * run, end = begin + run < count ? begin + run : count;
    if (begin >= end) return;
    u64 sum = 0;
    u32 next = begin ? indices[begin - 1] + 1 : 0;
    for (u64 i = begin; i < end; ++i) {
        sum += (indices[i] - next) >> lane_number();
        next = indices[i] + 1;
    }
    atomicAdd(sums + lane_number(), sum);
}

// words: the whole section, zeros before the launch. *end: its number of bits.
KERNEL rice_write(const u32* indices, u64 count, u64 numel, const u64* sums, u64* status, u32* words, u64* end) {
    __shared__ u32 parameter;
    if (threadIdx.x == 0)
        parameter = rice_parameter(count, numel, [=](u32 b, u64* three) {
            three[0] = sums[b ? b - 1 : 0], three[1] = sums[b], three[2] = sums[b < 31 ? b + 1 : 31];
        });
    __syncthreads();
    const u32 b = parameter, mask = (1u << b) - 1;
    if (grid_thread() == 0) put_bits(words, 0, b);
    each_place(
        count, 8 + 8 * field_bytes(count, b), status, end,
        [=](u64 i) { return (u64)(gap_at(indices, i) >> b) + 1; },
        [=](u64 i, u64 place) {
            const u32 gap = gap_at(indices, i);
            put_bits(words, 8 + i * b, gap & mask);
            put_bits(words, place + (gap >> b), 1);
        });
}

// in: the section with its first byte. *ones: how many ones its highs have; it stays 0 if the first byte is no
// parameter or the section is too short for the lows.
KERNEL rice_highs(const u8* in, u64 bytes, u64 count, u64* status, u32* highs, u64* ones) {
    const u32 b = in[0];
    const u64 lows = 1 + field_bytes(count, b);
    if (b > 31 || bytes < lows) return;
    find_highs(in + lows, bytes - lows, count, status, highs, ones);
}

// Sets *error to ERR_TRUNCATED if the section has fewer than `count` gaps, ERR_INDEX if an index is not below numel,
// ERR_VALUE if it continues after the last one, or bits after the lows or the highs are not zeros.
KERNEL rice_join(const u8* in, u64 bytes, u64 count, u64 numel, const u32* highs, const u64* ones, u64* status,
                 u64* end, u32* indices, i32* error) {
    const u32 b = in[0];
    if (b > 31 || *ones < count) {
        if (grid_thread() == 0) *error = b > 31 ? ERR_INDEX : ERR_TRUNCATED;
        return;
    }
    const u64 low_bytes = field_bytes(count, b);
    const auto low = [=](u64 i) { return (u64)load_field(in + 1, bytes - 1, i * b, b); };
    each_place(count, 0, status, end, low, [=](u64 i, u64 before) {
        const u64 index = ((u64)highs[i] << b) + before + low(i) + i;
        indices[i] = (u32)index;
        if (index >= numel || highs[i] == 0xFFFFFFFFu) atomicMin(error, ERR_INDEX);
        if (i + 1 < count) return;
        if (!zeros_follow(in + 1, count * b) || !highs_end(in + 1 + low_bytes, bytes - 1 - low_bytes, count, highs))
            atomicMin(error, ERR_VALUE);
    });
}
