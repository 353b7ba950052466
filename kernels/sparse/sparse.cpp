// Sparse vectors: the sum of several as one sparse vector, and accumulation at a gradient's indices.
#include <algorithm>

#include "common/cpu.h"

// ---- Accumulate: dense[indices] = `accumulated` with the values, which become the sums.

template <class T>
static void accumulate_at(T* dense, const u32* indices, u64 count, T* values) {
    const u64 ahead = 32;  // as in kernels/arrays/arrays.cpp
    for (u64 i = 0; i < count; ++i) {
        if (i + ahead < count) __builtin_prefetch(dense + indices[i + ahead], 1);
        T& element = dense[indices[i]];
        values[i] = element = accumulated(element, values[i]);
    }
}
DR_FLOATS(void, accumulate_at, (T* dense, const u32* indices, u64 count, T* values),
    accumulate_at(dense, indices, count, values))

// ---- Sum: the union of the supports, and scale * (0 + values of part 0 + values of part 1 ...) at each of its indices.

// The sums of a window of the vector, and one bit for each element that a part has: both fit into the first-level
// cache, and are zero between windows. Windows without elements are skipped, so the time depends on the elements.
template <class T>
static u64 sparse_sum(const u64* all_indices, const u64* all_values, const u64* counts, int parts, T scale,
                      u32* out_indices, T* out_values) {
    constexpr u64 WINDOW = 4096;
    T sums[WINDOW] = {};
    u64 present[WINDOW / 64] = {};
    std::vector<u64> at((size_t)parts);
    u64 written = 0;
    for (;;) {
        u64 first = ~0ull;
        for (int p = 0; p < parts; ++p)
            if (at[(size_t)p] < counts[p]) first = std::min<u64>(first, ((const u32*)all_indices[p])[at[(size_t)p]]);
        if (first == ~0ull) return written;
        first &= ~(WINDOW - 1);
        for (int p = 0; p < parts; ++p) {
            const u32* indices = (const u32*)all_indices[p];
            const T* values = (const T*)all_values[p];
            u64 i = at[(size_t)p];
            for (; i < counts[p] && indices[i] - first < WINDOW; ++i) {
                const u64 place = indices[i] - first;
                sums[place] += values[i];
                present[place / 64] |= 1ull << (place % 64);
            }
            at[(size_t)p] = i;
        }
        for (u64 word = 0; word < WINDOW / 64; ++word) {
            for (u64 bits = present[word]; bits; bits &= bits - 1) {
                const u64 place = 64 * word + (u64)__builtin_ctzll(bits);
                out_indices[written] = (u32)(first + place);
                out_values[written++] = sums[place] * scale;
                sums[place] = 0;
            }
            present[word] = 0;
        }
    }
}

// Returns the number of indices. indices, values: the addresses of each part's arrays; counts: their sizes. The indices
// of a part are strictly increasing. The results have room for the sum of the counts.
DR_FLOATS(u64, sparse_sum, (const u64* indices, const u64* values, const u64* counts, int parts, double scale,
                            u32* out_indices, T* out_values),
    return sparse_sum<T>(indices, values, counts, parts, (T)scale, out_indices, out_values))
