// Random-k: the CUDA side of random.h.
#include "common/device.cuh"
#include "random/random.h"

// Sets the bits of the images of first .. first + count - 1. bitmap: zeros before the launch.
KERNEL random_bits(u64 numel, u64 first, u64 count, u32 seed, u32 parameter, u32 step, u32* bitmap) {
    const Feistel key = random_permutation(numel, seed, parameter, step);
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 index = feistel_permute((u32)(first + i), key);
        atomicOr(bitmap + (index >> 5), 1u << (index & 31));
    }
}
