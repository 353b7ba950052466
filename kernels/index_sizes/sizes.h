// What the index codecs tell auto.cpp: the bytes that a section of these indices takes.
#ifndef HVD_DEEPREDUCE_SIZES_H
#define HVD_DEEPREDUCE_SIZES_H

#include "common/cpu.h"

const u64 SAMPLE = 8192;  // the most indices that auto.cpp looks at

u64 delta_bytes(const u32* keys, u64 count);
u64 rle_bytes(const u32* indices, u64 count, u64 numel);
u64 elias_fano_bytes(const u32* indices, u64 count, u64 numel);

// Of `whole` indices that are like these `count`, which are up to SAMPLE; estimated from their entropy.
u64 rans_indices_bytes(const u32* indices, u64 count, u64 whole);

#endif
