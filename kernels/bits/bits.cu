// Fixed-width fields, bitmaps and the places of ones: the CUDA side of kernels/bits/bits.cpp.
#include "common/device.cuh"

// Word w of the packed string, put together from the fields that lie in it. words: ceil(count * width / 32).
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

template <class T>
__device__ void unpack(const u8* in, u64 bytes, u64 count, u32 width, T* values) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) values[i] = (T)load_field(in, bytes, i * width, width);
}
KERNEL unpack8(const u8* in, u64 bytes, u64 count, u32 width, u8* values) { unpack(in, bytes, count, width, values); }
KERNEL unpack32(const u8* in, u64 bytes, u64 count, u32 width, u32* values) { unpack(in, bytes, count, width, values); }

// *error: where the indices are not strictly increasing or the last is not below numel.
KERNEL check_indices(const u32* indices, u64 count, u64 numel, i32* error) {
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads())
        bad |= indices[i] >= numel || (i && indices[i] <= indices[i - 1]);
    if (__syncthreads_or(bad) && threadIdx.x == 0) atomicMin(error, ERR_INDEX);
}

// Bits of a bitmap of zeros.
KERNEL bitmap_encode(const u32* indices, u64 count, u32* bitmap) {
    for (u64 i = grid_thread(); i < count; i += grid_threads())
        atomicOr(bitmap + (indices[i] >> 5), 1u << (indices[i] & 31));
}

// The places of the ones of a bit string, up to `room` of them; *found: how many it has.
KERNEL ones(const u8* in, u64 bytes, u64* status, u32* places, u64 room, u64* found) {
    each_one(in, bytes, room, status, found, [=](u64 number, u64 place) { places[number] = (u32)place; });
}

// *error: where a bitmap does not hold just `count` ones, all below numel.
KERNEL check_bitmap(const u8* in, u64 bytes, u64 numel, u64 count, const u64* found, i32* error) {
    bool bad = *found != count;
    for (u64 byte = numel / 8 + grid_thread(); byte < bytes; byte += grid_threads())
        bad |= (byte == numel / 8 ? in[byte] >> (numel % 8) : (u32)in[byte]) != 0;
    if (bad) atomicMin(error, ERR_INDEX);
}

// indices + by.
KERNEL moved(const u32* indices, u64 count, u32 by, u32* out) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) out[i] = indices[i] + by;
}

// *error: where the numbers are not 0 .. count - 1 in some order. seen: a bit for each, zeros.
KERNEL check_order(const u32* order, u64 count, u32* seen, i32* error) {
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 place = order[i], bit = 1u << (place & 31);
        bad |= place >= count || (atomicOr(seen + (place >> 5), bit) & bit);
    }
    if (__syncthreads_or(bad) && threadIdx.x == 0) atomicMin(error, ERR_ORDER);
}

// The elements of blocks, one behind the other.
KERNEL of_blocks(const u32* blocks, u64 block, u64 size, u32* indices) {
    for (u64 i = grid_thread(); i < size; i += grid_threads()) indices[i] = (u32)(blocks[i / block] * block + i % block);
}
