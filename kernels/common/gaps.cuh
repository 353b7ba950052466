// Sorted keys from their gaps, for the codes that decode gaps first.
#pragma once

#include "common/device.cuh"

// keys[i] = gaps[0] + ... + gaps[i] + i. *error: ERR_INDEX if a key is not below `numel`. status: for each_place.
KERNEL keys_of_gaps(const u32* gaps, u64 count, u64 numel, u64* status, u64* end, u32* keys, i32* error) {
    each_place(
        count, 0, status, end, [=](u64 i) { return (u64)gaps[i] + 1; },
        [=](u64 i, u64 place) {
            const u64 key = place + gaps[i];
            keys[i] = (u32)key;
            if (key >= numel) atomicMin(error, ERR_INDEX);
        });
}
