// DenseStream's blocks in an exchange over MPI, where each of a few passes over small arrays counts: streams of parts of
// a selection, their coded sections at once, and sums of streams as a dense vector. See densestream.h.
#include "bits/avx512.h"
#include "common/stream_copy.h"
#include "densestream/blocks_cpu.h"
#include "hash/hash.h"
#include "rice/rice.h"

extern "C" u32 dr_rice_parameter(const u32* indices, u64 count, u64 numel, u64* bytes);
extern "C" void dr_rice_encode(const u32* indices, u64 count, u32 b, u8* out);
extern "C" i64 dr_rice_decode(const u8* in, u64 bytes, u64 count, u32 b, u64 numel, u32* indices);
extern "C" void dr_stream_gaps(const u32* starts, const u32* lengths, u64 blocks, u32 begin, u32* skips, u32* ends);

#ifdef DR_X86
// The first elements of blocks without zeros, from the second index on, and their places. Returns the number of indices
// that it has looked at. Both arrays have room for sixteen more.
DR_AVX512 static u64 block_starts_avx512(const u32* indices, u64 count, u32* starts, u32* places, u64* blocks) {
    const __m512i lanes = lane_numbers(), one = _mm512_set1_epi32(1);
    u64 i = 1, block = *blocks;
    for (; i + 16 <= count; i += 16) {
        const __m512i index = _mm512_loadu_si512(indices + i), before = _mm512_loadu_si512(indices + i - 1);
        const __mmask16 cut = _mm512_cmpneq_epi32_mask(_mm512_sub_epi32(index, before), one);
        const __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(u32)i));
        _mm512_storeu_si512(starts + block, _mm512_maskz_compress_epi32(cut, index));
        _mm512_storeu_si512(places + block, _mm512_maskz_compress_epi32(cut, place));
        block += (u64)__builtin_popcount(cut);
    }
    *blocks = block;
    return i;
}
#endif

// The blocks of consecutive indices; no zeros inside. Returns their number. A block has fewer than 2^32 elements.
static u64 blocks_without_zeros(const u32* indices, u64 count, u32* starts, u32* lengths) {
    if (!count) return 0;
    starts[0] = indices[0], lengths[0] = 0;
    u64 blocks = 1, i = 1;
#ifdef DR_X86
    if (dr_vector_level() == 2) i = block_starts_avx512(indices, count, starts, lengths, &blocks);
#endif
    for (; i < count; ++i) {
        starts[blocks] = indices[i], lengths[blocks] = (u32)i;
        blocks += indices[i] - indices[i - 1] != 1;
    }
    for (u64 b = 0; b + 1 < blocks; ++b) lengths[b] = lengths[b + 1] - lengths[b];
    lengths[blocks - 1] = (u32)count - lengths[blocks - 1];
    return blocks;
}

// The blocks of some pieces of sorted indices, piece p being pieces[2 p] to pieces[2 p + 1]. A piece ends its last
// block. `starts` and `lengths` have room for all indices and 16 more; `out`, which may be null if gap is 0, for the
// values, `gap` zeros after each, and `gap` more. Returns the number of blocks; *covered: of the values.
template <class T>
static u64 encode_pieces(const u32* indices, const T* values, const u64* pieces, u64 count, u32 gap, u32* starts,
                         u32* lengths, T* out, u64* covered) {
    u64 blocks = 0, elements = 0;
    for (u64 p = 0; p < count; ++p) {
        const u64 from = pieces[2 * p], kept = pieces[2 * p + 1] - from;
        if (gap) {
            u64 more;
            blocks += encode_blocks(indices + from, values + from, kept, gap, starts + blocks, lengths + blocks,
                                    out + elements, &more);
            elements += more;
        } else {
            blocks += blocks_without_zeros(indices + from, kept, starts + blocks, lengths + blocks);
            if (out && kept) std::memcpy(out + elements, values + from, kept * sizeof(T));
            elements += kept;
        }
    }
    *covered = elements;
    return blocks;
}
DR_FLOATS(u64, stream_pieces, (const u32* indices, const T* values, const u64* pieces, u64 count, u32 gap, u32* starts,
                               u32* lengths, T* out, u64* covered),
    return encode_pieces(indices, values, pieces, count, gap, starts, lengths, out, covered))

static u64 padded8(u64 bytes) { return (bytes + 7) & ~7ull; }

// Copies, or leaves in place, `bytes` bytes, and zeros up to the next multiple of 8. Returns where the next part begins.
static u8* put_padded(u8* out, const u8* part, u64 bytes) {
    if (part != out && bytes) std::memcpy(out, part, bytes);
    std::memset(out + bytes, 0, padded8(bytes) - bytes);
    return out + padded8(bytes);
}

// The most bytes of dr_stream_pack's result.
DR_API u64 dr_stream_pack_bound(u64 blocks, u64 range, u64 covered, u64 value_bytes) {
    return padded8(rice_bound(blocks, range)) + padded8(rice_bound(blocks, covered)) + padded8(value_bytes);
}

// The rice sections of at least one block's start and length, and the values, each padded to a multiple of 8 bytes.
// `scratch`: 2 * blocks numbers. sizes: of the two sections, without padding. Returns the number of bytes.
DR_API u64 dr_stream_pack(const u32* starts, const u32* lengths, u64 blocks, u32 begin, u64 range, u64 covered,
                          const u8* values, u64 value_bytes, u32* scratch, u8* out, u64* sizes) {
    u32 *skips = scratch, *ends = scratch + blocks;
    dr_stream_gaps(starts, lengths, blocks, begin, skips, ends);
    u8* at = out;
    const u32* rows[2] = {skips, ends};
    const u64 limits[2] = {range, covered};
    for (int i = 0; i < 2; ++i) {
        const u32 b = dr_rice_parameter(rows[i], blocks, limits[i], &sizes[i]);
        *at = (u8)b;
        dr_rice_encode(rows[i], blocks, b, at + 1);
        at = put_padded(at, at, sizes[i]);
    }
    return (u64)(put_padded(at, values, value_bytes) - out);
}

// lengths[b] = ends[b] - ends[b - 1], in place, and starts[b] from skips[b], in place.
DR_CLONES static void blocks_of_rows(u32* starts, u32* lengths, u64 blocks, u32 begin) {
    constexpr u64 piece = 1024;
    u32 ends[piece + 1];
    ends[0] = ~0u;
    for (u64 first = 0; first < blocks; first += piece) {
        const u64 here = blocks - first < piece ? blocks - first : piece;
        std::memcpy(ends + 1, lengths + first, here * sizeof(u32));
        u32 *start = starts + first, *length = lengths + first;
        const u32 offset = begin + 1 - (u32)first;
        for (u64 b = 0; b < here; ++b) {
            start[b] = start[b] - (u32)b + offset + ends[b];
            length[b] = ends[b + 1] - ends[b];
        }
        ends[0] = ends[here];
    }
}

// The blocks of two rice sections, of at least one block. Returns 0; an error of dr_rice_decode; or 1 if the blocks do
// not lie within [begin, end) or do not hold `count` elements. Rows that increase give blocks that are not empty and do
// not overlap, and whose ends increase: so what the last block says holds for all.
DR_API i64 dr_stream_unpack(const u8* a, u64 a_bytes, const u8* b, u64 b_bytes, u64 blocks, u64 begin, u64 end,
                            u64 count, u32* starts, u32* lengths) {
    if (8 * a_bytes < blocks || 8 * b_bytes < blocks || !a_bytes || !b_bytes) return ERR_TRUNCATED;
    i64 error = dr_rice_decode(a + 1, a_bytes - 1, blocks, a[0], end - begin, starts);
    if (!error) error = dr_rice_decode(b + 1, b_bytes - 1, blocks, b[0], count, lengths);
    if (error) return error;
    const u64 last = blocks - 1;
    if (lengths[last] + 1ull != count || begin + starts[last] - last + count > end) return 1;
    blocks_of_rows(starts, lengths, blocks, (u32)begin);
    return 0;
}

// One of the streams of a sum, as ops/stream_exchange.py lays them out: addresses, and the number of blocks.
template <class T>
struct Summand {
    const u32* starts;
    const u32* lengths;
    const T* values;
    u64 blocks;
};

// The part of a stream that is inside [first, stop) is given to add(place - first, values, count), a block at a time.
// The stream becomes what is left.
template <class T, class F>
__attribute__((always_inline)) inline void for_blocks(Summand<T>& s, u64 first, u64 stop, F add) {
    const u32 *starts = s.starts, *lengths = s.lengths, *last = starts + s.blocks;
    const T* values = s.values;
    for (; starts < last && *starts < stop; ++starts, ++lengths) {
        // A block that began in an earlier piece goes on at this piece's first element.
        const u64 from = *starts < first ? first : *starts, to = (u64)*starts + *lengths;
        const u64 here = to < stop ? to : stop;
        add(from - first, values, here - from);
        values += here - from;
        if (to > stop) break;
    }
    s.blocks = (u64)(last - starts);
    s.starts = starts, s.lengths = lengths, s.values = values;
}

// Writes a stream to a row.
template <class T>
static void write_blocks(Summand<T>& stream, u64 first, u64 stop, T* row) {
    for_blocks(stream, first, stop, [row](u64 at, const T* values, u64 count) {
        for (u64 i = 0; i < count; ++i) row[at + i] = values[i];
    });
}

#ifdef DR_X86
// Up to sixteen values at once, because no branch could predict the length of a block.
DR_AVX512 static void write_blocks_avx512(Summand<float>& stream, u64 first, u64 stop, float* row) {
    for_blocks(stream, first, stop, [row](u64 at, const float* values, u64 count) DR_AVX512 {
        for (; count > 16; count -= 16, at += 16, values += 16) _mm512_storeu_ps(row + at, _mm512_loadu_ps(values));
        const __mmask16 mask = (__mmask16)((1u << count) - 1);
        _mm512_mask_storeu_ps(row + at, mask, _mm512_maskz_loadu_ps(mask, values));
    });
}
#endif

static void write_first(Summand<double>& stream, u64 first, u64 stop, double* row) {
    write_blocks(stream, first, stop, row);
}
static void write_first(Summand<float>& stream, u64 first, u64 stop, float* row) {
#ifdef DR_X86
    if (dr_vector_level() == 2) return write_blocks_avx512(stream, first, stop, row);
#endif
    write_blocks(stream, first, stop, row);
}

// out[end - begin] = scale * the sum of streams whose blocks are inside [begin, end), added in their order. Returns the
// hash of the written bytes, which is taken while they are in the first-level cache. The streams are used up.
template <class T>
static u64 sum(Summand<T>* streams, u64 count, u64 begin, u64 end, T scale, T* out) {
    constexpr u64 piece = 16384 / sizeof(T);
    alignas(64) T row[piece];
    Hash64 hash;
    for (u64 first = begin; first < end; first += piece) {
        const u64 stop = first + piece < end ? first + piece : end;
        std::memset(row, 0, (stop - first) * sizeof(T));
        if (count) write_first(streams[0], first, stop, row);
        for (u64 s = 1; s < count; ++s)
            for_blocks(streams[s], first, stop, [&row](u64 at, const T* values, u64 length) {
                for (u64 i = 0; i < length; ++i) row[at + i] += values[i];
            });
        if (scale != 1)
            for (u64 i = 0; i < stop - first; ++i) row[i] *= scale;
        hash.add((const u8*)row, (stop - first) * sizeof(T));
        stream_copy(out + (first - begin), row, (stop - first) * sizeof(T));
    }
    stream_fence();
    return hash.finish(0);
}
DR_FLOATS(u64, stream_sum, (u64* streams, u64 count, u64 begin, u64 end, double scale, T* out),
    return sum((Summand<T>*)streams, count, begin, end, (T)scale, out))
