// Fields of equal width, and checks of index lists: the CUDA side of bits.cpp, which draws the section.
#include "bits/pack.cuh"

CODE_KERNEL(pack, (const T* values, u64 count, u32 width, u32* words),
    pack(values, count, width, words, grid_thread(), grid_threads()))

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
CODE_KERNEL(unpack, (const u8* in, u64 bytes, u64 count, u32 width, T* values, i32* error),
    unpack(in, bytes, count, width, values, error))

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
