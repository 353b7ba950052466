// Ternary digits, five to a byte: see trits.h.
#include "ternary/trits_cpu.h"

// digits[count]: 0, 1 or 2. out: ceil(count / 5) bytes.
DR_API DR_CLONES void dr_ternary_pack(const u8* digits, u64 count, u8* out) {
    pack_trits(count, out, [=](u64 i) { return (u32)digits[i]; });
}

DR_CLONES static void unpack(const u8* in, u64 count, u8* digits) {
    unpack_trits(in, count, [=](u64 i, u32 digit) { digits[i] = (u8)digit; });
}
// digits[count]; in: ceil(count / 5) bytes. ERR_VALUE if dr_ternary_pack writes no such bytes.
DR_API i64 dr_ternary_unpack(const u8* in, u64 count, u8* digits) {
    if (!valid_trits(in, count)) return ERR_VALUE;
    unpack(in, count, digits);
    return 0;
}
