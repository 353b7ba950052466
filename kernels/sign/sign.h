// Signs, a bit each: bit i % 8 of byte i / 8 belongs to value i.
#pragma once

#include "bits/bits.h"

// The sign of value i, in the place that a float32 has it.
DR_HD u32 sign_bit(const u8* signs, u64 i) { return (u32)(signs[i >> 3] >> (i & 7) & 1) << 31; }
