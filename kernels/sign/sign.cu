// Signs, a bit each: the CUDA side of kernels/sign/sign.cpp.
#include "buckets/buckets.h"
#include "common/device.cuh"
#include "sign/sign.h"

// A warp takes a word. Lanes past the last value vote too, so that the whole warp is at the ballot.
KERNEL sign_encode(const float* values, u64 count, u32* words) {
    const u64 total = (count + 31) / 32;
    for (u64 w = grid_thread() / 32; w < total; w += grid_threads() / 32) {
        const u64 i = 32 * w + lane_number();
        const u32 word = __ballot_sync(WHOLE_WARP, i < count && values[i] < 0.0f);
        if (lane_number() == 0) words[w] = word;
    }
}

KERNEL sign_decode(const u8* signs, const float* scales, u64 count, u64 bucket_size, float* values, i32* error) {
    const u32 size = (u32)bucket_size;
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const float scale = scales[(u32)i / size];
        bad |= !valid_scale(scale);
        values[i] = __uint_as_float(bits_of(scale + 0.0f) | sign_bit(signs, i));  // -0.0 becomes 0.0
    }
    if (grid_thread() == 0) bad |= !zeros_follow(signs, count);
    if (bad) atomicMin(error, ERR_VALUE);
}
