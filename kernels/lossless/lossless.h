// Floats without loss: what the host and the device share. lossless.cpp draws the section.
#pragma once

#include "bits/bits.h"

const u32 CHUNK = 4096;      // values of a chunk; the last one has the rest
const u32 MOST_BITS = 3;     // of a code
const u32 MOST_RANKED = 14;  // symbols that codes of two steps can stand for: 2 (2^MOST_BITS - 1)
const u32 HEAD = 2;          // bytes of a chunk before its symbols
const u32 SAMPLE = 16, SAMPLE_EACH = 64;  // the exponents that are counted: so many of each so many
const u32 FRACTION = 23;     // bits of a float32 below its exponent
const u32 MOST_BYTES = 20480;  // of a chunk, whatever its plan is: 38 bits a value, a head and symbols are less
const u32 ROOM = 64;           // past the end of what the host stores and loads in whole words

DR_HD u64 chunks_of(u64 count) { return (count + CHUNK - 1) / CHUNK; }
// The symbols that a code of `bits` bits stands for; its last code word is the escape.
DR_HD u32 coded_symbols(u32 bits) { return (1u << bits) - 1; }

// Room for a section: form, sizes, and chunks; and for stores of whole words.
DR_HD u64 lossless_bound(u64 count) { return 1 + (2 + (u64)MOST_BYTES) * chunks_of(count) + ROOM; }

// How a chunk is coded.
struct Plan {
    u32 bits;           // of sign and fraction, together
    u32 first, second;  // bits of the codes of both steps
    u32 escapes;        // exponents that the first code does not have
    u32 others;         // exponents that neither code has

    DR_HD u32 symbols() const { return coded_symbols(first) + coded_symbols(second); }
    DR_HD u32 bytes(u32 count) const {
        return HEAD + symbols() + (u32)(field_bytes(count, bits) + field_bytes(count, first) +
                                        field_bytes(escapes, second)) + others;
    }
};

// How many exponents of a chunk are counted.
DR_HD u32 sample_of(u32 count) {
    const u32 rest = count % SAMPLE_EACH;
    return count / SAMPLE_EACH * SAMPLE + (rest < SAMPLE ? rest : SAMPLE);
}

// The plan that takes the fewest bits if all exponents are like those of the sample; of equal ones the first in the
// order of (first, second). Its escapes and others are not known yet.
// ranked: how often the MOST_RANKED most frequent exponents occur in the sample, falling.
// used: the union of all values' bits.
DR_HD Plan plan_of(u32 count, const u32* ranked, u32 used) {
    const u32 sample = sample_of(count);
    u32 unused = 0;  // low bits of the fraction that no value has
    while (unused < FRACTION && !(used >> unused & 1)) ++unused;
    Plan best = {FRACTION + 1 - unused, 0, 0, 0, 0};
    u32 least = ~0u;
    for (u32 first = 0; first <= MOST_BITS; ++first) {
        u32 escapes = sample;
        for (u32 i = 0; i < coded_symbols(first); ++i) escapes -= ranked[i];
        for (u32 second = 0, others = escapes; second <= MOST_BITS; ++second) {
            for (u32 i = second ? coded_symbols(second - 1) : 0; i < coded_symbols(second); ++i)
                others -= ranked[coded_symbols(first) + i];
            const u32 symbols = coded_symbols(first) + coded_symbols(second);
            const u32 cost = (sample * first + escapes * second + 8 * others) * count + 8 * symbols * sample;
            if (cost < least) least = cost, best.first = first, best.second = second;
        }
    }
    return best;
}

// Whether a chunk can begin with these bytes. Sets bits, first and second.
DR_HD bool read_head(const u8* head, Plan* plan) {
    plan->bits = head[0];
    plan->first = head[1] & 3;
    plan->second = head[1] >> 2;
    return plan->bits - 1 <= FRACTION && plan->second <= MOST_BITS;
}

// Sign and the upper bits of the fraction, of a float32 with this bit pattern, as a field of `bits` bits; and back.
DR_HD u32 field_of(u32 pattern, u32 bits) {
    return pattern >> 31 << (bits - 1) | (pattern & ((1u << FRACTION) - 1)) >> (FRACTION + 1 - bits);
}
DR_HD u32 pattern_of(u32 field, u32 exponent, u32 bits) {
    const u32 sign = field >> (bits - 1);
    return sign << 31 | exponent << FRACTION | (field & ((1u << (bits - 1)) - 1)) << (FRACTION + 1 - bits);
}
