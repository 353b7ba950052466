// Arrays of float32 and float64: add, gather, subtract, sum, and the search for NaN and infinity.
#include <algorithm>

#include "arrays/finite.h"
#include "common/cpu.h"
#include "common/stream_copy.h"

// ---- Add: dense += grad, as `accumulated`.

DR_CLONES static void add(float* dense, const float* grad, u64 begin, u64 end) {
    for (u64 i = begin; i < end; ++i) dense[i] = accumulated(dense[i], grad[i]);
}
DR_CLONES static void add(double* dense, const double* grad, u64 begin, u64 end) {
    for (u64 i = begin; i < end; ++i) dense[i] = accumulated(dense[i], grad[i]);
}
DR_API void dr_add_f32(float* dense, const float* grad, u64 n, int threads) {
    parallel_runs(n, threads, RUN, [&](int, u64 begin, u64 end) { add(dense, grad, begin, end); });
}
DR_API void dr_add_f64(double* dense, const double* grad, u64 n, int threads) {
    parallel_runs(n, threads, RUN, [&](int, u64 begin, u64 end) { add(dense, grad, begin, end); });
}

// ---- Gather: values = dense[indices].

DR_FLOATS(void, gather, (const T* dense, const u32* indices, u64 count, T* values),
    for (u64 i = 0; i < count; ++i) values[i] = dense[indices[i]])

// ---- Subtract: dense[indices] -= values.

// The elements are far apart and their addresses are known early, so they are prefetched.
template <class T, class V>
static void subtract(T* dense, const u32* indices, u64 count, const V* values) {
    const u64 ahead = 32;
    for (u64 i = 0; i < count; ++i) {
        if (i + ahead < count) __builtin_prefetch(dense + indices[i + ahead], 1);
        dense[indices[i]] -= (T)values[i];
    }
}
DR_FLOATS(void, subtract, (T* dense, const u32* indices, u64 count, const T* values),
    subtract(dense, indices, count, values))

// ---- Sum.

// One part of a sum: values at sorted indices, or a value for each element (indices null).
template <class T>
struct Part {
    const u32* indices;
    const T* values;
    u64 count;
};

#ifdef DR_X86
__attribute__((target("avx2"))) static inline __m256i scaled(const float* x, float scale) {
    return _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(scale)));
}
__attribute__((target("avx2"))) static inline __m256i scaled(const double* x, double scale) {
    return _mm256_castpd_si256(_mm256_mul_pd(_mm256_loadu_pd(x), _mm256_set1_pd(scale)));
}

// Whole lines of move_out; `out` begins with one. Returns how many elements it has moved.
template <bool of_one, class T>
__attribute__((target("avx2"))) static u64 move_lines(T* out, T* sums, u64 size, T scale) {
    const u64 half = 32 / sizeof(T);
    u64 i = 0;
    for (; i + 2 * half <= size; i += 2 * half)
        for (u64 j = i; j < i + 2 * half; j += half) {
            const __m256i x = of_one ? _mm256_loadu_si256((const __m256i*)(sums + j)) : scaled(sums + j, scale);
            _mm256_stream_si256((__m256i*)(out + j), x);
            _mm256_storeu_si256((__m256i*)(sums + j), _mm256_setzero_si256());
        }
    return i;
}
#endif

// out = scale * sums, past the cache, and sums = 0. By 1 is not multiplied: the caller's thread may flush denormals.
template <class T>
static void move_out(T* out, T* sums, u64 size, T scale) {
    const bool of_one = scale == (T)1;
    const auto move = [&](u64 begin, u64 end) {
        for (u64 i = begin; i < end; ++i) out[i] = of_one ? sums[i] : sums[i] * scale, sums[i] = 0;
    };
    u64 i = 0;
#ifdef DR_X86
    if (dr_vector_level() >= 1) {
        i = std::min(before_line(out), size);
        move(0, i);
        i += (of_one ? move_lines<true, T> : move_lines<false, T>)(out + i, sums + i, size - i, scale);
    }
#endif
    move(i, size);
}

template <class T>
static void sum_run(T* out, u64 begin, u64 end, const Part<T>* parts, int count, T scale) {
    // A block of the output is summed in the first-level cache, then scaled and written once.
    constexpr u64 block = 16384 / sizeof(T);
    alignas(64) thread_local T memory[block];  // zeros, between two calls too
    T* sums = memory;
    asm("" : "+r"(sums));  // else the compiler looks up the thread's memory for each element
    std::vector<u64> at((size_t)count);
    for (int p = 0; p < count; ++p) {
        if (!parts[p].indices) continue;
        u64 low = 0, high = parts[p].count;
        while (low < high) {
            const u64 middle = (low + high) / 2;
            if (parts[p].indices[middle] < begin) low = middle + 1;
            else high = middle;
        }
        at[(size_t)p] = low;
    }
    for (u64 first = begin, size; first < end; first += size) {
        size = std::min(block - past_line(out + first), end - first);
        for (int p = 0; p < count; ++p) {
            const Part<T>& part = parts[p];
            if (part.indices) {
                u64 i = at[(size_t)p];
                for (; i < part.count && part.indices[i] - first < size; ++i)
                    sums[part.indices[i] - first] += part.values[i];
                at[(size_t)p] = i;
            } else {
                for (u64 i = 0; i < size; ++i) sums[i] += part.values[first + i];
            }
        }
        move_out(out + first, sums, size, scale);
    }
    stream_fence();
}

template <class T>
static void sum(T* out, u64 n, const u64* indices, const u64* values, const u64* counts, int count, double scale,
                int threads) {
    std::vector<Part<T>> parts;
    for (int p = 0; p < count; ++p) parts.push_back({(const u32*)indices[p], (const T*)values[p], counts[p]});
    parallel_runs(n, threads, 1 << 20,
                  [&](int, u64 begin, u64 end) { sum_run<T>(out, begin, end, parts.data(), count, (T)scale); });
}

// out[i] = scale * (the sum over the parts, in their order, of their values at i). indices, values: the addresses of
// each part's arrays, 0 for a part without indices; counts: their sizes. The indices of a part are strictly increasing
// and below n.
DR_FLOATS(void, sum, (T* out, u64 n, const u64* indices, const u64* values, const u64* counts, int count, double scale,
                      int threads), sum<T>(out, n, indices, values, counts, count, scale, threads))

// ---- Finite.

template <class Bits>
static int finite(const Bits* words, u64 n, Bits infinity, int threads) {
    std::vector<Bits> largest((size_t)(threads < 1 ? 1 : threads));
    parallel_runs(n, threads, RUN,
                  [&](int t, u64 begin, u64 end) { largest[(size_t)t] = largest_bits(words, begin, end); });
    for (Bits bits : largest)
        if (bits >= infinity) return 0;
    return 1;
}
// Returns 1 if all n floats are finite, else 0.
DR_API int dr_finite_f32(const u32* words, u64 n, int threads) { return finite<u32>(words, n, 0x7F800000u, threads); }
DR_API int dr_finite_f64(const u64* words, u64 n, int threads) {
    return finite<u64>(words, n, 0x7FF0000000000000ull, threads);
}

// ---- Copy, and finite.

// Copies n floats. Returns 1 if all are finite, else 0.
DR_API int dr_copy_finite_f32(u32* out, const u32* words, u64 n, int threads) {
    return copy_finite<u32>(out, words, n, 0x7F800000u, threads);
}
DR_API int dr_copy_finite_f64(u64* out, const u64* words, u64 n, int threads) {
    return copy_finite<u64>(out, words, n, 0x7FF0000000000000ull, threads);
}

template <class Bits>
static int copy_finite_many(const u64* to, const u64* from, const u64* n, u64 arrays, Bits infinity) {
    int all = 1;
    for (u64 i = 0; i < arrays; ++i)
        all &= copy_finite<Bits>((Bits*)(uintptr_t)to[i], (const Bits*)(uintptr_t)from[i], n[i], infinity, 1);
    return all;
}
// Copies n[i] floats from the address from[i] to the address to[i], for all i < arrays. Returns 1 if all are finite.
DR_API int dr_copy_finite_many_f32(const u64* to, const u64* from, const u64* n, u64 arrays) {
    return copy_finite_many<u32>(to, from, n, arrays, 0x7F800000u);
}
DR_API int dr_copy_finite_many_f64(const u64* to, const u64* from, const u64* n, u64 arrays) {
    return copy_finite_many<u64>(to, from, n, arrays, 0x7FF0000000000000ull);
}
