// The checksums of many containers at once, on the device.
#pragma once

#include "common/device.cuh"

// Block number `block` of the `blocks` that check one container of version 2, which begins at any byte. Sets *error to
// ERR_CHECKSUM if its first word is not the checksum of its other words plus `salt`. total[2]: zeros before the launch.
__device__ inline void check_one_of_many(const u8* container, u64 bytes, u32 salt, u64 block, u64 blocks, u32* total,
                                         i32* error) {
    u32 sum = 0;
    for (u64 w = block * THREADS + threadIdx.x; 4 * w < (bytes + 7) / 8 * 8; w += blocks * THREADS)
        if (w) sum += checksum_word(load_field(container, bytes, 32 * w, 32), (u32)w);
    sum = block_sum(sum);
    if (threadIdx.x) return;
    atomicAdd(total, sum);
    __threadfence();
    // The last block to arrive sees the sum of all blocks.
    if (atomicAdd(total + 1, 1u) + 1 == (u32)blocks &&
        atomicAdd(total, 0u) + salt != load_field(container, bytes, 0, 32))
        atomicMin(error, ERR_CHECKSUM);
}
