// Stochastic rounding on the host: words are drawn a chunk at a time, and handed out by bucket.
#pragma once

#include "common/cpu.h"
#include "rounding/rounding.h"

#ifdef DR_X86
#include <immintrin.h>
#endif

const u64 ROUNDING_CHUNK = 1024;  // words drawn at once
const u64 PHILOX_LANES = 16;      // counters computed side by side, so that the compiler vectorizes the rounds

extern "C" int dr_vector_level();

// The words of the ROUNDING_CHUNK elements from `begin` on; `begin` is a multiple of four.
DR_CLONES static void rounding_words_portable(const RoundingKey& key, u64 begin, u32* words) {
    for (u64 base = 0; base < ROUNDING_CHUNK / 4; base += PHILOX_LANES) {
        u32 x[PHILOX_LANES], y[PHILOX_LANES], z[PHILOX_LANES], w[PHILOX_LANES];
        for (u64 q = 0; q < PHILOX_LANES; ++q) {
            const Philox4 r = rounding_draw(key, begin / 4 + base + q);
            x[q] = r.x, y[q] = r.y, z[q] = r.z, w[q] = r.w;
        }
        u32* out = words + 4 * base;
        for (u64 q = 0; q < PHILOX_LANES; ++q) {
            out[4 * q] = x[q], out[4 * q + 1] = y[q], out[4 * q + 2] = z[q], out[4 * q + 3] = w[q];
        }
    }
}

#ifdef DR_X86
// rounding_draw of eight counters. Each word is the low half of a 64-bit lane: the multiplication reads only that half.
__attribute__((target("avx512f"))) static void rounding_words_avx512(const RoundingKey& key, u64 begin, u32* words) {
    const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
    const __m512i lanes = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    for (u64 base = 0; base < ROUNDING_CHUNK / 4; base += 8) {
        __m512i x = _mm512_add_epi64(_mm512_set1_epi64((i64)(begin / 4 + base)), lanes);
        __m512i y = _mm512_set1_epi64(key.step), z = _mm512_set1_epi64(STREAM_ROUNDING);
        __m512i w = _mm512_set1_epi64(key.rank);
        u32 k0 = key.seed, k1 = key.parameter;
        for (int round = 0; round < 10; ++round) {
            const __m512i p0 = _mm512_mul_epu32(m0, x), p1 = _mm512_mul_epu32(m1, z);
            x = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p1, 32), y), _mm512_set1_epi64(k0));
            z = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p0, 32), w), _mm512_set1_epi64(k1));
            y = p1;
            w = p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        const __m512i xy = _mm512_mask_blend_epi32(0xAAAA, x, _mm512_slli_epi64(y, 32));
        const __m512i zw = _mm512_mask_blend_epi32(0xAAAA, z, _mm512_slli_epi64(w, 32));
        _mm512_storeu_si512(words + 4 * base, _mm512_permutex2var_epi64(xy, first, zw));
        _mm512_storeu_si512(words + 4 * base + 16, _mm512_permutex2var_epi64(xy, second, zw));
    }
}
#endif

static inline void rounding_words(const RoundingKey& key, u64 begin, u32* words) {
#ifdef DR_X86
    if (dr_vector_level() == 2) return rounding_words_avx512(key, begin, words);
#endif
    rounding_words_portable(key, begin, words);
}

// Calls f(b, at, size, words) for each run of `size` elements from `at` on that belong to one bucket b; words[j] is the
// word of element at + j. Always inlined, so that f is compiled for the machine of the caller's clone.
template <class F>
__attribute__((always_inline)) inline void rounded_runs(u64 count, u64 bucket_size, const RoundingKey& key, F f) {
    u32 words[ROUNDING_CHUNK];
    for (u64 begin = 0; begin < count; begin += ROUNDING_CHUNK) {
        rounding_words(key, begin, words);
        const u64 size = begin + ROUNDING_CHUNK < count ? ROUNDING_CHUNK : count - begin;
        for (u64 i = 0; i < size;) {
            const u64 b = (begin + i) / bucket_size;
            const u64 left = (b + 1) * bucket_size - begin;
            const u64 stop = left < size ? left : size;
            f(b, begin + i, stop - i, words + i);
            i = stop;
        }
    }
}
