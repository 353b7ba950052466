// Fields of equal width, and checks of index lists: the CUDA side of bits.cpp, which draws the section.
#include "bits/bits.h"
#include "common/device.cuh"

// Each thread builds one word of the packed string from the fields that overlap it:
//
//     word w:      bits   32 w ... 32 w + 31
//     field i:     bits   i width ... (i + 1) width - 1
//
// words: ceil(count * width / 32).
template <class T>
__device__ void pack(const T* values, u64 count, u32 width, u32* words) {
    const u64 total = (count * width + 31) / 32;
    for (u64 w = grid_thread(); w < total; w += grid_threads()) {
        const u64 begin = w * 32;
        u32 word = 0;
        for (u64 i = begin / width; i < count && i * width < begin + 32; ++i) {
            const u64 at = i * width, value = values[i];
            word |= at >= begin ? (u32)(value << (at - begin)) : (u32)(value >> (begin - at));
        }
        words[w] = word;
    }
}
KERNEL pack8(const u8* values, u64 count, u32 width, u32* words) { pack(values, count, width, words); }
KERNEL pack32(const u32* values, u64 count, u32 width, u32* words) { pack(values, count, width, words); }

// Sets *error to ERR_VALUE if the bits after the last field are not zeros. A thread reads four fields at a time, and
// stores them at once.
template <class T>
__device__ void unpack(const u8* in, u64 bytes, u64 count, u32 width, T* values, i32* error) {
    for (u64 i = 4 * grid_thread(); i < count; i += 4 * grid_threads()) {
        const Four<T> four = load_fields<T>(in, bytes, i, width);
        store_four(values, i, count, four);
    }
    if (grid_thread() == 0 && !zeros_follow(in, count * width)) *error = ERR_VALUE;
}
KERNEL unpack8(const u8* in, u64 bytes, u64 count, u32 width, u8* values, i32* error) {
    unpack(in, bytes, count, width, values, error);
}
KERNEL unpack32(const u8* in, u64 bytes, u64 count, u32 width, u32* values, i32* error) {
    unpack(in, bytes, count, width, values, error);
}

// Sets *error to ERR_INDEX if the indices are not strictly increasing or the last one is not below numel.
KERNEL check_indices(const u32* indices, u64 count, u64 numel, i32* error) {
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads())
        bad |= indices[i] >= numel || (i && indices[i] <= indices[i - 1]);
    if (__syncthreads_or(bad) && threadIdx.x == 0) atomicMin(error, ERR_INDEX);
}

// Sets *error to ERR_ORDER if the numbers are not a permutation of 0 .. count - 1.
// seen: one bit per number, zeros before the launch.
KERNEL check_order(const u32* order, u64 count, u32* seen, i32* error) {
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 place = order[i], bit = 1u << (place & 31);
        bad |= place >= count || (atomicOr(seen + (place >> 5), bit) & bit);
    }
    if (__syncthreads_or(bad) && threadIdx.x == 0) atomicMin(error, ERR_ORDER);
}
