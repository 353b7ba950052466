// Sorts float32 values.
#include "sort/pairs.h"
#include "sort/radix.h"

// sorted: the values from the largest down. order: the place of each in `values`. scratch: 2 * count words. count <
// 2^32.
DR_API void dr_sort_values(const float* values, u64 count, u64* scratch, float* sorted, u32* order) {
    for (u64 i = 0; i < count; ++i) scratch[i] = value_pair(values[i], i);
    const u64* const pairs = radix_sort(scratch, scratch + count, count, 32, 64);
    for (u64 i = 0; i < count; ++i) {
        sorted[i] = value_of_pair(pairs[i]);
        order[i] = (u32)pairs[i];
    }
}
