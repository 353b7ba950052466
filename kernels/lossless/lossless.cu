// Floats without loss: the CUDA side of lossless.cpp, which draws the section. A block codes a chunk, and each of its
// threads EACH values in a row; fields and codes are packed in groups of eight, which begin and end with a whole byte.
#include "common/device.cuh"
#include "lossless/lossless.h"

const u32 EACH = CHUNK / THREADS;

// Packs field(i), i below `count`, of `bits` bits.
template <class F>
__device__ void pack_groups(u32 count, u32 bits, u8* out, F field) {
    for (u32 first = 8 * threadIdx.x; first < count; first += 8 * THREADS) {
        const u32 fields = count - first < 8 ? count - first : 8;
        u64 group = 0;
        for (u32 j = 0; j < fields; ++j) group |= (u64)field(first + j) << j * bits;
        for (u32 j = 0; 8 * j < fields * bits; ++j) out[first / 8 * bits + j] = (u8)(group >> 8 * j);
    }
}

// out: lossless_bound(count) bytes. status: of chunks_of(count) tiles. *end: the bytes of the section.
KERNEL lossless_encode(const float* values, u64 count, u64* status, u8* out, u64* end) {
    __shared__ u8 exponents[CHUNK], escapes[CHUNK], symbols[MOST_RANKED];
    __shared__ u8 first_code[256], second_code[256];
    __shared__ u32 counts[256], ranked[MOST_RANKED], used;
    const u32 chunks = (u32)chunks_of(count), t = threadIdx.x;
    if (grid_thread() == 0) {
        out[0] = 1;
        if (!chunks) *end = 1;
    }
    for (u32 chunk; (chunk = next_tile(status, chunks)) < chunks;) {
        const float* in = values + (u64)chunk * CHUNK;
        const u32 n = count - (u64)chunk * CHUNK < CHUNK ? (u32)(count - (u64)chunk * CHUNK) : CHUNK;
        counts[t] = 0;
        if (t == 0) used = 0;
        __syncthreads();
        u32 own = 0;
        for (u32 i = t; i < n; i += THREADS) {
            const u32 pattern = bits_of(in[i]);
            own |= pattern;
            exponents[i] = (u8)(pattern >> FRACTION);
            if (i % SAMPLE_EACH < SAMPLE) atomicAdd(counts + exponents[i], 1u);
        }
        atomicOr(&used, own);
        __syncthreads();
        u32 key = counts[t] << 8 | (255 - t);
        for (u32 i = 0; i < MOST_RANKED; ++i) {
            const u32 largest = block_max(key);
            if (key == largest) {
                symbols[i] = (u8)t;
                ranked[i] = key >> 8;
                key = 0;
            }
        }
        __syncthreads();
        Plan plan = plan_of(n, ranked, used);
        const u32 of_first = coded_symbols(plan.first), of_second = coded_symbols(plan.second);
        u8 one = (u8)of_first, two = (u8)of_second;
        for (u32 j = 0; j < of_first; ++j)
            if (symbols[j] == t) one = (u8)j;
        for (u32 j = 0; j < of_second; ++j)
            if (symbols[of_first + j] == t) two = (u8)j;
        first_code[t] = one;
        second_code[t] = two;
        __syncthreads();
        u32 found = 0, total;  // | others << 16 | escapes |
        for (u32 i = EACH * t; i < EACH * (t + 1) && i < n; ++i)
            if (first_code[exponents[i]] == of_first) found += second_code[exponents[i]] == of_second ? 0x10001 : 1;
        const u32 before = block_scan(found, &total);
        plan.escapes = total & 0xFFFF;
        plan.others = total >> 16;
        const u32 bytes = plan.bytes(n);
        const u64 at = 1 + 2ull * chunks + tiles_before(status, chunk, bytes);
        u8* to = out + at;
        if (t < 2) out[1 + 2ull * chunk + t] = (u8)(bytes >> 8 * t);
        if (t == 0) {
            to[0] = (u8)plan.bits;
            to[1] = (u8)(plan.first | plan.second << 2);
            if (chunk + 1 == chunks) *end = at + bytes;
        }
        if (t < plan.symbols()) to[HEAD + t] = symbols[t];
        to += HEAD + plan.symbols();
        const u32 low = plan.bits % 8;
        pack_groups(n, low, to, [=](u32 i) { return field_of(bits_of(in[i]), plan.bits) & ((1u << low) - 1); });
        to += field_bytes(n, low);
        for (u32 shift = low; shift < plan.bits; shift += 8, to += n)
            for (u32 i = t; i < n; i += THREADS) to[i] = (u8)(field_of(bits_of(in[i]), plan.bits) >> shift);
        if (plan.first) pack_groups(n, plan.first, to, [&](u32 i) { return (u32)first_code[exponents[i]]; });
        to += field_bytes(n, plan.first);
        u8* const others = to + field_bytes(plan.escapes, plan.second);
        u32 escape = before & 0xFFFF, other = before >> 16;
        for (u32 i = EACH * t; i < EACH * (t + 1) && i < n; ++i) {
            const u8 exponent = exponents[i];
            if (first_code[exponent] != of_first) continue;
            escapes[escape++] = exponent;
            if (second_code[exponent] == of_second) others[other++] = exponent;
        }
        __syncthreads();
        if (plan.second)
            pack_groups(plan.escapes, plan.second, to, [&](u32 i) { return (u32)second_code[escapes[i]]; });
    }
}

// Sets *error as dr_lossless_decode in lossless.cpp returns it; of several chunks' errors, to the smallest.
KERNEL lossless_decode(const u8* section, u64 bytes, u64 count, u64* status, float* values, i32* error) {
    __shared__ u8 escapes[CHUNK];
    const u32 chunks = (u32)chunks_of(count), t = threadIdx.x;
    if (!chunks && t == 0 && bytes != 1) atomicMin(error, ERR_SIZES);
    for (u32 chunk; (chunk = next_tile(status, chunks)) < chunks;) {
        const u32 n = count - (u64)chunk * CHUNK < CHUNK ? (u32)(count - (u64)chunk * CHUNK) : CHUNK;
        const u8* size_at = section + 1 + 2ull * chunk;
        const u32 size = size_at[0] | (u32)size_at[1] << 8;
        const u64 at = 1 + 2ull * chunks + tiles_before(status, chunk, size);
        const u8* in = section + at;
        const auto failed = [=](i32 code) {
            if (t == 0) atomicMin(error, code);
        };
        Plan plan;
        if (at + size > bytes || size < HEAD) {
            failed(ERR_TRUNCATED);
            continue;
        }
        if (size > MOST_BYTES || (chunk + 1 == chunks && at + size != bytes)) {
            failed(ERR_SIZES);
            continue;
        }
        if (!read_head(in, &plan)) {
            failed(ERR_VALUE);
            continue;
        }
        plan.escapes = plan.others = 0;
        if (plan.bytes(n) > size) {
            failed(ERR_TRUNCATED);
            continue;
        }
        const u32 of_first = coded_symbols(plan.first), of_second = coded_symbols(plan.second), low = plan.bits % 8;
        const u8 *symbols = in + HEAD, *fields = symbols + plan.symbols(), *planes = fields + field_bytes(n, low);
        const u8 *codes = fields + field_bytes(n, plan.bits), *seconds = codes + field_bytes(n, plan.first);
        const u64 first_bytes = field_bytes(n, plan.first);
        const auto code_of = [=](u32 i) { return load_field(codes, first_bytes, i * plan.first, plan.first); };
        u32 own = 0;
        for (u32 i = EACH * t; i < EACH * (t + 1) && i < n; ++i) own += code_of(i) == of_first;
        u32 place = block_scan(own, &plan.escapes);
        if (plan.bytes(n) > size) {
            failed(ERR_TRUNCATED);
            continue;
        }
        const u64 second_bytes = field_bytes(plan.escapes, plan.second);
        const auto second_of = [=](u32 i) { return load_field(seconds, second_bytes, i * plan.second, plan.second); };
        own = 0;
        for (u32 i = EACH * t; i < EACH * (t + 1) && i < plan.escapes; ++i) own += second_of(i) == of_second;
        u32 other = block_scan(own, &plan.others);
        if (plan.bytes(n) != size) {
            failed(ERR_SIZES);
            continue;
        }
        const u8* others = seconds + second_bytes;
        bool infinite = t < plan.symbols() && symbols[t] == 255;
        for (u32 i = t; i < plan.others; i += THREADS) infinite |= others[i] == 255;
        if (infinite) atomicMin(error, ERR_NOT_FINITE);
        if (t == 0 && !(zeros_follow(fields, n * low) && zeros_follow(codes, n * plan.first) &&
                        zeros_follow(seconds, plan.escapes * plan.second)))
            atomicMin(error, ERR_VALUE);
        for (u32 i = EACH * t; i < EACH * (t + 1) && i < plan.escapes; ++i) {
            const u32 code = second_of(i);
            escapes[i] = code == of_second ? others[other++] : symbols[of_first + code];
        }
        __syncthreads();
        for (u32 i = EACH * t; i < EACH * (t + 1) && i < n; ++i) {
            const u32 code = code_of(i), exponent = code == of_first ? escapes[place++] : symbols[code];
            u32 field = load_field(fields, field_bytes(n, low), i * low, low);
            for (u32 plane = 0; plane < plan.bits / 8; ++plane)
                field |= (u32)planes[plane * n + i] << (8 * plane + low);
            values[(u64)chunk * CHUNK + i] = __uint_as_float(pattern_of(field, exponent, plan.bits));
        }
    }
}
