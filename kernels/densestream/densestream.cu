// DenseStream: the CUDA side of kernels/densestream/densestream.cpp. A scan sums blocks and covered elements together,
// as two fields of 31 bits in one word:
//
//     | 2 bits of the scan | blocks, 31 bits | covered elements, 31 bits |
#include "densestream/densestream.h"

#include "arrays/finite.cuh"

const u32 HALF = 31;
const u64 LOW = (1ull << HALF) - 1;

// Whether element i of sorted indices begins a block.
__device__ __forceinline__ bool begins_block(const u32* indices, u64 i, u32 gap) {
    return i == 0 || ends_block(indices[i] - indices[i - 1] - 1, gap);
}

// totals: | blocks | covered elements |; zeros before the launch.
KERNEL stream_count(const u32* indices, u64 count, u32 gap, u64* totals) {
    u32 blocks = 0, zeros = 0;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const bool begins = begins_block(indices, i, gap);
        blocks += begins;
        zeros += begins ? 0 : indices[i] - indices[i - 1] - 1;
    }
    blocks = block_sum(blocks);
    zeros = block_sum(zeros);
    if (threadIdx.x == 0) {
        atomicAdd(totals, (u64)blocks);
        atomicAdd(totals + 1, (u64)zeros);
    }
    if (grid_thread() == 0) atomicAdd(totals + 1, count);
}

// firsts[b]: the place of block b's first value. covered, which may be null: the indices of all elements inside the
// blocks. out, which may be null, else zeros before the launch: the values. *end: | blocks | values |, as the scan
// leaves it.
template <class T>
__device__ void stream_write(const u32* indices, const T* values, u64 count, u32 gap, u64* status, u64* end,
                             u32* starts, u32* firsts, u32* covered, T* out) {
    const auto steps = [=](u64 i) {
        return begins_block(indices, i, gap) ? 1ull << HALF | 1 : (u64)(indices[i] - indices[i - 1]);
    };
    each_place(count, 0, status, end, steps, [=](u64 i, u64 before) {
        const u64 step = steps(i), place = ((before + step) & LOW) - 1;
        if (begins_block(indices, i, gap)) {
            starts[before >> HALF] = indices[i];
            firsts[before >> HALF] = (u32)place;
        }
        if (covered)
            for (u32 back = 0; back < (step & LOW); ++back) covered[place - back] = indices[i] - back;
        if (out) out[place] = values[i];
    });
}

// The lengths of the blocks, from the places of their first values. *end: | blocks | values |, as the scan leaves it.
KERNEL stream_lengths(const u32* firsts, const u64* end, u32* lengths) {
    const u64 blocks = *end >> HALF;
    for (u64 b = grid_thread(); b < blocks; b += grid_threads())
        lengths[b] = (b + 1 < blocks ? firsts[b + 1] : (u32)(*end & LOW)) - firsts[b];
}

// *error: ERR_INDEX if the blocks are empty, overlap, are out of order, are not inside [begin, end), or do not cover
// `count` elements. sums: | elements | blocks of the grid that have added theirs |, zeros before the launch.
KERNEL stream_check(const u32* starts, const u32* lengths, u64 blocks, u64 begin, u64 end, u64 count, u64* sums,
                    i32* error) {
    bool bad = false;
    u64 covered = 0;
    for (u64 b = grid_thread(); b < blocks; b += grid_threads()) {
        const u64 stop = (u64)starts[b] + lengths[b];
        bad |= lengths[b] == 0 || stop > (b + 1 < blocks ? starts[b + 1] : end) || (b == 0 && starts[0] < begin);
        covered += lengths[b];
    }
    covered = block_sum(covered);
    if (threadIdx.x == 0) {
        atomicAdd(sums, covered);
        __threadfence();
        if (atomicAdd(sums + 1, 1ull) + 1 == gridDim.x) bad |= atomicAdd(sums, 0ull) != count;
    }
    if (bad) atomicMin(error, ERR_INDEX);
}

// firsts[b]: the place of block b's first value.
KERNEL stream_firsts(const u32* lengths, u64 blocks, u64* status, u64* end, u32* firsts) {
    each_place(
        blocks, 0, status, end, [=](u64 b) { return (u64)lengths[b]; },
        [=](u64 b, u64 place) { firsts[b] = (u32)place; });
}

// The index of the covered element whose value is at `place`.
__device__ __forceinline__ u32 covered_index(const u32* starts, const u32* firsts, u64 blocks, u64 place) {
    const u64 b = last_at_most(firsts, blocks, place);
    return starts[b] + (u32)(place - firsts[b]);
}

KERNEL stream_indices(const u32* starts, const u32* firsts, u64 blocks, u64 count, u32* indices) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) indices[i] = covered_index(starts, firsts, blocks, i);
}

// The indices and values of the covered elements that are not zero; *kept: their number.
template <class T>
__device__ void stream_nonzero(const u32* starts, const u32* firsts, u64 blocks, const T* values, u64 count,
                               u64* status, u64* kept, u32* indices, T* out) {
    const auto keeps = [=](u64 i) { return (u64)(values[i] != (T)0); };
    each_place<1>(count, 0, status, kept, keeps, [=](u64 i, u64 place) {
        if (!keeps(i)) return;
        indices[place] = covered_index(starts, firsts, blocks, i);
        out[place] = values[i];
    });
}

// dense[index - begin] = the stream's values; with `adds`, +=.
template <class T>
__device__ void stream_scatter(const u32* starts, const u32* firsts, u64 blocks, const T* values, u64 count, u64 begin,
                               u32 adds, T* dense) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        T* to = dense + (covered_index(starts, firsts, blocks, i) - begin);
        *to = adds ? *to + values[i] : values[i];
    }
}

// ---- The sum of two streams. All blocks are ordered by their starts; of equal starts, a's is first. The blocks of one
// stream do not overlap, so the farthest end before a block is the end of one of two blocks: the block before it in its
// own stream, and the last block of the other stream that begins earlier.

// How many of sorted a[count] are below `value`; with `equal`, how many are not above it.
__device__ __forceinline__ u64 rank_of(const u32* a, u64 count, u32 value, bool equal) {
    return first_not(count, [=](u64 i) { return a[i] < value || (equal && a[i] == value); });
}

// order[r]: the r-th block, as | its stream, 1 bit | its number there, 31 bits |.
KERNEL stream_order(const u32* a, u64 a_blocks, const u32* b, u64 b_blocks, u32* order) {
    for (u64 i = grid_thread(); i < a_blocks + b_blocks; i += grid_threads()) {
        if (i < a_blocks) order[i + rank_of(b, b_blocks, a[i], false)] = (u32)i;
        else order[i - a_blocks + rank_of(a, a_blocks, b[i - a_blocks], true)] = (u32)(i - a_blocks) | 1u << HALF;
    }
}

// starts, firsts: of the blocks of the sum. block_of[i]: for block i of a, then of b, the block of the sum that
// contains it. *end: | blocks | values |.
KERNEL stream_join(const u32* a_starts, const u32* a_lengths, u64 a_blocks, const u32* b_starts, const u32* b_lengths,
                   u64 b_blocks, u32 gap, const u32* order, u64* status, u64* end, u32* starts, u32* firsts,
                   u32* block_of) {
    // What the r-th block adds: the zeros before it, and its elements that no block before it covers.
    const auto step = [=](u64 r, bool* opens) {
        const bool of_b = order[r] >> HALF;
        const u64 i = order[r] & (u32)LOW, others = r - i;
        const u32* own_starts = of_b ? b_starts : a_starts;
        const u32* own_lengths = of_b ? b_lengths : a_lengths;
        const u32* other_starts = of_b ? a_starts : b_starts;
        const u32* other_lengths = of_b ? a_lengths : b_lengths;
        const u64 start = own_starts[i], stop = start + own_lengths[i];
        u64 before = i ? (u64)own_starts[i - 1] + own_lengths[i - 1] : 0;
        const u64 other = others ? (u64)other_starts[others - 1] + other_lengths[others - 1] : 0;
        before = other > before ? other : before;
        *opens = r == 0 || start > before + gap;
        if (*opens) return 1ull << HALF | (stop - start);
        return stop > before ? stop - before : 0ull;  // from the last end on: zeros up to the start, then values
    };
    each_place(
        a_blocks + b_blocks, 0, status, end, [=](u64 r) { bool opens; return step(r, &opens); },
        [=](u64 r, u64 before) {
            bool opens;
            step(r, &opens);
            const u32 i = order[r] & (u32)LOW;
            const u64 block = (before >> HALF) - (opens ? 0 : 1);
            if (opens) {
                starts[block] = order[r] >> HALF ? b_starts[i] : a_starts[i];
                firsts[block] = (u32)(before & LOW);
            }
            block_of[order[r] >> HALF ? a_blocks + i : i] = (u32)block;
        });
}

// Puts the values of one stream into the sum. A second launch does the other stream, and adds where the first one
// (`other_starts`) covers an element. out: zeros before the first launch.
template <class T>
__device__ void stream_place(const u32* own_starts, const u32* own_firsts, u64 blocks, const T* values, u64 count,
                             const u32* block_of, const u32* starts, const u32* firsts, const u32* other_starts,
                             const u32* other_lengths, u64 other_blocks, T* out) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u64 b = last_at_most(own_firsts, blocks, i);
        const u32 index = own_starts[b] + (u32)(i - own_firsts[b]), block = block_of[b];
        T* to = out + firsts[block] + (index - starts[block]);
        bool covered = false;
        if (other_blocks) {
            const u64 other = last_at_most(other_starts, other_blocks, index);
            covered = other_starts[other] <= index && index - other_starts[other] < other_lengths[other];
        }
        *to = covered ? *to + values[i] : values[i];
    }
}

// Starts and lengths as the two rows that densestream.h describes, and back.
KERNEL stream_gaps(const u32* starts, const u32* lengths, u64 blocks, u32 begin, u64* status, u64* end, u32* skips,
                   u32* ends) {
    each_place(
        blocks, 0, status, end, [=](u64 b) { return (u64)lengths[b]; },
        [=](u64 b, u64 covered) {
            skips[b] = skip_of_start(starts[b], begin, (u32)covered, (u32)b);
            ends[b] = (u32)(covered + lengths[b] - 1);
        });
}
KERNEL stream_blocks(const u32* skips, const u32* ends, u64 blocks, u32 begin, u32* starts, u32* lengths, i32* error) {
    for (u64 b = grid_thread(); b < blocks; b += grid_threads()) {
        const u64 next = (u64)ends[b] + 1, covered = b ? (u64)ends[b - 1] + 1 : 0;
        const u64 start = start_of_skip(skips[b], begin, covered, b);
        if (block_overflows(start, next - covered)) atomicMin(error, ERR_INDEX);
        starts[b] = (u32)start;
        lengths[b] = (u32)(next - covered);
    }
}

// ---- The streams of many containers at once, each of at least one block and of a whole vector. Both forms of blocks
// become the two rows of densestream.h, which say all: the element at `place` of block b has the index
// skips[b] - b + place.

// One stream, as the host has read its header. Places are bytes of `data`, words of `scratch`, and elements of `rows`
// and `indices`. The same in ops/densestream.py. Each stream has `each` blocks of every grid.
struct StreamSection {
    u64 a, b;                  // its parts
    u64 blocks, numel, count;  // count: of its values
    u64 values;                // where they are if they are raw, otherwise NOWHERE
    u64 row;                   // of its `skips`; its `ends` follow them
    u64 first;                 // of its elements
    u64 found;                 // | covered | status of the blocks |, for plain blocks
    u64 end_a, end_b, end;     // where its parts and its values end; zeros follow up to a multiple of 8
};

__device__ __forceinline__ const StreamSection& stream_of(const u64* table, u64 each) {
    return ((const StreamSection*)table)[blockIdx.x / each];
}

// The rows of plain blocks. Sets *error to ERR_INDEX if blocks are empty, overlap, or are out of order.
KERNEL stream_rows(const u8* data, const u64* table, u64 each, u64* scratch, u32* rows, i32* error) {
    const StreamSection& of = stream_of(table, each);
    const u32 *starts = (const u32*)(data + of.a), *lengths = (const u32*)(data + of.b);
    u32 *skips = rows + of.row, *ends = skips + of.blocks;
    each_place(
        of.blocks, 0, scratch + of.found + 1, scratch + of.found, [=](u64 b) { return (u64)lengths[b]; },
        [=](u64 b, u64 covered) {
            const u64 stop = (u64)starts[b] + lengths[b];
            if (!lengths[b] || stop > (b + 1 < of.blocks ? starts[b + 1] : of.numel))
                atomicMin(error, ERR_INDEX);
            skips[b] = skip_of_start(starts[b], 0, (u32)covered, (u32)b);
            ends[b] = (u32)(covered + lengths[b] - 1);
        });
}

// The indices of all covered elements, from rows that increase. Sets *error to ERR_INDEX if the blocks do not cover
// `count` elements below numel, which the last one says for all; to ERR_NOT_FINITE if a raw value is not finite; and to
// ERR_PADDING if the parts are not filled with zeros.
template <class T>
__device__ void stream_supports(const u8* data, const u64* table, u64 each, const u32* rows, u32* indices, i32* error) {
    const StreamSection& of = stream_of(table, each);
    const u32 *skips = rows + of.row, *ends = skips + of.blocks;
    const u64 thread = blockIdx.x % each * THREADS + threadIdx.x, last = of.blocks - 1;
    for (u64 place = thread; place < of.count; place += each * THREADS) {
        const u64 b = first_not(last, [=](u64 i) { return ends[i] < place; });
        indices[of.first + place] = skips[b] - (u32)b + (u32)place;
    }
    if (of.values != NOWHERE)
        find_nonfinite((const T*)(data + of.values), of.count, (u32)(blockIdx.x % each), (u32)each, error);
    if (thread >= 3) return;
    if (thread == 0 && (ends[last] + 1ull != of.count || skips[last] - last + of.count > of.numel))
        atomicMin(error, ERR_INDEX);
    for (u64 at = thread == 0 ? of.end_a : thread == 1 ? of.end_b : of.end; at % 8; ++at)
        if (data[at]) atomicMin(error, ERR_PADDING);
}

// ---- Cutting a stream before each of sorted cuts.

__device__ __forceinline__ u64 cuts_up_to(const u64* cuts, u64 count, u64 value) {
    return first_not(count, [=](u64 c) { return cuts[c] <= value; });
}

// The number of different cuts in (after, last].
__device__ __forceinline__ u32 cuts_between(const u64* cuts, u64 count, u64 after, u64 last) {
    u32 different = 0;
    for (u64 c = cuts_up_to(cuts, count, after); c < count && cuts[c] <= last; ++c)
        different += c == 0 || cuts[c] != cuts[c - 1];
    return different;
}

// places[b]: the new number of block b's first piece; *pieces: the number of pieces.
KERNEL stream_split(const u32* starts, const u32* lengths, u64 blocks, const u64* cuts, u64 count, u64* status,
                    u64* pieces, u32* places, u32* out_starts, u32* out_lengths) {
    each_place<1>(
        blocks, 0, status, pieces,
        [=](u64 b) { return 1 + (u64)cuts_between(cuts, count, starts[b], (u64)starts[b] + lengths[b] - 1); },
        [=](u64 b, u64 place) {
            u64 from = starts[b];
            const u64 end = from + lengths[b];
            places[b] = (u32)place;
            for (u64 c = cuts_up_to(cuts, count, from); c < count && cuts[c] < end; ++c) {
                if (cuts[c] == from) continue;
                out_starts[place] = (u32)from;
                out_lengths[place++] = (u32)(cuts[c] - from);
                from = cuts[c];
            }
            out_starts[place] = (u32)from;
            out_lengths[place] = (u32)(end - from);
        });
}

// block_at[count + 2], value_at[count + 2]: as in dr_stream_split. firsts: the place of each block's first value.
KERNEL stream_pieces(const u32* starts, const u32* lengths, const u32* firsts, u64 blocks, const u64* values,
                     const u64* cuts, u64 count, const u64* pieces, const u32* places, u64* block_at, u64* value_at) {
    for (u64 c = grid_thread(); c < count + 2; c += grid_threads()) {
        const u64 cut = c && c <= count ? cuts[c - 1] : NOWHERE;
        block_at[c] = c ? *pieces : 0;
        value_at[c] = c ? *values : 0;
        // The first block that ends after the cut.
        const u64 b = c ? first_not(blocks, [=](u64 i) { return (u64)starts[i] + lengths[i] <= cut; }) : blocks;
        if (b < blocks) {
            block_at[c] = places[b] + cuts_between(cuts, count, starts[b], cut);
            value_at[c] = firsts[b] + (cut > starts[b] ? cut - starts[b] : 0);
        }
    }
}

#define STREAM(suffix, T)                                                                                             \
    KERNEL stream_write_##suffix(const u32* indices, const T* values, u64 count, u32 gap, u64* status, u64* end,      \
                                 u32* starts, u32* firsts, u32* covered, T* out) {                                    \
        stream_write(indices, values, count, gap, status, end, starts, firsts, covered, out);                         \
    }                                                                                                                 \
    KERNEL stream_nonzero_##suffix(const u32* starts, const u32* firsts, u64 blocks, const T* values, u64 count,      \
                                   u64* status, u64* kept, u32* indices, T* out) {                                    \
        stream_nonzero(starts, firsts, blocks, values, count, status, kept, indices, out);                            \
    }                                                                                                                 \
    KERNEL stream_scatter_##suffix(const u32* starts, const u32* firsts, u64 blocks, const T* values, u64 count,      \
                                   u64 begin, u32 adds, T* dense) {                                                   \
        stream_scatter(starts, firsts, blocks, values, count, begin, adds, dense);                                    \
    }                                                                                                                 \
    KERNEL stream_supports_##suffix(const u8* data, const u64* table, u64 each, const u32* rows, u32* indices,         \
                                    i32* error) {                                                                     \
        stream_supports<T>(data, table, each, rows, indices, error);                                                  \
    }                                                                                                                 \
    KERNEL stream_place_##suffix(const u32* own_starts, const u32* own_firsts, u64 blocks, const T* values, u64 count, \
                                 const u32* block_of, const u32* starts, const u32* firsts, const u32* other_starts,  \
                                 const u32* other_lengths, u64 other_blocks, T* out) {                                \
        stream_place(own_starts, own_firsts, blocks, values, count, block_of, starts, firsts, other_starts,           \
                     other_lengths, other_blocks, out);                                                               \
    }
STREAM(f32, float)
STREAM(f64, double)
