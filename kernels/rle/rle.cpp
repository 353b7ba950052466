// Run lengths of the bitmap's bits (DeepReduce, Kostopoulou et al., arXiv:2102.03112, section 2: bit-level RLE).
//
// The bitmap consists of runs of zeros and ones in turn, zeros first; the zeros after the last one are not written. A
// run of n is written as v = n - 1; the first run of zeros, which may be empty, as v = n. Runs of zeros have fields of
// z bits, runs of ones fields of o bits: v itself if it is below 2^z - 1 (2^o - 1), else a field of ones (an escape)
// and then v in W bits, W = bit_length(numel - 1).
//
//     section:  | z u8 | o u8 | zeros, ones, zeros, ones, ..., to a whole byte |             empty for no indices
//
// z and o are 1 .. 32, those of the smallest section; of equal ones the smallest.
#include "bits/bits_cpu.h"
#include "index_sizes/sizes.h"
#include "rle/rle.h"

// Calls zeros(v) and ones(v) for each pair of runs.
template <class Zeros, class Ones>
static void each_run(const u32* indices, u64 count, Zeros zeros, Ones ones) {
    zeros((u64)indices[0]);
    u64 begin = 0;
    for (u64 i = 1; i < count; ++i) {
        const u32 gap = indices[i] - indices[i - 1] - 1;
        if (gap) {
            ones(i - begin - 1);
            zeros((u64)gap - 1);
            begin = i;
        }
    }
    ones(count - begin - 1);
}

static void put(BitWriter& writer, u64 v, u32 width, u32 escape) {
    const u64 all = (1ull << width) - 1;
    if (v < all) return writer.put(v, width);
    writer.put(all, width);
    writer.put(v, escape);
}

struct RunPlan {
    RunFields zeros, ones;
    u32 escape;
};

static RunPlan plan(const u32* indices, u64 count, u64 numel) {
    u64 zeros[34] = {}, ones[34] = {};
    each_run(
        indices, count, [&](u64 v) { ++zeros[bit_length(v + 1)]; }, [&](u64 v) { ++ones[bit_length(v + 1)]; });
    const u32 escape = run_escape(numel);
    return {best_fields(zeros, escape), best_fields(ones, escape), escape};
}

u64 rle_bytes(const u32* indices, u64 count, u64 numel) {
    if (count == 0) return 0;
    const RunPlan best = plan(indices, count, numel);
    return 2 + (best.zeros.bits + best.ones.bits + 7) / 8;
}

DR_API u64 dr_rle_bound(u64 count) { return rle_bound(count); }

// Writes a section into dr_rle_bound(count) bytes and returns its size.
DR_API u64 dr_rle_encode(const u32* indices, u64 count, u64 numel, u8* out) {
    if (count == 0) return 0;
    const RunPlan best = plan(indices, count, numel);
    const u32 z = best.zeros.width, o = best.ones.width, escape = best.escape;
    out[0] = (u8)z;
    out[1] = (u8)o;
    BitWriter writer{out + 2};
    each_run(
        indices, count, [&](u64 v) { put(writer, v, z, escape); }, [&](u64 v) { put(writer, v, o, escape); });
    return (u64)(writer.finish() - out);
}

static inline u64 get(BitReader& reader, u32 width, u32 escape) {
    const u64 all = (1ull << width) - 1, v = reader.get(width);
    return v < all ? v : reader.get(escape);
}

// Returns 0; ERR_TRUNCATED if the section ends before the last index; ERR_INDEX if a run passes `count` indices or
// numel; ERR_VALUE if z or o is out of range, or the section continues after the last index.
DR_API i64 dr_rle_decode(const u8* in, u64 bytes, u64 count, u64 numel, u32* indices) {
    if (count == 0) return bytes ? (i64)ERR_VALUE : 0;
    if (bytes < 2) return ERR_TRUNCATED;
    const u32 z = in[0], o = in[1], escape = run_escape(numel);
    if (z < 1 || z > 32 || o < 1 || o > 32) return ERR_VALUE;
    BitReader reader{in + 2, bytes - 2};
    u64 next = get(reader, z, escape), done = 0;
    for (;;) {
        const u64 ones = get(reader, o, escape) + 1;
        if (reader.overrun()) return ERR_TRUNCATED;
        if (ones > count - done || next + ones > numel) return ERR_INDEX;
        indices[done] = (u32)next;  // most runs have no other
        for (u64 i = 1; i < ones; ++i) indices[done + i] = (u32)(next + i);
        done += ones;
        next += ones;
        if (done == count) return reader.ended() ? 0 : (i64)ERR_VALUE;
        next += get(reader, z, escape) + 1;
    }
}
