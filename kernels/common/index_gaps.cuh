// Gaps between sorted indices, on the device.
#pragma once

#include "common/device.cuh"

// index_i - index_{i-1} - 1, with index_{-1} = -1.
__device__ __forceinline__ u32 gap_at(const u32* indices, u64 i) {
    return i ? indices[i] - indices[i - 1] - 1 : indices[0];
}
