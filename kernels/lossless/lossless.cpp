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
#include "lossless/lossless.h"

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

// ---- Signs and fractions.

// The exponents of the bit patterns of floats; returns the union of all bits.
DR_CLONES static u32 take_exponents(const u32* __restrict patterns, u32 count, u8* __restrict exponents) {
    u32 used = 0;
    for (u32 i = 0; i < count; ++i) {
        exponents[i] = (u8)(patterns[i] >> FRACTION);
        used |= patterns[i];
    }
    return used;
}

DR_CLONES static void write_fields(const u32* __restrict patterns, u32 count, u32 bits, u8* __restrict out) {
    const u32 low = bits % 8;
    if (low) {
        u8 fields[CHUNK + ROOM];
        for (u32 i = 0; i < count; ++i) fields[i] = (u8)(field_of(patterns[i], bits) & ((1u << low) - 1));
        with_constant<1, 7>(low, [&](auto number) __attribute__((always_inline)) { pack<number>(fields, count, out); });
        out += field_bytes(count, low);
    }
    if (bits == 8)
        for (u32 i = 0; i < count; ++i) out[i] = (u8)field_of(patterns[i], 8);
    else
        for (u32 shift = low; shift < bits; shift += 8, out += count)
            for (u32 i = 0; i < count; ++i) out[i] = (u8)(field_of(patterns[i], bits) >> shift);
}

DR_CLONES static void read_fields(const u8* __restrict in, const u8* __restrict exponents, u32 count, u32 bits,
                                  u32* __restrict patterns) {
    const u32 low = bits % 8;
    if (bits == 8) {
        for (u32 i = 0; i < count; ++i) patterns[i] = pattern_of(in[i], exponents[i], 8);
        return;
    }
    if (bits == 24) {
        const u8 *second = in + count, *third = second + count;
        for (u32 i = 0; i < count; ++i)
            patterns[i] = pattern_of(in[i] | second[i] << 8 | third[i] << 16, exponents[i], 24);
        return;
    }
    u8 fields[CHUNK + ROOM] = {};
    if (low) {
        with_constant<1, 7>(low, [&](auto w) __attribute__((always_inline)) { unpack<w>(in, count, fields); });
        in += field_bytes(count, low);
    }
    with_constant<0, 2>(bits / 8, [&](auto planes) __attribute__((always_inline)) {
        for (u32 i = 0; i < count; ++i) {
            u32 field = fields[i];
            for (u32 plane = 0; plane < planes; ++plane) field |= (u32)in[(u64)plane * count + i] << (8 * plane + low);
            patterns[i] = pattern_of(field, exponents[i], bits);
        }
    });
}

// ---- Codes of 1 to 3 bits.

// Writes the code of each byte: its place in symbols[2^bits - 1], or the escape.
DR_CLONES static void write_codes(const u8* __restrict in, u32 count, u32 bits, const u8* __restrict symbols,
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
// Reads codes, and finds the symbols of those that are not the escape; 0 for the escape. Returns how many are.
DR_CLONES static u32 read_codes(const u8* __restrict in, u32 count, u32 bits, const u8* __restrict symbols,
                                u8* __restrict codes, u8* __restrict out) {
    with_constant<1, MOST_BITS>(bits, [&](auto number) __attribute__((always_inline)) {
        unpack<number>(in, count, codes);
    });
    // A loop for each symbol, since the compiler makes branches of a choice among several.
    std::memset(out, 0, count);
    const u8 escape = (u8)coded_symbols(bits);
    for (u8 j = 0; j < escape; ++j) {
        const u8 symbol = symbols[j];
        for (u32 i = 0; i < count; ++i) out[i] |= codes[i] == j ? symbol : 0;
    }
    u32 escapes = 0;
    for (u32 begin = 0; begin < count; begin += 128) {
        u8 some = 0;  // a byte, so that a vector has as many sums as bytes
        for (u32 i = begin; i < std::min(count, begin + 128); ++i) some += codes[i] == escape;
        escapes += some;
    }
    return escapes;
}

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

#define DR_AVX2 __attribute__((target("avx2,popcnt")))
// Whole groups of sixteen, of which these return the number of bytes; *place moves on by the escapes.
DR_AVX2 static u32 gather_avx2(const u8* in, const u8* codes, u32 count, u8 escape, u8* escapes, u32* place) {
    const __m128i wanted = _mm_set1_epi8((char)escape);
    u32 i = 0, at = *place;
    for (; i + 16 <= count; i += 16) {
        const u32 mask = (u32)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128((const __m128i*)(codes + i)), wanted));
        const __m128i low = _mm_loadl_epi64((const __m128i*)(in + i));
        const __m128i high = _mm_loadl_epi64((const __m128i*)(in + i + 8));
        const __m128i to_low = _mm_loadl_epi64((const __m128i*)(MOVES.gather + (mask & 255)));
        const __m128i to_high = _mm_loadl_epi64((const __m128i*)(MOVES.gather + (mask >> 8)));
        _mm_storel_epi64((__m128i*)(escapes + at), _mm_shuffle_epi8(low, to_low));
        _mm_storel_epi64((__m128i*)(escapes + at + __builtin_popcount(mask & 255)), _mm_shuffle_epi8(high, to_high));
        at += (u32)__builtin_popcount(mask);
    }
    *place = at;
    return i;
}
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

// The bytes of in[count] whose codes are the escape; returns how many.
static u32 gather(const u8* in, const u8* codes, u32 count, u32 bits, u8* escapes) {
    const u8 escape = (u8)coded_symbols(bits);
    u32 i = 0, place = 0;
#ifdef DR_X86
    if (dr_vector_level()) i = gather_avx2(in, codes, count, escape, escapes, &place);
#endif
    for (; i < count; ++i) {
        escapes[place] = in[i];
        place += codes[i] == escape;
    }
    return place;
}
// Puts them back, where `out` has zeros.
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

// The MOST_RANKED most frequent exponents of the sample, and how often they occur in it.
static void rank(const u8* exponents, u32 count, u8* symbols, u32* ranked) {
    u16 counts[4][256] = {};  // four tables, so that equal exponents in a row do not wait for each other's count
    for (u32 begin = 0; begin < count; begin += SAMPLE_EACH)
        for (u32 i = 0; i < std::min(SAMPLE, count - begin); ++i) ++counts[i % 4][exponents[begin + i]];
    u32 keys[256 + MOST_RANKED], found = 0;  // | occurrences << 8 | 255 - exponent |: the largest has the first rank
    u16* const sums = counts[0];
    for (u32 s = 0; s < 256; ++s) sums[s] = (u16)(counts[0][s] + counts[1][s] + counts[2][s] + counts[3][s]);
    for (u32 s = 0; s < 256; ++s) {
        keys[found] = (u32)sums[s] << 8 | (255 - s);
        found += sums[s] > 0;
    }
    for (u32 s = 0; found < MOST_RANKED; ++s)
        if (!sums[s]) keys[found++] = 255 - s;
    std::partial_sort(keys, keys + MOST_RANKED, keys + found, [](u32 a, u32 b) { return a > b; });
    for (u32 i = 0; i < MOST_RANKED; ++i) {
        symbols[i] = (u8)(255 - (keys[i] & 255));
        ranked[i] = keys[i] >> 8;
    }
}

// Returns the bytes of the chunk. Stores up to ROOM bytes past its end.
static u32 encode_chunk(const u32* patterns, u32 count, u8* out) {
    u8 exponents[CHUNK + ROOM], escapes[CHUNK + ROOM], others[CHUNK + ROOM], codes[CHUNK + ROOM], symbols[MOST_RANKED];
    u32 ranked[MOST_RANKED];
    const u32 used = take_exponents(patterns, count, exponents);
    rank(exponents, count, symbols, ranked);
    const Plan plan = plan_of(count, ranked, used);
    out[0] = (u8)plan.bits;
    out[1] = (u8)(plan.first | plan.second << 2);
    std::memcpy(out + HEAD, symbols, plan.symbols());
    u8* at = out + HEAD + plan.symbols();
    write_fields(patterns, count, plan.bits, at);
    at += field_bytes(count, plan.bits);
    const u8* left = exponents;
    u32 escapes_of = count;
    if (plan.first) {
        write_codes(left, count, plan.first, symbols, codes, at);
        escapes_of = gather(left, codes, count, plan.first, escapes);
        at += field_bytes(count, plan.first);
        left = escapes;
    }
    u32 others_of = escapes_of;
    if (plan.second) {
        write_codes(left, escapes_of, plan.second, symbols + coded_symbols(plan.first), codes, at);
        others_of = gather(left, codes, escapes_of, plan.second, others);
        at += field_bytes(escapes_of, plan.second);
        left = others;
    }
    std::memcpy(at, left, others_of);
    return (u32)(at - out) + others_of;
}

// in[bytes], and ROOM bytes after them. Returns 0 or an error.
static i64 decode_chunk(const u8* in, u32 bytes, u32 count, u32* patterns) {
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
    read_fields(fields, at, count, plan.bits, patterns);
    return 0;
}

DR_API u64 dr_lossless_bound(u64 count) { return lossless_bound(count); }

// values[count], finite. Writes a section into dr_lossless_bound(count) bytes and returns its size.
DR_API u64 dr_lossless_encode(const u32* values, u64 count, u8* out) {
    *out = 1;
    u8 *sizes = out + 1, *at = sizes + 2 * chunks_of(count);
    for (u64 begin = 0; begin < count; begin += CHUNK, sizes += 2) {
        const u16 bytes = (u16)encode_chunk(values + begin, (u32)std::min<u64>(CHUNK, count - begin), at);
        std::memcpy(sizes, &bytes, 2);
        at += bytes;
    }
    return (u64)(at - out);
}

// Of a section whose form is 1. Returns 0; ERR_TRUNCATED if the section or a chunk is too short; ERR_SIZES if a chunk
// or the section is too long; ERR_VALUE if no chunk begins so, or bits after a field are not zeros; ERR_NOT_FINITE.
DR_API i64 dr_lossless_decode(const u8* section, u64 bytes, u64 count, u32* values) {
    const u8 *sizes = section + 1, *end = section + bytes;
    if (bytes < 1 + 2 * chunks_of(count)) return ERR_TRUNCATED;
    const u8* at = sizes + 2 * chunks_of(count);
    for (u64 begin = 0; begin < count; begin += CHUNK, sizes += 2) {
        u16 of_chunk;
        std::memcpy(&of_chunk, sizes, 2);
        if (of_chunk > end - at) return ERR_TRUNCATED;
        if (of_chunk > MOST_BYTES) return ERR_SIZES;
        u8 last[MOST_BYTES + ROOM];
        const u8* chunk = at;
        if ((u64)(end - at) < of_chunk + (u64)ROOM) chunk = (const u8*)std::memcpy(last, at, of_chunk);
        const i64 failed = decode_chunk(chunk, of_chunk, (u32)std::min<u64>(CHUNK, count - begin), values + begin);
        if (failed) return failed;
        at += of_chunk;
    }
    return at == end ? 0 : (i64)ERR_SIZES;
}
