// Reading a section of rice_blocks on the device: for one section (blocks.cu), and for those of many containers
// (fused.cu).
#pragma once

#include "bits/unary.cuh"
#include "common/index_gaps.cuh"
#include "rice/rice.h"

// The parameter of block j; 0 past the end of the section.
__device__ __forceinline__ u32 rice_block_parameter(const u8* in, u64 bytes, u64 j) {
    return load_field(in, bytes, j * RICE_FIELD, RICE_FIELD);
}

// places[j]: the byte where the lows of block j begin. *highs: the byte where the highs begin. Sets *error to ERR_VALUE
// if bits after the parameters are not zeros.
__device__ inline void read_rice_places(const u8* in, u64 bytes, u64 count, u64* status, u64* places, u64* highs,
                                        i32* error) {
    const u64 blocks = rice_block_count(count);
    each_place(
        blocks, rice_block_fields(count), status, highs,
        [=](u64 j) { return field_bytes(rice_block_size(count, j), rice_block_parameter(in, bytes, j)); },
        [=](u64 j, u64 place) {
            places[j] = place;
            if (j + 1 == blocks && rice_block_fields(count) <= bytes && !zeros_follow(in, blocks * RICE_FIELD))
                atomicMin(error, ERR_VALUE);
        });
}

// *ones: how many ones the highs have, which begin at the byte `begin`; it stays 0 if the section is too short for the
// lows.
__device__ inline void find_rice_blocks_highs(const u8* in, u64 bytes, u64 count, u64 begin, u64* status, u32* highs,
                                              u64* ones) {
    if (bytes < begin) return;
    find_highs(in + begin, bytes - begin, count, status, highs, ones);
}

// The indices, of a section that has at least `count` ones. Sets *error to ERR_INDEX if an index is not below numel,
// ERR_VALUE if the section continues after the last one, or bits after the lows or the highs are not zeros.
__device__ inline void join_rice_blocks(const u8* in, u64 bytes, u64 count, u64 numel, const u64* places, u64 begin,
                                        const u32* highs, u64* status, u64* end, u32* indices, i32* error) {
    const auto step = [=](u64 i) {  // the gap and 1, or beyond every index
        const u64 j = i / RICE_BLOCK;
        const u32 b = rice_block_parameter(in, bytes, j);
        const u64 high = highs[i] - (i ? highs[i - 1] : 0);
        if (highs[i] == 0xFFFFFFFFu || high > numel >> b) return numel + 1;
        return (high << b) + load_field(in + places[j], bytes - places[j], i % RICE_BLOCK * b, b) + 1;
    };
    each_place(count, 0, status, end, step, [=](u64 i, u64 before) {
        const u64 index = before + step(i) - 1, j = i / RICE_BLOCK;
        indices[i] = (u32)index;
        if (index >= numel) atomicMin(error, ERR_INDEX);
        if (i + 1 == count || i % RICE_BLOCK == RICE_BLOCK - 1) {
            const u32 b = rice_block_parameter(in, bytes, j);
            if (!zeros_follow(in + places[j], (u64)rice_block_size(count, j) * b)) atomicMin(error, ERR_VALUE);
        }
        if (i + 1 == count && !highs_end(in + begin, bytes - begin, count, highs)) atomicMin(error, ERR_VALUE);
    });
}
