// Bitmaps: the CUDA side of bitmap.cpp.
#include "common/device.cuh"

// bitmap: zeros before the launch.
KERNEL bitmap_encode(const u32* indices, u64 count, u32* bitmap) {
    for (u64 i = grid_thread(); i < count; i += grid_threads())
        atomicOr(bitmap + (indices[i] >> 5), 1u << (indices[i] & 31));
}

// The places of the ones, in order, of which the first `room` are written. *ones: how many there are in all.
KERNEL find_ones(const u8* in, u64 bytes, u64* status, u32* places, u64 room, u64* ones) {
    each_one(in, bytes, room, status, ones, [=](u64 number, u64 place) { places[number] = (u32)place; });
}

// Sets *error to ERR_INDEX if the bitmap does not have exactly `count` ones, or has one at numel or after it.
KERNEL check_bitmap(const u8* in, u64 bytes, u64 numel, u64 count, const u64* ones, i32* error) {
    bool bad = *ones != count;
    for (u64 byte = numel / 8 + grid_thread(); byte < bytes; byte += grid_threads())
        bad |= (byte == numel / 8 ? in[byte] >> (numel % 8) : (u32)in[byte]) != 0;
    if (bad) atomicMin(error, ERR_INDEX);
}
