// Delta-binary code on the host, for the kernels that have one in their sections.
#pragma once

#include "common/cpu.h"
#include "delta/delta.h"

DR_API u64 dr_delta_encode(const u32* keys, u64 count, u8* out);
DR_API i64 dr_delta_decode(const u8* in, u64 bytes, u64 count, u64 numel, u8* bits, u32* keys);
