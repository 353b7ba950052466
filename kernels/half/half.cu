// Values in 16 bits: the CUDA side of kernels/half/half.cpp.
#include "half/half.h"

#include "common/device.cuh"

KERNEL half_encode(const float* values, u64 count, u32 bfloat16, u16* section) {
    for (u64 i = grid_thread(); i <= count; i += grid_threads()) {
        const u32 bits = i ? bits_of(values[i - 1]) : 0;
        section[i] = (u16)(i == 0 ? bfloat16 : bfloat16 ? bfloat16_of(bits) : float16_of(bits));
    }
}

KERNEL half_decode(const u16* section, u64 count, float* values, i32* error) {
    const u32 bfloat16 = section[0];
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 word = section[i + 1], bits = bfloat16 ? bits_of_bfloat16(word) : bits_of_float16(word);
        bad |= (bits & 0x7FFFFFFFu) >= 0x7F800000u;
        values[i] = __uint_as_float(bits);
    }
    if (bfloat16 > 1) bad = grid_thread() == 0;
    if (bad) atomicMin(error, bfloat16 > 1 ? ERR_VALUE : ERR_NOT_FINITE);
}
