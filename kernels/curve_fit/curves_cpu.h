// What both curve fits share on the host.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/cpu.h"
#include "curve_fit/curves.h"

#define DR_INLINE static inline __attribute__((always_inline))

// The sum of a[j] b[j] over a block; size: a multiple of 8, up to FIT_BLOCK.
DR_INLINE double block_dot(const double* a, const double* b, u64 size) {
    double lane[8] = {};
    for (u64 i = 0; i < size; i += 8)
        for (int j = 0; j < 8; ++j) lane[j] += a[i + j] * b[i + j];
    for (int half = 4; half; half /= 2)
        for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
    return lane[0];
}

DR_INLINE u64 round_up8(u64 size) { return (size + 7) & ~7ull; }

// How many of the sorted values are positive, and how many negative.
struct Signs {
    u64 positives, negatives;
};

inline Signs signs_of(const float* sorted, u64 count) {
    const float* end = sorted + count;
    const float* zeros = std::partition_point(sorted, end, [](float v) { return v > 0.0f; });
    const float* negatives = std::partition_point(zeros, end, [](float v) { return v >= 0.0f; });
    return {(u64)(zeros - sorted), (u64)(end - negatives)};
}

// A 4-byte word of a section, which need not be aligned.
template <class T>
inline T word_at(const u8* section, u64 word) {
    T value;
    std::memcpy(&value, section + 4 * word, 4);
    return value;
}

template <class T>
inline void put_word(u8* section, u64 word, T value) {
    std::memcpy(section + 4 * word, &value, 4);
}
