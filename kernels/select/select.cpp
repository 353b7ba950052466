// Accumulate and select: the gradient is added to the residual, and the elements to send are selected, in one pass. The
// sum is written over the residual, or elsewhere: then the residual is as it was if the gradient is not finite, and the
// check needs no pass of its own.
//
// Top-k is exact and takes one pass: a sample gives a magnitude that a little more than k elements reach; the pass
// collects these elements as candidates; the k largest are found among the candidates. If the sample misled and there
// are fewer than k candidates, the pass is repeated (without accumulating) with a lower magnitude.
//
// Magnitudes are compared as integers: for finite floats, the bits below the sign are in the order of the magnitudes.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "common/cpu.h"
#include "common/stream_copy.h"
#include "select/select.h"

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

// Growing arrays of indices and values. Unlike std::vector, they are not filled with zeros.
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
    // Makes room for `more` elements and one vector store after them.
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

static const u64 BLOCK = 16384;  // elements between two checks of the room that is left
static const u64 RUN = 1 << 20;  // no thread is started for fewer elements

// Where a pass writes the sums: over the residual or elsewhere in the cache, or past the cache.
enum class Stores { CACHED, STREAMED };

// Bytes from what a pass reads to what it prefetches: a page, since the processor's own prefetching ends with each page
// of 4 KiB, and the address of the next one has to be looked up.
static const u64 AHEAD = 4096;

// Prefetches what the pass will read when it comes to `at`. An address that is past the end does no harm.
static inline void prefetch_ahead(const float* at) {
    __builtin_prefetch((const char*)((uintptr_t)at + AHEAD), 0);
}

// The pass over `size` elements, of which the first has the index `first`: out = dense + grad (unless grad is null), then
// the elements with at least `least` magnitude bits go to `kept`, which has room for `size` more.
template <class T, class Bits>
static void pass_portable(const T* dense, const T* grad, T* out, u64 first, u64 size, Bits least, Kept<T>& kept) {
    u64 count = kept.count;
    for (u64 i = 0; i < size; ++i) {
        const T x = grad ? accumulated(dense[i], grad[i]) : dense[i];
        if (grad) out[i] = x;
        kept.indices[count] = (u32)(first + i);
        kept.values[count] = x;
        count += magnitude_bits(x) >= least;
    }
    kept.count = count;
}

#ifdef DR_X86
template <Stores stores>
__attribute__((target("avx512f,avx512vl,avx512dq,popcnt"))) static void pass_avx512(
    const float* dense, const float* grad, float* out, u64 first, u64 size, u32 least, Kept<float>& kept) {
    const __m512i sign_off = _mm512_set1_epi32(0x7FFFFFFF), limit = _mm512_set1_epi32((int)least);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    u64 i = stores == Stores::STREAMED ? std::min(before_line(out), size) : 0;
    pass_portable(dense, grad, out, first, i, least, kept);
    u64 count = kept.count;
    for (; i + 16 <= size; i += 16) {
        __m512 x = _mm512_loadu_ps(dense + i);
        prefetch_ahead(dense + i);
        if (grad) {
            prefetch_ahead(grad + i);
            // As `accumulated`: the smaller magnitude of the two, with the sign of the sum.
            x = _mm512_range_ps(_mm512_add_ps(x, _mm512_loadu_ps(grad + i)), _mm512_set1_ps(FLT_MAX), 2);
            if (stores == Stores::STREAMED) _mm512_stream_ps(out + i, x);
            else _mm512_storeu_ps(out + i, x);
        }
        const __mmask16 take = _mm512_cmpge_epu32_mask(_mm512_and_si512(_mm512_castps_si512(x), sign_off), limit);
        if (take) {
            const __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int)(u32)(first + i)), lanes);
            _mm512_storeu_si512(kept.indices + count, _mm512_maskz_compress_epi32(take, at));
            _mm512_storeu_ps(kept.values + count, _mm512_maskz_compress_ps(take, x));
            count += (u64)__builtin_popcount(take);
        }
    }
    kept.count = count;
    pass_portable(dense + i, grad ? grad + i : nullptr, out + i, first + i, size - i, least, kept);
}

// Eight elements of the pass.
__attribute__((target("avx2"))) static inline __m256 eight_sums(const float* dense, const float* grad, u64 i) {
    __m256 x = _mm256_loadu_ps(dense + i);
    if (!grad) return x;
    x = _mm256_min_ps(_mm256_add_ps(x, _mm256_loadu_ps(grad + i)), _mm256_set1_ps(FLT_MAX));
    return _mm256_max_ps(x, _mm256_set1_ps(-FLT_MAX));
}

// AVX2 has no compress instruction, so the mask of two vectors, which are a cache line, is read bit by bit.
template <Stores stores>
__attribute__((target("avx2,popcnt,bmi"))) static void pass_avx2(const float* dense, const float* grad, float* out,
                                                                 u64 first, u64 size, u32 least, Kept<float>& kept) {
    const __m256i sign_off = _mm256_set1_epi32(0x7FFFFFFF);
    // Magnitude bits have 31 bits, so a signed comparison with least - 1 gives the same result.
    const __m256i below = _mm256_set1_epi32((int)least - 1);
    u64 i = stores == Stores::STREAMED ? std::min(before_line(out), size) : 0;
    pass_portable(dense, grad, out, first, i, least, kept);
    u64 count = kept.count;
    for (; i + 16 <= size; i += 16) {
        prefetch_ahead(dense + i);
        if (grad) prefetch_ahead(grad + i);
        const __m256 low = eight_sums(dense, grad, i), high = eight_sums(dense, grad, i + 8);
        const __m256i over_low = _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(low), sign_off), below);
        const __m256i over_high = _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(high), sign_off), below);
        u32 take = (u32)_mm256_movemask_ps(_mm256_castsi256_ps(over_low)) |
                   (u32)_mm256_movemask_ps(_mm256_castsi256_ps(over_high)) << 8;
        if (grad && stores == Stores::STREAMED) {
            _mm256_stream_ps(out + i, low), _mm256_stream_ps(out + i + 8, high);
        } else if (grad) {
            _mm256_storeu_ps(out + i, low), _mm256_storeu_ps(out + i + 8, high);
        }
        if (take) {  // the values are not read from `out`, which a streaming store may not have reached
            alignas(32) float both[16];
            _mm256_store_ps(both, low), _mm256_store_ps(both + 8, high);
            for (; take; take &= take - 1) {
                const u64 lane = (u64)__builtin_ctz(take);
                kept.indices[count] = (u32)(first + i + lane);
                kept.values[count++] = both[lane];
            }
        }
    }
    kept.count = count;
    pass_portable(dense + i, grad ? grad + i : nullptr, out + i, first + i, size - i, least, kept);
}
#endif

template <Stores stores>
static void pass_run(const float* dense, const float* grad, float* out, u64 first, u64 size, u32 least,
                     Kept<float>& kept) {
#ifdef DR_X86
    if (dr_vector_level() == 2) return pass_avx512<stores>(dense, grad, out, first, size, least, kept);
    if (dr_vector_level() == 1) return pass_avx2<stores>(dense, grad, out, first, size, least, kept);
#endif
    pass_portable(dense, grad, out, first, size, least, kept);
}
template <Stores>
static void pass_run(const double* dense, const double* grad, double* out, u64 first, u64 size, u64 least,
                     Kept<double>& kept) {
    pass_portable(dense, grad, out, first, size, least, kept);
}

template <class T>
struct Selection {
    std::vector<Kept<T>> runs;  // in index order
    u64 count = 0;
};

// The pieces' elements of [begin, end), one call f(piece's elements, begin, end) for each piece. `piece` is the first one
// that ends after `begin`, and afterwards the first one that ends after `end`.
template <class T, class F>
static void each_piece(const Pieces<T>& of, u64& piece, u64 begin, u64 end, F f) {
    for (u64 next; begin < end; begin = next) {
        while (of.ends[piece] <= begin) ++piece;
        next = std::min(of.ends[piece], end);
        f(of.at(piece) + (begin - of.begin(piece)), begin, next);
    }
}

// `expected`: how many elements will be found, about.
template <class T, class Bits>
static void collect(const T* dense, const Pieces<T>& grads, T* out, u64 n, Bits least, u64 expected, int threads,
                    Selection<T>& found) {
    found.runs = std::vector<Kept<T>>((size_t)(threads < 1 ? 1 : threads));
    const bool streamed = out != dense && n * sizeof(T) >= STREAMED;
    parallel_runs(n, threads, RUN, [&](int thread, u64 begin, u64 end) {
        Kept<T>& kept = found.runs[(size_t)thread];
        kept.reserve(expected / found.runs.size());  // arrays that grow are copied
        u64 piece = 0;
        for (u64 block = begin, stop; block < end; block = stop) {
            stop = std::min(block + BLOCK - past_line(out + block), end);
            kept.reserve(stop - block);
            const auto pass = [&](const T* grad, u64 i, u64 j) {
                if (streamed) pass_run<Stores::STREAMED>(dense + i, grad, out + i, i, j - i, least, kept);
                else pass_run<Stores::CACHED>(dense + i, grad, out + i, i, j - i, least, kept);
            };
            if (grads.count) each_piece(grads, piece, block, stop, pass);
            else pass(nullptr, block, stop);
        }
        if (streamed) stream_fence();
    });
    found.count = 0;
    for (const auto& run : found.runs) found.count += run.count;
}

// The bits of a magnitude that about k elements of dense + grad reach, and more by `margin` standard deviations; 0 if
// no sample can tell (there are few elements, or k is nearly n).
template <class T, class Bits>
static Bits sampled_bits(const T* dense, const Pieces<T>& grads, u64 n, u64 k, double margin) {
    // A sample costs about twice as much as an unneeded candidate; this number makes the sum of both costs least, with a
    // margin of three.
    const u64 best = (u64)std::pow(0.75 * std::sqrt((double)n * (double)k), 2.0 / 3.0);
    const u64 samples = std::min<u64>(n / 8, std::max<u64>(best, 512));
    if (samples < 512) return 0;
    const double expected = (double)k * (double)samples / (double)n;
    const u64 rank = (u64)(expected + margin * std::max(std::sqrt(expected), 2.0));
    if (rank >= samples) return 0;
    // Each sample is of a cache line, and a page, of its own, so it is prefetched long before it is read.
    const u64 ahead = 32;
    const auto place = [=](u64 i) {
        const u64 first = n * i / samples, next = n * (i + 1) / samples;
        return first + fmix32((u32)i) % (next - first);
    };
    std::vector<Bits> bits(samples);
    u64 piece = 0, soon = 0, places[ahead];
    for (u64 i = 0; i < samples + ahead; ++i) {
        if (i >= ahead) {
            const u64 at = places[i % ahead];
            T x = dense[at];
            if (grads.count)
                each_piece(grads, piece, at, at + 1, [&](const T* grad, u64, u64) { x = accumulated(x, *grad); });
            bits[i - ahead] = magnitude_bits(x);
        }
        if (i < samples) {
            const u64 at = places[i % ahead] = place(i);
            __builtin_prefetch(dense + at);
            if (grads.count) each_piece(grads, soon, at, at + 1, [](const T* grad, u64, u64) { __builtin_prefetch(grad); });
        }
    }
    std::nth_element(bits.begin(), bits.begin() + (i64)rank, bits.end(), std::greater<Bits>());
    return bits[rank];
}

// The bits of the k-th largest magnitude (k >= 1) and, in *above, how many magnitudes are larger. The range that they are
// in is divided into 2048 parts, and these are counted; then the part with the k-th is divided, until a part is one
// magnitude. Counting digits from the top is slower: most candidates have the same first digit, and to count in the same
// place again is to wait for the count before.
template <class T, class Bits>
static Bits kth_largest(const Selection<T>& from, u64 k, u64* above) {
    const int digit = 11;
    Bits low = ~(Bits)0, high = 0;
    for (const auto& run : from.runs)
        for (u64 i = 0; i < run.count; ++i) {
            const Bits bits = magnitude_bits(run.values[i]);
            low = std::min(low, bits), high = std::max(high, bits);
        }
    std::vector<u64> counts((size_t)1 << digit);
    *above = 0;
    while (low != high) {
        const Bits range = high - low;
        int shift = 0;
        while (range >> shift >> digit) ++shift;
        std::fill(counts.begin(), counts.end(), 0);
        for (const auto& run : from.runs)
            for (u64 i = 0; i < run.count; ++i) {
                const Bits from_low = magnitude_bits(run.values[i]) - low;
                if (from_low <= range) ++counts[(size_t)(from_low >> shift)];
            }
        Bits part = range >> shift;
        for (; *above + counts[(size_t)part] < k; --part) *above += counts[(size_t)part];
        low += part << shift;
        high = std::min<Bits>(high, low + (((Bits)1 << shift) - 1));
    }
    return low;
}

// Copies the k largest of `from` to the caller's arrays, in index order; of equal magnitudes those of lower index.
template <class T, class Bits>
static void take_largest(const Selection<T>& from, u64 k, u32* indices, T* values) {
    u64 above = 0;
    const Bits least = kth_largest<T, Bits>(from, k, &above);
    u64 ties = k - above, count = 0;
    for (const auto& run : from.runs)
        for (u64 i = 0; i < run.count && count < k; ++i) {
            const Bits bits = magnitude_bits(run.values[i]);
            indices[count] = run.indices[i];
            values[count] = run.values[i];
            count += (u64)(bits > least);
            if (bits == least && ties) --ties, ++count;
        }
}

// Copies all of `from` to the caller's arrays.
template <class T>
static void copy_all(const Selection<T>& from, u32* indices, T* values) {
    for (const auto& run : from.runs) {
        if (!run.count) continue;
        std::memcpy(indices, run.indices, run.count * sizeof(u32));
        std::memcpy(values, run.values, run.count * sizeof(T));
        indices += run.count;
        values += run.count;
    }
}

// Whether what was added up, or selected from, is finite, by its candidates: what is not finite is among them, whatever
// the limit was, and has become the largest number if it was added to another one.
template <class T>
static bool all_finite(const Selection<T>& found, const Pieces<T>& grads, int threads) {
    const auto most = magnitude_bits(std::numeric_limits<T>::max());
    bool largest = false;
    for (const auto& run : found.runs)
        for (u64 i = 0; i < run.count; ++i) {
            if (magnitude_bits(run.values[i]) > most) return false;
            largest |= magnitude_bits(run.values[i]) == most;
        }
    return !largest || grads.finite(threads);
}

template <class T>
static i64 topk(const T* dense, Pieces<T> grads, T* out, u64 n, u64 k, bool finite, u32* indices, T* values,
                int threads) {
    typedef typename BitsOf<T>::type Bits;
    try {
        Selection<T> candidates;
        if (k == 0) {  // the pass alone; nothing reaches this limit but what is not finite
            if (!finite && !(grads.count ? grads.finite(threads) : all_finite(dense, n, threads))) return ERR_NOT_FINITE;
            if (grads.count) collect<T, Bits>(dense, grads, out, n, ~(Bits)0 >> 1, 0, threads, candidates);
            return 0;
        }
        for (double margin = 3.0;; margin *= 8.0) {
            // At least the bits of the smallest denormal, so that zeros are never candidates. By the bits, since denormals
            // compare equal to 0 if the caller's thread flushes them.
            const Bits least = std::max<Bits>(sampled_bits<T, Bits>(dense, grads, n, k, margin), 1);
            collect<T, Bits>(dense, grads, out, n, least, k + k / 2, threads, candidates);
            if (!finite && !all_finite(candidates, grads, threads)) return ERR_NOT_FINITE;
            dense = out, grads.count = 0, finite = true;  // the first pass has added them
            if (candidates.count >= k) break;
            if (least == 1) {
                copy_all(candidates, indices, values);
                return (i64)candidates.count;
            }
        }
        take_largest<T, Bits>(candidates, k, indices, values);
        return (i64)k;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

i64 topk_into(const float* dense, const Pieces<float>& grads, float* out, u64 n, u64 k, bool finite, u32* indices,
              float* values, int threads) {
    return topk(dense, grads, out, n, k, finite, indices, values, threads);
}

// As topk_into, of a vector in `pieces` pieces of memory.
DR_API i64 dr_topk_into(const float* dense, float* out, const u64* addresses, const u64* ends, u64 pieces, u64 n, u64 k,
                        int finite, u32* indices, float* values, int threads) {
    return topk_into(dense, {addresses, ends, pieces}, out, n, k, finite != 0, indices, values, threads);
}

// dense += grad (unless null), then the k elements of largest magnitude, or all that are not zero if these are fewer:
// their sorted indices and their values. All elements are finite, 0 <= k <= n. Returns how many were selected, or -1 if
// memory is short; a part of grad may then have been added.
DR_FLOATS(i64, topk, (T* dense, const T* grad, u64 n, u64 k, u32* indices, T* values, int threads),
    const u64 at = (u64)(uintptr_t)grad;
    return topk<T>(dense, {&at, &n, (u64)(grad != nullptr)}, dense, n, k, true, indices, values, threads))

// The k largest of each chunk. The pass over a chunk collects the elements that reach a magnitude a little below the
// k-th largest of the chunk before it; if these are fewer than k, the pass is repeated, within the cache, with a lower
// one. So the result depends on the chunk alone, and its cost a little on its neighbour.
template <class T, class Bits>
static u64 topk_of_chunk(T* dense, const T* grad, u64 begin, u64 end, u64 k, Bits* least, Kept<T>& kept,
                         std::vector<Bits>& bits, u32* indices, T* values) {
    const Bits octave = (Bits)1 << (std::numeric_limits<T>::digits - 1);
    kept.count = 0;
    pass_run<Stores::CACHED>(dense + begin, grad ? grad + begin : nullptr, dense + begin, begin, end - begin, *least, kept);
    for (Bits lower = octave; kept.count < k && *least > 1; lower = lower == octave ? 8 * octave : *least) {
        *least = *least > lower ? *least - lower : 1;
        kept.count = 0;
        pass_run<Stores::CACHED>(dense + begin, (const T*)nullptr, dense + begin, begin, end - begin, *least, kept);
    }
    u64 count = 0, ties = 0;
    Bits kth = *least;
    if (kept.count > k) {
        for (u64 i = 0; i < kept.count; ++i) bits[i] = magnitude_bits(kept.values[i]);
        const auto last = bits.begin() + (i64)kept.count, at = bits.begin() + (i64)k - 1;
        std::nth_element(bits.begin(), at, last, std::greater<Bits>());
        kth = *at;
        ties = k - (u64)std::count_if(bits.begin(), at, [=](Bits b) { return b > kth; });
        for (u64 i = 0; i < kept.count && count < k; ++i) {
            const Bits b = magnitude_bits(kept.values[i]);
            const bool tie = b == kth && ties > 0;
            indices[count] = kept.indices[i];
            values[count] = kept.values[i];
            count += (u64)(b > kth || tie);
            ties -= tie;
        }
    } else {
        count = kept.count;
        std::copy(kept.indices, kept.indices + count, indices);
        std::copy(kept.values, kept.values + count, values);
    }
    *least = kth > octave / 4 ? kth - octave / 4 : 1;
    return count;
}

template <class T>
static i64 topk_of_chunks(T* dense, const T* grad, u64 n, u64 chunk, u64 k, u64 last, u32* indices, T* values,
                          int threads) {
    typedef typename BitsOf<T>::type Bits;
    const u64 chunks = (n + chunk - 1) / chunk, grain = chunk < RUN ? RUN / chunk : 1;
    struct Run {
        u64 first = 0, count = 0;
    };
    try {
        std::vector<Run> runs((size_t)(threads < 1 ? 1 : threads));
        parallel_runs(chunks, threads, grain, [&](int thread, u64 first, u64 end) {
            Kept<T> kept;
            kept.reserve(chunk);
            std::vector<Bits> bits(chunk);
            Bits least = 1;
            Run run{first * k, 0};
            for (u64 c = first; c < end; ++c)
                run.count += topk_of_chunk<T, Bits>(dense, grad, c * chunk, std::min((c + 1) * chunk, n),
                                                    c + 1 == chunks ? last : k, &least, kept, bits,
                                                    indices + run.first + run.count, values + run.first + run.count);
            runs[(size_t)thread] = run;
        });
        u64 count = 0;  // zeros are not selected, so a run may have left room behind it
        for (const Run& run : runs) {
            if (run.first != count) {
                std::memmove(indices + count, indices + run.first, run.count * sizeof(u32));
                std::memmove(values + count, values + run.first, run.count * sizeof(T));
            }
            count += run.count;
        }
        return (i64)count;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

// dense += grad (unless null), then of each chunk [c * chunk, (c + 1) * chunk) the k elements of largest magnitude, or
// all that are not zero if these are fewer; `last` of the last chunk. 1 <= k <= chunk, 1 <= last <= size of the last
// chunk, n >= 1. indices and values have room for k of each chunk and `last`. Returns as dr_topk_*.
DR_FLOATS(i64, topk_of_chunks, (T* dense, const T* grad, u64 n, u64 chunk, u64 k, u64 last, u32* indices, T* values,
                                int threads),
    return topk_of_chunks(dense, grad, n, chunk, k, last, indices, values, threads))

// The magnitude bits of the smallest T that is not below `least` (at least 0) and not zero.
template <class T>
static typename BitsOf<T>::type threshold_bits(double least) {
    typedef typename BitsOf<T>::type Bits;
    T limit = (T)least;
    if ((double)limit < least) limit = std::nextafter(limit, std::numeric_limits<T>::infinity());
    return std::max<Bits>(magnitude_bits(limit), 1);
}

DR_FLOATS(u64, threshold_bits, (double least), return threshold_bits<T>(least))

template <class T>
static Selection<T>* threshold(T* dense, const T* grad, u64 n, double least, int threads, u64* count) {
    typedef typename BitsOf<T>::type Bits;
    try {
        auto selection = std::make_unique<Selection<T>>();
        const u64 at = (u64)(uintptr_t)grad;
        const Pieces<T> grads{&at, &n, (u64)(grad != nullptr)};
        collect<T, Bits>(dense, grads, dense, n, threshold_bits<T>(least), 0, threads, *selection);
        *count = selection->count;
        return selection.release();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

template <class T>
static void copy_selection(Selection<T>* selection, u32* indices, T* values) {
    copy_all(*selection, indices, values);
    delete selection;
}

// dense += grad (unless null), then all elements with |x| >= least and x != 0. Returns a selection of *count elements,
// which dr_copy_selection_* copies and frees; null if memory is short.
DR_FLOATS(void*, threshold, (T* dense, const T* grad, u64 n, double least, int threads, u64* count),
    return threshold(dense, grad, n, least, threads, count))
DR_FLOATS(void, copy_selection, (void* selection, u32* indices, T* values),
    copy_selection((Selection<T>*)selection, indices, values))
