// Accumulate and select: the residual takes the gradient in, and the elements to send are picked, in one pass.
//
// Top-k is exact and still one pass: a sample gives a magnitude that a little more than k elements reach; the pass
// keeps those as candidates; the k largest are found among them. Where the sample misled and fewer than k were kept,
// the pass is repeated (without accumulating) at a lower magnitude.
//
// Magnitudes are compared as integers: for finite floats the bits below the sign order as the magnitudes do.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "common/cpu.h"

#ifdef DR_X86
#include <immintrin.h>
#endif

static inline u32 magnitude_bits(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x7FFFFFFFu;
}
static inline u64 magnitude_bits(double x) {
    u64 bits;
    std::memcpy(&bits, &x, 8);
    return bits & 0x7FFFFFFFFFFFFFFFull;
}
template <class T>
struct BitsOf;
template <>
struct BitsOf<float> {
    typedef u32 type;
};
template <>
struct BitsOf<double> {
    typedef u64 type;
};

// Growing arrays of indices and values that are never filled with zeros first.
template <class T>
struct Kept {
    u32* indices = nullptr;
    T* values = nullptr;
    u64 count = 0, capacity = 0;

    Kept() = default;
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;
    ~Kept() {
        std::free(indices);
        std::free(values);
    }
    // Room for `more` and for one vector store beyond.
    void reserve(u64 more) {
        if (count + more + 16 <= capacity) return;
        capacity = std::max(count + more + 16, capacity + capacity / 2);
        void* i = std::realloc(indices, capacity * sizeof(u32));
        if (i) indices = (u32*)i;
        void* v = std::realloc(values, capacity * sizeof(T));
        if (v) values = (T*)v;
        if (!i || !v) throw std::bad_alloc();
    }
};

// The pass over [begin, end): dense += grad (where grad is given), keep what has at least `least` magnitude bits.
// Room for end - begin more was reserved.
template <class T, class Bits>
static void pass_portable(T* dense, const T* grad, u64 begin, u64 end, Bits least, Kept<T>& kept) {
    u64 count = kept.count;
    for (u64 i = begin; i < end; ++i) {
        const T x = grad ? accumulated(dense[i], grad[i]) : dense[i];
        if (grad) dense[i] = x;
        kept.indices[count] = (u32)i;
        kept.values[count] = x;
        count += magnitude_bits(x) >= least;
    }
    kept.count = count;
}

#ifdef DR_X86
__attribute__((target("avx512f,avx512vl,avx512dq,popcnt"))) static void pass_avx512(float* dense, const float* grad,
                                                                                    u64 begin, u64 end, u32 least,
                                                                                    Kept<float>& kept) {
    const __m512i sign_off = _mm512_set1_epi32(0x7FFFFFFF), limit = _mm512_set1_epi32((int)least);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    u64 count = kept.count, i = begin;
    for (; i + 16 <= end; i += 16) {
        __m512 x = _mm512_loadu_ps(dense + i);
        if (grad) {
            // The smaller magnitude of the two, with the sum's sign.
            x = _mm512_range_ps(_mm512_add_ps(x, _mm512_loadu_ps(grad + i)), _mm512_set1_ps(FLT_MAX), 2);
            _mm512_storeu_ps(dense + i, x);
        }
        const __mmask16 take = _mm512_cmpge_epu32_mask(_mm512_and_si512(_mm512_castps_si512(x), sign_off), limit);
        if (take) {
            const __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int)(u32)i), lanes);
            _mm512_storeu_si512(kept.indices + count, _mm512_maskz_compress_epi32(take, at));
            _mm512_storeu_ps(kept.values + count, _mm512_maskz_compress_ps(take, x));
            count += (u64)__builtin_popcount(take);
        }
    }
    kept.count = count;
    pass_portable(dense, grad, i, end, least, kept);
}

// AVX2 has no compress: a vector with something to keep is walked bit by bit.
__attribute__((target("avx2,popcnt,bmi"))) static void pass_avx2(float* dense, const float* grad, u64 begin, u64 end,
                                                                 u32 least, Kept<float>& kept) {
    const __m256i sign_off = _mm256_set1_epi32(0x7FFFFFFF);
    // Magnitude bits fit 31 bits, so a signed comparison with one less will do.
    const __m256i below = _mm256_set1_epi32((int)least - 1);
    u64 count = kept.count, i = begin;
    for (; i + 8 <= end; i += 8) {
        __m256 x = _mm256_loadu_ps(dense + i);
        if (grad) {
            x = _mm256_min_ps(_mm256_add_ps(x, _mm256_loadu_ps(grad + i)), _mm256_set1_ps(FLT_MAX));
            x = _mm256_max_ps(x, _mm256_set1_ps(-FLT_MAX));
            _mm256_storeu_ps(dense + i, x);
        }
        const __m256i over = _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(x), sign_off), below);
        for (u32 take = (u32)_mm256_movemask_ps(_mm256_castsi256_ps(over)); take; take &= take - 1) {
            const u64 at = i + (u64)__builtin_ctz(take);
            kept.indices[count] = (u32)at;
            kept.values[count++] = dense[at];
        }
    }
    kept.count = count;
    pass_portable(dense, grad, i, end, least, kept);
}
#endif

// 0 portable, 1 AVX2, 2 AVX-512; HVD_DEEPREDUCE_VECTOR lowers it, so that tests reach each one.
static int vector_level() {
#ifdef DR_X86
    static const int level = [] {
        __builtin_cpu_init();
        int best = 0;
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi")) best = 1;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("bmi2"))
            best = 2;
        const char* wanted = std::getenv("HVD_DEEPREDUCE_VECTOR");
        if (wanted && std::strcmp(wanted, "portable") == 0) best = 0;
        if (wanted && std::strcmp(wanted, "avx2") == 0) best = std::min(best, 1);
        return best;
    }();
    return level;
#else
    return 0;
#endif
}

DR_API int dr_vector_level() { return vector_level(); }

static void pass_run(float* dense, const float* grad, u64 begin, u64 end, u32 least, Kept<float>& kept) {
#ifdef DR_X86
    if (vector_level() == 2) return pass_avx512(dense, grad, begin, end, least, kept);
    if (vector_level() == 1) return pass_avx2(dense, grad, begin, end, least, kept);
#endif
    pass_portable(dense, grad, begin, end, least, kept);
}
static void pass_run(double* dense, const double* grad, u64 begin, u64 end, u64 least, Kept<double>& kept) {
    pass_portable(dense, grad, begin, end, least, kept);
}

template <class T>
struct Selection {
    std::vector<Kept<T>> runs;  // in index order
    u64 count = 0;
};

const u64 BLOCK = 4096;         // elements between two looks at the room that is left
const u64 RUN = 1 << 20;        // no thread is started for fewer elements

template <class T, class Bits>
static void collect(T* dense, const T* grad, u64 n, Bits least, int threads, Selection<T>& out) {
    out.runs = std::vector<Kept<T>>((size_t)(threads < 1 ? 1 : threads));
    parallel_runs(n, threads, RUN, [&](int thread, u64 begin, u64 end) {
        Kept<T>& kept = out.runs[(size_t)thread];
        for (u64 block = begin; block < end; block += BLOCK) {
            const u64 stop = std::min(block + BLOCK, end);
            kept.reserve(stop - block);
            pass_run(dense, grad, block, stop, least, kept);
        }
    });
    out.count = 0;
    for (const auto& run : out.runs) out.count += run.count;
}

// A magnitude that about k elements of dense + grad reach, with `margin` standard deviations more; 0 where no sample
// can say (few elements, or nearly all wanted).
template <class T, class Bits>
static Bits sampled_bits(const T* dense, const T* grad, u64 n, u64 k, double margin) {
    // A sample costs about twice what a candidate too many does; this many make the sum of both least.
    const u64 best = (u64)std::pow(1.25 * std::sqrt((double)n * (double)k), 2.0 / 3.0);
    const u64 samples = std::min<u64>(n / 8, std::max<u64>(best, 512));
    if (samples < 512) return 0;
    const double expected = (double)k * (double)samples / (double)n;
    const u64 rank = (u64)(expected + margin * std::max(std::sqrt(expected), 2.0));
    if (rank >= samples) return 0;
    std::vector<Bits> bits(samples);
    for (u64 i = 0; i < samples; ++i) {
        const u64 first = n * i / samples, next = n * (i + 1) / samples;
        const u64 at = first + fmix32((u32)i) % (next - first);
        bits[i] = magnitude_bits(grad ? accumulated(dense[at], grad[at]) : dense[at]);
    }
    std::nth_element(bits.begin(), bits.begin() + (i64)rank, bits.end(), std::greater<Bits>());
    return bits[rank];
}

// The k-th largest magnitude (k >= 1), by counting eleven bits at a time from the top. *above: how many are larger.
template <class T, class Bits>
static Bits kth_largest(const Selection<T>& from, u64 k, u64* above) {
    const int top = sizeof(Bits) * 8 - 1, digit = 11;
    Bits prefix = 0, known = 0;
    u64 larger = 0;
    for (int shift = top - digit; known != (~(Bits)0 >> 1); shift = std::max(shift - digit, 0)) {
        // Bits below the sign that the digits so far leave open, at most eleven of them.
        const Bits open = (~(Bits)0 >> 1) & ~known & (~(Bits)0 << shift);
        std::vector<u64> counts((size_t)(open >> shift) + 1);
        for (const auto& run : from.runs)
            for (u64 i = 0; i < run.count; ++i) {
                const Bits bits = magnitude_bits(run.values[i]);
                if ((bits & known) == prefix) ++counts[(size_t)((bits & open) >> shift)];
            }
        u64 d = counts.size() - 1;
        for (; larger + counts[d] < k; --d) larger += counts[d];
        prefix |= (Bits)d << shift;
        known |= open;
    }
    *above = larger;
    return prefix;
}

// Moves the k largest of `from` to the caller's arrays, in index order; ties go to the lower index.
template <class T, class Bits>
static void take_largest(const Selection<T>& from, u64 k, u32* indices, T* values) {
    u64 above = 0;
    const Bits least = kth_largest<T, Bits>(from, k, &above);
    u64 ties = k - above, count = 0;
    for (const auto& run : from.runs)
        for (u64 i = 0; i < run.count && count < k; ++i) {
            const Bits bits = magnitude_bits(run.values[i]);
            const bool tie = bits == least && ties > 0;
            indices[count] = run.indices[i];
            values[count] = run.values[i];
            count += (u64)(bits > least || tie);
            ties -= tie;
        }
}

// Fewer than k elements are not zero: takes them all and the first zeros.
template <class T>
static void take_with_zeros(const T* dense, u64 k, u64 nonzero, u32* indices, T* values) {
    u64 zeros = k - nonzero, count = 0;
    for (u64 i = 0; count < k; ++i) {
        // By the bits, as the candidates were: where the caller's thread flushes denormals, they compare equal to 0.
        const bool zero = magnitude_bits(dense[i]) == 0;
        if (zero && !zeros) continue;
        zeros -= zero;
        indices[count] = (u32)i;
        values[count++] = dense[i];
    }
}

template <class T>
static int topk(T* dense, const T* grad, u64 n, u64 k, u32* indices, T* values, int threads) {
    typedef typename BitsOf<T>::type Bits;
    try {
        if (k == 0) {
            if (grad)
                for (u64 i = 0; i < n; ++i) dense[i] = accumulated(dense[i], grad[i]);
            return 0;
        }
        Selection<T> candidates;
        for (double margin = 5.0;; margin *= 8.0) {
            // At least the smallest denormal: zeros are never candidates.
            const Bits least = std::max<Bits>(sampled_bits<T, Bits>(dense, grad, n, k, margin), 1);
            collect<T, Bits>(dense, grad, n, least, threads, candidates);
            grad = nullptr;  // taken in by the first pass
            if (candidates.count >= k) break;
            if (least == 1) {
                take_with_zeros(dense, k, candidates.count, indices, values);
                return 0;
            }
        }
        take_largest<T, Bits>(candidates, k, indices, values);
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

// dense += grad (unless grad is null), then the k elements of dense with the largest magnitude: their sorted indices
// and their values. All elements finite, 0 <= k <= n. -1 where memory is short; dense has then taken in a part.
DR_API int dr_topk_f32(float* dense, const float* grad, u64 n, u64 k, u32* indices, float* values, int threads) {
    return topk(dense, grad, n, k, indices, values, threads);
}
DR_API int dr_topk_f64(double* dense, const double* grad, u64 n, u64 k, u32* indices, double* values, int threads) {
    return topk(dense, grad, n, k, indices, values, threads);
}

template <class T>
static Selection<T>* threshold(T* dense, const T* grad, u64 n, double least, int threads, u64* count) {
    typedef typename BitsOf<T>::type Bits;
    // The smallest value of T that is not below `least`, and not zero.
    T limit = (T)least;
    if ((double)limit < least) limit = std::nextafter(limit, std::numeric_limits<T>::infinity());
    try {
        auto found = std::make_unique<Selection<T>>();
        collect<T, Bits>(dense, grad, n, std::max<Bits>(magnitude_bits(limit), 1), threads, *found);
        *count = found->count;
        return found.release();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

template <class T>
static void take(Selection<T>* found, u32* indices, T* values) {
    for (const auto& run : found->runs) {
        if (run.count) {
            std::memcpy(indices, run.indices, run.count * sizeof(u32));
            std::memcpy(values, run.values, run.count * sizeof(T));
        }
        indices += run.count;
        values += run.count;
    }
    delete found;
}

// dense += grad (unless null), then all elements with |x| >= least and x != 0. Returns a selection of *count
// elements, which dr_take_* copies out and frees; null where memory is short.
DR_API void* dr_threshold_f32(float* dense, const float* grad, u64 n, double least, int threads, u64* count) {
    return threshold(dense, grad, n, least, threads, count);
}
DR_API void* dr_threshold_f64(double* dense, const double* grad, u64 n, double least, int threads, u64* count) {
    return threshold(dense, grad, n, least, threads, count);
}
DR_API void dr_take_f32(void* selection, u32* indices, float* values) {
    take((Selection<float>*)selection, indices, values);
}
DR_API void dr_take_f64(void* selection, u32* indices, double* values) {
    take((Selection<double>*)selection, indices, values);
}

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

// The largest magnitude bits: an exponent of all ones is NaN or infinity.
DR_CLONES static u32 largest_bits(const u32* words, u64 begin, u64 end) {
    u32 largest = 0;
    for (u64 i = begin; i < end; ++i) largest = std::max(largest, words[i] & 0x7FFFFFFFu);
    return largest;
}
DR_CLONES static u64 largest_bits(const u64* words, u64 begin, u64 end) {
    u64 largest = 0;
    for (u64 i = begin; i < end; ++i) largest = std::max<u64>(largest, words[i] & 0x7FFFFFFFFFFFFFFFull);
    return largest;
}
template <class Bits>
static int finite(const Bits* words, u64 n, Bits infinity, int threads) {
    std::vector<Bits> largest((size_t)(threads < 1 ? 1 : threads));
    parallel_runs(n, threads, RUN,
                  [&](int t, u64 begin, u64 end) { largest[(size_t)t] = largest_bits(words, begin, end); });
    for (Bits bits : largest)
        if (bits >= infinity) return 0;
    return 1;
}
// 1 where all n floats are finite, else 0.
DR_API int dr_finite_f32(const u32* words, u64 n, int threads) { return finite<u32>(words, n, 0x7F800000u, threads); }
DR_API int dr_finite_f64(const u64* words, u64 n, int threads) {
    return finite<u64>(words, n, 0x7FF0000000000000ull, threads);
}
