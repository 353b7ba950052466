// Golomb-Rice code of the gaps between sorted indices (Golomb, "Run-length encodings", IEEE Trans. Inf. Theory 1966;
// Rice and Plaunt, IEEE Trans. Commun. 1971), with the low bits and the high bits in two strings.
//
// gap_i = index_i - index_{i-1} - 1 (index_{-1} = -1). With the parameter b, low_i is gap_i's b low bits and
// high_i = gap_i >> b.
//
//     section:  | b u8 | lows: count fields of b bits, to a whole byte | highs, to a whole byte |
//     highs:    for each i, high_i zeros and then a one
//
// Two strings, since fields of equal width are read independently of each other, and the highs' ones are found a word
// at a time: if the one of element i is bit P_i, then high_0 + ... + high_i = P_i - i.
#include "bits/avx512.h"
#include "rice/gap_writer.h"
#include "rice/rice.h"

// The sums of the highs for b - 1, b and b + 1. They are below numel, so 32 bits hold them.
DR_CLONES static void sums_of_highs(const u32* indices, u64 count, u32 b, u64* sums) {
    const u32 less = b ? b - 1 : 0, more = b < 31 ? b + 1 : 31;
    u32 sum_less = indices[0] >> less, sum = indices[0] >> b, sum_more = indices[0] >> more;
    for (u64 i = 1; i < count; ++i) {
        const u32 gap = indices[i] - indices[i - 1] - 1;
        sum_less += gap >> less;
        sum += gap >> b;
        sum_more += gap >> more;
    }
    sums[0] = sum_less, sums[1] = sum, sums[2] = sum_more;
}

// Returns the parameter of the fewest bits for count >= 1 indices. *bytes: the section's size with it.
DR_API u32 dr_rice_parameter(const u32* indices, u64 count, u64 numel, u64* bytes) {
    u64 highs = 0;
    const u32 b = rice_parameter(count, numel, [&](u32 b, u64* sums) {
        sums_of_highs(indices, count, b, sums);
        highs = sums[1];
    });
    *bytes = rice_bytes(count, b, highs);
    return b;
}

DR_API u64 dr_rice_bound(u64 count, u64 numel) { return rice_bound(count, numel); }

#ifdef DR_X86
// Writes whole groups of sixteen elements and returns their number. It leaves the last 128 elements to the caller,
// whose stores overwrite what pack16 and BitWriter have stored after their own bits.
DR_AVX512 static u64 encode_avx512(const u32* indices, u64 count, u32 b, u8* lows, BitWriter& highs) {
    const __m512i one = _mm512_set1_epi32(1), lanes = lane_numbers();
    const __m512i mask = _mm512_set1_epi32((int)((1u << b) - 1));
    const __m128i shift = _mm_cvtsi32_si128((int)b);
    __m512i previous = _mm512_set1_epi32(-1);
    u64 i = 0;
    for (; i + 16 + 128 <= count; i += 16) {
        const __m512i index = _mm512_loadu_si512(indices + i);
        const __m512i before = _mm512_add_epi32(_mm512_alignr_epi32(index, previous, 15), one);
        const __m512i gap = _mm512_sub_epi32(index, before);
        previous = index;
        if (b) pack16(_mm512_and_si512(gap, mask), b, lows + i / 8 * b);
        put_ones(highs, _mm512_add_epi32(prefix_sums(_mm512_srl_epi32(gap, shift)), lanes));
    }
    return i;
}

// Reads whole groups of sixteen elements and returns their number. *position becomes the next bit of the highs, *sum
// the sum of the lows. A sum of highs above `most` gives an index beyond numel, which might wrap around.
DR_AVX512 static u64 decode_avx512(const u8* in, u64 bytes, u64 count, u32 b, u64 numel, u32* indices,
                                        u64* position, u64* sum, bool* bad) {
    const u64 low_bytes = field_bytes(count, b);
    Ones ones(in + low_bytes, bytes - low_bytes);
    const Fields fields = fields_of(b);
    const __m128i shift = _mm_cvtsi32_si128((int)b);
    const __m512i lanes = lane_numbers(), most = _mm512_set1_epi32((int)(u32)((numel - 1) >> b));
    __m512i previous = _mm512_set1_epi32(-1), lows = _mm512_setzero_si512(), places = lows;
    __mmask16 wrong = 0;
    u64 i = 0;
    for (; i + 16 <= count && i / 8 * b + 64 <= bytes && next_ones(ones, places); i += 16) {
        const __m512i number = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(u32)i));
        const __m512i high = _mm512_sub_epi32(places, number);
        *position = last_of(places) + 1ull;
        lows = _mm512_add_epi32(last_lane(lows), prefix_sums(unpack16(in + i / 8 * b, fields)));
        const __m512i index = _mm512_add_epi32(_mm512_add_epi32(_mm512_sll_epi32(high, shift), lows), number);
        wrong |= _mm512_cmpgt_epu32_mask(high, most) | not_increasing(index, previous);
        previous = index;
        _mm512_storeu_si512(indices + i, index);
    }
    *bad = wrong || (i && last_of(previous) >= numel);
    *sum = last_of(lows);
    return i;
}
#endif

// Writes the section without its first byte.
DR_API void dr_rice_encode(const u32* indices, u64 count, u32 b, u8* out) {
    GapWriter gaps{out, out + field_bytes(count, b)};
    u64 i = 0;
#ifdef DR_X86
    if (dr_vector_level() == 2 && b <= 16 && count >= 256) {
        BitWriter writer{gaps.highs};
        i = encode_avx512(indices, count, b, gaps.lows, writer);
        if (i) gaps.next = indices[i - 1] + 1;
        gaps.lows += i / 8 * b;
        gaps.highs = writer.out, gaps.high_word = writer.word, gaps.position = writer.filled;
    }
#endif
    for (; i < count; ++i) gaps.put(indices[i], b);
    gaps.end_lows();
    std::memcpy(gaps.highs, &gaps.high_word, (gaps.position + 7) / 8);
}

// Reads a section without its first byte. Returns 0; ERR_TRUNCATED if it has fewer than `count` gaps; ERR_INDEX if an
// index is not below numel; ERR_VALUE if the section continues after the last one, or bits after the lows or the highs
// are not zeros.
DR_API DR_CLONES i64 dr_rice_decode(const u8* in, u64 bytes, u64 count, u32 b, u64 numel, u32* indices) {
    if (b > 31) return ERR_INDEX;
    const u64 low_bytes = field_bytes(count, b);
    if (bytes < low_bytes) return ERR_TRUNCATED;
    const u8* highs = in + low_bytes;
    const u8* end = in + bytes;
    const u64 high_bytes = bytes - low_bytes, mask = (1ull << b) - 1;
    u64 i = 0, sum = 0, position = 0, out_of_range = 0;
#ifdef DR_X86
    if (dr_vector_level() == 2 && count >= 64 && high_bytes < (1ull << 32) / 8 - 8) {
        bool bad;
        i = decode_avx512(in, bytes, count, b, numel, indices, &position, &sum, &bad);
        if (bad) return ERR_INDEX;
    }
#endif
    u64 skip = ~0ull << (position & 63);  // without the ones that decode_avx512 has read
    for (u64 base = position / 64 * 8; base < high_bytes && i < count; base += 8, skip = ~0ull) {
        u64 word = (base + 8 <= high_bytes ? load64(highs + base) : load64_tail(highs + base, end)) & skip;
        for (; word && i < count; word &= word - 1, ++i) {
            const u8* at = in + (i * b >> 3);
            const u64 low = (at + 8 <= end ? load64(at) : load64_tail(at, end)) >> (i * b & 7) & mask;
            sum += low;
            position = base * 8 + (u64)__builtin_ctzll(word) + 1;
            const u64 high = position - 1 - i, index = (high << b) + sum + i;
            out_of_range |= (u64)(index >= numel) | (high >> 32);
            indices[i] = (u32)index;
        }
    }
    if (out_of_range) return ERR_INDEX;  // before the other one, as decode_avx512 and the device have it
    if (i < count) return ERR_TRUNCATED;
    return zeros_follow(in, count * b) && ends_at(highs, high_bytes, position) ? 0 : (i64)ERR_VALUE;
}
