// Elias-Fano code of sorted indices (Elias, "Efficient storage and retrieval by content and address of static files",
// J. ACM 1974; Fano, 1971): low bits plain, high bits as the ones of a bit string.
//
//     section:  | lows: count fields of l bits, to a whole byte | highs, to a whole byte |     empty for no indices
//     highs:    bit (index_i >> l) + i is one, for each i, and no other
//
// l follows from the number of indices and numel (elias_fano_low_bits), so it is not sent.
#include "bits/avx512.h"
#include "elias_fano/elias_fano.h"

DR_API u32 dr_elias_fano_low_bits(u64 count, u64 numel) { return elias_fano_low_bits(count, numel); }

DR_API u64 dr_elias_fano_bytes(u64 last, u64 count, u64 numel) { return elias_fano_bytes(last, count, numel); }

#ifdef DR_X86
// Writes whole groups of sixteen elements and returns their number. It leaves the last 128 elements to the caller,
// whose stores overwrite what pack16 and BitWriter have stored after their own bits.
DR_AVX512 static u64 encode_avx512(const u32* indices, u64 count, u32 l, u8* lows, BitWriter& highs) {
    const __m512i lanes = lane_numbers(), mask = _mm512_set1_epi32((int)((1u << l) - 1));
    const __m128i shift = _mm_cvtsi32_si128((int)l);
    u32 next = 0;  // bit of the highs
    u64 i = 0;
    for (; i + 16 + 128 <= count; i += 16) {
        const __m512i index = _mm512_loadu_si512(indices + i);
        if (l) pack16(_mm512_and_si512(index, mask), l, lows + i / 8 * l);
        const __m512i number = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(u32)i));
        const __m512i places = _mm512_add_epi32(_mm512_srl_epi32(index, shift), number);
        put_ones(highs, _mm512_sub_epi32(places, _mm512_set1_epi32((int)next)));
        next = last_of(places) + 1;
    }
    return i;
}

// Reads whole groups of sixteen elements and returns their number. *position becomes the next bit of the highs.
DR_AVX512 static u64 decode_avx512(const u8* in, u64 bytes, u64 count, u32 l, u64 numel, u32* indices, u64* position,
                                   bool* bad) {
    const u64 low_bytes = field_bytes(count, l);
    Ones ones(in + low_bytes, bytes - low_bytes);
    const Fields fields = fields_of(l);
    const __m128i shift = _mm_cvtsi32_si128((int)l);
    const __m512i lanes = lane_numbers(), most = _mm512_set1_epi32((int)(u32)((numel - 1) >> l));
    __m512i previous = _mm512_set1_epi32(-1), places = previous;
    __mmask16 wrong = 0;
    u64 i = 0;
    for (; i + 16 <= count && i / 8 * l + 64 <= bytes && next_ones(ones, places); i += 16) {
        const __m512i high = _mm512_sub_epi32(places, _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(u32)i)));
        const __m512i index = _mm512_or_si512(_mm512_sll_epi32(high, shift), unpack16(in + i / 8 * l, fields));
        wrong |= _mm512_cmpgt_epu32_mask(high, most) | not_increasing(index, previous);
        previous = index;
        _mm512_storeu_si512(indices + i, index);
    }
    if (i) *position = last_of(_mm512_srl_epi32(previous, shift)) + i;
    *bad = wrong || (i && last_of(previous) >= numel);
    return i;
}
#endif

// out: dr_elias_fano_bytes(...) bytes.
DR_API void dr_elias_fano_encode(const u32* indices, u64 count, u64 numel, u8* out) {
    if (count == 0) return;
    const u32 l = elias_fano_low_bits(count, numel);
    const u64 mask = (1ull << l) - 1;
    u8* lows = out;
    u8* highs = out + field_bytes(count, l);
    u64 low_word = 0, high_word = 0, base = 0, i = 0;
    u32 filled = 0;
#ifdef DR_X86
    if (dr_vector_level() == 2 && l <= 16 && count >= 256 && (numel >> l) + count < 1ull << 32) {
        BitWriter writer{highs};
        i = encode_avx512(indices, count, l, lows, writer);
        lows += i / 8 * l;
        base = (u64)(writer.out - highs) * 8;
        highs = writer.out, high_word = writer.word;
    }
#endif
    for (; i < count; ++i) {
        const u64 low = indices[i] & mask;
        low_word |= low << filled;
        filled += l;
        if (filled >= 64) {
            std::memcpy(lows, &low_word, 8);
            lows += 8;
            filled -= 64;
            low_word = filled ? low >> (l - filled) : 0;
        }
        const u64 position = (indices[i] >> l) + i;
        while (position >= base + 64) {
            std::memcpy(highs, &high_word, 8);
            highs += 8;
            high_word = 0;
            base += 64;
        }
        high_word |= 1ull << (position - base);
    }
    std::memcpy(lows, &low_word, (filled + 7) / 8);
    std::memcpy(highs, &high_word, ((indices[count - 1] >> l) + count - base + 7) / 8);
}

// Returns 0; ERR_TRUNCATED if the section has fewer than `count` indices; ERR_INDEX if they are not strictly increasing
// or not below numel; ERR_VALUE if the section continues after the last one, or bits after the lows or the highs are
// not zeros.
DR_API DR_CLONES i64 dr_elias_fano_decode(const u8* in, u64 bytes, u64 count, u64 numel, u32* indices) {
    if (count == 0) return bytes ? (i64)ERR_VALUE : 0;
    const u32 l = elias_fano_low_bits(count, numel);
    const u64 low_bytes = field_bytes(count, l), mask = (1ull << l) - 1;
    if (bytes < low_bytes) return ERR_TRUNCATED;
    const u8* highs = in + low_bytes;
    const u8* end = in + bytes;
    const u64 high_bytes = bytes - low_bytes;
    u64 i = 0, next = 0, bad = 0, position = 0;
#ifdef DR_X86
    if (dr_vector_level() == 2 && count >= 64 && high_bytes < (1ull << 32) / 8 - 8) {
        bool wrong;
        i = decode_avx512(in, bytes, count, l, numel, indices, &position, &wrong);
        if (wrong) return ERR_INDEX;
        if (i) next = indices[i - 1] + 1ull;
    }
#endif
    u64 skip = ~0ull << (position & 63);  // without the ones that decode_avx512 has read
    for (u64 base = position / 64 * 8; base < high_bytes && i < count; base += 8, skip = ~0ull) {
        u64 word = (base + 8 <= high_bytes ? load64(highs + base) : load64_tail(highs + base, end)) & skip;
        for (; word && i < count; word &= word - 1, ++i) {
            const u8* at = in + (i * l >> 3);
            const u64 low = (at + 8 <= end ? load64(at) : load64_tail(at, end)) >> (i * l & 7) & mask;
            position = base * 8 + (u64)__builtin_ctzll(word) + 1;
            const u64 index = (position - 1 - i) << l | low;
            bad |= (u64)(index < next) | (u64)(index >= numel);
            next = index + 1;
            indices[i] = (u32)index;
        }
    }
    if (bad) return ERR_INDEX;  // before the other one, as decode_avx512 and the device have it
    if (i < count) return ERR_TRUNCATED;
    return zeros_follow(in, count * l) && ends_at(highs, high_bytes, position) ? 0 : (i64)ERR_VALUE;
}
