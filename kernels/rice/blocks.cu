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

KERNEL rice_blocks_read_places(const u8* in, u64 bytes, u64 count, u64* status, u64* places, u64* highs, i32* error) {
    read_rice_places(in, bytes, count, status, places, highs, error);
}

KERNEL rice_blocks_highs(const u8* in, u64 bytes, u64 count, const u64* begin, u64* status, u32* highs, u64* ones) {
    find_rice_blocks_highs(in, bytes, count, *begin, status, highs, ones);
}

// As join_rice_blocks. Sets *error to ERR_TRUNCATED if the section has fewer than `count` gaps.
KERNEL rice_blocks_join(const u8* in, u64 bytes, u64 count, u64 numel, const u64* places, const u64* begin,
                        const u32* highs, const u64* ones, u64* status, u64* end, u32* indices, i32* error) {
    if (*ones < count) {
        if (grid_thread() == 0) atomicMin(error, ERR_TRUNCATED);
        return;
    }
    join_rice_blocks(in, bytes, count, numel, places, *begin, highs, status, end, indices, error);
}
