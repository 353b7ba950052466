// Floats without loss. The exponents of a gradient take 2.5 to 3 bits each, and its signs and fractions are noise: so
// the exponents are coded, and the rest is sent as it is (ZipNN: Hershcovitch et al., arXiv:2411.05239, 2024; DFloat11:
// Zhang et al., arXiv:2504.11651, 2025). Of the fraction, a chunk sends no low bits that are zero in all of its values:
// values that were bfloat16 have 16 of these, and those that were float16 have 13.
//
// The code is not a Huffman code, as there, but codes of equal length with escapes, in two steps (one step is PFOR:
// Zukowski et al., "Super-scalar RAM-CPU cache compression", ICDE 2006). They take about 0.3 bits a value more, and
// vector instructions write and read them. With a and b for the bits of both codes, 0 to 3 each:
//
//     first code:   rank 0 .. 2^a - 2 of an exponent by how often it occurs in the chunk, else 2^a - 1, the escape
//     second code:  of the escapes only: rank - (2^a - 1) if that is 0 .. 2^b - 2, else 2^b - 1
//     others:       the exponents that neither code has, a byte each
//
//     section:  | 1 | bytes of each chunk u16 | chunk 0 | chunk 1 | ...        a chunk: 4096 values, the last: the rest
//     chunk:    | m u8 | a + 4 b u8 | symbols u8 [2^a - 1 + 2^b - 1] | fields, m bits each | first codes |
//               | second codes | others |                  each of them to a whole byte; symbols: by rank
//     field:    | the m - 1 upper bits of the fraction | sign |           lowest bit first
//     fields:   | the m % 8 lowest bits of each | the next 8 bits of each | the next 8 bits of each | ...
//
// Exponents that occur equally often are ranked by their number, and so are those that do not occur, after all others.
// a and b are those of the fewest bytes, and m is the least that holds all values.
#include <algorithm>
#include <type_traits>

#include "bits/bits_cpu.h"
#include "common/stream_copy.h"
#include "lossless/lossless_cpu.h"

#ifdef DR_X86
#include <immintrin.h>
#endif

// ---- Fields of BITS bits, 1 to 7, a byte each before they are packed. Their arrays have ROOM past their ends.

// Eight fields moved together, and apart again: the upper one of two, of two pairs, of two fours.
template <u32 BITS>
struct Group {
    static const u64 ONES = 0x0001000100010001 * ((1u << BITS) - 1), TWOS = 0x0000000100000001 * ((1u << 2 * BITS) - 1);
    static const u64 FOURS = (1u << 4 * BITS) - 1;
    static const u32 GAP = 8 - BITS;
};
template <u32 BITS>
__attribute__((always_inline)) inline u64 together(u64 x) {
    typedef Group<BITS> G;
    x = (x & G::ONES) | (x >> G::GAP & G::ONES << BITS);
    x = (x & G::TWOS) | (x >> 2 * G::GAP & G::TWOS << 2 * BITS);
    return (x & G::FOURS) | (x >> 4 * G::GAP & G::FOURS << 4 * BITS);
}
template <u32 BITS>
__attribute__((always_inline)) inline u64 apart(u64 x) {
    typedef Group<BITS> G;
    x = (x & G::FOURS) | (x << 4 * G::GAP & G::FOURS << 32);
    x = (x & G::TWOS) | (x << 2 * G::GAP & G::TWOS << 16);
    return (x & G::ONES) | (x << G::GAP & G::ONES << 8);
}
// Bytes of a last group of eight that are not fields become zeros. Stores up to eight bytes past the end.
template <u32 BITS>
__attribute__((always_inline)) inline void pack(u8* __restrict fields, u32 count, u8* __restrict out) {
    std::memset(fields + count, 0, 8);
    const u64 groups = (count + 7) / 8;
    u64 words[CHUNK / 8];  // loops of their own for loads and stores, so that the others have vector instructions
    std::memcpy(words, fields, 8 * groups);
    for (u64 i = 0; i < groups; ++i) words[i] = together<BITS>(words[i]);
    for (u64 i = 0; i < groups; ++i) std::memcpy(out + i * BITS, words + i, 8);
}
// Loads up to eight bytes past the end.
template <u32 BITS>
__attribute__((always_inline)) inline void unpack(const u8* __restrict in, u32 count, u8* __restrict fields) {
    const u64 groups = (count + 7) / 8;
    u64 words[CHUNK / 8];
    for (u64 i = 0; i < groups; ++i) words[i] = load64(in + i * BITS);
    for (u64 i = 0; i < groups; ++i) words[i] = apart<BITS>(words[i]);
    std::memcpy(fields, words, count);
}

// Calls f of an integral_constant with this number, LEAST to MOST: a function with DR_CLONES cannot be a template.
template <u32 LEAST, u32 MOST, class F>
__attribute__((always_inline)) inline void with_constant(u32 number, F f) {
    if (number == LEAST) f(std::integral_constant<u32, LEAST>());
    else if constexpr (LEAST < MOST) with_constant<LEAST + 1, MOST>(number, f);
}

// ---- Signs and fractions: the 24 bits of both are three bytes, and the first `bits` of them are sent.

// The planes of a chunk's values: the lowest 8 bits of the fraction, the next 8, its upper 7 below the sign.
struct Planes {
    u8 of[3][CHUNK + ROOM];
};
struct Found {
    u32 used = 0;                 // the union of all values' bits
    u8 least = 255, largest = 0;  // exponent
};

DR_CLONES static Found take_apart_portable(const u32* __restrict patterns, u32 begin, u32 count, Planes* planes,
                                           u8* __restrict exponents) {
    u8 *__restrict low = planes->of[0], *__restrict middle = planes->of[1], *__restrict high = planes->of[2];
    Found found;
    u32 used = 0;
    u8 least = 255, largest = 0;
    for (u32 i = begin; i < count; ++i) {
        const u32 pattern = patterns[i];
        used |= pattern;
        low[i] = (u8)pattern;
        middle[i] = (u8)(pattern >> 8);
        high[i] = (u8)((pattern >> 24 & 128) | (pattern >> 16 & 127));
        exponents[i] = (u8)(pattern >> FRACTION);
    }
    for (u32 i = begin; i < count; ++i) {
        least = std::min(least, exponents[i]);
        largest = std::max(largest, exponents[i]);
    }
    found.used = used, found.least = least, found.largest = largest;
    return found;
}

#ifdef DR_X86
#define DR_AVX2 __attribute__((target("avx2,popcnt")))
#define DR_AVX2_INLINE __attribute__((target("avx2,popcnt"), always_inline)) inline

DR_AVX2_INLINE static __m256i load(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
DR_AVX2_INLINE static void store(void* to, __m256i what) { _mm256_storeu_si256((__m256i*)to, what); }

// Whole groups of 32, of which it returns the number of values.
DR_AVX2 static u32 take_apart_avx2(const u32* patterns, u32 count, Planes* planes, u8* exponents, Found* found) {
    const __m256i by_byte = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i sign = _mm256_set1_epi8((char)128), one = _mm256_set1_epi8(1);
    __m256i used = _mm256_setzero_si256(), largest = used, least = _mm256_set1_epi8(-1);
    u32 i = 0;
    for (; i + 32 <= count; i += 32) {
        // The next chunk's, which the processor does not foresee between two chunks.
        _mm_prefetch((const char*)(patterns + i + CHUNK), _MM_HINT_T1);
        _mm_prefetch((const char*)(patterns + i + 16 + CHUNK), _MM_HINT_T1);
        __m256i of[4];
        for (u32 j = 0; j < 4; ++j) {
            of[j] = load(patterns + i + 8 * j);
            used = _mm256_or_si256(used, of[j]);
            of[j] = _mm256_shuffle_epi8(of[j], by_byte);
        }
        const __m256i a = _mm256_unpacklo_epi32(of[0], of[1]), b = _mm256_unpackhi_epi32(of[0], of[1]);
        const __m256i c = _mm256_unpacklo_epi32(of[2], of[3]), d = _mm256_unpackhi_epi32(of[2], of[3]);
        const __m256i third = _mm256_unpacklo_epi64(b, d), fourth = _mm256_unpackhi_epi64(b, d);
        const __m256i high = _mm256_or_si256(_mm256_and_si256(fourth, sign), _mm256_andnot_si256(sign, third));
        const __m256i exponent =
            _mm256_or_si256(_mm256_add_epi8(fourth, fourth), _mm256_and_si256(_mm256_srli_epi16(third, 7), one));
        largest = _mm256_max_epu8(largest, exponent);
        least = _mm256_min_epu8(least, exponent);
        store(planes->of[0] + i, _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(a, c), in_order));
        store(planes->of[1] + i, _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(a, c), in_order));
        store(planes->of[2] + i, _mm256_permutevar8x32_epi32(high, in_order));
        store(exponents + i, _mm256_permutevar8x32_epi32(exponent, in_order));
    }
    u32 unions[8];
    u8 each[2][32];
    store(unions, used);
    store(each[0], least);
    store(each[1], largest);
    for (u32 bits : unions) found->used |= bits;
    found->least = *std::min_element(each[0], each[0] + 32);
    found->largest = *std::max_element(each[1], each[1] + 32);
    return i;
}
#endif

static Found take_apart(const u32* patterns, u32 count, Planes* planes, u8* exponents) {
    Found found;
    u32 done = 0;
#ifdef DR_X86
    if (dr_vector_level()) done = take_apart_avx2(patterns, count, planes, exponents, &found);
#endif
    const Found rest = take_apart_portable(patterns, done, count, planes, exponents);
    found.used |= rest.used;
    found.least = std::min(found.least, rest.least);
    found.largest = std::max(found.largest, rest.largest);
    return found;
}

// The bits of a plane below those of whole bytes, as fields.
DR_CLONES static void pack_upper(const u8* __restrict plane, u32 count, u32 bits, u8* __restrict out) {
    u8 fields[CHUNK + ROOM];
    for (u32 i = 0; i < count; ++i) fields[i] = (u8)(plane[i] >> (8 - bits));
    with_constant<1, 7>(bits, [&](auto number) __attribute__((always_inline)) { pack<number>(fields, count, out); });
}
DR_CLONES static void unpack_upper(const u8* __restrict in, u32 count, u32 bits, u8* __restrict plane) {
    with_constant<1, 7>(bits, [&](auto number) __attribute__((always_inline)) { unpack<number>(in, count, plane); });
    for (u32 i = 0; i < count; ++i) plane[i] = (u8)(plane[i] << (8 - bits));
}

static void write_fields(const Planes& planes, u32 count, u32 bits, u8* out) {
    const u32 whole = bits / 8, low = bits % 8;
    if (low) {
        pack_upper(planes.of[2 - whole], count, low, out);
        out += field_bytes(count, low);
    }
    for (u32 plane = 3 - whole; plane < 3; ++plane, out += count) std::memcpy(out, planes.of[plane], count);
}

// Values begin to count - 1. planes: of which those below PLANES are there, the upper ones.
template <u32 PLANES, Use USE>
__attribute__((always_inline)) inline void put_together(const u8* const* planes, const u8* __restrict exponents,
                                                        u32 begin, u32 count, float scale, float* __restrict out) {
    for (u32 i = begin; i < count; ++i) {
        const u32 high = planes[2][i];
        u32 pattern = (high & 128) << 24 | (u32)exponents[i] << FRACTION | (high & 127) << 16;
        if (PLANES > 1) pattern |= (u32)planes[1][i] << 8;
        if (PLANES > 2) pattern |= planes[0][i];
        if (USE == STORED) {
            std::memcpy(out + i, &pattern, 4);
        } else {
            float value;
            std::memcpy(&value, &pattern, 4);
            out[i] = USE == ADDED ? out[i] + value : USE == FIRST ? 0.0f + value : (0.0f + value) * scale;
        }
    }
}
#ifdef DR_X86
// Whole groups of 32 from `begin` on; returns where the rest begins. STREAMS: out + begin is at a multiple of 32 bytes,
// and is not written through the cache.
template <u32 PLANES, Use USE, bool STREAMS>
DR_AVX2 static u32 put_together_avx2(const u8* const* planes, const u8* exponents, u32 begin, u32 count, float scale,
                                     float* out) {
    const __m256i sign = _mm256_set1_epi8((char)128), zero = _mm256_setzero_si256();
    const __m256 factor = _mm256_set1_ps(scale);
    u32 i = begin;
    for (; i + 32 <= count; i += 32) {
        const __m256i high = load(planes[2] + i), exponent = load(exponents + i);
        const __m256i fourth = _mm256_or_si256(_mm256_and_si256(high, sign),
                                               _mm256_andnot_si256(sign, _mm256_srli_epi16(exponent, 1)));
        const __m256i third = _mm256_or_si256(_mm256_andnot_si256(sign, high),
                                              _mm256_and_si256(sign, _mm256_slli_epi16(exponent, 7)));
        const __m256i second = PLANES > 1 ? load(planes[1] + i) : zero, first = PLANES > 2 ? load(planes[0] + i) : zero;
        const __m256i a = _mm256_unpacklo_epi8(first, second), b = _mm256_unpackhi_epi8(first, second);
        const __m256i c = _mm256_unpacklo_epi8(third, fourth), d = _mm256_unpackhi_epi8(third, fourth);
        const __m256i w = _mm256_unpacklo_epi16(a, c), x = _mm256_unpackhi_epi16(a, c);
        const __m256i y = _mm256_unpacklo_epi16(b, d), z = _mm256_unpackhi_epi16(b, d);
        const __m256i of[4] = {_mm256_permute2x128_si256(w, x, 0x20), _mm256_permute2x128_si256(y, z, 0x20),
                               _mm256_permute2x128_si256(w, x, 0x31), _mm256_permute2x128_si256(y, z, 0x31)};
        for (u32 j = 0; j < 4; ++j) {
            float* const to = out + i + 8 * j;
            __m256 value = _mm256_castsi256_ps(of[j]);
            if (USE == ADDED) value = _mm256_add_ps(_mm256_loadu_ps(to), value);
            if (USE == FIRST || USE == SCALED) value = _mm256_add_ps(_mm256_setzero_ps(), value);
            if (USE == SCALED) value = _mm256_mul_ps(value, factor);
            STREAMS ? _mm256_stream_ps(to, value) : _mm256_storeu_ps(to, value);
        }
    }
    return i;
}
#endif

static void read_fields(const u8* in, const u8* exponents, u32 count, u32 bits, Use use, bool streams, float scale,
                        float* out) {
    const u32 whole = bits / 8, low = bits % 8;
    u8 upper[CHUNK + ROOM];
    const u8* planes[3] = {};
    if (low) {
        unpack_upper(in, count, low, upper);
        planes[2 - whole] = upper;
        in += field_bytes(count, low);
    }
    for (u32 plane = 3 - whole; plane < 3; ++plane, in += count) planes[plane] = in;
    with_constant<1, 3>(whole + (low > 0), [&](auto present) {
        with_constant<STORED, SCALED>(use, [&](auto way) {
            u32 done = 0;
#ifdef DR_X86
            if (dr_vector_level()) {
                const u32 head = streams ? std::min(count, (u32)(-(uintptr_t)out % 32 / 4)) : 0;
                put_together<present, (Use)way()>(planes, exponents, 0, head, scale, out);
                done = (streams ? put_together_avx2<present, (Use)way(), true>
                                : put_together_avx2<present, (Use)way(), false>)(planes, exponents, head, count, scale, out);
            }
#endif
            put_together<present, (Use)way()>(planes, exponents, done, count, scale, out);
        });
    });
}

// ---- Codes of 1 to 3 bits.

#ifdef DR_X86
// For eight bytes of which those in a mask are escapes: where each of these is found, and where each of these goes.
struct Moves {
    u64 gather[256], scatter[256];
    Moves() {
        for (u32 mask = 0; mask < 256; ++mask) {
            gather[mask] = scatter[mask] = 0x8080808080808080;  // pshufb gives 0 for 0x80
            u32 found = 0;
            for (u32 place = 0; place < 8; ++place)
                if (mask >> place & 1) {
                    ((u8*)(gather + mask))[found] = (u8)place;
                    ((u8*)(scatter + mask))[place] = (u8)found++;
                }
        }
    }
};
static const Moves MOVES;

// Whole groups of 32, of which it returns the number of bytes. *place moves on by the escapes.
template <u32 BITS>
DR_AVX2 static u32 write_codes_avx2(const u8* in, u32 count, const u8* symbols, u8* out, u8* escapes, u32* place) {
    const u32 escape = (1u << BITS) - 1;
    const __m256i escaped = _mm256_set1_epi8((char)escape);
    const __m256i pairs = _mm256_set1_epi16(1 | 256 << BITS), fours = _mm256_set1_epi32(1 | 65536 << 2 * BITS);
    char bytes[16];  // of both words of a half, those with codes
    for (u32 j = 0; j < 16; ++j) bytes[j] = (char)(j < 2 * BITS ? j / BITS * 8 + j % BITS : 128);
    const __m256i with_codes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes));
    __m256i of[escape], below[escape];  // a symbol, and how far its code is below the escape
    for (u32 j = 0; j < escape; ++j) {
        of[j] = _mm256_set1_epi8((char)symbols[j]);
        below[j] = _mm256_set1_epi8((char)(escape - j));
    }
    u32 i = 0, at = *place;
    for (; i + 32 <= count; i += 32, out += 4 * BITS) {
        const __m256i each = load(in + i);
        __m256i codes = escaped;
        for (u32 j = 0; j < escape; ++j)
            codes = _mm256_sub_epi8(codes, _mm256_and_si256(_mm256_cmpeq_epi8(each, of[j]), below[j]));
        u32 mask = (u32)_mm256_movemask_epi8(_mm256_cmpeq_epi8(codes, escaped));
        for (u32 j = 0; j < 32; j += 8, mask >>= 8) {
            const __m128i eight = _mm_loadl_epi64((const __m128i*)(in + i + j));
            const __m128i moves = _mm_loadl_epi64((const __m128i*)(MOVES.gather + (mask & 255)));
            _mm_storel_epi64((__m128i*)(escapes + at), _mm_shuffle_epi8(eight, moves));
            at += (u32)__builtin_popcount(mask & 255);
        }
        const __m256i words = _mm256_madd_epi16(_mm256_maddubs_epi16(codes, pairs), fours);
        const __m256i packed =
            _mm256_shuffle_epi8(_mm256_or_si256(words, _mm256_srli_epi64(words, 32 - 4 * BITS)), with_codes);
        _mm_storel_epi64((__m128i*)out, _mm256_castsi256_si128(packed));
        _mm_storel_epi64((__m128i*)(out + 2 * BITS), _mm256_extracti128_si256(packed, 1));
    }
    *place = at;
    return i;
}

// Whole groups of 32, of which it returns the number of codes. *escapes is how many of these are the escape.
template <u32 BITS>
DR_AVX2 static u32 read_codes_avx2(const u8* in, u32 count, const u8* table, u8* codes, u8* out, u32* escapes) {
    // Of each two codes, the two bytes that have them, and a factor that moves them to the top.
    u8 source[32];
    u16 factor[16];
    for (u32 k = 0; k < 16; ++k) {
        const u32 bit = 2 * BITS * k;
        source[2 * k] = (u8)(bit / 8), source[2 * k + 1] = (u8)(bit / 8 + 1);
        factor[k] = (u16)(1u << (16 - 2 * BITS - bit % 8));
    }
    const __m256i sources = load(source), factors = load(factor);
    const __m256i low = _mm256_set1_epi16((1 << BITS) - 1), high = _mm256_set1_epi16(((1 << BITS) - 1) << 8);
    const __m256i symbols = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    const __m256i escaped = _mm256_set1_epi8((1 << BITS) - 1);
    u32 i = 0, found = 0;
    for (; i + 32 <= count; i += 32, in += 4 * BITS) {
        const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)in));
        const __m256i top = _mm256_mullo_epi16(_mm256_shuffle_epi8(all, sources), factors);
        const __m256i each = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(top, 16 - 2 * BITS), low),
                                             _mm256_and_si256(_mm256_srli_epi16(top, 8 - BITS), high));
        store(codes + i, each);
        store(out + i, _mm256_shuffle_epi8(symbols, each));
        found += (u32)__builtin_popcount((u32)_mm256_movemask_epi8(_mm256_cmpeq_epi8(each, escaped)));
    }
    *escapes = found;
    return i;
}
#endif

DR_CLONES static void find_codes(const u8* __restrict in, u32 count, u32 bits, const u8* __restrict symbols,
                                 u8* __restrict codes, u8* __restrict out) {
    with_constant<1, MOST_BITS>(bits, [&](auto number) __attribute__((always_inline)) {
        const u8 escape = coded_symbols(number);
        for (u32 i = 0; i < count; ++i) {
            u8 code = escape;
            for (u8 j = escape; j--;) code = in[i] == symbols[j] ? j : code;
            codes[i] = code;
        }
        pack<number>(codes, count, out);
    });
}
// Writes the code of each byte: its place in symbols[2^bits - 1], or the escape. Moves bytes whose code is the escape to
// `escapes`, and returns how many there are.
static u32 write_codes(const u8* in, u32 count, u32 bits, const u8* symbols, u8* out, u8* escapes) {
    u8 codes[CHUNK + ROOM];
    u32 done = 0, place = 0;
#ifdef DR_X86
    if (dr_vector_level())
        with_constant<1, MOST_BITS>(bits, [&](auto number) {
            done = write_codes_avx2<number>(in, count, symbols, out, escapes, &place);
        });
#endif
    find_codes(in + done, count - done, bits, symbols, codes, out + field_bytes(done, bits));
    for (u32 i = done; i < count; ++i) {
        escapes[place] = in[i];
        place += codes[i - done] == coded_symbols(bits);
    }
    return place;
}

DR_CLONES static void unpack_codes(const u8* __restrict in, u32 count, u32 bits, u8* __restrict codes) {
    with_constant<1, MOST_BITS>(bits, [&](auto number) __attribute__((always_inline)) {
        unpack<number>(in, count, codes);
    });
}
// Reads codes, and finds the symbols of those that are not the escape; 0 for the escape. Returns how many are. Loads up
// to 16 bytes past the end.
static u32 read_codes(const u8* in, u32 count, u32 bits, const u8* symbols, u8* codes, u8* out) {
    const u8 escape = (u8)coded_symbols(bits);
    u8 table[16] = {};
    std::memcpy(table, symbols, escape);
    u32 i = 0, escapes = 0;
#ifdef DR_X86
    if (dr_vector_level())
        with_constant<1, MOST_BITS>(bits, [&](auto number) {
            i = read_codes_avx2<number>(in, count, table, codes, out, &escapes);
        });
#endif
    unpack_codes(in + field_bytes(i, bits), count - i, bits, codes + i);
    for (; i < count; ++i) {
        out[i] = table[codes[i]];
        escapes += codes[i] == escape;
    }
    return escapes;
}

#ifdef DR_X86
// Whole groups of sixteen, of which it returns the number of bytes; *place moves on by the escapes.
DR_AVX2 static u32 scatter_avx2(const u8* escapes, const u8* codes, u32 count, u8 escape, u8* out, u32* place) {
    const __m128i wanted = _mm_set1_epi8((char)escape);
    u32 i = 0, at = *place;
    for (; i + 16 <= count; i += 16) {
        const u32 mask = (u32)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128((const __m128i*)(codes + i)), wanted));
        const u32 in_low = (u32)__builtin_popcount(mask & 255);
        const __m128i low = _mm_loadl_epi64((const __m128i*)(escapes + at));
        const __m128i high = _mm_loadl_epi64((const __m128i*)(escapes + at + in_low));
        const __m128i to_low = _mm_loadl_epi64((const __m128i*)(MOVES.scatter + (mask & 255)));
        const __m128i to_high = _mm_loadl_epi64((const __m128i*)(MOVES.scatter + (mask >> 8)));
        const __m128i moved = _mm_unpacklo_epi64(_mm_shuffle_epi8(low, to_low), _mm_shuffle_epi8(high, to_high));
        __m128i* const to = (__m128i*)(out + i);
        _mm_storeu_si128(to, _mm_or_si128(_mm_loadu_si128(to), moved));
        at += (u32)__builtin_popcount(mask);
    }
    *place = at;
    return i;
}
#endif

// Puts escapes back, where `out` has zeros.
static void scatter(const u8* escapes, const u8* codes, u32 count, u32 bits, u8* out) {
    const u8 escape = (u8)coded_symbols(bits);
    u32 i = 0, place = 0;
#ifdef DR_X86
    if (dr_vector_level()) i = scatter_avx2(escapes, codes, count, escape, out, &place);
#endif
    for (; i < count; ++i) {
        const bool escaped = codes[i] == escape;
        out[i] = escaped ? escapes[place] : out[i];
        place += escaped;
    }
}

// ---- Chunks.

// The MOST_RANKED most frequent exponents of the sample, and how often they occur in it. All are within the range.
static void rank(const u8* exponents, u32 count, Found range, u8* symbols, u32* ranked) {
    const u32 least = range.least, end = range.largest + 1u;
    u16 counts[4][256];  // four tables, so that equal exponents in a row do not wait for each other's count
    for (u16* table : counts) std::memset(table + least, 0, 2 * (end - least));
    u32 begin = 0;
    for (; begin + SAMPLE <= count; begin += SAMPLE_EACH)
        for (u32 i = 0; i < SAMPLE; ++i) ++counts[i % 4][exponents[begin + i]];
    for (u32 i = begin; i < count; ++i) ++counts[0][exponents[i]];
    u32 keys[256 + MOST_RANKED], found = 0;  // | occurrences << 8 | 255 - exponent |: the largest has the first rank
    u16* const sums = counts[0];
    for (u32 s = least; s < end; ++s) {
        sums[s] = (u16)(counts[0][s] + counts[1][s] + counts[2][s] + counts[3][s]);
        keys[found] = (u32)sums[s] << 8 | (255 - s);
        found += sums[s] > 0;
    }
    for (u32 s = 0; found < MOST_RANKED; ++s)
        if (s < least || s >= end || !sums[s]) keys[found++] = 255 - s;
    std::partial_sort(keys, keys + MOST_RANKED, keys + found, [](u32 a, u32 b) { return a > b; });
    for (u32 i = 0; i < MOST_RANKED; ++i) {
        symbols[i] = (u8)(255 - (keys[i] & 255));
        ranked[i] = keys[i] >> 8;
    }
}

u32 lossless_encode_chunk(const u32* patterns, u32 count, u8* out, bool* finite) {
    u8 exponents[CHUNK + ROOM], escapes[CHUNK + ROOM], others[CHUNK + ROOM], symbols[MOST_RANKED];
    u32 ranked[MOST_RANKED];
    Planes planes;
    const Found found = take_apart(patterns, count, &planes, exponents);
    *finite = found.largest < 255;
    rank(exponents, count, found, symbols, ranked);
    const Plan plan = plan_of(count, ranked, found.used);
    out[0] = (u8)plan.bits;
    out[1] = (u8)(plan.first | plan.second << 2);
    std::memcpy(out + HEAD, symbols, plan.symbols());
    u8* at = out + HEAD + plan.symbols();
    write_fields(planes, count, plan.bits, at);
    at += field_bytes(count, plan.bits);
    const u8* left = exponents;
    u32 escapes_of = count;
    if (plan.first) {
        escapes_of = write_codes(left, count, plan.first, symbols, at, escapes);
        at += field_bytes(count, plan.first);
        left = escapes;
    }
    u32 others_of = escapes_of;
    if (plan.second) {
        others_of = write_codes(left, escapes_of, plan.second, symbols + coded_symbols(plan.first), at, others);
        at += field_bytes(escapes_of, plan.second);
        left = others;
    }
    std::memcpy(at, left, others_of);
    return (u32)(at - out) + others_of;
}

// in[bytes], and ROOM bytes after them. Returns 0 or an error.
static i64 decode_chunk(const u8* in, u32 bytes, u32 count, Use use, bool streams, float scale, float* out) {
    u8 exponents[CHUNK + ROOM], escapes[CHUNK + ROOM], codes[2][CHUNK + ROOM];
    Plan plan;
    if (bytes < HEAD) return ERR_TRUNCATED;
    if (!read_head(in, &plan)) return ERR_VALUE;
    plan.escapes = plan.others = 0;
    if (plan.bytes(count) > bytes) return ERR_TRUNCATED;
    const u8 *symbols = in + HEAD, *fields = symbols + plan.symbols(), *at = fields + field_bytes(count, plan.bits);
    bool padded = zeros_follow(fields, (u64)count * (plan.bits % 8));
    plan.escapes = count;
    if (plan.first) {
        plan.escapes = read_codes(at, count, plan.first, symbols, codes[0], exponents);
        padded &= zeros_follow(at, (u64)count * plan.first);
        at += field_bytes(count, plan.first);
    }
    if (plan.bytes(count) > bytes) return ERR_TRUNCATED;
    plan.others = plan.escapes;
    if (plan.second) {
        plan.others = read_codes(at, plan.escapes, plan.second, symbols + coded_symbols(plan.first), codes[1], escapes);
        padded &= zeros_follow(at, (u64)plan.escapes * plan.second);
        at += field_bytes(plan.escapes, plan.second);
    }
    if (plan.bytes(count) != bytes) return ERR_SIZES;
    if (!padded) return ERR_VALUE;
    if (std::memchr(symbols, 255, plan.symbols()) || std::memchr(at, 255, plan.others)) return ERR_NOT_FINITE;
    if (plan.second) {
        scatter(at, codes[1], plan.escapes, plan.second, escapes);
        at = escapes;
    }
    if (plan.first) {
        scatter(at, codes[0], count, plan.first, exponents);
        at = exponents;
    }
    read_fields(fields, at, count, plan.bits, use, streams, scale, out);
    return 0;
}

DR_API u64 dr_lossless_bound(u64 count) { return lossless_bound(count); }

// values[count], finite. Writes a section into dr_lossless_bound(count) bytes and returns its size.
DR_API u64 dr_lossless_encode(const u32* values, u64 count, u8* out) {
    *out = 1;
    u8 *sizes = out + 1, *at = sizes + 2 * chunks_of(count);
    bool finite;
    for (u64 begin = 0; begin < count; begin += CHUNK, sizes += 2) {
        const u32 of_chunk = (u32)std::min<u64>(CHUNK, count - begin);
        const u16 bytes = (u16)lossless_encode_chunk(values + begin, of_chunk, at, &finite);
        std::memcpy(sizes, &bytes, 2);
        at += bytes;
    }
    return (u64)(at - out);
}

i64 LosslessReader::open(const u8* section, u64 bytes, u64 count) {
    sizes = section + 1, at = sizes + 2 * chunks_of(count), end = section + bytes;
    return bytes < 1 + 2 * chunks_of(count) ? (i64)ERR_TRUNCATED : 0;
}
i64 LosslessReader::next(u32 count, Use use, bool streams, float scale, float* out) {
    u16 bytes;
    std::memcpy(&bytes, sizes, 2);
    sizes += 2;
    if (bytes > end - at) return ERR_TRUNCATED;
    if (bytes > MOST_BYTES) return ERR_SIZES;
    u8 last[MOST_BYTES + ROOM];
    const u8* chunk = at;
    if ((u64)(end - at) < bytes + (u64)ROOM) chunk = (const u8*)std::memcpy(last, at, bytes);
    at += bytes;
    return decode_chunk(chunk, bytes, count, use, streams, scale, out);
}

// Of a section whose form is 1. Returns 0; ERR_TRUNCATED if the section or a chunk is too short; ERR_SIZES if a chunk
// or the section is too long; ERR_VALUE if no chunk begins so, or bits after a field are not zeros; ERR_NOT_FINITE.
DR_API i64 dr_lossless_decode(const u8* section, u64 bytes, u64 count, float* values) {
    LosslessReader reader;
    i64 failed = reader.open(section, bytes, count);
    for (u64 begin = 0; !failed && begin < count; begin += CHUNK)
        failed = reader.next((u32)std::min<u64>(CHUNK, count - begin), STORED, 4 * count >= STREAMED, 1, values + begin);
    stream_fence();
    return failed ? failed : reader.at == reader.end ? 0 : (i64)ERR_SIZES;
}
