// The sum of two streams of many blocks, by way of a dense piece in the first-level cache: see densestream.h.
#include "bits/avx512.h"
#include "densestream/merge_avx512.h"

#ifdef DR_X86
namespace {

constexpr u64 PIECE = 4096, WORDS = PIECE / 64;

// The elements of one stream inside a piece of the vector, and which of them it has.
struct Row {
    alignas(64) float values[PIECE];
    u64 has[WORDS + 1];
};

// Writes what a stream has inside [first, first + PIECE). The stream becomes what is left.
DR_AVX512 void fill(Row& row, FloatStream& s, u64 first) {
    std::memset(row.has, 0, sizeof(row.has));
    const u32 *start = s.starts, *length = s.lengths, *last = s.starts + s.blocks;
    const float* values = s.values;
    const u64 stop = first + PIECE;
    for (; start < last && *start < stop; ++start, ++length) {
        const u64 from = *start < first ? first : *start, to = (u64)*start + *length;
        u64 at = from - first, left = (to < stop ? to : stop) - from;
        while (left) {  // once for most blocks
            const u64 here = left < 16 ? left : 16, bit = at % 64, ones = (1u << here) - 1;
            _mm512_mask_storeu_ps(row.values + at, (__mmask16)ones, _mm512_maskz_loadu_ps((__mmask16)ones, values));
            row.has[at / 64] |= ones << bit;
            row.has[at / 64 + 1] |= ones >> 1 >> (63 - bit);
            at += here, values += here, left -= here;
        }
        if (to > stop) break;
    }
    s.blocks = (u64)(last - start);
    s.starts = start, s.lengths = length, s.values = values;
}

DR_AVX512_INLINE u64 put_numbers(u32* out, u64 count, __mmask16 mask, __m512i numbers) {
    _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(mask, numbers));
    return count + (u64)__builtin_popcount(mask);
}

}  // namespace

// About the share of the elements that a stream has, where it has any: from the distances of a few neighbours.
static double share(const FloatStream& s, u64 count) {
    constexpr u64 samples = 32;
    const u64 step = s.blocks / samples;
    if (!step) return 1;
    u64 distance = 0;
    for (u64 i = 0; i < samples; ++i) {
        const u64 apart = s.starts[i * step + (i * step + 1 < s.blocks)] - s.starts[i * step];
        distance += apart < PIECE ? apart : PIECE;
    }
    return (double)count / (double)s.blocks * (double)samples / (double)(distance + 1);
}

bool worth_merge_avx512(const FloatStream& a, u64 a_count, const FloatStream& b, u64 b_count) {
    return a.blocks && b.blocks && share(a, a_count) + share(b, b_count) > MERGE_SHARE;
}

DR_AVX512 bool merge_avx512(FloatStream a, FloatStream b, u32* starts, u32* lengths, float* out, u64* blocks,
                            u64* count) {
    static thread_local Row rows[2];
    const u64 begin = (a.starts[0] < b.starts[0] ? a.starts[0] : b.starts[0]) / 64 * 64;
    const __m512i lanes = lane_numbers();
    u64 begun = 0, ended = 0, elements = 0, before = 0;  // before: whether the last element belongs to a block
    __mmask16 nan = 0;
    for (u64 first = begin; a.blocks || b.blocks || before; first += PIECE) {
        if (!before) {  // there may be nothing for long
            const u64 next_a = a.blocks ? *a.starts : ~0ull, next_b = b.blocks ? *b.starts : ~0ull;
            const u64 next = (next_a < next_b ? next_a : next_b) / 64 * 64;
            first = next > first ? next : first;
        }
        fill(rows[0], a, first);
        fill(rows[1], b, first);
        for (u64 w = 0; w < WORDS; ++w) {
            const u64 in_a = rows[0].has[w], in_b = rows[1].has[w], in = in_a | in_b;
            const u64 left = in << 1 | before, begins = in & ~left, ends = ~in & left;
            before = in >> 63;
            if (!(in | ends)) continue;
            for (int part = 0; part < 4; ++part) {
                const u64 place = 64 * w + 16 * (u64)part;
                const int shift = 16 * part;
                const __mmask16 ma = (__mmask16)(in_a >> shift), mb = (__mmask16)(in_b >> shift);
                const __m512i index = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(u32)(first + place)));
                begun = put_numbers(starts, begun, (__mmask16)(begins >> shift), index);
                ended = put_numbers(lengths, ended, (__mmask16)(ends >> shift), index);
                const __m512 va = _mm512_maskz_loadu_ps(ma, rows[0].values + place);
                const __m512 vb = _mm512_maskz_loadu_ps(mb, rows[1].values + place);
                const __m512 one = _mm512_mask_blend_ps(mb, va, vb);
                const __m512 sum = _mm512_mask_add_ps(one, ma & mb, va, vb);
                nan |= _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
                _mm512_storeu_ps(out + elements, _mm512_maskz_compress_ps(ma | mb, sum));
                elements += (u64)__builtin_popcount((u32)(__mmask16)(ma | mb));
            }
        }
    }
    if (nan) return false;
    for (u64 i = 0; i < begun; ++i) lengths[i] -= starts[i];
    *blocks = begun;
    *count = elements;
    return true;
}
#endif
