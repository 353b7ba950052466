// Values in 16 bits (codecs/value/half.py), rounded to nearest, ties to even, and never up to infinity.
//
//     section, as 16-bit words:  | 0 float16 or 1 bfloat16 | values [count] |
#pragma once

#include "common/common.h"

// From the bits of a finite float32.
DR_HD u32 bfloat16_of(u32 bits) {
    const u32 rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    return (rounded & 0x7FFF) == 0x7F80 ? rounded - 1 : rounded;
}

// From the bits of a finite float32. 65504 and more become 65504. A normal result loses 13 bits of the fraction, and
// its exponent's bias changes from 127 to 15. Below 2^-14 the result is denormal and loses more bits; a shift by 25
// loses all.
DR_HD u32 float16_of(u32 bits) {
    const u32 sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu, exponent = magnitude >> 23;
    const bool normal = exponent > 112;
    const u32 shift = normal ? 13 : exponent < 101 ? 25 : 126 - exponent;
    const u32 fraction = normal ? magnitude - (112u << 23) : (magnitude & 0x7FFFFFu) | 0x800000u;
    const u32 half = 1u << (shift - 1), kept = fraction >> shift, rest = fraction & (2 * half - 1);
    const u32 rounded = kept + (u32)(rest + (kept & 1) > half);
    return sign | (magnitude >= 0x477FE000u ? 0x7BFFu : rounded);
}

// The bits of a float32, infinite or NaN where the 16 bits are.
DR_HD u32 bits_of_bfloat16(u32 word) { return word << 16; }
DR_HD u32 bits_of_float16(u32 word) {
    const u32 exponent = word >> 10 & 31, fraction = word & 1023;
    union {
        float value;
        u32 bits;
    } denormal;
    denormal.value = (float)(i32)fraction * 5.9604644775390625e-08f;  // fraction * 2^-24, exact in float32
    const u32 normal = (exponent + 112) << 23 | fraction << 13;
    const u32 magnitude = exponent == 31 ? 0x7F800000u | fraction << 13 : exponent == 0 ? denormal.bits : normal;
    return magnitude | (word & 0x8000u) << 16;
}
