// Ternary digits, five to a byte: the CUDA side of kernels/ternary/ternary.cpp.
#include "ternary/trits.cuh"

KERNEL ternary_pack(const u8* digits, u64 count, u8* out) {
    pack_trits(count, out, [=](u64 i) { return (u32)digits[i]; });
}

KERNEL ternary_unpack(const u8* in, u64 count, u8* digits, i32* error) {
    unpack_trits(in, count, error, [=](u64 i, u32 digit) { digits[i] = (u8)digit; });
}
