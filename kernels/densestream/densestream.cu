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

// dense[index - begin] = the stream's values; with `adds`, +=.
template <class T>
__device__ void stream_scatter(const u32* starts, const u32* firsts, u64 blocks, const T* values, u64 count, u64 begin,
                               u32 adds, T* dense) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        T* to = dense + (covered_index(starts, firsts, blocks, i) - begin);
        *to = adds ? *to + values[i] : values[i];
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

#define STREAM(suffix, T)                                                                                             \
    KERNEL stream_write_##suffix(const u32* indices, const T* values, u64 count, u32 gap, u64* status, u64* end,      \
                                 u32* starts, u32* firsts, u32* covered, T* out) {                                    \
        stream_write(indices, values, count, gap, status, end, starts, firsts, covered, out);                         \
    }                                                                                                                 \
    KERNEL stream_scatter_##suffix(const u32* starts, const u32* firsts, u64 blocks, const T* values, u64 count,      \
                                   u64 begin, u32 adds, T* dense) {                                                   \
        stream_scatter(starts, firsts, blocks, values, count, begin, adds, dense);                                    \
    }                                                                                                                 \
    KERNEL stream_supports_##suffix(const u8* data, const u64* table, u64 each, const u32* rows, u32* indices,         \
                                    i32* error) {                                                                     \
        stream_supports<T>(data, table, each, rows, indices, error);                                                  \
    }
STREAM(f32, float)
STREAM(f64, double)
