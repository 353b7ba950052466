// AVX-512 for bit strings, sixteen elements at a time: fields of equal width, and strings of zeros with ones in them,
// as rice.cpp and elias_fano.cpp have them.
#pragma once

#include "bits/bits_cpu.h"

#ifdef DR_X86
#include <immintrin.h>

#define DR_AVX512 __attribute__((target("avx512f,avx512vl,avx512dq")))
#define DR_AVX512_INLINE DR_AVX512 __attribute__((always_inline)) static inline

DR_AVX512_INLINE __m512i lane_numbers() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// Where each lane finds its field in 64 bytes that begin with sixteen fields of `width` <= 32 bits.
struct Fields {
    __m512i word, shift, mask;
};

DR_AVX512_INLINE Fields fields_of(u32 width) {
    const __m512i bit = _mm512_mullo_epi32(lane_numbers(), _mm512_set1_epi32((int)width));
    return {_mm512_srli_epi32(bit, 5), _mm512_and_si512(bit, _mm512_set1_epi32(31)),
            _mm512_set1_epi32((int)(u32)((1ull << width) - 1))};
}

DR_AVX512_INLINE __m512i unpack16(const u8* in, const Fields& fields) {
    const __m512i bytes = _mm512_loadu_si512(in), one = _mm512_set1_epi32(1), all = _mm512_set1_epi32(32);
    const __m512i low = _mm512_srlv_epi32(_mm512_permutexvar_epi32(fields.word, bytes), fields.shift);
    const __m512i next = _mm512_permutexvar_epi32(_mm512_add_epi32(fields.word, one), bytes);
    // A shift by 32 gives zero.
    const __m512i high = _mm512_sllv_epi32(next, _mm512_sub_epi32(all, fields.shift));
    return _mm512_and_si512(_mm512_or_si512(low, high), fields.mask);
}

// Writes sixteen fields of `width` <= 16 bits: 2 * width bytes, and up to 16 bytes of anything after them.
DR_AVX512_INLINE void pack16(__m512i values, u32 width, u8* out) {
    const __m512i odd = _mm512_sll_epi64(_mm512_srli_epi64(values, 32), _mm_cvtsi32_si128((int)width));
    const __m512i pairs = _mm512_or_si512(_mm512_and_si512(values, _mm512_set1_epi64(0xFFFFFFFF)), odd);
    const __m512i second = _mm512_shuffle_epi32(pairs, (_MM_PERM_ENUM)0x4E);
    const __m512i fours = _mm512_or_si512(pairs, _mm512_sll_epi64(second, _mm_cvtsi32_si128((int)(2 * width))));
    u64 four[8];
    _mm512_storeu_si512(four, fours);
    typedef unsigned __int128 u128;
    const u128 low = four[0] | (u128)four[2] << (4 * width), high = four[4] | (u128)four[6] << (4 * width);
    std::memcpy(out, &low, 16);
    std::memcpy(out + width, &high, 16);
}

DR_AVX512_INLINE __m512i prefix_sums(__m512i x) {
    const __m512i zero = _mm512_setzero_si512();
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 15));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 14));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 12));
    return _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 8));
}

DR_AVX512_INLINE __m512i last_lane(__m512i x) { return _mm512_permutexvar_epi32(_mm512_set1_epi32(15), x); }
DR_AVX512_INLINE u32 last_of(__m512i x) { return (u32)_mm_cvtsi128_si32(_mm512_castsi512_si128(last_lane(x))); }

// Appends the bits 0 .. places[15], of which those at the sixteen increasing places are ones and the others zeros.
DR_AVX512_INLINE void put_ones(BitWriter& writer, __m512i places) {
    const u32 last = last_of(places);
    if (last < 56) {
        const __m512i one = _mm512_set1_epi64(1);
        const __m512i low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(places));
        const __m512i high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(places, 1));
        const __m512i ones = _mm512_or_si512(_mm512_sllv_epi64(one, low), _mm512_sllv_epi64(one, high));
        return writer.put((u64)_mm512_reduce_or_epi64(ones), last + 1);
    }
    u32 place[16], next = 0;
    _mm512_storeu_si512(place, places);
    for (int lane = 0; lane < 16; ++lane) {
        for (; place[lane] - next > 55; next += 56) writer.put(0, 56);
        writer.put(1ull << (place[lane] - next), place[lane] - next + 1);
        next = place[lane] + 1;
    }
}

// Reads the places of the ones of a bit string of fewer than 2^32 - 64 bits, sixteen at a time.
struct Ones {
    const u8* in;
    u64 bytes;
    u64 at = 0;              // the bytes of `in` that have been read
    u32 begin = 0, end = 0;  // of the places that have not been taken
    u32 place[256 + 64 + 16];

    Ones(const u8* in, u64 bytes) : in(in), bytes(bytes) {}
};

// Sets `places` to the next sixteen; false if fewer are left.
DR_AVX512_INLINE bool next_ones(Ones& ones, __m512i& places) {
    if (ones.end - ones.begin < 16) {
        _mm512_storeu_si512(ones.place, _mm512_loadu_si512(ones.place + ones.begin));
        u32 end = ones.end - ones.begin;
        u64 at = ones.at;
        for (; end < 256 && at + 8 <= ones.bytes; at += 8) {
            const u64 word = load64(ones.in + at);
            const __m512i bit = _mm512_add_epi32(lane_numbers(), _mm512_set1_epi32((int)(u32)(at * 8)));
            for (u32 k = 0; k < 4; ++k) {
                const __mmask16 part = (__mmask16)(word >> (16 * k));
                const __m512i found = _mm512_add_epi32(bit, _mm512_set1_epi32((int)(16 * k)));
                _mm512_storeu_si512(ones.place + end, _mm512_maskz_compress_epi32(part, found));
                end += (u32)__builtin_popcount(part);
            }
        }
        ones.at = at, ones.begin = 0, ones.end = end;
        if (end < 16) return false;
    }
    places = _mm512_loadu_si512(ones.place + ones.begin);
    ones.begin += 16;
    return true;
}

// The lanes that are not greater than the lane before them. `previous`: the sixteen indices before these, or 2^32 - 1
// in all lanes for the first sixteen.
DR_AVX512_INLINE __mmask16 not_increasing(__m512i indices, __m512i previous) {
    const __m512i before = _mm512_alignr_epi32(indices, previous, 15);
    return _mm512_cmple_epu32_mask(_mm512_add_epi32(indices, _mm512_set1_epi32(1)),
                                   _mm512_add_epi32(before, _mm512_set1_epi32(1)));
}
#endif
