// Values in 16 bits. A section need not be aligned.
#include "half/half.h"

#include "common/cpu.h"

#ifdef DR_X86
#include <immintrin.h>
#endif

template <class F>
__attribute__((always_inline)) inline void encode_words(const float* values, u64 count, u8* out, F convert) {
    for (u64 i = 0; i < count; ++i) {
        u32 bits;
        std::memcpy(&bits, values + i, 4);
        const u16 word = (u16)convert(bits);
        std::memcpy(out + 2 * i, &word, 2);
    }
}
DR_CLONES static void encode_float16(const float* values, u64 count, u8* out) {
    encode_words(values, count, out, [](u32 bits) { return float16_of(bits); });
}
DR_CLONES static void encode_bfloat16(const float* values, u64 count, u8* out) {
    encode_words(values, count, out, [](u32 bits) { return bfloat16_of(bits); });
}

// section: 2 * (count + 1) bytes.
DR_API void dr_half_encode(const float* values, u64 count, int bfloat16, u8* section) {
    const u16 format = bfloat16 != 0;
    std::memcpy(section, &format, 2);
    bfloat16 ? encode_bfloat16(values, count, section + 2) : encode_float16(values, count, section + 2);
}

// Returns the largest magnitude's bits.
template <class F>
__attribute__((always_inline)) inline u32 decode_words(const u8* in, u64 count, float* values, F convert) {
    u32 largest = 0;
    for (u64 i = 0; i < count; ++i) {
        u16 word;
        std::memcpy(&word, in + 2 * i, 2);
        const u32 bits = convert(word), magnitude = bits & 0x7FFFFFFFu;
        largest = magnitude > largest ? magnitude : largest;
        std::memcpy(values + i, &bits, 4);
    }
    return largest;
}
DR_CLONES static u32 decode_float16(const u8* in, u64 count, float* values) {
    return decode_words(in, count, values, [](u32 word) { return bits_of_float16(word); });
}
DR_CLONES static u32 decode_bfloat16(const u8* in, u64 count, float* values) {
    return decode_words(in, count, values, [](u32 word) { return bits_of_bfloat16(word); });
}

#ifdef DR_X86
// Whole groups of sixteen float16. The largest magnitude's bits, or those of infinity, are joined to *largest.
__attribute__((target("avx512f,avx512vl"))) static u64 decode_float16_avx512(const u8* in, u64 count, float* values,
                                                                            u32* largest) {
    const __m256i magnitude = _mm256_set1_epi16(0x7FFF), infinite = _mm256_set1_epi16(0x7C00);
    __m256i most = _mm256_setzero_si256();
    u64 i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m256i words = _mm256_loadu_si256((const __m256i*)(in + 2 * i));
        most = _mm256_max_epu16(most, _mm256_and_si256(words, magnitude));
        _mm512_storeu_ps(values + i, _mm512_cvtph_ps(words));
    }
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_max_epu16(most, infinite), most))) *largest = 0x7F800000u;
    return i;
}
#endif

// values[count]; section: 2 * (count + 1) bytes. ERR_VALUE if the format is unknown, ERR_NOT_FINITE if a value is
// infinite or NaN.
DR_API i64 dr_half_decode(const u8* section, u64 count, float* values) {
    u16 format;
    std::memcpy(&format, section, 2);
    if (format > 1) return ERR_VALUE;
    u32 largest = 0;
    u64 done = 0;
#ifdef DR_X86
    if (!format && dr_vector_level() == 2) done = decode_float16_avx512(section + 2, count, values, &largest);
#endif
    const auto decode = format ? decode_bfloat16 : decode_float16;
    const u32 rest = decode(section + 2 + 2 * done, count - done, values + done);
    largest = rest > largest ? rest : largest;
    return largest >= 0x7F800000u ? (i64)ERR_NOT_FINITE : 0;
}
