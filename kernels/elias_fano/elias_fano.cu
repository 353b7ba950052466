// Elias-Fano code: the CUDA side of elias_fano.cpp, which draws the section.
//
// The section is one bit string in words that were zero: each element sets its low bits and its one. A decoder first
// finds the ones, which give the high bits, and then adds the low bits.
#include "bits/unary.cuh"

// words: zeros before the launch. l: the number of low bits.
KERNEL elias_fano_write(const u32* indices, u64 count, u32 l, u32* words) {
    const u64 highs = 8 * field_bytes(count, l);
    const u32 mask = (u32)((1ull << l) - 1);
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        put_bits(words, i * l, indices[i] & mask);
        put_bits(words, highs + (indices[i] >> l) + i, 1);
    }
}

// in: the highs of the section. *ones: how many ones they have.
KERNEL elias_fano_highs(const u8* in, u64 bytes, u64 count, u64* status, u32* highs, u64* ones) {
    find_highs(in, bytes, count, status, highs, ones);
}

// in: the section, whose highs begin at byte `at`. Sets *error to ERR_TRUNCATED if it has fewer than `count` ones,
// ERR_INDEX if the indices are not strictly increasing or not below numel, ERR_VALUE if it continues after the last
// one.
KERNEL elias_fano_join(const u8* in, u64 bytes, u64 at, u64 count, u64 numel, u32 l, const u32* highs, const u64* ones,
                       u32* indices, i32* error) {
    if (*ones < count) {
        if (grid_thread() == 0) *error = ERR_TRUNCATED;
        return;
    }
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u64 index = (u64)highs[i] << l | load_field(in, bytes, i * l, l);
        const u64 before = i ? (u64)highs[i - 1] << l | load_field(in, bytes, (i - 1) * l, l) : 0;
        indices[i] = (u32)index;
        if (index >= numel || (i && index <= before)) atomicMin(error, ERR_INDEX);
        if (i + 1 < count) continue;
        if (!zeros_follow(in, count * l) || !highs_end(in + at, bytes - at, count, highs)) atomicMin(error, ERR_VALUE);
    }
}
