// Interleaved rANS: the CUDA side of rans.cpp, which draws the sections.
//
// The lanes of the format are lanes of a warp. A stream has at most 32 of them, so one warp codes a stream of any
// length.
#include "bits/bits.cuh"
#include "common/gaps.cuh"
#include "common/index_gaps.cuh"
#include "rans/rans.h"

// One block. The section ends with byte `bound - 1` of `out`; *begin: the place of its first byte. shares: SHARES_BYTES
// bytes of zeros, for the kernel's own use.
KERNEL rans_encode(const u8* symbols, u64 count, const u64* counts, u32* shares, u8* out, u64 bound, u64* begin) {
    __shared__ u32 share[256], table[256], share_bytes;  // table: share | first slot << 16
    const u32 p = share_bits(count), s = threadIdx.x, whole = 1u << p;
    share[s] = rounded_share(counts[s], count, p);
    __syncthreads();
    u32 sum = block_sum(share[s]);
    for (const u32 step = sum < whole ? 1u : ~0u; sum != whole; sum += step) {
        const u32 largest = 255 - (block_max(share[s] << 8 | (255 - s)) & 255);
        if (s == largest) share[s] += step;
        __syncthreads();
    }
    if (s == 0) {
        BitWriter writer = {shares, 0};
        write_shares(share, p, writer);
        share_bytes = (u32)((writer.position + 7) / 8);
    }
    const u32 scaled = share[s] << (12 - p);
    table[s] = scaled | block_scan(scaled, &sum) << 16;
    __syncthreads();
    if (warp_number()) return;
    const u32 lanes = rans_lanes(count), lane = lane_number(), below = (1u << lane) - 1;
    u32 x = LOWEST;
    u64 at = bound;
    for (u64 group = (count + lanes - 1) / lanes; group-- > 0;) {
        const u64 i = group * lanes + lane;
        const bool active = lane < lanes && i < count;
        const u32 entry = active ? table[symbols[i]] : 0, f = entry & 0xFFFF, first = entry >> 16;
        const bool emits = active && x >> 20 >= f;
        const u32 mask = __ballot_sync(WHOLE_WARP, emits);
        at -= 2 * (u64)__popc(mask);
        if (emits) {
            *(u16*)(out + at + 2 * (u64)__popc(mask & below)) = (u16)x;
            x >>= 16;
        }
        if (active) x = x / f * 4096 + x % f + first;
    }
    at -= 4 * lanes;
    if (lane < lanes)
        for (u32 j = 0; j < 4; ++j) out[at + 4 * lane + j] = (u8)(x >> (8 * j));
    at -= share_bytes;
    for (u32 j = lane; j < share_bytes; j += 32) out[at + j] = ((const u8*)shares)[j];
    if (lane == 0) *begin = at;
}

// One block. *used: the number of bytes of the section, which may be fewer than `bytes`.
KERNEL rans_decode(const u8* in, u64 bytes, u64 count, u8* symbols, u64* used, i32* error) {
    __shared__ u32 share[256], slots[4096];
    __shared__ i64 taken;
    const u32 p = share_bits(count), lanes = rans_lanes(count), s = threadIdx.x;
    if (s == 0) taken = read_shares(BitReader{in, bytes, 0}, p, share);
    __syncthreads();
    if (taken < 0 || bytes - (u64)taken < 4 * lanes) {
        if (s == 0) *error = taken < 0 ? (i32)taken : ERR_TRUNCATED;
        return;
    }
    u32 all;
    const u32 f = share[s] << (12 - p), first = block_scan(f, &all);
    for (u32 i = 0; i < f; ++i) slots[first + i] = rans_slot(s, i, f);
    __syncthreads();
    if (warp_number()) return;
    const u32 lane = lane_number(), below = (1u << lane) - 1;
    u64 at = (u64)taken;
    u32 x = LOWEST;
    if (lane < lanes) x = load_field(in, bytes, 8 * (at + 4 * lane), 32);
    at += 4 * lanes;
    for (u64 base = 0; base < count; base += lanes) {
        const bool active = lane < lanes && base + lane < count;
        bool wants = false;
        if (active) {
            const u32 slot = slots[x & 4095];
            symbols[base + lane] = (u8)slot;
            x = rans_advance(slot, x);
            wants = x < LOWEST;
        }
        const u32 mask = __ballot_sync(WHOLE_WARP, wants);
        if (wants) x = x << 16 | load_field(in, bytes, 8 * (at + 2 * (u64)__popc(mask & below)), 16);
        at += 2 * (u64)__popc(mask);
    }
    const bool wrong = __any_sync(WHOLE_WARP, x != LOWEST);
    if (lane) return;
    *used = at;
    if (at > bytes || wrong) *error = at > bytes ? ERR_TRUNCATED : ERR_VALUE;
}

// ---- The index codec: gaps as tokens and plain low bits.

// lows: words of zeros before the launch. *end: the number of their bits.
KERNEL rans_tokens(const u32* indices, u64 count, u64* status, u64* end, u8* tokens, u32* lows) {
    const u32 t = fraction_bits(count);
    each_place(
        count, 0, status, end, [=](u64 i) { return (u64)gap_lows(gap_at(indices, i), t); },
        [=](u64 i, u64 place) {
            const u32 gap = gap_at(indices, i), low = gap_lows(gap, t);
            tokens[i] = (u8)token_of(gap, low, t);
            put_bits(lows, place, gap & ((1u << low) - 1));
        });
}

// The gaps, from the tokens and from the lows after the first *used bytes of the section; keys_of_gaps turns them into
// indices. Does nothing if the tokens could not be read. Sets *error to ERR_INDEX for a token whose gap would have 33
// bits, so an index beyond numel, and to ERR_VALUE if the section does not end with the last gap.
KERNEL rans_gaps(const u8* in, u64 bytes, u64 count, const u8* tokens, const u64* used, const i32* unread, u64* status,
                 u64* end, u32* gaps, i32* error) {
    if (*unread) return;
    const u32 t = fraction_bits(count);
    const u8* lows = in + *used;
    const u64 size = bytes - *used;
    const auto length = [=](u64 i) {
        const u32 e = token_lows(tokens[i], t);
        return e + t <= 31 ? (u64)e : 0ull;
    };
    each_place(count, 0, status, end, length, [=](u64 i, u64 place) {
        const u32 e = token_lows(tokens[i], t);
        if (e + t > 31) atomicMin(error, ERR_INDEX);
        gaps[i] = e + t <= 31 ? token_gap(tokens[i], e, t) + load_field(lows, size, place, e) : 0;
        if (i + 1 == count && !ends_at(lows, size, place + length(i))) atomicMin(error, ERR_VALUE);
    });
}
