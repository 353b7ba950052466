// Natural compression: float32 exponent fields, one byte each.
#include "natural/natural.h"

#include "rounding/rounding_cpu.h"

DR_CLONES static void natural_exponents(const float* values, u64 count, const RoundingKey& key, u8* exponents) {
    rounded_runs(count, count, key, [=](u64, u64 at, u64 size, const u32* words) {
        for (u64 i = 0; i < size; ++i) {
            u32 bits;
            std::memcpy(&bits, values + at + i, 4);
            exponents[at + i] = (u8)natural_exponent(bits, words[i]);
        }
    });
}

// exponents[count].
DR_API void dr_natural_encode(const float* values, u64 count, u32 seed, u32 parameter, u32 step, u32 rank,
                              u8* exponents) {
    natural_exponents(values, count, {seed, parameter, step, rank}, exponents);
}

// Returns the largest exponent.
DR_CLONES static u32 natural_values(const u8* signs, const u8* exponents, u64 count, float* values) {
    u32 largest = 0;
    u64 i = 0;
    for (; i + 8 <= count; i += 8) {
        const u32 eight = signs[i >> 3];
        u32 words[8];
        for (u32 j = 0; j < 8; ++j) {
            const u32 exponent = exponents[i + j];
            largest = exponent > largest ? exponent : largest;
            words[j] = exponent << 23 | (eight >> j) << 31;
        }
        std::memcpy(values + i, words, 32);
    }
    for (; i < count; ++i) {
        const u32 word = (u32)exponents[i] << 23 | sign_bit(signs, i);
        largest = exponents[i] > largest ? exponents[i] : largest;
        std::memcpy(values + i, &word, 4);
    }
    return largest;
}

// values[count]. ERR_VALUE if an exponent is infinity's, or the bits after the last sign are not zeros.
DR_API i64 dr_natural_decode(const u8* signs, const u8* exponents, u64 count, float* values) {
    if (!zeros_follow(signs, count)) return ERR_VALUE;
    return natural_values(signs, exponents, count, values) > LARGEST_EXPONENT ? (i64)ERR_VALUE : 0;
}
