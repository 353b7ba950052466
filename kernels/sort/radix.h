// A stable radix sort of unsigned words on the host, 11 bits per pass. A pass is skipped if all words have the same
// digit.
#pragma once

#include <utility>

#include "common/cpu.h"

// Sorts data[count] by the bits low .. high - 1, at most 33; bits from `high` on must be zero; count < 2^32. Returns
// the array that holds the sorted words, `data` or `spare`; the other one holds anything.
template <class T>
static T* radix_sort(T* data, T* spare, u64 count, u32 low, u32 high) {
    const u32 mask = 2047;
    u32 starts[3][2048] = {};
    for (u64 i = 0; i < count; ++i) {
        const u64 word = (u64)data[i] >> low;
        ++starts[0][word & mask];
        ++starts[1][word >> 11 & mask];
        ++starts[2][word >> 22 & mask];
    }
    for (u32 pass = 0, shift = low; shift < high; ++pass, shift += 11) {
        u32* const start = starts[pass];
        u32 sum = 0, largest = 0;
        for (u32 digit = 0; digit <= mask; ++digit) {
            const u32 of_digit = start[digit];
            largest = of_digit > largest ? of_digit : largest;
            start[digit] = sum;
            sum += of_digit;
        }
        if (largest == count) continue;
        for (u64 i = 0; i < count; ++i) spare[start[(u32)(data[i] >> shift) & mask]++] = data[i];
        std::swap(data, spare);
    }
    return data;
}
