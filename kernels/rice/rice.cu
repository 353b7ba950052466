// Plain low bits and unary high bits: the CUDA side of kernels/rice/rice.cpp and elias_fano.cpp.
//
// A section is one bit string in words that were zero: every element sets its low bits and its one. Decoding finds the
// ones first, which give the high bits, and then adds the lows up.
#include "entropy/codes.h"
#include "common/device.cuh"

// sums[b] += the sum of gap >> b, for all b at once: lane b of every warp adds for b, over a run of the gaps.
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

// *end: the section's bits. words: zeros.
KERNEL rice_write(const u32* indices, u64 count, u64 numel, const u64* sums, u64* status, u32* words, u64* end) {
    __shared__ u32 parameter;
    if (threadIdx.x == 0)
        parameter = rice_parameter(count, numel, [=](u32 b, u64* three) {
            three[0] = sums[b ? b - 1 : 0], three[1] = sums[b], three[2] = sums[b < 31 ? b + 1 : 31];
        });
    __syncthreads();
    const u32 b = parameter, mask = (1u << b) - 1;
    if (grid_thread() == 0) put_bits(words, 0, b);
    const auto gap = [=](u64 i) { return i ? indices[i] - indices[i - 1] - 1 : indices[0]; };
    each_place(
        count, 8 + (count * b + 7) / 8 * 8, status, end, [=](u64 i) { return (u64)(gap(i) >> b) + 1; },
        [=](u64 i, u64 place) {
            const u32 g = gap(i);
            put_bits(words, 8 + i * b, g & mask);
            put_bits(words, place + (g >> b), 1);
        });
}

// highs[i]: the number of zeros before the one of element i; what is beyond 32 bits becomes 2^32 - 1.
__device__ void find_highs(const u8* in, u64 bytes, u64 count, u64* status, u32* highs, u64* found) {
    each_one(in, bytes, count, status, found, [=](u64 number, u64 place) {
        const u64 high = place - number;
        highs[number] = high >> 32 ? 0xFFFFFFFFu : (u32)high;
    });
}

// Whether the bits behind the last one are an encoder's.
__device__ bool highs_end(const u8* in, u64 bytes, u64 count, const u32* highs) {
    return ends_at(in, bytes, (u64)highs[count - 1] + count);
}

// in: the section with its first byte. *found stays 0 where that is bad.
KERNEL rice_highs(const u8* in, u64 bytes, u64 count, u64* status, u32* highs, u64* found) {
    const u64 b = in[0], lows = 1 + (count * b + 7) / 8;
    if (b > 31 || bytes < lows) return;
    find_highs(in + lows, bytes - lows, count, status, highs, found);
}

KERNEL rice_join(const u8* in, u64 bytes, u64 count, u64 numel, const u32* highs, const u64* found, u64* status,
                 u64* end, u32* indices, i32* error) {
    const u32 b = in[0];
    if (b > 31 || *found < count) {
        if (grid_thread() == 0) *error = b > 31 ? ERR_INDEX : ERR_TRUNCATED;
        return;
    }
    const u64 low_bytes = (count * b + 7) / 8;
    const auto low = [=](u64 i) { return (u64)load_field(in + 1, bytes - 1, i * b, b); };
    each_place(count, 0, status, end, low, [=](u64 i, u64 before) {
        const u64 index = ((u64)highs[i] << b) + before + low(i) + i;
        indices[i] = (u32)index;
        if (index >= numel || highs[i] == 0xFFFFFFFFu) atomicMin(error, ERR_INDEX);
        if (i + 1 == count && !highs_end(in + 1 + low_bytes, bytes - 1 - low_bytes, count, highs))
            atomicMin(error, ERR_VALUE);
    });
}

// words: zeros.
KERNEL elias_fano_write(const u32* indices, u64 count, u32 l, u32* words) {
    const u64 highs = (count * l + 7) / 8 * 8;
    const u32 mask = (u32)((1ull << l) - 1);
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        put_bits(words, i * l, indices[i] & mask);
        put_bits(words, highs + (indices[i] >> l) + i, 1);
    }
}

KERNEL elias_fano_highs(const u8* in, u64 bytes, u64 count, u64* status, u32* highs, u64* found) {
    find_highs(in, bytes, count, status, highs, found);
}

// in: the section; its highs begin at `at`.
KERNEL elias_fano_join(const u8* in, u64 bytes, u64 at, u64 count, u64 numel, u32 l, const u32* highs, const u64* found,
                       u32* indices, i32* error) {
    if (*found < count) {
        if (grid_thread() == 0) *error = ERR_TRUNCATED;
        return;
    }
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u64 index = (u64)highs[i] << l | load_field(in, bytes, i * l, l);
        const u64 before = i ? (u64)highs[i - 1] << l | load_field(in, bytes, (i - 1) * l, l) : 0;
        indices[i] = (u32)index;
        if (index >= numel || (i && index <= before)) atomicMin(error, ERR_INDEX);
        if (i + 1 == count && !highs_end(in + at, bytes - at, count, highs)) atomicMin(error, ERR_VALUE);
    }
}
