// Golomb-Rice code with a parameter for each block of 64 gaps: the CUDA side of blocks.cpp, which draws the section.
//
// A prefix sum over the blocks gives the place of each block's lows; the rest is as in rice.cu.
#include "rice/blocks.cuh"

// A warp for each block. Lane b adds up the high bits for the parameter b.
KERNEL rice_blocks_parameters(const u32* indices, u64 count, u8* parameters) {
    __shared__ u64 of_warp[WARPS][32];
    const u64 blocks = rice_block_count(count);
    u64* sums = of_warp[warp_number()];
    for (u64 j = grid_thread() / 32; j < blocks; j += grid_threads() / 32) {
        const u64 begin = j * RICE_BLOCK;
        const u32 size = rice_block_size(count, j), before = begin ? indices[begin - 1] + 1 : 0;
        u64 sum = 0;
        for (u32 i = 0; i < size; ++i) sum += gap_at(indices, begin + i) >> lane_number();
        sums[lane_number()] = sum;
        __syncwarp();
        if (lane_number() == 0) {
            const u64 span = (u64)indices[begin + size - 1] + 1 - before;
            parameters[j] = (u8)rice_downhill(rice_block_first(size, span), size, [=](u32 b, u64* three) {
                three[0] = sums[b ? b - 1 : 0], three[1] = sums[b], three[2] = sums[b < 31 ? b + 1 : 31];
            });
        }
        __syncwarp();
    }
}

// places[j]: the byte where the lows of block j begin. *highs: the byte where the highs begin.
KERNEL rice_blocks_places(const u8* parameters, u64 count, u64* status, u64* places, u64* highs) {
    each_place(
        rice_block_count(count), rice_block_fields(count), status, highs,
        [=](u64 j) { return field_bytes(rice_block_size(count, j), parameters[j]); },
        [=](u64 j, u64 place) { places[j] = place; });
}

// words: the whole section, zeros before the launch. *end: its number of bits.
KERNEL rice_blocks_write(const u32* indices, u64 count, const u8* parameters, const u64* places, const u64* highs,
                         u64* status, u32* words, u64* end) {
    each_place(
        count, 8 * *highs, status, end,
        [=](u64 i) { return (u64)(gap_at(indices, i) >> parameters[i / RICE_BLOCK]) + 1; },
        [=](u64 i, u64 place) {
            const u64 j = i / RICE_BLOCK;
            const u32 b = parameters[j], gap = gap_at(indices, i);
            if (i % RICE_BLOCK == 0) put_bits(words, j * RICE_FIELD, b);
            put_bits(words, 8 * places[j] + i % RICE_BLOCK * b, gap & (u32)((1ull << b) - 1));
            put_bits(words, place + (gap >> b), 1);
        });
}

// One section among many, which are decoded by one set of launches. Places are bytes of `data`, words of `scratch`, and
// elements of `highs`, `indices` and `places`. The same in ops/rice_blocks.py. Each section has `each` blocks of every
// grid.
struct BlocksSection {
    u64 at, bytes;           // the section
    u64 numel, count;        // of its tensor, and of its support
    u64 first, first_block;  // of its indices, and of its blocks of gaps
    u64 found;               // | ones | end | place of the highs |
    u64 of_places, of_highs, of_join;  // status words
};

__device__ __forceinline__ const BlocksSection& section_of(const u64* table, u64 each) {
    return ((const BlocksSection*)table)[blockIdx.x / each];
}

KERNEL rice_blocks_read_places(const u8* data, const u64* table, u64 each, u64* scratch, u64* places, i32* error) {
    const BlocksSection& of = section_of(table, each);
    read_rice_places(data + of.at, of.bytes, of.count, scratch + of.of_places, places + of.first_block,
                     scratch + of.found + 2, error);
}

KERNEL rice_blocks_highs(const u8* data, const u64* table, u64 each, u64* scratch, u32* highs) {
    const BlocksSection& of = section_of(table, each);
    find_rice_blocks_highs(data + of.at, of.bytes, of.count, scratch[of.found + 2], scratch + of.of_highs,
                           highs + of.first, scratch + of.found);
}

// As join_rice_blocks. Sets *error to ERR_TRUNCATED if a section has fewer than `count` gaps.
KERNEL rice_blocks_join(const u8* data, const u64* table, u64 each, u64* scratch, const u64* places, const u32* highs,
                        u32* indices, i32* error) {
    const BlocksSection& of = section_of(table, each);
    if (scratch[of.found] < of.count) {
        if (blockIdx.x % each == 0 && threadIdx.x == 0) atomicMin(error, ERR_TRUNCATED);
        return;
    }
    join_rice_blocks(data + of.at, of.bytes, of.count, of.numel, places + of.first_block, scratch[of.found + 2],
                     highs + of.first, scratch + of.of_join, scratch + of.found + 1, indices + of.first, error);
}
