// Ternary digits (trits), five to a byte. The n digits 0, 1, 2 (for -1, 0, 1) are cut into five parts of m = ceil(n /
// 5). Byte j holds digit j of each part; a part that has ended counts as ones:
//
//     digits:   | part 0, m digits | part 1 | part 2 | part 3 | part 4, may be shorter |
//     byte j  = 81 * digit[j] + 27 * digit[m + j] + 9 * digit[2m + j] + 3 * digit[3m + j] + digit[4m + j]
//
// A byte is 0 .. 242; 121 is five ones, so five zero values.
#pragma once

#include "common/common.h"

const u32 ALL_ZERO = 121, LARGEST_BYTE = 242;

// m: the number of bytes, and of digits in a part.
DR_HD u64 trit_bytes(u64 count) { return (count + 4) / 5; }
