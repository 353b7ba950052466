// Pairs to be sorted by their upper half: what the host and the device share.
//
//     a value's pair:   | ~key (32 bits) | index (32 bits) |
//
// The unsigned key orders as the float does: a float with the sign bit set is complemented, another gets its sign bit
// set. The complement of the key puts the largest value first. The sort is stable and the pairs are in the order
// of their indices, so equal values keep their order.
#pragma once

#include "common/common.h"

union FloatBits {
    float value;
    u32 bits;
};

DR_HD u64 value_pair(float value, u64 index) {
    FloatBits x;
    x.value = value + 0.0f;  // -0 counts as 0
    const u32 key = x.bits >> 31 ? ~x.bits : x.bits | 0x80000000u;
    return (u64)~key << 32 | index;
}

DR_HD float value_of_pair(u64 pair) {
    const u32 key = ~(u32)(pair >> 32);
    FloatBits x;
    x.bits = key >> 31 ? key & 0x7FFFFFFFu : ~key;
    return x.value;
}
