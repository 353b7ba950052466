// Interleaved rANS: the CUDA side of kernels/cpu/rans.cpp, which draws the sections. The lanes of the format are the
// lanes of one warp; a stream has no more than 32, so one warp codes it, however long it is.
#include "entropy.cuh"

const u32 LOWEST = 1u << 16;

__device__ __forceinline__ u32 share_bits(u64 count) {
    u32 p = 5;
    while (p < 12 && count >> p) ++p;
    return p;
}
__device__ __forceinline__ u32 rans_lanes(u64 count) { return count < 2048 ? 1 : count < 32768 ? 4 : 32; }

// One thread: writes the shares into words that were zero; the number of bytes.
__device__ u32 write_shares(const u32* share, u32 p, u32* out) {
    u64 at = 0;
    u32 sum = 0;
    for (u32 s = 0; sum < 1u << p;) {
        if (share[s]) {
            const u32 length = bit_length(share[s]);
            put_bits(out, at, length | (share[s] - (1u << (length - 1))) << 4);
            at += 3 + length;
            sum += share[s++];
            continue;
        }
        u32 run = 1;
        while (run < 16 && share[s + run] == 0) ++run;
        put_bits(out, at, (run - 1) << 4);
        at += 8;
        s += run;
    }
    return (u32)((at + 7) / 8);
}

// One thread: the number of bytes, or ERR_VALUE.
__device__ i64 read_shares(const u8* in, u64 bytes, u32 p, u32* share) {
    u64 at = 0;
    u32 sum = 0;
    for (u32 s = 0; s < 256; ++s) share[s] = 0;
    for (u32 s = 0; sum < 1u << p;) {
        const u32 length = load_field(in, bytes, at, 4);
        const u32 run = length ? 1 : 1 + load_field(in, bytes, at + 4, 4);
        at += length ? 3 + length : 8;
        if (length > 13 || s + run > 256 || at > 8 * bytes) return ERR_VALUE;
        if (length) sum += share[s] = 1u << (length - 1) | load_field(in, bytes, at - (length - 1), length - 1);
        s += run;
    }
    return sum == 1u << p ? (i64)((at + 7) / 8) : ERR_VALUE;
}

// One block: writes shares, states and words so that they end with byte `bound - 1` of `out`; *begin: the first one's
// place. shares: 160 words of zeros.
KERNEL rans_encode(const u8* symbols, u64 count, const u64* counts, u32* shares, u8* out, u64 bound, u64* begin) {
    __shared__ u32 share[256], table[256], share_bytes;  // table: share | first slot << 16
    const u32 p = share_bits(count), s = threadIdx.x, whole = 1u << p;
    const u64 rounded = ((counts[s] << p) + count / 2) / count;
    share[s] = counts[s] == 0 ? 0 : rounded == 0 ? 1 : (u32)rounded;
    __syncthreads();
    u32 sum = block_sum(share[s]);
    for (const u32 step = sum < whole ? 1u : ~0u; sum != whole; sum += step) {
        const u32 largest = 255 - (block_max(share[s] << 8 | (255 - s)) & 255);
        if (s == largest) share[s] += step;
        __syncthreads();
    }
    if (s == 0) share_bytes = write_shares(share, p, shares);
    const u32 own = share[s] << (12 - p);
    table[s] = own | block_scan(own, &sum) << 16;
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

// One block. *used: the bytes that the section took.
KERNEL rans_decode(const u8* in, u64 bytes, u64 count, u8* symbols, u64* used, i32* error) {
    __shared__ u32 share[256], slots[4096];  // symbol | (slot - first) << 8 | (share - 1) << 20
    __shared__ i64 taken;
    const u32 p = share_bits(count), lanes = rans_lanes(count), s = threadIdx.x;
    if (s == 0) taken = read_shares(in, bytes, p, share);
    __syncthreads();
    if (taken < 0 || bytes - (u64)taken < 4 * lanes) {
        if (s == 0) *error = taken < 0 ? (i32)taken : ERR_TRUNCATED;
        return;
    }
    u32 all;
    const u32 f = share[s] << (12 - p), first = block_scan(f, &all);
    for (u32 i = 0; i < f; ++i) slots[first + i] = s | i << 8 | (f - 1) << 20;
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
            x = ((slot >> 20) + 1) * (x >> 12) + (slot >> 8 & 4095);
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

__device__ __forceinline__ u32 fraction_bits(u64 count) { return count < 512 ? 1 : count < 8192 ? 2 : 3; }
__device__ __forceinline__ u32 gap_of(const u32* indices, u64 i) {
    return i ? indices[i] - indices[i - 1] - 1 : indices[0];
}
__device__ __forceinline__ u32 low_bits(u32 gap, u32 t) { return 31 - t - (u32)__clz((i32)(gap | 1u << t)); }

// tokens, and the lows into words that were zero; *end: their bits.
KERNEL rans_tokens(const u32* indices, u64 count, u64* status, u64* end, u8* tokens, u32* lows) {
    const u32 t = fraction_bits(count);
    each_place(
        count, 0, status, end, [=](u64 i) { return (u64)low_bits(gap_of(indices, i), t); },
        [=](u64 i, u64 place) {
            const u32 gap = gap_of(indices, i), low = low_bits(gap, t);
            tokens[i] = (u8)((low << t) + (gap >> low));
            put_bits(lows, place, gap & ((1u << low) - 1));
        });
}

// gaps of the tokens and of the lows behind the section's first *used bytes. A token whose gap would have 33 bits is an
// error: its index would be beyond numel. Nothing is done where the tokens could not be read.
KERNEL rans_gaps(const u8* in, u64 bytes, u64 count, const u8* tokens, const u64* used, const i32* unread, u64* status,
                 u64* end, u32* gaps, i32* error) {
    if (*unread) return;
    const u32 t = fraction_bits(count);
    const u8* lows = in + *used;
    const u64 size = bytes - *used;
    const auto exponent = [=](u64 i) { return tokens[i] >> t ? (u32)(tokens[i] >> t) - 1 : 0u; };
    const auto length = [=](u64 i) { return exponent(i) + t <= 31 ? (u64)exponent(i) : 0ull; };
    each_place(count, 0, status, end, length, [=](u64 i, u64 place) {
        const u32 e = exponent(i);
        if (e + t > 31) atomicMin(error, ERR_INDEX);
        gaps[i] = e + t <= 31 ? ((tokens[i] - (e << t)) << e) + load_field(lows, size, place, e) : 0;
        if (i + 1 == count && (place + length(i) + 7) / 8 != size) atomicMin(error, ERR_VALUE);
    });
}
