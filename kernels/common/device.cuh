// What the CUDA kernels share: sums over a warp and a block, prefix sums over a whole grid in one launch, bit strings.
//
// All kernels have blocks of THREADS threads, and any number of blocks unless they say otherwise: they loop over their
// elements or tiles.
#pragma once

#include "common/common.h"

#define THREADS 256
#define WARPS (THREADS / 32)
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

// The kernel for two types T: <name>_f32 and <name>_f64, for floats; <name>8 and <name>32, for codes.
#define TYPED_KERNEL(type, name, parameters, ...) \
    namespace type { KERNEL name parameters { __VA_ARGS__; } } \
    using type::name;
#define FLOAT_KERNEL(name, parameters, ...)                   \
    TYPED_KERNEL(of_f32, name##_f32, parameters, __VA_ARGS__) \
    TYPED_KERNEL(of_f64, name##_f64, parameters, __VA_ARGS__)
#define CODE_KERNEL(name, parameters, ...)                \
    TYPED_KERNEL(of_u8, name##8, parameters, __VA_ARGS__) \
    TYPED_KERNEL(of_u32, name##32, parameters, __VA_ARGS__)

const u32 WHOLE_WARP = 0xFFFFFFFFu;
const u64 NOWHERE = ~0ull;

__device__ __forceinline__ u32 lane_number() { return threadIdx.x & 31u; }
__device__ __forceinline__ u32 warp_number() { return threadIdx.x >> 5; }
// A thread's number in the grid, and the number of threads in the grid.
__device__ __forceinline__ u64 grid_thread() { return (u64)blockIdx.x * THREADS + threadIdx.x; }
__device__ __forceinline__ u64 grid_threads() { return (u64)gridDim.x * THREADS; }

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u64 bits_of(double x) { return (u64)__double_as_longlong(x); }
__device__ __forceinline__ u32 magnitude_bits(float x) { return bits_of(x) & 0x7FFFFFFFu; }
__device__ __forceinline__ u64 magnitude_bits(double x) { return bits_of(x) & 0x7FFFFFFFFFFFFFFFull; }
__device__ __forceinline__ bool finite_bits(float x) { return magnitude_bits(x) < 0x7F800000u; }

// Sixteen bytes, which one instruction loads or stores.
template <class T>
struct __align__(16) Vector {
    static const u32 SIZE = 16 / sizeof(T);
    T x[SIZE];
};
__device__ __forceinline__ bool aligned16(const void* p) { return ((u64)p & 15) == 0; }

// Four numbers, which one instruction stores.
template <class T>
struct __align__(4 * sizeof(T)) Four {
    T x[4];
};
// out[i .. i + 3] = four, or as many of them as are below `count`; i: a multiple of 4.
template <class T>
__device__ __forceinline__ void store_four(T* out, u64 i, u64 count, const Four<T>& four) {
    if (i + 4 <= count && (u64)out % sizeof(four) == 0) *(Four<T>*)(out + i) = four;
    else
        for (u32 j = 0; j < 4; ++j)
            if (i + j < count) out[i + j] = four.x[j];
}

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
    for (u32 half = 16; half; half /= 2) x += __shfl_xor_sync(WHOLE_WARP, x, half);
    return x;
}
template <class T>
__device__ __forceinline__ T warp_max(T x) {
    for (u32 half = 16; half; half /= 2) {
        const T other = __shfl_xor_sync(WHOLE_WARP, x, half);
        x = other > x ? other : x;
    }
    return x;
}

// The first i below `count` for which holds(i) is false, or `count` if there is none. holds(i) must be true up to some
// i and false from there on.
template <class F>
__device__ __forceinline__ u64 first_not(u64 count, F holds) {
    u64 low = 0, high = count;
    while (low < high) {
        const u64 middle = (low + high) / 2;
        if (holds(middle)) low = middle + 1;
        else high = middle;
    }
    return low;
}
// The last i of sorted a[count] with a[i] <= value, or 0 if there is none.
template <class T>
__device__ __forceinline__ u64 last_at_most(const T* a, u64 count, u64 value) {
    const u64 above = first_not(count, [=](u64 i) { return a[i] <= value; });
    return above ? above - 1 : 0;
}

// The sum (the largest) of all threads' values over the block, returned to every thread.
template <class T>
__device__ T block_sum(T x) {
    __shared__ T of_warp[WARPS];
    x = warp_sum(x);
    if (lane_number() == 0) of_warp[warp_number()] = x;
    __syncthreads();
    x = warp_sum(lane_number() < WARPS ? of_warp[lane_number()] : (T)0);
    __syncthreads();
    return x;
}
template <class T>
__device__ T block_max(T x) {
    __shared__ T of_warp[WARPS];
    x = warp_max(x);
    if (lane_number() == 0) of_warp[warp_number()] = x;
    __syncthreads();
    x = warp_max(of_warp[lane_number() % WARPS]);
    __syncthreads();
    return x;
}

// From the sum of each warp, which its last lane has: the sum over the warps before this one. *total: over the block.
template <class T>
__device__ T warps_before(T of_this, T* total) {
    __shared__ T of_warp[WARPS];
    if (lane_number() == 31) of_warp[warp_number()] = of_this;
    __syncthreads();
    T before = 0, all = 0;
    for (u32 warp = 0; warp < WARPS; ++warp) {
        if (warp == warp_number()) before = all;
        all += of_warp[warp];
    }
    __syncthreads();
    *total = all;
    return before;
}
// The sum over the lanes up to this one.
template <class T>
__device__ __forceinline__ T warp_scan(T x) {
    for (u32 step = 1; step < 32; step *= 2) {
        const T before = __shfl_up_sync(WHOLE_WARP, x, step);
        if (lane_number() >= step) x += before;
    }
    return x;
}
// The sum over the threads before this one; *total: the sum over the block.
template <class T>
__device__ T block_scan(T x, T* total) {
    const T sum = warp_scan(x);  // of lane 31: of the whole warp
    return warps_before(sum, total) + sum - x;
}

// ---- Prefix sums over tiles, in a single launch (Merrill and Garland, "Single-pass parallel prefix scan with
// decoupled look-back", NVIDIA 2016). Blocks take tiles in order, so all tiles before a block's tile are finished or
// being worked on, and waiting for them ends. A tile's word is 0, then AGGREGATE | the tile's sum, then PREFIX | the
// sum of all tiles up to it, so that one read gives both the kind and the sum. Sums are below 2^62.
//
//     status:  | word of tile 0 | word of tile 1 | ... | number of the next tile |      zeros before the launch
const u64 AGGREGATE = 1ull << 62, PREFIX = 2ull << 62, SUM = AGGREGATE - 1;

__device__ __forceinline__ u64 observed(const u64* word) { return *(const volatile u64*)word; }

// The next tile for this block; `tiles` or more if none is left.
__device__ inline u32 next_tile(u64* status, u32 tiles) {
    __shared__ u32 tile;
    __syncthreads();
    if (threadIdx.x == 0) tile = atomicAdd((u32*)(status + tiles), 1u);
    __syncthreads();
    return tile;
}

// The sum of `own` over the tiles before `tile`, returned to every thread. `own` is this tile's sum, the same for all
// threads.
__device__ inline u64 tiles_before(u64* status, u32 tile, u64 own) {
    __shared__ u64 result;
    if (warp_number() == 0) {
        u64 sum = 0;
        if (tile == 0) {
            if (lane_number() == 0) atomicExch(status, PREFIX | own);
        } else {
            if (lane_number() == 0) atomicExch(status + tile, AGGREGATE | own);
            // Reads 32 words at a time, backwards, up to a prefix. Words before the first tile count as prefixes of 0.
            for (i64 at = (i64)tile - 1 - lane_number();; at -= 32) {
                u64 word = at < 0 ? PREFIX : observed(status + at);
                while (__any_sync(WHOLE_WARP, word < AGGREGATE))
                    if (word < AGGREGATE) word = observed(status + at);
                const u32 prefixes = __ballot_sync(WHOLE_WARP, word >= PREFIX);
                const u32 last = prefixes ? (u32)__ffs((i32)prefixes) - 1 : 31;
                sum += warp_sum(lane_number() <= last ? word & SUM : 0ull);
                if (prefixes) break;
            }
            if (lane_number() == 0) atomicExch(status + tile, PREFIX | (sum + own));
        }
        if (lane_number() == 0) result = sum;
    }
    __syncthreads();
    const u64 sum = result;
    __syncthreads();
    return sum;
}

// ---- Bit strings: bit b is bit b % 8 of byte b / 8.

// 64 bits from byte `at` on; bits past `bytes` are zero. Two aligned words hold them, unless one of these begins before
// the string or ends after it.
__device__ __forceinline__ u64 load64(const u8* in, u64 bytes, u64 at) {
    const u32 off = (u32)((u64)(in + at) & 7);
    if (off == 0 && at + 8 <= bytes) return *(const u64*)(in + at);
    if (off <= at && at - off + 16 <= bytes) {
        const u64* words = (const u64*)(in + at - off);
        return words[0] >> 8 * off | words[1] << (64 - 8 * off);
    }
    u64 word = 0;
    for (u32 j = 0; j < 8; ++j)
        if (at + j < bytes) word |= (u64)in[at + j] << (8 * j);
    return word;
}

// The field of `width` <= 32 bits at bit `at`; bits past `bytes` are zero.
__device__ __forceinline__ u32 load_field(const u8* in, u64 bytes, u64 at, u32 width) {
    const u64 first = at >> 3, mask = (1ull << width) - 1;
    const u32 off = (u32)((u64)(in + first) & 3);
    if (off <= first && first - off + 8 <= bytes) {
        const u32* words = (const u32*)(in + first - off);
        return (u32)(((u64)words[1] << 32 | words[0]) >> (8 * off + (u32)(at & 7)) & mask);
    }
    u64 word = 0;
    for (u32 j = 0; j < 5; ++j)
        if (8 * j < width + (at & 7) && first + j < bytes) word |= (u64)in[first + j] << (8 * j);
    return (u32)(word >> (at & 7) & mask);
}

// The four fields of `width` <= 8 * sizeof(T) bits from field `i` on; those of bytes have 32 bits at most together.
template <class T>
__device__ __forceinline__ Four<T> load_fields(const u8* in, u64 bytes, u64 i, u32 width) {
    Four<T> four;
    if (sizeof(T) == 1) {
        const u32 all = load_field(in, bytes, i * width, 4 * width);
        for (u32 j = 0; j < 4; ++j) four.x[j] = (T)(all >> j * width & ((1u << width) - 1));
    } else {
        for (u32 j = 0; j < 4; ++j) four.x[j] = (T)load_field(in, bytes, (i + j) * width, width);
    }
    return four;
}

// Sets the bits of `value` from bit `at` on. The words were zero before the launch; other threads may set other bits of
// them.
__device__ __forceinline__ void put_bits(u32* words, u64 at, u64 value) {
    if (!value) return;
    u32* word = words + (at >> 5);
    const u32 shift = (u32)(at & 31);
    const u32 low = (u32)(value << shift), middle = (u32)(value << shift >> 32);
    const u32 high = shift ? (u32)(value >> (64 - shift)) : 0;
    if (low) atomicOr(word, low);
    if (middle) atomicOr(word + 1, middle);
    if (high) atomicOr(word + 2, high);
}

// Calls put(number, place) for the first `most` ones of a bit string. *found: the number of all ones. `status` is of
// ceil(bytes / (8 * THREADS)) tiles.
template <class F>
__device__ void each_one(const u8* in, u64 bytes, u64 most, u64* status, u64* found, F put) {
    const u32 tiles = (u32)((bytes + 8 * THREADS - 1) / (8 * THREADS));
    for (u32 tile; (tile = next_tile(status, tiles)) < tiles;) {
        const u64 at = ((u64)tile * THREADS + threadIdx.x) * 8;
        u64 word = at < bytes ? load64(in, bytes, at) : 0;
        u32 total;
        u64 number = block_scan((u32)__popcll(word), &total);
        const u64 before = tiles_before(status, tile, total);
        if (threadIdx.x == 0 && tile == tiles - 1) *found = before + total;
        for (number += before; word && number < most; word &= word - 1, ++number)
            put(number, at * 8 + (u64)__ffsll((i64)word) - 1);
    }
}

// A prefix sum over `count` elements, as it places variable-length fields: calls put(i, place) for each element i,
// where place is `first` plus the sum of length(j) over all j < i. *end: the place after the last element. `status` is
// of ceil(count / THREADS) tiles or fewer.
//
// A thread has ROWS elements of a tile, so that their loads are under way together and fewer tiles wait for each other.
// Where length or put has much to do, one row leaves it enough registers:
//
//     tile:   | warp 0: row 0, row 1, ... | warp 1: row 0, row 1, ... | ...      a row: one element for each lane
template <u32 ROWS = 4, class L, class P>
__device__ void each_place(u64 count, u64 first, u64* status, u64* end, L length, P put) {
    const u32 tiles = (u32)((count + ROWS * THREADS - 1) / (ROWS * THREADS));
    for (u32 tile; (tile = next_tile(status, tiles)) < tiles;) {
        const u64 begin = ((u64)tile * WARPS + warp_number()) * ROWS * 32 + lane_number();
        u64 place[ROWS], of_warp = 0, total;
        for (u32 row = 0; row < ROWS; ++row) {
            const u64 own = begin + 32 * row < count ? (u64)length(begin + 32 * row) : 0, upto = warp_scan(own);
            place[row] = of_warp + upto - own;
            of_warp += __shfl_sync(WHOLE_WARP, upto, 31);
        }
        const u64 in_tile = warps_before(of_warp, &total), base = first + tiles_before(status, tile, total);
        for (u32 row = 0; row < ROWS; ++row)
            if (begin + 32 * row < count) put(begin + 32 * row, base + in_tile + place[row]);
        if (tile + 1 == tiles && threadIdx.x == 0) *end = base + total;
    }
}
