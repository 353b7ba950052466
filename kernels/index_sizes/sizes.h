// The bytes that each index codec's section takes, for index_sizes.cpp.
#pragma once

#include "common/cpu.h"

const u64 SAMPLE = 8192;  // the most indices that index_sizes.cpp reads

u64 delta_bytes(const u32* keys, u64 count);
u64 rle_bytes(const u32* indices, u64 count, u64 numel);
DR_API u32 dr_rice_parameter(const u32* indices, u64 count, u64 numel, u64* bytes);
DR_API u64 dr_rice_blocks_plan(const u32* indices, u64 count, u8* parameters);

// An estimate, from their entropy, for `whole` indices of which these `count`, at most SAMPLE, are a sample.
u64 rans_indices_bytes(const u32* indices, u64 count, u64 whole);
