// Natural compression: values rounded to powers of two. A value becomes its float32 exponent field, one byte; signs are
// sent apart (kernels/sign).
#pragma once

#include "sign/sign.h"

const u32 LARGEST_EXPONENT = 254;  // of a finite float32; 255 is infinity's

// Natural compression (Horvath et al. 2019, section 2): the power of two below or above a magnitude, as its float32
// exponent field, 0 .. 254. The mantissa over 2^23 is the probability of the one above, so adding 23 random bits to the
// magnitude's bits carries into the exponent just so often. 2^128 is no float: the top binade rounds down.
DR_HD u32 natural_exponent(u32 bits, u32 random) {
    const u32 exponent = ((bits & 0x7FFFFFFFu) + (random >> 9)) >> 23;
    return exponent > LARGEST_EXPONENT ? LARGEST_EXPONENT : exponent;
}
