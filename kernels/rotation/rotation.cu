// Random rotation of buckets: the CUDA side of kernels/rotation/rotation.cpp. A launch for each level.
#include "rotation/rotation.h"

#include "common/device.cuh"

// work[places]: the values with their signs, and zeros after the last one.
KERNEL rotation_begin(const float* values, u64 count, u64 places, u32 seed, u32 parameter, u32 step, double* work) {
    for (u64 i = grid_thread(); i < places; i += grid_threads()) {
        const double x = i < count ? (double)values[i] : 0.0;
        work[i] = i < count && rotation_minus({seed, parameter, step}, i) ? -x : x;
    }
}
KERNEL rotation_widen(const float* rotated, u64 places, double* work) {
    for (u64 i = grid_thread(); i < places; i += grid_threads()) work[i] = (double)rotated[i];
}

// The pairs at the distance `half` < bucket_size. The last bucket, which may be shorter, ends at `places`, so pairs
// beyond it are not its own.
KERNEL rotation_level(double* work, u64 places, u64 half) {
    for (u64 t = grid_thread(); t < (places + 1) / 2; t += grid_threads()) {
        const u64 i = t / half * 2 * half + t % half;
        if (i + half >= places) continue;
        const double a = work[i], b = work[i + half];
        work[i] = a + b;
        work[i + half] = a - b;
    }
}

// The scale of place i's bucket.
__device__ __forceinline__ double scale_at(u64 i, u64 places, u64 bucket_size) {
    const u64 begin = i / bucket_size * bucket_size;
    return rotation_scale(run_end(begin, bucket_size, places) - begin);
}
KERNEL rotation_end(const double* work, u64 places, u64 bucket_size, float* rotated) {
    for (u64 i = grid_thread(); i < places; i += grid_threads())
        rotated[i] = limited_float(work[i] * scale_at(i, places, bucket_size));
}
KERNEL rotation_back(const double* work, u64 count, u64 places, u64 bucket_size, u32 seed, u32 parameter, u32 step,
                     float* values) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const double x = rotation_minus({seed, parameter, step}, i) ? -work[i] : work[i];
        values[i] = limited_float(x * scale_at(i, places, bucket_size));
    }
}
