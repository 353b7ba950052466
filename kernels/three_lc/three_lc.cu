// 3LC: the CUDA side of kernels/three_lc/three_lc.cpp.
#include "three_lc/three_lc.h"

#include "ternary/trits.cuh"

KERNEL three_lc_pack(const float* values, u64 count, float m, u8* out) {
    pack_trits(count, out, [=](u64 i) { return three_lc_digit(values[i], m); });
}

KERNEL three_lc_unpack(const u8* in, u64 count, float m, float* values, i32* error) {
    unpack_trits(in, count, error, [=](u64 i, u32 digit) { values[i] = three_lc_value(digit, m); });
}

// others: the places of the bytes that are not ALL_ZERO, in order; *found: how many; rank[i]: how many of them are
// before byte i.
KERNEL zero_runs_find(const u8* in, u64 count, u64* status, u64* found, u32* others, u32* rank) {
    each_place(
        count, 0, status, found, [=](u64 i) { return (u64)(in[i] != ALL_ZERO); },
        [=](u64 i, u64 place) {
            rank[i] = (u32)place;
            if (in[i] != ALL_ZERO) others[place] = (u32)i;
        });
}

// *size: the number of bytes written.
KERNEL zero_runs_write(const u8* in, u64 count, const u64* found, const u32* others, const u32* rank, u64* status,
                       u64* size, u8* out) {
    const auto begins = [=](u64 i) {
        if (in[i] != ALL_ZERO) return 1ull;
        const u64 first = rank[i] ? (u64)others[rank[i] - 1] + 1 : 0;
        return (u64)((i - first) % LONGEST_RUN == 0);
    };
    each_place(count, 0, status, size, begins, [=](u64 i, u64 place) {
        if (!begins(i)) return;
        const u64 next = rank[i] < *found ? others[rank[i]] : count;  // for ALL_ZERO: the end of its run
        const u64 run = next - i < LONGEST_RUN ? next - i : LONGEST_RUN;
        out[place] = in[i] != ALL_ZERO || run < 2 ? in[i] : run_byte(run);
    });
}

// *size: the number of bytes that the section encodes; those from `count` on are not written.
KERNEL zero_runs_decode(const u8* in, u64 bytes, u64 count, u64* status, u64* size, u8* out) {
    const auto length = [=](u64 i) { return run_length(in[i]); };
    each_place(bytes, 0, status, size, length, [=](u64 i, u64 place) {
        for (u64 j = 0; j < length(i); ++j)
            if (place + j < count) out[place + j] = in[i] > LARGEST_BYTE ? (u8)ALL_ZERO : in[i];
    });
}
