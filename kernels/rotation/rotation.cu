// Random rotation of buckets: the CUDA side of kernels/rotation/rotation.cpp.
//
// A launch computes several levels in shared memory. A tile has pieces of `columns` places at the distance `half` of the
// launch's first level; those of the first launch have one place, so that its tiles are places in a row:
//
//     tile:   | work[at .. at + columns - 1] | work[at + half ..] | work[at + 2 half ..] | ...
//
// The first launch also reads the input, and the last one writes the result, so that buckets of up to TILE places need
// no memory in between.
#include "rotation/rotation.h"

#include "common/device.cuh"

const u32 TILE_BITS = 12, TILE = 1u << TILE_BITS;  // as in ops/rotation.py
const u32 RUN = TILE / THREADS;                    // places in a row, in the first launch and the others

struct Tiles {
    u64 places;
    u32 half_bits, column_bits;
    // The first place of a tile. Tiles take their pieces side by side, until the next place is theirs already.
    __device__ u64 first(u64 tile) const {
        const u32 beside = half_bits - column_bits;
        return (tile >> beside << (TILE_BITS + beside)) + ((tile & ((1ull << beside) - 1)) << column_bits);
    }
    __device__ u64 at(u64 first, u32 t) const {
        return first + ((u64)(t >> column_bits) << half_bits) + (t & ((1u << column_bits) - 1));
    }
};

// Some levels of all buckets, in `count` tiles: load(place, minus) gives a place's number, and store(place, number, minus)
// takes it. minus: whether the place has a minus, if `signs`.
template <class L, class S>
__device__ void rotate_tiles(const Tiles& tiles, u64 count, u32 levels, bool signs, const RotationKey& key, L load,
                             S store) {
    __shared__ double x[TILE];
    __shared__ u32 minus[THREADS];  // of each run
    for (u64 tile = blockIdx.x; tile < count; tile += gridDim.x) {
        const u64 first = tiles.first(tile);
        const bool whole = tiles.at(first, TILE - 1) < tiles.places;
        if (signs) {
            const u64 i = tiles.at(first, threadIdx.x * RUN);
            minus[threadIdx.x] = rotation_signs(key, i) >> (i % 32);
        }
        __syncthreads();
        const auto minus_at = [&](u32 t) { return signs && (minus[t / RUN] >> (t % RUN) & 1); };
        for (u32 t = threadIdx.x; t < TILE; t += THREADS) {
            const u64 i = tiles.at(first, t);
            x[t] = i < tiles.places ? load(i, minus_at(t)) : 0.0;
        }
        for (u32 bits = tiles.column_bits; bits < tiles.column_bits + levels; ++bits) {
            __syncthreads();
            for (u32 pair = threadIdx.x; pair < TILE / 2; pair += THREADS) {
                const u32 t = (pair >> bits << (bits + 1)) + (pair & ((1u << bits) - 1)), other = t + (1u << bits);
                // The last bucket may be shorter, and ends at `places`: pairs beyond it are not its own.
                if (!whole && tiles.at(first, other) >= tiles.places) continue;
                const double a = x[t], b = x[other];
                x[t] = a + b;
                x[other] = a - b;
            }
        }
        __syncthreads();
        for (u32 t = threadIdx.x; t < TILE; t += THREADS) {
            const u64 i = tiles.at(first, t);
            if (i < tiles.places) store(i, x[t], minus_at(t));
        }
        __syncthreads();
    }
}

// The scale of a place: that of the last bucket, which may be shorter, from `begin` on.
struct Scales {
    u64 begin;
    double whole, last;
    __device__ double at(u64 i) const { return i < begin ? whole : last; }
};
__device__ Scales scales_of(u64 places, u64 bucket_size) {
    const u64 begin = (places - 1) / bucket_size * bucket_size;
    return {begin, rotation_scale(bucket_size), rotation_scale(places - begin)};
}

// Some of the levels. The first launch, half_bits 0, reads `values`, and the last one writes `rotated`; else `work`.
KERNEL rotate(const float* values, u64 count, u64 places, u64 bucket_size, u32 seed, u32 parameter, u32 step, u32 half_bits,
              u32 column_bits, u32 levels, u64 tiles, u32 last, double* work, float* rotated) {
    const Scales scales = scales_of(places, bucket_size);
    rotate_tiles(
        {places, half_bits, column_bits}, tiles, levels, half_bits == 0, {seed, parameter, step},
        [=](u64 i, bool minus) {
            if (half_bits) return work[i];
            const double x = i < count ? (double)values[i] : 0.0;
            return i < count && minus ? -x : x;
        },
        [=](u64 i, double x, bool) {
            if (last) rotated[i] = limited_float(x * scales.at(i));
            else work[i] = x;
        });
}
KERNEL unrotate(const float* rotated, u64 count, u64 places, u64 bucket_size, u32 seed, u32 parameter, u32 step,
                u32 half_bits, u32 column_bits, u32 levels, u64 tiles, u32 last, double* work, float* values) {
    const Scales scales = scales_of(places, bucket_size);
    rotate_tiles(
        {places, half_bits, column_bits}, tiles, levels, last, {seed, parameter, step},
        [=](u64 i, bool) { return half_bits ? work[i] : (double)rotated[i]; },
        [=](u64 i, double x, bool minus) {
            if (!last) work[i] = x;
            else if (i < count) values[i] = limited_float((minus ? -x : x) * scales.at(i));
        });
}
