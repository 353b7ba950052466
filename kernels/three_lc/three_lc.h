// 3LC (Lim et al. 2019, sections 3.2 and 3.3): ternary digits, five to a byte (ternary/trits.h), with runs of ALL_ZERO
// in one byte each. common.h has the quantization of one value, three_lc_digit.
//
//     byte:   0 .. 242   five digits                    243 .. 255   a run of 2 .. 14 bytes of ALL_ZERO
//
// A longer run is cut into runs of LONGEST_RUN from its first byte on, and a rest.
#ifndef HVD_DEEPREDUCE_THREE_LC_H
#define HVD_DEEPREDUCE_THREE_LC_H

#include "ternary/trits.h"

const u32 LONGEST_RUN = 14;

// The byte of a run of 2 .. LONGEST_RUN bytes.
DR_HD u8 run_byte(u64 run) { return (u8)(LARGEST_BYTE - 1 + run); }

// How many bytes of packed digits a byte encodes.
DR_HD u64 run_length(u32 byte) { return byte > LARGEST_BYTE ? byte - (u64)(LARGEST_BYTE - 1) : 1; }

// The value of a digit.
DR_HD float three_lc_value(u32 digit, float m) { return m * (float)((i32)digit - 1); }

#endif
