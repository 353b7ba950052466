// Golomb-Rice code: the CUDA side of rice.cpp, which draws the section.
//
// The section is one bit string in words that were zero: each element sets its low bits and its one. A decoder first
// finds the ones, which give the high bits, and then adds up the low bits.
#include "common/index_gaps.cuh"
#include "rice/rice.cuh"

// sums[b] += the sum of gap >> b, for all b at once: lane b of each warp adds for b, over a run of the gaps. A block
// adds up its warps first, since all blocks add to the same few words.
KERNEL rice_sums(const u32* indices, u64 count, u64* sums) {
    __shared__ u64 of_warp[WARPS][32];
    const u64 warps = grid_threads() / 32, run = (count + warps - 1) / warps;
    const u64 begin = grid_thread() / 32 * run, end = begin + run < count ? begin + run : count;
    u64 sum = 0;
    u32 next = begin && begin < end ? indices[begin - 1] + 1 : 0;
    for (u64 i = begin; i < end; ++i) {
        const u32 index = indices[i];
        sum += (index - next) >> lane_number();
        next = index + 1;
    }
    of_warp[warp_number()][lane_number()] = sum;
    __syncthreads();
    if (warp_number()) return;
    for (u32 warp = 1; warp < WARPS; ++warp) sum += of_warp[warp][lane_number()];
    if (sum) atomicAdd(sums + lane_number(), sum);
}

// words: the whole section, zeros before the launch. *end: its number of bits.
KERNEL rice_write(const u32* indices, u64 count, u64 numel, const u64* sums, u64* status, u32* words, u64* end) {
    __shared__ u32 parameter;
    if (threadIdx.x == 0)
        parameter = rice_parameter(count, numel, [=](u32 b, u64* three) {
            three[0] = sums[b ? b - 1 : 0], three[1] = sums[b], three[2] = sums[b < 31 ? b + 1 : 31];
        });
    __syncthreads();
    const u32 b = parameter, mask = (1u << b) - 1;
    if (grid_thread() == 0) put_bits(words, 0, b);
    each_place(
        count, 8 + 8 * field_bytes(count, b), status, end,
        [=](u64 i) { return (u64)(gap_at(indices, i) >> b) + 1; },
        [=](u64 i, u64 place) {
            const u32 gap = gap_at(indices, i);
            put_bits(words, 8 + i * b, gap & mask);
            put_bits(words, place + (gap >> b), 1);
        });
}

// One section among many, which are decoded by one set of launches. Places are bytes of `data`, words of `scratch`, and
// elements of `highs` and `indices`. The same in ops/rice.py. Each section has `each` blocks of every grid.
struct RiceSection {
    u64 at, bytes;           // the section
    u64 numel, count;        // of its indices
    u64 first;               // of its elements
    u64 found;               // | ones | end |
    u64 of_highs, of_join;   // status words
};

__device__ __forceinline__ const RiceSection& section_of(const u64* table, u64 each) {
    return ((const RiceSection*)table)[blockIdx.x / each];
}

// scratch: zeros before the launch; as in rice_join.
KERNEL rice_highs(const u8* data, const u64* table, u64 each, u64* scratch, u32* highs) {
    const RiceSection& of = section_of(table, each);
    find_rice_highs(data + of.at, of.bytes, of.count, scratch + of.of_highs, highs + of.first, scratch + of.found);
}

// As join_rice. Sets *error to ERR_TRUNCATED if a section has fewer than `count` gaps, to ERR_INDEX if it has no
// parameter.
KERNEL rice_join(const u8* data, const u64* table, u64 each, u64* scratch, const u32* highs, u32* indices, i32* error) {
    const RiceSection& of = section_of(table, each);
    const u32 b = data[of.at];
    if (b > 31 || scratch[of.found] < of.count) {
        if (blockIdx.x % each == 0 && threadIdx.x == 0) atomicMin(error, b > 31 ? ERR_INDEX : ERR_TRUNCATED);
        return;
    }
    join_rice(data + of.at, of.bytes, of.count, of.numel, highs + of.first, scratch + of.of_join,
              scratch + of.found + 1, indices + of.first, error);
}
