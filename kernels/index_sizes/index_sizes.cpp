// The size of each index codec's section, for the choice of the smallest.
#include "index_sizes/sizes.h"

#include "elias_fano/elias_fano.h"
#include "rice/rice.h"

static const u64 BLOCK = 256;

// sizes: bytes of the rice, rle, delta, rice_blocks, elias_fano and rans sections, in this order, for count >= 1
// indices.
//
// Up to SAMPLE indices all sizes but rans's, an estimate, are exact. For more indices, a sample is read: the gaps of
// SAMPLE / BLOCK runs of BLOCK indices, spread evenly and joined into one list, whose sizes are scaled. A run has whole
// blocks of rice_blocks. Only elias_fano's size is then exact, since it depends on the last index alone.
DR_API void dr_index_sizes(const u32* indices, u64 count, u64 numel, u64* sizes) {
    u32 sample[SAMPLE];
    u8 parameters[SAMPLE / RICE_BLOCK];
    const u32* sampled = indices;
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
        sampled = sample, size = SAMPLE, span = next;
    }
    dr_rice_parameter(sampled, size, span, sizes);
    sizes[1] = rle_bytes(sampled, size, numel);
    sizes[2] = delta_bytes(sampled, size);
    sizes[3] = dr_rice_blocks_plan(sampled, size, parameters);
    for (u32 i = 0; i < 4; ++i) sizes[i] = (u64)((double)sizes[i] * ((double)count / (double)size));
    sizes[4] = elias_fano_bytes(indices[count - 1], count, numel);
    sizes[5] = rans_indices_bytes(sampled, size, count);
}
