// The size of each lossless section, for the choice of the smallest.
#include "index_sizes/sizes.h"

extern "C" u32 dr_rice_parameter(const u32* indices, u64 count, u64 numel, u64* highs);

static const u64 BLOCK = 256;

// sizes: bytes of the rice, rle, delta, elias_fano and rans sections, in this order. Exact but for rans where there are
// up to SAMPLE indices, one or more. Beyond, the gaps of SAMPLE / 256 runs of 256 indices, spread evenly, are put one
// behind the other, and their sizes scaled; elias_fano's hangs on the last index alone and stays exact.
DR_API void dr_index_sizes(const u32* indices, u64 count, u64 numel, u64* sizes) {
    u32 sample[SAMPLE];
    const u32* looked_at = indices;
    u64 size = count, span = numel;
    if (count > SAMPLE) {
        const u64 runs = SAMPLE / BLOCK;
        u32 next = 0;
        for (u64 run = 0; run < runs; ++run) {
            const u64 begin = run * (count - BLOCK) / (runs - 1);
            for (u64 i = 0; i < BLOCK; ++i) {
                const u32 before = begin + i ? indices[begin + i - 1] + 1 : 0;
                next += indices[begin + i] - before;
                sample[run * BLOCK + i] = next++;
            }
        }
        looked_at = sample, size = SAMPLE, span = next;
    }
    u64 highs;
    const u64 b = dr_rice_parameter(looked_at, size, span, &highs);
    sizes[0] = 1 + (size * b + 7) / 8 + (highs + size + 7) / 8;
    sizes[1] = rle_bytes(looked_at, size, numel);
    sizes[2] = delta_bytes(looked_at, size);
    for (u32 i = 0; i < 3; ++i) sizes[i] = (u64)((double)sizes[i] * ((double)count / (double)size));
    sizes[3] = elias_fano_bytes(indices, count, numel);
    sizes[4] = rans_indices_bytes(looked_at, size, count);
}
