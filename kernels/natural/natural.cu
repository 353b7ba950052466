// Natural compression: the CUDA side of kernels/natural/natural.cpp.
#include "natural/natural.h"
#include "rounding/rounding.cuh"

KERNEL natural_encode(const float* values, u64 count, u32 seed, u32 parameter, u32 step, u32 rank, u8* exponents) {
    each_rounded(count, {seed, parameter, step, rank}, [=](u64 i, u32 word) {
        exponents[i] = (u8)natural_exponent(bits_of(values[i]), word);
    });
}

KERNEL natural_decode(const u8* signs, const u8* exponents, u64 count, float* values, i32* error) {
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        bad |= exponents[i] > LARGEST_EXPONENT;
        values[i] = __uint_as_float((u32)exponents[i] << 23 | sign_bit(signs, i));
    }
    if (grid_thread() == 0) bad |= !zeros_follow(signs, count);
    if (bad) atomicMin(error, ERR_VALUE);
}
