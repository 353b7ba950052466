// 3LC (Lim et al. 2019, sections 3.2 and 3.3): ternary digits, five to a byte (ternary/trits.h), with runs of ALL_ZERO
// in one byte each.
//
//     byte:   0 .. 242   five digits                    243 .. 255   a run of 2 .. 14 bytes of ALL_ZERO
//
// A longer run is cut into runs of LONGEST_RUN from its first byte on, and a rest.
#pragma once

#include "ternary/trits.h"

const u32 LONGEST_RUN = 14;

// The byte of a run of 2 .. LONGEST_RUN bytes.
DR_HD u8 run_byte(u64 run) { return (u8)(LARGEST_BYTE - 1 + run); }

// How many bytes of packed digits a byte encodes.
DR_HD u64 run_length(u32 byte) { return byte > LARGEST_BYTE ? byte - (u64)(LARGEST_BYTE - 1) : 1; }

// The value of a digit.
DR_HD float three_lc_value(u32 digit, float m) { return m * (float)((i32)digit - 1); }

// 3LC's three-value quantization, round(value / m) + 1, a half away from zero (Lim et al. 2019, section 3.1). Written
// without the division: |value| / m >= 1/2 where |value| >= m - |value|, which is exact at the border.
DR_HD u32 three_lc_digit(float value, float m) {
    const float magnitude = value < 0.0f ? -value : value;
    const i32 sign = value < 0.0f ? -1 : 1;
    const i32 level = magnitude >= m - magnitude ? sign : 0;
    return (u32)(1 + (magnitude > 0.0f ? level : 0));
}
