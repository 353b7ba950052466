// Keys as gaps of whole bytes: the CUDA side of kernels/sketch/flagged_keys.cpp.
#include "sketch/flagged_keys.cuh"

#include "common/gaps.cuh"

// *end: the number of bytes written.
KERNEL flagged_encode(const u32* keys, u64 count, u64* status, u64* end, u8* out) {
    write_flagged(keys, count, status, end, out);
}

// The gaps of a section; keys_of_gaps turns them into keys.
KERNEL flagged_gaps(const u8* in, u64 bytes, u64 count, u64* status, u64* end, u32* gaps, i32* error) {
    const auto length = [=](u64 i) { return (u64)(in[i / 4] >> (2 * (i & 3)) & 3) + 1; };
    each_place(count, length_bytes(count), status, end, length, [=](u64 i, u64 place) {
        u32 gap = 0;
        for (u32 j = 0; j < length(i); ++j)
            if (place + j < bytes) gap |= (u32)in[place + j] << (8 * j);
        gaps[i] = gap;
        if (gap_bytes(gap) != length(i)) atomicMin(error, ERR_INDEX);
        if (i + 1 < count) return;
        if (place + length(i) != bytes) atomicMin(error, ERR_TRUNCATED);
        if (!zeros_follow(in, 2 * count)) atomicMin(error, ERR_VALUE);
    });
}
