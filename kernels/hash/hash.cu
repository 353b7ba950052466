// The 64-bit hash of parts of an array: the CUDA side of hash.cpp.
#include "common/device.cuh"
#include "hash/lanes.h"

// rows: | first u32 | bytes, a multiple of 4 | of each part. sums[8] of each part: of its lanes, zeros before the launch.
// Each part has `each` blocks. Zeros fill it to a whole stripe.
KERNEL hash_parts(const u32* data, const u64* rows, u64 each, u64* sums) {
    const u64 part = blockIdx.x / each, count = rows[2 * part + 1] / 4;
    const u32* in = data + rows[2 * part];
    const u64 words = (count + HASH_STRIPE / 4 - 1) / (HASH_STRIPE / 4) * HASH_LANES;
    // Strides are multiples of HASH_LANES, so all words of a thread are of one lane.
    const u64 lane = threadIdx.x % HASH_LANES, first = hash_key(lane);
    u64 sum = 0;
    for (u64 w = blockIdx.x % each * THREADS + threadIdx.x; w < words; w += each * THREADS) {
        const u64 low = 2 * w < count ? in[2 * w] : 0, high = 2 * w + 1 < count ? in[2 * w + 1] : 0;
        sum += hash_term(low | high << 32, first + w / HASH_LANES * HASH_STEP);
    }
    for (u32 half = 16; half >= HASH_LANES; half /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, half);
    if (lane_number() < HASH_LANES && sum) atomicAdd(sums + HASH_LANES * part + lane, sum);
}
