// Keys as their gaps, in one to four bytes each (SKCompress, section 5.1):
//
//     | lengths: 2 bits each, to a whole byte; the number of bytes less one | gaps: that many bytes each |
//
// gap_i = key_i - key_{i-1} - 1, key_{-1} = -1.
#pragma once

#include "bits/bits.h"

// The bytes of the lengths.
DR_HD u64 length_bytes(u64 count) { return (count + 3) / 4; }

// The bytes of a gap.
DR_HD u32 gap_bytes(u32 gap) { return (bit_length(gap | 1) - 1) / 8 + 1; }
