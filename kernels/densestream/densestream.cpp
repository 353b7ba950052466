// DenseStream's blocks and their sums on the host: see densestream.h.
#include "densestream/densestream.h"

#include "common/stream_copy.h"
#include "densestream/blocks_cpu.h"
#include "densestream/merge_avx512.h"

// Returns the number of blocks of sorted indices; *covered: the number of elements in these blocks.
DR_API DR_CLONES u64 dr_stream_count(const u32* indices, u64 count, u32 gap, u64* covered) {
    u64 blocks = count > 0, zeros = 0;
    for (u64 i = 1; i < count; ++i) {
        const u32 between = indices[i] - indices[i - 1] - 1;
        blocks += ends_block(between, gap);
        zeros += ends_block(between, gap) ? 0 : between;
    }
    *covered = count + zeros;
    return blocks;
}

// Writes the blocks that dr_stream_count has counted.
template <class T>
static void encode(const u32* indices, const T* values, u64 count, u32 gap, u32* starts, u32* lengths, T* out) {
    u64 covered;
    encode_blocks(indices, values, count, gap, starts, lengths, out, &covered);
}
DR_FLOATS(void, stream_encode, (const u32* indices, const T* values, u64 count, u32 gap, u32* starts, u32* lengths,
                                T* out), encode(indices, values, count, gap, starts, lengths, out))

// ERR_INDEX unless the blocks are not empty, in order, do not overlap, are inside [begin, end), and cover `count`
// elements.
DR_API DR_CLONES i64 dr_stream_check(const u32* starts, const u32* lengths, u64 blocks, u64 begin, u64 end, u64 count) {
    if (!blocks) return count ? (i64)ERR_INDEX : 0;
    u64 bad = (u64)(starts[0] < begin) | (u64)((u64)starts[blocks - 1] + lengths[blocks - 1] > end), sum = lengths[0];
    bad |= (u64)(lengths[0] == 0);
    for (u64 b = 1; b < blocks; ++b) {
        bad |= (u64)((u64)starts[b - 1] + lengths[b - 1] > starts[b]) | (u64)(lengths[b] == 0);
        sum += lengths[b];
    }
    return bad || sum != count ? (i64)ERR_INDEX : 0;
}

// indices: of every element that the blocks cover.
DR_API void dr_stream_indices(const u32* starts, const u32* lengths, u64 blocks, u32* indices) {
    for (u64 b = 0; b < blocks; ++b)
        for (u32 j = 0; j < lengths[b]; ++j) *indices++ = starts[b] + j;
}

// The indices and values of the covered elements that are not zero. Returns their number. Both arrays have room for one
// element more than are covered.
template <class T>
static u64 nonzero(const u32* starts, const u32* lengths, u64 blocks, const T* values, u32* indices, T* out) {
    u64 kept = 0;
    for (u64 b = 0; b < blocks; ++b)
        for (u32 j = 0; j < lengths[b]; ++j) {
            indices[kept] = starts[b] + j;
            out[kept] = *values;
            kept += *values++ != 0;
        }
    return kept;
}
DR_FLOATS(u64, stream_nonzero, (const u32* starts, const u32* lengths, u64 blocks, const T* values, u32* indices,
                                T* out), return nonzero(starts, lengths, blocks, values, indices, out))

// out[end - begin]: the elements begin .. end - 1, for blocks inside [begin, end). A piece at a time is assembled in
// the first-level cache, and then written past the caches.
template <class T>
static void dense(const u32* starts, const u32* lengths, u64 blocks, const T* values, u64 begin, u64 end, T* out) {
    constexpr u64 piece = 16384 / sizeof(T);
    alignas(64) T row[piece];
    u64 block = 0, done = 0;  // done: elements of the block that are written
    for (u64 first = begin; first < end; first += piece) {
        const u64 stop = first + piece < end ? first + piece : end;
        std::memset(row, 0, (stop - first) * sizeof(T));
        while (block < blocks && starts[block] + done < stop) {
            const u64 from = starts[block] + done;
            const u64 left = lengths[block] - done, count = left < stop - from ? left : stop - from;
            for (u64 j = 0; j < count; ++j) row[from - first + j] = values[j];
            values += count;
            if (count == left) ++block, done = 0;
            else done += count;
        }
        stream_copy(out + (first - begin), row, (stop - first) * sizeof(T));
    }
    stream_fence();
}
DR_FLOATS(void, stream_dense, (const u32* starts, const u32* lengths, u64 blocks, const T* values, u64 begin, u64 end,
                               T* out), dense(starts, lengths, blocks, values, begin, end, out))

// dense += the stream.
template <class T>
static void add(const u32* starts, const u32* lengths, u64 blocks, const T* values, T* dense) {
    const u64 ahead = 16;
    for (u64 b = 0; b < blocks; ++b) {
        if (b + ahead < blocks) __builtin_prefetch(dense + starts[b + ahead], 1);
        T* to = dense + starts[b];
        for (u32 j = 0; j < lengths[b]; ++j) to[j] += values[j];
        values += lengths[b];
    }
}
DR_FLOATS(void, stream_add, (const u32* starts, const u32* lengths, u64 blocks, const T* values, T* dense),
    add(starts, lengths, blocks, values, dense))

template <class T>
struct Stream {
    const u32* starts;
    const u32* lengths;
    const T* values;
    u64 blocks;
};

// The sum of two streams. `starts` and `lengths` have room for a.blocks + b.blocks, `out` for the values of both, `gap`
// more for each block, and gap + 4 at the end; for merge_avx512, each for 16 more. Returns the number of blocks; *count: the number of values.
//
//     a       [1 2]        [3]           The block with the smaller start is next. It joins the open block if at most
//     b            . [4    5]            `gap` elements are between; where both overlap (5 and 3), values are added.
//
// As in encode, there is no branch on what no branch could predict: which stream is next, and whether its block joins
// the open one. Short blocks are copied as four values; the next block overwrites what is too much.
template <class T>
static u64 merge(Stream<T> a, Stream<T> b, u64 a_count, u64 b_count, u32 gap, u32* starts, u32* lengths, T* out,
                 u64* count) {
    const u64 never = ~0ull;
    const T* ends[2] = {a.values + a_count, b.values + b_count};
    Stream<T> s[2] = {a, b};
    u64 next[2] = {a.blocks ? a.starts[0] : never, b.blocks ? b.starts[0] : never};
    u64 block = 0, start = next[0] < next[1] ? next[0] : next[1], end = start;  // of the open block; `to` is at its end
    T* to = out;
    if (start == never) return *count = 0;
    for (u64 left = a.blocks + b.blocks; left; --left) {
        const u32 side = next[1] < next[0];
        Stream<T>& from = s[side];
        const u64 begin = next[side];
        const u32 length = *from.lengths++;
        const T* values = from.values;
        from.values += length;
        ++from.starts;
        next[side] = --from.blocks ? *from.starts : never;
        if (begin < end) {
            const u64 common = end - begin < length ? end - begin : length;
            T* at = to - (end - begin);
            for (u64 k = 0; k < common; ++k) at[k] += values[k];
            for (u64 k = common; k < length; ++k) *to++ = values[k];
            end += length - common;
            continue;
        }
        const bool cut = begin - end > gap;  // ends_block in 64 bits
        lengths[block] = (u32)(end - start);
        block += cut;
        start = cut ? begin : start;
        starts[block] = (u32)start;
        for (u32 j = 0; j < gap; ++j) to[j] = 0;
        to += cut ? 0 : begin - end;
        if (length <= 4 && values + 4 <= ends[side]) {
            std::memcpy(to, values, 4 * sizeof(T));
        } else {
            for (u64 k = 0; k < length; ++k) to[k] = values[k];
        }
        to += length;
        end = begin + length;
    }
    starts[block] = (u32)start;
    lengths[block] = (u32)(end - start);
    *count = (u64)(to - out);
    return block + 1;
}
DR_API u64 dr_stream_merge_f32(const u32* a_starts, const u32* a_lengths, const float* a_values, u64 a_blocks,
                               u64 a_count, const u32* b_starts, const u32* b_lengths, const float* b_values,
                               u64 b_blocks, u64 b_count, u32 gap, u32* starts, u32* lengths, float* out, u64* count) {
#ifdef DR_X86
    const FloatStream a{a_starts, a_lengths, a_values, a_blocks}, b{b_starts, b_lengths, b_values, b_blocks};
    u64 blocks;
    if (gap == 0 && dr_vector_level() == 2 && worth_merge_avx512(a, a_count, b, b_count) &&
        merge_avx512(a, b, starts, lengths, out, &blocks, count))
        return blocks;
#endif
    return merge<float>({a_starts, a_lengths, a_values, a_blocks}, {b_starts, b_lengths, b_values, b_blocks}, a_count,
                        b_count, gap, starts, lengths, out, count);
}
DR_API u64 dr_stream_merge_f64(const u32* a_starts, const u32* a_lengths, const double* a_values, u64 a_blocks,
                               u64 a_count, const u32* b_starts, const u32* b_lengths, const double* b_values,
                               u64 b_blocks, u64 b_count, u32 gap, u32* starts, u32* lengths, double* out, u64* count) {
    return merge<double>({a_starts, a_lengths, a_values, a_blocks}, {b_starts, b_lengths, b_values, b_blocks}, a_count,
                         b_count, gap, starts, lengths, out, count);
}

// Cuts a stream before each of the sorted `cuts`: a block across a cut becomes two. Piece p, of count + 1, has the new
// blocks block_at[p] .. block_at[p + 1] - 1 and the values value_at[p] .. value_at[p + 1] - 1. The values are not
// moved.
DR_API void dr_stream_split(const u32* starts, const u32* lengths, u64 blocks, const u64* cuts, u64 count,
                            u32* out_starts, u32* out_lengths, u64* block_at, u64* value_at) {
    u64 pieces = 0, values = 0, cut = 0;
    block_at[0] = value_at[0] = 0;
    for (u64 b = 0; b < blocks; ++b) {
        u64 from = starts[b];
        const u64 end = from + lengths[b];
        for (; cut < count && cuts[cut] < end; ++cut) {
            if (cuts[cut] > from) {
                out_starts[pieces] = (u32)from;
                out_lengths[pieces++] = (u32)(cuts[cut] - from);
                values += cuts[cut] - from;
                from = cuts[cut];
            }
            block_at[cut + 1] = pieces;
            value_at[cut + 1] = values;
        }
        out_starts[pieces] = (u32)from;
        out_lengths[pieces++] = (u32)(end - from);
        values += end - from;
    }
    for (; cut <= count; ++cut) block_at[cut + 1] = pieces, value_at[cut + 1] = values;
}

// Starts and lengths as the two rows that densestream.h describes.
DR_API void dr_stream_gaps(const u32* starts, const u32* lengths, u64 blocks, u32 begin, u32* skips, u32* ends) {
    u32 covered = 0;
    for (u64 b = 0; b < blocks; ++b) {
        skips[b] = skip_of_start(starts[b], begin, covered, (u32)b);
        covered += lengths[b];
        ends[b] = covered - 1;
    }
}

// The inverse, in place: `skips` becomes the starts, `ends` the lengths. ERR_INDEX if a start or an end exceeds 32
// bits; dr_stream_check checks the rest.
DR_API i64 dr_stream_blocks(u32* skips, u32* ends, u64 blocks, u32 begin) {
    u64 covered = 0;
    bool bad = false;
    for (u64 b = 0; b < blocks; ++b) {
        const u64 next = (u64)ends[b] + 1, start = start_of_skip(skips[b], begin, covered, b);
        bad |= block_overflows(start, next - covered);
        skips[b] = (u32)start;
        ends[b] = (u32)(next - covered);
        covered = next;
    }
    return bad ? (i64)ERR_INDEX : 0;
}
