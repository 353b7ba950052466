// Interleaved rANS: the CUDA side of rans.cpp, which draws the sections.
//
// The lanes of the format are lanes of a warp, so a warp codes a part of any length, and other blocks code the other
// parts at the same time. Decoders take the sections of many containers at once.
#include "bits/bits.cuh"
#include "common/index_gaps.cuh"
#include "rans/rans.h"

const i64 AHEAD = 8;

// A block codes a part into `room`, each to the end of its own place there, and copies it behind the parts before it.
// room: rans_bound(count) bytes, at a multiple of 2. status: of rans_parts(count) tiles. *end: the bytes of the section.
KERNEL rans_encode(const u8* symbols, u64 count, const u64* counts, u8* room, u64* status, u8* out, u64* end) {
    __shared__ u32 share[256], table[256];  // table: share | first slot << 16, less 1 << 16 for a share of 1
    __shared__ u64 reciprocal[256];         // as in rans.cpp
    __shared__ u32 shares[SHARES_BYTES / 4], share_bytes;
    __shared__ u64 place;
    const u32 p = share_bits(count), s = threadIdx.x, whole = 1u << p;
    share[s] = rounded_share(counts[s], count, p);
    for (u32 i = s; i < SHARES_BYTES / 4; i += THREADS) shares[i] = 0;
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
    const u32 scaled = share[s] << (12 - p), slot = block_scan(scaled, &sum);
    table[s] = scaled | (scaled == 1 ? slot + 4095 : slot) << 16;
    reciprocal[s] = scaled > 1 ? ~0ull / scaled + 1 : ~0ull;
    __syncthreads();
    const u32 lanes = rans_lanes(count), lane = lane_number(), below = (1u << lane) - 1;
    const u32 parts = (u32)rans_parts(count), several = parts > 1;
    const u64 header = several + share_bytes + 4ull * (parts - 1);
    for (u32 part; (part = next_tile(status, parts)) < parts;) {
        const u64 begin = part_begin(count, parts, part), after = part_begin(count, parts, part + 1);
        const u64 stop = 2 * after + 4ull * lanes * (part + 1);
        if (warp_number() == 0) {
            u32 x = LOWEST;
            u64 at = stop;
            // Symbols are loaded AHEAD groups before they are coded. 256: there is none.
            const auto symbol_at = [=](i64 group) {
                const u64 i = begin + group * lanes + lane;
                return group >= 0 && lane < lanes && i < after ? (u32)symbols[i] : 256u;
            };
            const i64 last = (i64)((after - begin + lanes - 1) / lanes) - 1;
            u32 next[AHEAD];
#pragma unroll
            for (u32 j = 0; j < AHEAD; ++j) next[j] = symbol_at(last - j);
            for (i64 group = last; group >= 0; group -= AHEAD)
#pragma unroll
                for (u32 j = 0; j < AHEAD; ++j) {
                    const u32 symbol = next[j];
                    next[j] = symbol_at(group - j - AHEAD);
                    const bool active = symbol < 256;
                    const u32 entry = active ? table[symbol] : 0, f = entry & 0xFFFF;
                    const bool emits = active && x >> 20 >= f;
                    const u32 mask = __ballot_sync(WHOLE_WARP, emits);
                    at -= 2 * (u64)__popc(mask);
                    if (emits) {
                        *(u16*)(room + at + 2 * (u64)__popc(mask & below)) = (u16)x;
                        x >>= 16;
                    }
                    if (active) {
                        const u64 r = reciprocal[symbol];
                        const u32 quotient = (u32)((x * (r >> 32) + (x * (r & 0xFFFFFFFF) >> 32)) >> 32);
                        x += (entry >> 16) + quotient * (4096 - f);
                    }
                }
            at -= 4 * lanes;
            if (lane < lanes)
                for (u32 j = 0; j < 4; ++j) room[at + 4 * lane + j] = (u8)(x >> (8 * j));
            if (lane == 0) place = at;
        }
        __syncthreads();
        const u64 from = place, size = stop - from, to = header + tiles_before(status, part, size);
        for (u64 i = s; i < size; i += THREADS) out[to + i] = room[from + i];
        if (part + 1 < parts && s < 4) {
            const u64 words = (size - 4 * lanes) / 2;
            out[several + share_bytes + 4ull * part + s] = (u8)(words >> (8 * s));
        }
        if (part == 0) {
            if (several && s == 0) out[0] = PARTS;
            for (u32 j = s; j < share_bytes; j += THREADS) out[several + j] = (u8)(shares[j / 4] >> (8 * (j % 4)));
        }
        if (part + 1 == parts && s == 0) *end = to + size;
    }
}

// One section, as the host knows it. Places are bytes of `data`, words of `scratch`, and elements of `symbols` and
// `indices`. The same in ops/rans.py.
struct Section {
    u64 at, bytes, count;
    u64 numel;   // of the tensor, for a section of indices
    u64 first;   // of its symbols
    u64 found;   // | bytes of the symbols' section | its error, i32 |: zeros before the launch
    u64 status;  // of the lows, and of the gaps: ceil(count / THREADS) + 1 words each
};

// The words of a part, for a warp that takes some at a time. Lane l holds words 2 l and 2 l + 1 of each of three runs of
// 64, so that loads are under way long before their words are needed. Words past the end are zeros.
struct Words {
    const u8* in;
    u64 bytes, run;
    u32 a, b, c, place;  // place: of the next word in run a
    __device__ u32 load() { return load_field(in, bytes, (run++ * 64 + 2 * lane_number()) * 16, 32); }
    __device__ Words(const u8* in, u64 bytes) : in(in), bytes(bytes), run(0), place(0) {
        a = load(), b = load(), c = load();
    }
    // The next word of each lane in `mask`, in the order of the lanes. All lanes call it.
    __device__ u32 take(u32 mask) {
        const u32 mine = place + (u32)__popc(mask & ((1u << lane_number()) - 1)), lane = mine >> 1 & 31;
        const u32 in_a = __shfl_sync(WHOLE_WARP, a, (i32)lane), in_b = __shfl_sync(WHOLE_WARP, b, (i32)lane);
        const u32 pair = mine < 64 ? in_a : in_b;
        place += (u32)__popc(mask);
        if (place >= 64) a = b, b = c, c = load(), place -= 64;
        return mine & 1 ? pair >> 16 : pair & 0xFFFF;
    }
};

// Each section has `each` blocks, of which each takes a part. Sets the section's error, and *error.
KERNEL rans_decode(const u8* data, const u64* sections, u64 each, u8* symbols, u64* scratch, i32* error) {
    __shared__ u32 share[256], slots[4096];
    __shared__ i64 taken;
    const Section& section = ((const Section*)sections)[blockIdx.x / each];
    const u8* in = data + section.at;
    const u64 count = section.count, part = blockIdx.x % each;
    const u64 parts = section.bytes && *in == PARTS ? rans_parts(count) : 1, several = parts > 1;
    if (part >= parts) return;
    u64* found = scratch + section.found;
    const auto broken = [=](i32 code) {
        atomicMin((i32*)(found + 1), code);
        atomicMin(error, code);
    };
    const u32 p = share_bits(count), lanes = rans_lanes(count), s = threadIdx.x;
    if (s == 0) taken = read_shares(BitReader{in + several, section.bytes - several, 0}, p, share);
    __syncthreads();
    const u64 sizes = several + (u64)taken, first_part = sizes + 4 * (parts - 1);
    if (taken < 0 || section.bytes < first_part) {
        if (s == 0) broken(taken < 0 ? (i32)taken : ERR_TRUNCATED);
        return;
    }
    u64 words = 0;  // of the parts before this one
    for (u64 i = s; i < part; i += THREADS) words += load_field(in + sizes, 4 * parts, 32 * i, 32);
    u64 at = first_part + 4 * lanes * part + 2 * block_sum(words), room = section.bytes;
    if (part + 1 < parts) room = at + 4 * lanes + 2ull * load_field(in + sizes, 4 * parts, 32 * part, 32);
    if (room > section.bytes || room < at + 4 * lanes) {
        if (s == 0) broken(ERR_TRUNCATED);
        return;
    }
    u32 all;
    const u32 f = share[s] << (12 - p), slot_of = block_scan(f, &all);
    for (u32 i = 0; i < f; ++i) slots[slot_of + i] = rans_slot(s, i, f);
    __syncthreads();
    if (warp_number()) return;
    const u32 lane = lane_number();
    const u64 end = part_begin(count, parts, part + 1);
    u8* const out = symbols + section.first;  // here: a store to bytes may change a section, which is loaded again then
    u32 x = LOWEST;
    if (lane < lanes) x = load_field(in, section.bytes, 8 * (at + 4 * lane), 32);
    at += 4 * lanes;
    Words next(in + at, room - at);
    for (u64 base = part_begin(count, parts, part); base < end; base += lanes) {
        const bool active = lane < lanes && base + lane < end;
        bool wants = false;
        if (active) {
            const u32 slot = slots[x & 4095];
            out[base + lane] = (u8)slot;
            x = rans_advance(slot, x);
            wants = x < LOWEST;
        }
        const u32 mask = __ballot_sync(WHOLE_WARP, wants), word = next.take(mask);
        if (wants) x = x << 16 | word;
        at += 2 * (u64)__popc(mask);
    }
    const bool wrong = __any_sync(WHOLE_WARP, x != LOWEST);
    if (lane) return;
    if (part + 1 == parts) *found = at;
    if (at > room) broken(ERR_TRUNCATED);
    else if (wrong || (part + 1 < parts && at != room)) broken(ERR_VALUE);
}

// Sections of symbols alone: each must end with its last word.
KERNEL rans_ends(const u64* sections, u64 count, const u64* scratch, i32* error) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const Section& section = ((const Section*)sections)[i];
        if (!*(const i32*)(scratch + section.found + 1) && scratch[section.found] != section.bytes)
            atomicMin(error, ERR_VALUE);
    }
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

// The indices, from the tokens and from the lows after them; each section has `each` blocks. Does nothing if the tokens
// could not be read. Sets *error to ERR_INDEX for a token whose gap would have 33 bits and for an index beyond numel, and
// to ERR_VALUE if the section does not end with the last gap.
KERNEL rans_indices(const u8* data, const u64* sections, u64 each, const u8* symbols, u64* scratch, u32* indices,
                    i32* error) {
    const Section& section = ((const Section*)sections)[blockIdx.x / each];
    const u64 count = section.count, used = scratch[section.found];
    if (*(const i32*)(scratch + section.found + 1)) return;
    const u32 t = fraction_bits(count), tiles = (u32)((count + THREADS - 1) / THREADS);
    const u8 *lows = data + section.at + used, *tokens = symbols + section.first;
    const u64 size = section.bytes - used;
    u64 *of_lows = scratch + section.status, *of_gaps = of_lows + tiles + 1;
    for (u32 tile; (tile = next_tile(of_lows, tiles)) < tiles;) {
        const u64 i = (u64)tile * THREADS + threadIdx.x;
        const u32 token = i < count ? tokens[i] : 0, e = token_lows(token, t);
        const bool there = i < count && e + t <= 31;
        u64 total, place = block_scan(there ? (u64)e : 0ull, &total);
        place += tiles_before(of_lows, tile, total);
        const u64 gap = there ? (u64)token_gap(token, e, t) + load_field(lows, size, place, e) : 0;
        u64 before = block_scan(i < count ? gap + 1 : 0ull, &total);
        before += tiles_before(of_gaps, tile, total);
        if (i >= count) continue;
        indices[section.first + i] = (u32)(before + gap);
        if (!there || before + gap >= section.numel) atomicMin(error, ERR_INDEX);
        if (i + 1 == count && !ends_at(lows, size, place + e)) atomicMin(error, ERR_VALUE);
    }
}
