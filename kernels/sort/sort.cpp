// Sorts float32 values.
#include "sort/radix.h"

// A pair is | ~key (32 bits) | index (32 bits) |, where the unsigned key orders as the float does: a float with the
// sign bit set is complemented, another gets its sign bit set. The complement of the key puts the largest first. The
// sort is stable and the pairs begin in the order of their indices, so equal values stay in that order.
static inline u64 pair_of(float value, u64 index) {
    value += 0.0f;  // -0 counts as 0
    u32 bits;
    std::memcpy(&bits, &value, 4);
    const u32 key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)~key << 32 | index;
}

static inline float value_of(u64 pair) {
    const u32 key = ~(u32)(pair >> 32);
    const u32 bits = key >> 31 ? key & 0x7FFFFFFFu : ~key;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// sorted: the values from the largest down; order: where each stood. scratch: 2 * count words. count < 2^32.
DR_API void dr_sort_values(const float* values, u64 count, u64* scratch, float* sorted, u32* order) {
    for (u64 i = 0; i < count; ++i) scratch[i] = pair_of(values[i], i);
    const u64* const pairs = radix_sort(scratch, scratch + count, count, 32, 64);
    for (u64 i = 0; i < count; ++i) {
        sorted[i] = value_of(pairs[i]);
        order[i] = (u32)pairs[i];
    }
}
