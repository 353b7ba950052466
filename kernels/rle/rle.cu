// Run lengths of a bitmap: the CUDA side of rle.cpp, which draws the section.
//
// Run r begins with index number begins[r]. The section is read as pairs of runs, zeros and then ones.
#include "entropy/chunks.cuh"
#include "rle/rle.h"

__device__ __forceinline__ bool begins_run(const u32* indices, u64 i) {
    return i == 0 || indices[i] - indices[i - 1] > 1;
}

// begins[r]: the place of the first index of run r. *runs: the number of runs.
KERNEL rle_runs(const u32* indices, u64 count, u64* status, u64* runs, u32* begins) {
    each_place(
        count, 0, status, runs, [=](u64 i) { return (u64)begins_run(indices, i); },
        [=](u64 i, u64 place) {
            if (begins_run(indices, i)) begins[place] = (u32)i;
        });
}

// The values v that are written for the zeros before run r and for its ones.
struct Run {
    u64 zeros, ones;
};
__device__ __forceinline__ Run run_of(const u32* indices, u64 count, const u32* begins, u64 runs, u64 r) {
    const u64 begin = begins[r], end = r + 1 < runs ? begins[r + 1] : count;
    return {r ? (u64)(indices[begin] - indices[begin - 1]) - 2 : (u64)indices[0], end - begin - 1};
}

// lengths: for the zeros [34], then for the ones [34], as rle.h's best_fields takes them; zeros before the launch.
KERNEL rle_count(const u32* indices, u64 count, const u32* begins, const u64* runs, u64* lengths) {
    __shared__ u32 local[68];
    if (threadIdx.x < 68) local[threadIdx.x] = 0;
    __syncthreads();
    for (u64 r = grid_thread(); r < *runs; r += grid_threads()) {
        const Run run = run_of(indices, count, begins, *runs, r);
        atomicAdd(local + bit_length(run.zeros + 1), 1u);
        atomicAdd(local + 34 + bit_length(run.ones + 1), 1u);
    }
    __syncthreads();
    if (threadIdx.x < 68 && local[threadIdx.x]) atomicAdd(lengths + threadIdx.x, (u64)local[threadIdx.x]);
}

__device__ __forceinline__ u32 run_bits(u64 v, u32 width, u32 escape) {
    return v < (1ull << width) - 1 ? width : width + escape;
}
__device__ __forceinline__ void put_run(u32* words, u64 at, u64 v, u32 width, u32 escape) {
    const u64 all = (1ull << width) - 1;
    put_bits(words, at, v < all ? v : all);
    if (v >= all) put_bits(words, at + width, v);
}

// words: the section, zeros before the launch. *end: its number of bits.
KERNEL rle_write(const u32* indices, u64 count, u64 numel, const u32* begins, const u64* runs, const u64* lengths,
                 u64* status, u32* words, u64* end) {
    __shared__ u32 widths[2];
    const u32 escape = run_escape(numel);
    if (threadIdx.x < 2) widths[threadIdx.x] = best_fields(lengths + 34 * threadIdx.x, escape).width;
    __syncthreads();
    const u32 z = widths[0], o = widths[1];
    if (grid_thread() == 0) put_bits(words, 0, z | o << 8);
    const u64 total = *runs;
    each_place(
        total, 16, status, end,
        [=](u64 r) {
            const Run run = run_of(indices, count, begins, total, r);
            return (u64)run_bits(run.zeros, z, escape) + run_bits(run.ones, o, escape);
        },
        [=](u64 r, u64 place) {
            const Run run = run_of(indices, count, begins, total, r);
            put_run(words, place, run.zeros, z, escape);
            put_run(words, place + run_bits(run.zeros, z, escape), run.ones, o, escape);
        });
}

struct RunReader {
    const u8* in;
    u64 bytes;
    u32 width[2], escape;
    __device__ RunReader(const u8* section, u64 size, u64 numel)
        : in(section + 2), bytes(size - 2), width{section[0], section[1]}, escape(run_escape(numel)) {}
    __device__ bool valid() const { return width[0] - 1 < 32 && width[1] - 1 < 32; }
    __device__ u64 read(u64& position, u32& phase) const {
        const u32 w = width[phase];
        u64 v = load_field(in, bytes, position, w);
        position += w;
        if (v == (1ull << w) - 1) {
            v = load_field(in, bytes, position, escape);
            position += escape;
        }
        phase ^= 1;
        return v;
    }
};

// A word is a field and perhaps its escape, so 64 bits at most; the phases are zeros and ones.
KERNEL rle_walk(const u8* section, u64 size, u64 numel, u64 chunks, u64* exits) {
    const RunReader reader(section, size, numel);
    if (!reader.valid()) return;
    walk_all(8 * reader.bytes, 64, 2, chunks, exits, [&](u64& position, u32& phase) { reader.read(position, phase); });
}

// zeros[r], ones[r]: the lengths of the r-th pair of runs, for up to `room` pairs; zeros before the launch, which stay
// where there is no pair. ends[r]: the bit after the pair.
KERNEL rle_read(const u8* section, u64 size, u64 numel, u64 chunks, const u64* starts, u64 room, u64* zeros, u64* ones,
                u64* ends) {
    const RunReader reader(section, size, numel);
    if (!reader.valid()) return;
    walk_again(
        8 * reader.bytes, 2, chunks, starts, [&](u64& position, u32& phase) { reader.read(position, phase); },
        [&](u64 number, u64 at, u64 after, u32 phase) {
            const u64 r = number / 2;
            if (r >= room) return;
            const bool is_ones = phase;
            const u64 v = reader.read(at, phase);
            if (is_ones) ones[r] = v + 1, ends[r] = after;
            else zeros[r] = v + (r ? 1 : 0);
        });
}

// places[r]: the number of indices before pair r.
KERNEL rle_places(const u64* ones, u64 room, u64* status, u64* end, u64* places) {
    each_place(
        room, 0, status, end, [=](u64 r) { return ones[r]; }, [=](u64 r, u64 place) { places[r] = place; });
}

// firsts[r]: the index of the first one of pair r. *pairs: the number of pairs that give `count` indices; it stays 0 if
// there is none. Sets *error to ERR_INDEX if a run passes `count` indices or numel, ERR_VALUE if the section continues
// after the last pair.
KERNEL rle_firsts(const u8* section, u64 size, const u64* zeros, const u64* ones, const u64* ends, const u64* places,
                  u64 room, u64 count, u64 numel, u64* status, u64* end, u32* firsts, u64* pairs, i32* error) {
    each_place(
        room, 0, status, end, [=](u64 r) { return zeros[r] + ones[r]; },
        [=](u64 r, u64 place) {
            const u64 first = place + zeros[r], done = places[r] + ones[r];
            firsts[r] = (u32)first;
            if (places[r] >= count || ones[r] == 0) return;
            if (done > count || first + ones[r] > numel) atomicMin(error, ERR_INDEX);
            if (done == count) {
                *pairs = r + 1;
                if (!ends_at(section + 2, size - 2, ends[r])) atomicMin(error, ERR_VALUE);
            }
        });
}

// Sets *error to ERR_TRUNCATED if *pairs is 0.
KERNEL rle_fill(const u64* places, const u32* firsts, const u64* pairs, u64 count, u32* indices, i32* error) {
    if (*pairs == 0) {
        if (grid_thread() == 0) atomicMin(error, ERR_TRUNCATED);
        return;
    }
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u64 r = last_at_most(places, *pairs, i);
        indices[i] = firsts[r] + (u32)(i - places[r]);
    }
}
