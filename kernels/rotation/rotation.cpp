// Random rotation of buckets: see rotation.h.
#include "rotation/rotation.h"

#include <algorithm>
#include <memory>
#include <new>

#include "common/cpu.h"

// Changes the signs of the `count` places from `begin` on.
static void multiply_signs(double* at, u64 begin, u64 count, const RotationKey& key) {
    for (u64 i = 0; i < count;) {
        const u64 place = begin + i;
        const Philox4 r = philox4x32(key.seed, key.parameter, (u32)(place / 128), key.step, STREAM_ROTATION, 0);
        const u32 words[4] = {r.x, r.y, r.z, r.w};
        for (u64 j = place % 128; j < 128 && i < count; ++j, ++i)
            at[i] = words[j / 32] >> (j % 32) & 1 ? -at[i] : at[i];
    }
}

DR_CLONES static void hadamard(double* at, u64 places) {
    for (u64 half = 1; half < places; half *= 2)
        for (u64 begin = 0; begin < places; begin += 2 * half)
            for (u64 i = begin; i < begin + half; ++i) {
                const double a = at[i], b = at[i + half];
                at[i] = a + b;
                at[i + half] = a - b;
            }
}

// The number of places that `count` values take.
DR_API u64 dr_rotated_count(u64 count, u64 bucket_size) { return rotated_count(count, bucket_size); }

// Calls each(at, begin, size, places) for every bucket; `at` has room for its places. 1 if there is no memory.
template <class F>
static i64 for_each_bucket(u64 count, u64 bucket_size, F each) {
    const u64 most = count < bucket_size ? rotation_places(count) : bucket_size;
    const std::unique_ptr<double[]> memory(new (std::nothrow) double[most]);
    if (!memory) return 1;
    for (u64 begin = 0; begin < count; begin += bucket_size) {
        const u64 size = run_end(begin, bucket_size, count) - begin;
        each(memory.get(), begin, size, rotation_places(size));
    }
    return 0;
}

// rotated[rotated_count]. count >= 1; bucket_size: a power of two. 1 if there is no memory.
DR_API i64 dr_rotate(const float* values, u64 count, u64 bucket_size, u32 seed, u32 parameter, u32 step,
                     float* rotated) {
    return for_each_bucket(count, bucket_size, [&](double* at, u64 begin, u64 size, u64 places) {
        std::copy(values + begin, values + begin + size, at);
        std::fill(at + size, at + places, 0.0);
        multiply_signs(at, begin, size, {seed, parameter, step});
        hadamard(at, places);
        const double scale = rotation_scale(places);
        for (u64 i = 0; i < places; ++i) rotated[begin + i] = limited_float(at[i] * scale);
    });
}

// values[count], from rotated[rotated_count].
DR_API i64 dr_unrotate(const float* rotated, u64 count, u64 bucket_size, u32 seed, u32 parameter, u32 step,
                       float* values) {
    return for_each_bucket(count, bucket_size, [&](double* at, u64 begin, u64 size, u64 places) {
        std::copy(rotated + begin, rotated + begin + places, at);
        hadamard(at, places);
        multiply_signs(at, begin, size, {seed, parameter, step});
        const double scale = rotation_scale(places);
        for (u64 i = 0; i < size; ++i) values[begin + i] = limited_float(at[i] * scale);
    });
}
