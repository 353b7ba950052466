// Fields of equal width, and checks of index lists.
//
// Field i of width w fills bits i w .. (i + 1) w - 1 of the bit string. With w = 5, and i.j for bit j of field i:
//
//     bit of the byte:    7    6    5    4    3    2    1    0
//     byte 0:            1.2  1.1  1.0  0.4  0.3  0.2  0.1  0.0
//     byte 1:            3.0  2.4  2.3  2.2  2.1  2.0  1.4  1.3
#include "bits/avx512.h"

#ifdef DR_X86
// pack16_wide writes sixteen fields of 17 to 32 bits: 2 * width bytes, but it stores 64. An output word has bits of at
// most three fields, beginning with field `word * 32 / width`.
struct Words {
    __m512i field, down, up, up2;
};

DR_AVX512_INLINE Words words_of(u32 width) {
    u32 field[16], down[16];
    for (u32 word = 0; word < 16; ++word) field[word] = word * 32 / width, down[word] = word * 32 % width;
    const __m512i shift = _mm512_loadu_si512(down), all = _mm512_set1_epi32((int)width);
    const __m512i up = _mm512_sub_epi32(all, shift);
    return {_mm512_loadu_si512(field), shift, up, _mm512_add_epi32(up, all)};
}

DR_AVX512_INLINE void pack16_wide(__m512i values, const Words& words, u8* out) {
    const __m512i one = _mm512_set1_epi32(1), next = _mm512_add_epi32(words.field, one);
    const __m512i first = _mm512_srlv_epi32(_mm512_permutexvar_epi32(words.field, values), words.down);
    const __m512i second = _mm512_sllv_epi32(_mm512_permutexvar_epi32(next, values), words.up);
    const __m512i third = _mm512_permutexvar_epi32(_mm512_add_epi32(next, one), values);
    // A shift by 32 or more gives zero.
    _mm512_storeu_si512(out, _mm512_or_si512(_mm512_or_si512(first, second), _mm512_sllv_epi32(third, words.up2)));
}

// The functions below write or read whole groups of sixteen (eight) fields and return the number of fields. The writers
// leave the last 128 fields to the caller, whose stores overwrite what a vector store has put after its own bits.
DR_AVX512 static u64 pack_avx512(const u32* values, u64 count, u32 width, u8* out) {
    const Words words = words_of(width);
    u64 i = 0;
    for (; i + 16 + 128 <= count; i += 16) {
        const __m512i fields = _mm512_loadu_si512(values + i);
        if (width <= 16)
            pack16(fields, width, out + i / 8 * width);
        else
            pack16_wide(fields, words, out + i / 8 * width);
    }
    return i;
}

DR_AVX512 static u64 unpack_avx512(const u8* in, u64 bytes, u64 count, u32 width, u32* values) {
    const Fields fields = fields_of(width);
    u64 i = 0;
    for (; i + 16 <= count && i / 8 * width + 64 <= bytes; i += 16)
        _mm512_storeu_si512(values + i, unpack16(in + i / 8 * width, fields));
    return i;
}

// Whether the instructions that gather (pext) and scatter (pdep) bits are fast: the first AMD processors that have them
// take a hundred times as long.
static bool gathers_bits() {
    static const bool fast = [] {
        __builtin_cpu_init();
        return __builtin_cpu_supports("bmi2") && !__builtin_cpu_is("amdfam15h") && !__builtin_cpu_is("amdfam17h");
    }();
    return fast && dr_vector_level() >= 1;
}

// Eight uint8 at a time.
__attribute__((target("bmi2"))) static u64 pack_bmi2(const u8* values, u64 count, u32 width, u8* out) {
    const u64 mask = 0x0101010101010101 * ((1u << width) - 1);
    u64 i = 0;
    for (; i + 8 + 128 <= count; i += 8) {
        const u64 fields = _pext_u64(load64(values + i), mask);
        std::memcpy(out + i / 8 * width, &fields, 8);
    }
    return i;
}

__attribute__((target("bmi2"))) static u64 unpack_bmi2(const u8* in, u64 bytes, u64 count, u32 width, u8* values) {
    const u64 mask = 0x0101010101010101 * ((1u << width) - 1);
    u64 i = 0;
    for (; i + 8 <= count && i / 8 * width + 8 <= bytes; i += 8) {
        const u64 fields = _pdep_u64(load64(in + i / 8 * width), mask);
        std::memcpy(values + i, &fields, 8);
    }
    return i;
}

static u64 pack_vector(const u32* values, u64 count, u32 width, u8* out) {
    return dr_vector_level() == 2 ? pack_avx512(values, count, width, out) : 0;
}
static u64 pack_vector(const u8* values, u64 count, u32 width, u8* out) {
    return gathers_bits() ? pack_bmi2(values, count, width, out) : 0;
}
static u64 unpack_vector(const u8* in, u64 bytes, u64 count, u32 width, u32* values) {
    return dr_vector_level() == 2 ? unpack_avx512(in, bytes, count, width, values) : 0;
}
static u64 unpack_vector(const u8* in, u64 bytes, u64 count, u32 width, u8* values) {
    return gathers_bits() ? unpack_bmi2(in, bytes, count, width, values) : 0;
}
#endif

// Writes field_bytes(count, width) bytes. Bits after the last field are zero.
template <class T>
static void pack(const T* values, u64 count, u32 width, u8* out) {
    if (width == 0) return;
    u64 word = 0, i = 0;
    u32 filled = 0;
#ifdef DR_X86
    i = pack_vector(values, count, width, out);
    out += i / 8 * width;
#endif
    for (; i < count; ++i) {
        const u64 value = values[i];
        word |= value << filled;
        filled += width;
        if (filled >= 64) {
            std::memcpy(out, &word, 8);
            out += 8;
            filled -= 64;
            // The bits of the value that did not fit. The test avoids a shift by 64, which is undefined.
            word = filled ? value >> (width - filled) : 0;
        }
    }
    std::memcpy(out, &word, (filled + 7) / 8);
}

// Returns 0; ERR_TRUNCATED if `bytes` bytes cannot hold `count` fields; ERR_VALUE if the bits after the last one are
// not zeros.
template <class T>
static i64 unpack(const u8* in, u64 bytes, u64 count, u32 width, T* values) {
    if (width > 8 * sizeof(T) || bytes < field_bytes(count, width)) return ERR_TRUNCATED;
    const u64 mask = (1ull << width) - 1;
    u64 i = 0;
#ifdef DR_X86
    i = unpack_vector(in, bytes, count, width, values);
#endif
    // A field of up to 57 bits is contained in the eight bytes from its first byte on.
    const u64 safe = bytes < 8 ? 0 : ((bytes - 8) * 8) / (width ? width : 1);
    const u64 fast = safe < count ? safe : count;
    for (; i < fast; ++i) values[i] = (T)((load64(in + (i * width >> 3)) >> (i * width & 7)) & mask);
    for (; i < count; ++i)
        values[i] = (T)((load64_tail(in + (i * width >> 3), in + bytes) >> (i * width & 7)) & mask);
    return zeros_follow(in, count * width) ? 0 : (i64)ERR_VALUE;
}

DR_CODES(void, pack, (const T* values, u64 count, u32 width, u8* out), pack(values, count, width, out))

DR_CODES(i64, unpack, (const u8* in, u64 bytes, u64 count, u32 width, T* values),
    return unpack(in, bytes, count, width, values))

DR_CLONES static u32 disorder(const u32* indices, u64 count) {
    u32 bad = 0;
    for (u64 i = 1; i < count; ++i) bad |= indices[i] <= indices[i - 1];
    return bad;
}

// Returns 0, or ERR_INDEX if the indices are not strictly increasing or the last one is not below numel.
DR_API i64 dr_check_indices(const u32* indices, u64 count, u64 numel) {
    return disorder(indices, count) || (count && indices[count - 1] >= numel) ? (i64)ERR_INDEX : 0;
}
