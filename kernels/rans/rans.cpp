// Interleaved static rANS (Duda, "Asymmetric numeral systems", arXiv:1311.2540, 2013; interleaving: Giesen,
// arXiv:1402.3392, 2014), and the index codec that codes gaps with it.
//
// The coder of symbols. From 65536 symbols on there are P = floor(count / 32768) parts of about as many symbols, which a
// GPU codes at the same time; else P = 1. Part j begins with symbol floor(count j / P / 32) 32. Symbol i of a part belongs
// to lane i % N; N is 1 below 2048 symbols, 4 below 32768, else 32 (a warp of a GPU, or two AVX-512 vectors). A lane's state x has 32 bits and is at least 2^16. Symbol s has f_s of 4096 slots, its
// share, which begins at slot c_s, the sum of the shares before it.
//
//     encode, from the last symbol to the first:   if x >= f_s 2^20: the low 16 bits of x are a word, x >>= 16
//                                                  x = (x / f_s) 4096 + x % f_s + c_s
//     decode, from the first to the last:          s from x % 4096;  x = f_s (x / 4096) + x % 4096 - c_s
//                                                  if x < 2^16: x = x 2^16 + the next word
//
//     section:  | shares, to a whole byte | part 0 |                                           P = 1; empty for no symbols
//               | 15 | shares, to a whole byte | words of part j u32 [P - 1] | part 0 | part 1 | ... |             P > 1
//     part:     | states u32 [N] | words u16 ... |
//     shares:   for each symbol from 0 up, until they sum to 2^p:   L (4 bits) | f's L - 1 bits below its highest one |
//               or, for a run of n symbols that do not occur:       0 (4 bits) | n - 1 (4 bits) |
//
// Shares are sent in units of 4096 / 2^p, p = bit_length(count) within 5 .. 12, since few symbols need no fine shares.
// The encoder's states begin at 2^16, where the decoder's must end. A decoder reads P = 1 for any count: earlier releases
// wrote it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "bits/avx512.h"
#include "entropy/histogram.h"
#include "index_sizes/sizes.h"
#include "rans/rans.h"

// rounded_share() of all symbols, made to sum to 2^p.
static void shares_of(const u64* counts, u64 total, u32 p, u32* share) {
    i64 sum = 0;
    for (int s = 0; s < 256; ++s) sum += share[s] = rounded_share(counts[s], total, p);
    for (const i64 step = sum < (1 << p) ? 1 : -1; sum != 1 << p; sum += step)
        *std::max_element(share, share + 256) += (u32)step;
}

// One symbol for the encoder. x / share is the high half of x * reciprocal, reciprocal = ceil(2^64 / share). A share of
// 1 would need 2^64; with 2^64 - 1 the quotient is x - 1, for which `start` compensates.
struct Symbol {
    u64 reciprocal;
    u32 share, start;
};

static inline u32 encode_one(u32 x, const Symbol& symbol, u8*& out) {
    // No branch, which would be mispredicted often: the word is always stored, and then kept or overwritten.
    const u32 emit = (x >> 20) >= symbol.share;
    const u16 word = (u16)x;
    std::memcpy(out - 2, &word, 2);
    out -= 2 * emit;
    x >>= 16 * emit;
    const u32 quotient = (u32)((unsigned __int128)x * symbol.reciprocal >> 64);
    return x + symbol.start + quotient * (4096 - symbol.share);
}

template <u32 N>
static u8* encode_lanes(const u8* symbols, u64 count, const Symbol* table, u32* state, u8* out) {
    u32 x[N];
    std::memcpy(x, state, sizeof x);
    u64 i = count;
    while (i % N) --i, x[i % N] = encode_one(x[i % N], table[symbols[i]], out);
    for (; i; i -= N)
        for (u32 lane = N; lane--;) x[lane] = encode_one(x[lane], table[symbols[i - N + lane]], out);
    std::memcpy(state, x, sizeof x);
    return out;
}

template <u32 N>
static i64 decode_lanes(const u8* in, const u8* end, u64 begin, u64 count, const u32* slots, u32* x, u8* symbols) {
    const u8* at = in;
    for (u64 i = begin; i < count; ++i) {
        u32& state = x[i % N];
        const u32 slot = slots[state & 4095];
        symbols[i] = (u8)slot;
        state = rans_advance(slot, state);
        if (state < LOWEST) {
            if (end - at < 2) return ERR_TRUNCATED;
            u16 word;
            std::memcpy(&word, at, 2);
            at += 2;
            state = state << 16 | word;
        }
    }
    for (u32 lane = 0; lane < N; ++lane)
        if (x[lane] != LOWEST) return ERR_VALUE;
    return at - in;
}

// Decodes whole groups of N symbols while N words fit before `end`, moves `in` after the words that it has read, and
// returns the number of symbols.
template <u32 N>
static u64 decode_groups(const u8*& in, const u8* end, u64 count, const u32* slots, u32* state, u8* symbols) {
    u32 x[N];
    std::memcpy(x, state, sizeof x);
    const u8* at = in;
    u64 i = 0;
    for (; i + N <= count && (u64)(end - at) >= 2 * N; i += N)
        for (u32 lane = 0; lane < N; ++lane) {
            const u32 slot = slots[x[lane] & 4095];
            symbols[i + lane] = (u8)slot;
            const u32 next = rans_advance(slot, x[lane]);
            u16 word;
            std::memcpy(&word, at, 2);
            const u32 refill = next < LOWEST;
            at += 2 * refill;
            x[lane] = next << (16 * refill) | (word & (0u - refill));
        }
    in = at;
    std::memcpy(state, x, sizeof x);
    return i;
}

#ifdef DR_X86
DR_AVX512_INLINE __m512i decode16(__m512i x, const u32* slots, const u8*& at, u8* symbols) {
    const __m512i low = _mm512_set1_epi32(4095);
    const __m512i slot = _mm512_i32gather_epi32(_mm512_and_si512(x, low), (const int*)slots, 4);
    _mm_storeu_si128((__m128i*)symbols, _mm512_cvtepi32_epi8(slot));
    const __m512i share = _mm512_add_epi32(_mm512_srli_epi32(slot, 20), _mm512_set1_epi32(1));
    x = _mm512_add_epi32(_mm512_mullo_epi32(share, _mm512_srli_epi32(x, 12)),
                         _mm512_and_si512(_mm512_srli_epi32(slot, 8), low));
    const __mmask16 short_of = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32((int)LOWEST));
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
    at += 2 * __builtin_popcount(short_of);
    return _mm512_mask_or_epi32(x, short_of, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(short_of, words));
}

DR_AVX512 static u64 decode_avx512(const u8*& in, const u8* end, u64 count, const u32* slots, u32* state, u8* symbols) {
    __m512i a = _mm512_loadu_si512(state), b = _mm512_loadu_si512(state + 16);
    u64 i = 0;
    for (; i + 32 <= count && end - in >= 64; i += 32) {
        a = decode16(a, slots, in, symbols + i);
        b = decode16(b, slots, in, symbols + i + 16);
    }
    _mm512_storeu_si512(state, a);
    _mm512_storeu_si512(state + 16, b);
    return i;
}

// x / share is the whole part of (x + 1/2) * (1 / share) in float64: (x + 1/2) / share differs from any integer by at
// least 2^-13, far more than the product's error.
DR_AVX512_INLINE __m512i encode16(__m512i x, const u8* symbols, const double* inverse, const u32* shares,
                                         u8*& out) {
    const __m128i narrow = _mm_loadu_si128((const __m128i*)symbols);
    const __m512i symbol = _mm512_cvtepu8_epi32(narrow);
    const __m512i packed = _mm512_i32gather_epi32(symbol, (const int*)shares, 4);  // share | start << 16
    const __m512i share = _mm512_and_si512(packed, _mm512_set1_epi32(0xFFFF));
    const __mmask16 emit = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x, 20), share);
    const u32 words = (u32)__builtin_popcount(emit);
    out -= 2 * words;
    _mm512_mask_cvtepi32_storeu_epi16(out, (__mmask16)((1u << words) - 1), _mm512_maskz_compress_epi32(emit, x));
    x = _mm512_mask_srli_epi32(x, emit, x, 16);
    const __m512d half = _mm512_set1_pd(0.5);
    const __m256i symbol_low = _mm512_castsi512_si256(symbol), symbol_high = _mm512_extracti64x4_epi64(symbol, 1);
    const __m512d low = _mm512_add_pd(_mm512_cvtepu32_pd(_mm512_castsi512_si256(x)), half);
    const __m512d high = _mm512_add_pd(_mm512_cvtepu32_pd(_mm512_extracti64x4_epi64(x, 1)), half);
    const __m256i q_low = _mm512_cvttpd_epu32(_mm512_mul_pd(low, _mm512_i32gather_pd(symbol_low, inverse, 8)));
    const __m256i q_high = _mm512_cvttpd_epu32(_mm512_mul_pd(high, _mm512_i32gather_pd(symbol_high, inverse, 8)));
    const __m512i quotient = _mm512_inserti64x4(_mm512_castsi256_si512(q_low), q_high, 1);
    return _mm512_add_epi32(_mm512_add_epi32(x, _mm512_srli_epi32(packed, 16)),
                            _mm512_mullo_epi32(quotient, _mm512_sub_epi32(_mm512_set1_epi32(4096), share)));
}

// `count` is a multiple of 32.
DR_AVX512 static u8* encode_avx512(const u8* symbols, u64 count, const u32* share, u32* state, u8* out) {
    double inverse[256];
    u32 packed[256], start = 0;
    for (int s = 0; s < 256; ++s) {
        inverse[s] = share[s] ? 1.0 / share[s] : 0.0;
        packed[s] = share[s] | start << 16;
        start += share[s];
    }
    __m512i a = _mm512_loadu_si512(state), b = _mm512_loadu_si512(state + 16);
    for (u64 i = count; i; i -= 32) {
        b = encode16(b, symbols + i - 16, inverse, packed, out);
        a = encode16(a, symbols + i - 32, inverse, packed, out);
    }
    _mm512_storeu_si512(state, a);
    _mm512_storeu_si512(state + 16, b);
    return out;
}
#endif

// Writes a part, of a section with `lanes` lanes, so that it ends before `at`. Returns its first byte.
static u8* encode_part(const u8* symbols, u64 count, u32 lanes, const u32* share, const Symbol* table, u8* at) {
    u32 state[32];
    for (u32 lane = 0; lane < lanes; ++lane) state[lane] = LOWEST;
    if (lanes == 1) at = encode_lanes<1>(symbols, count, table, state, at);
    if (lanes == 4) at = encode_lanes<4>(symbols, count, table, state, at);
    if (lanes == 32) {
        const u64 whole = count - count % 32;
        for (u64 i = count; i-- > whole;) state[i % 32] = encode_one(state[i % 32], table[symbols[i]], at);
#ifdef DR_X86
        if (dr_vector_level() == 2)
            at = encode_avx512(symbols, whole, share, state, at);
        else
#endif
            at = encode_lanes<32>(symbols, whole, table, state, at);
    }
    at -= 4 * lanes;
    std::memcpy(at, state, 4 * lanes);
    return at;
}

// Writes the section so that it ends with out[rans_bound(count) - 1], and returns the place of its first byte.
static u64 rans_encode(const u8* symbols, u64 count, u8* out) {
    const u64 bound = rans_bound(count);
    if (count == 0) return bound;
    u64 counts[256];
    u32 share[256];
    histogram(symbols, count, counts);
    const u32 p = share_bits(count);
    shares_of(counts, count, p, share);
    u8 shares[SHARES_BYTES];
    BitWriter writer{shares};
    write_shares(share, p, writer);
    const u64 share_bytes = (u64)(writer.finish() - shares);

    Symbol table[256];
    u32 start = 0;
    for (int s = 0; s < 256; ++s) {
        const u32 f = share[s] <<= 12 - p;
        table[s] = {f > 1 ? ~0ull / f + 1 : ~0ull, f, f == 1 ? start + 4095 : start};
        start += f;
    }
    const u32 lanes = rans_lanes(count);
    const u64 parts = rans_parts(count);
    std::vector<u32> words(parts);
    u8* at = out + bound;
    for (u64 part = parts; part--;) {
        const u64 begin = part_begin(count, parts, part), end = part_begin(count, parts, part + 1);
        const u8* const after = at;
        at = encode_part(symbols + begin, end - begin, lanes, share, table, at);
        words[part] = (u32)((u64)(after - at) / 2 - 2 * lanes);
    }
    at -= 4 * (parts - 1);
    std::memcpy(at, words.data(), 4 * (parts - 1));
    at -= share_bytes;
    std::memcpy(at, shares, share_bytes);
    if (parts > 1) *--at = PARTS;
    return (u64)(at - out);
}

// Reads a part and returns its number of bytes, which may be fewer than there are before `end`, or an error.
static i64 decode_part(const u8* in, const u8* end, u32 lanes, u64 count, const u32* slots, u8* symbols) {
    if ((u64)(end - in) < 4 * lanes) return ERR_TRUNCATED;
    u32 state[32];
    std::memcpy(state, in, 4 * lanes);
    const u8* at = in + 4 * lanes;
    i64 rest = 0;
    if (lanes == 1) rest = decode_lanes<1>(at, end, 0, count, slots, state, symbols);
    if (lanes == 4) {
        const u64 done = decode_groups<4>(at, end, count, slots, state, symbols);
        rest = decode_lanes<4>(at, end, done, count, slots, state, symbols);
    }
    if (lanes == 32) {
#ifdef DR_X86
        const u64 done = dr_vector_level() == 2 ? decode_avx512(at, end, count, slots, state, symbols)
                                                : decode_groups<32>(at, end, count, slots, state, symbols);
#else
        const u64 done = decode_groups<32>(at, end, count, slots, state, symbols);
#endif
        rest = decode_lanes<32>(at, end, done, count, slots, state, symbols);
    }
    return rest < 0 ? rest : at - in + rest;
}

// Returns the number of bytes of the section, which may be fewer than `bytes`, or an error.
static i64 rans_decode(const u8* in, u64 bytes, u64 count, u8* symbols) {
    if (count == 0) return 0;
    u32 share[256];
    const u32 p = share_bits(count), lanes = rans_lanes(count);
    const u64 parts = bytes && in[0] == PARTS ? rans_parts(count) : 1, first = parts > 1;
    const i64 share_bytes = read_shares(BitReader{in + first, bytes - first}, p, share);
    if (share_bytes < 0) return share_bytes;
    const u8 *sizes = in + first + share_bytes, *end = in + bytes;
    if ((u64)(end - sizes) < 4 * (parts - 1)) return ERR_TRUNCATED;
    u32 slots[4096], slot = 0;
    for (u32 s = 0; s < 256; ++s) {
        const u32 f = share[s] << (12 - p);
        for (u32 i = 0; i < f; ++i) slots[slot++] = rans_slot(s, i, f);
    }
    const u8* at = sizes + 4 * (parts - 1);
    for (u64 part = 0; part < parts; ++part) {
        const u64 begin = part_begin(count, parts, part), symbols_of = part_begin(count, parts, part + 1) - begin;
        const u8* end_of = end;
        if (part + 1 < parts) {
            u32 words;
            std::memcpy(&words, sizes + 4 * part, 4);
            if ((u64)(end - at) < 4 * lanes + 2ull * words) return ERR_TRUNCATED;
            end_of = at + 4 * lanes + 2ull * words;
        }
        const i64 used = decode_part(at, end_of, lanes, symbols_of, slots, symbols + begin);
        if (used < 0) return used;
        at += used;
        if (part + 1 < parts && at != end_of) return ERR_VALUE;
    }
    return at - in;
}

DR_API u64 dr_rans_bound(u64 count) { return rans_bound(count); }
DR_API u64 dr_rans_lows_bound(u64 count) { return rans_lows_bound(count); }

DR_API u64 dr_rans_encode(const u8* symbols, u64 count, u8* out) { return rans_encode(symbols, count, out); }

// Returns 0; ERR_TRUNCATED if the section is too short; ERR_VALUE if the shares do not sum to 2^p, a lane's last state
// is not 2^16, or the section goes on.
DR_API i64 dr_rans_decode(const u8* in, u64 bytes, u64 count, u8* symbols) {
    const i64 used = rans_decode(in, bytes, count, symbols);
    return used < 0 ? used : (u64)used == bytes ? 0 : (i64)ERR_VALUE;
}

// ---- The index codec. gap_i = index_i - index_{i-1} - 1 (index_{-1} = -1). With t fraction bits, a gap is a token,
// coded by rANS, and the bits below its t + 1 highest bits, plain:
//
//     gap < 2^t:                  token = gap
//     gap = (2^t + f) 2^e + low:  token = (e + 1) 2^t + f,  f < 2^t, and low in e bits
//
//     section:  | rANS section of the tokens | lows, to a whole byte |
//
// t is 1 below 512 gaps, 2 below 8192, else 3: more tokens fit the gaps' distribution better, but their shares take
// more.
DR_CLONES static void tokens_of(const u32* indices, u64 count, u32 t, u8* tokens) {
    tokens[0] = (u8)token_of(indices[0], gap_lows(indices[0], t), t);
    for (u64 i = 1; i < count; ++i) {
        const u32 gap = indices[i] - indices[i - 1] - 1;
        tokens[i] = (u8)token_of(gap, gap_lows(gap, t), t);
    }
}

u64 rans_indices_bytes(const u32* indices, u64 count, u64 whole) {
    if (count == 0) return 0;
    const u32 t = fraction_bits(whole), p = share_bits(whole);
    u8 tokens[SAMPLE];
    u64 counts[256];
    u32 share[256];
    tokens_of(indices, count, t, tokens);
    histogram(tokens, count, counts);
    shares_of(counts, count, p, share);
    BitCount table{};
    write_shares(share, p, table);
    double bits = 0.0;
    for (u32 s = 0; s < 256; ++s)
        if (counts[s]) bits += (double)counts[s] * (p - std::log2((double)share[s]) + token_lows(s, t));
    return table.bytes() + 4 * rans_lanes(whole) * rans_parts(whole) + (u64)(bits / 8 * (double)whole / (double)count);
}

// tokens: scratch, one byte per index. out: rans_bound(count) + rans_lows_bound(count) bytes. Returns the place of the
// section's first byte in `out`; *end: the place after its last.
DR_API u64 dr_rans_indices_encode(const u32* indices, u64 count, u8* tokens, u8* out, u64* end) {
    *end = rans_bound(0);
    if (count == 0) return *end;
    const u32 t = fraction_bits(count);
    tokens_of(indices, count, t, tokens);
    const u64 begin = rans_encode(tokens, count, out);
    BitWriter lows{out + rans_bound(count)};
    u32 next = 0;
    for (u64 i = 0; i < count; ++i) {
        const u32 gap = indices[i] - next, low = gap_lows(gap, t);
        next = indices[i] + 1;
        lows.put(gap & ((1u << low) - 1), low);
    }
    *end = (u64)(lows.finish() - out);
    return begin;
}

// Returns 0; ERR_TRUNCATED if the section is too short; ERR_INDEX if an index is not below numel; ERR_VALUE if no
// encoder writes the tokens' section, or the lows continue after the last gap.
DR_API i64 dr_rans_indices_decode(const u8* in, u64 bytes, u64 count, u64 numel, u8* tokens, u32* indices) {
    const i64 used = rans_decode(in, bytes, count, tokens);
    if (used < 0) return used;
    const u32 t = fraction_bits(count);
    u64 base[256];
    u8 low[256];
    for (u32 token = 0; token < 256; ++token) {
        const u32 e = token_lows(token, t);
        low[token] = (u8)(e + t <= 31 ? e : 0);
        // A gap of 33 bits makes the last index exceed numel.
        base[token] = e + t <= 31 ? token_gap(token, e, t) : 1ull << 32;
    }
    BitReader lows{in + used, bytes - (u64)used};
    u64 next = 0;
    for (u64 i = 0; i < count; ++i) {
        next += base[tokens[i]] + lows.get(low[tokens[i]]);
        indices[i] = (u32)next++;
    }
    if (lows.overrun()) return ERR_TRUNCATED;
    return next > numel ? (i64)ERR_INDEX : lows.ended() ? 0 : (i64)ERR_VALUE;
}
