// Scales, codes and values of the quantizers: the CUDA side of kernels/quantize/qsgd.cpp, quantize.cpp and three_lc.cpp.
// Element i of a tensor has fewer than 2^32 others, so buckets are found by 32-bit divisions.
#include "common/device.cuh"

struct RoundingKey {
    u32 seed, parameter, step, rank;
};

// The words of elements 4 q .. 4 q + 3, as in kernels/quantize/rounding.h.
__device__ __forceinline__ void rounding_words(const RoundingKey& key, u64 q, u32* words) {
    const Philox4 r = philox4x32(key.seed, key.parameter, (u32)q, key.step, STREAM_ROUNDING, key.rank);
    words[0] = r.x, words[1] = r.y, words[2] = r.z, words[3] = r.w;
}

// Calls f(i, word) for every element; a thread takes four.
template <class F>
__device__ __forceinline__ void each_rounded(u64 count, const RoundingKey& key, F f) {
    for (u64 q = grid_thread(); 4 * q < count; q += grid_threads()) {
        u32 words[4];
        rounding_words(key, q, words);
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            if (4 * q + j < count) f(4 * q + j, words[j]);
    }
}

const u32 CHUNK = 16 * THREADS;

// Walks over the buckets in chunks, a block each: f(bucket, begin, end).
template <class F>
__device__ void each_chunk(u64 count, u64 bucket, F f) {
    const u64 of_bucket = (bucket + CHUNK - 1) / CHUNK, chunks = (count + bucket - 1) / bucket * of_bucket;
    for (u64 c = blockIdx.x; c < chunks; c += gridDim.x) {
        const u64 b = c / of_bucket, begin = b * bucket + c % of_bucket * CHUNK;
        u64 end = (b + 1) * bucket < count ? (b + 1) * bucket : count;
        end = begin + CHUNK < end ? begin + CHUNK : end;
        if (begin < end) f(b, begin, end);
    }
}

// norms: zeros; becomes the bits of each bucket's largest magnitude.
KERNEL max_norms(const float* values, u64 count, u64 bucket, u32* norms) {
    each_chunk(count, bucket, [=](u64 b, u64 begin, u64 end) {
        u32 largest = 0;
        for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
            const u32 bits = magnitude_bits(values[i]);
            largest = bits > largest ? bits : largest;
        }
        largest = block_max(largest);
        if (threadIdx.x == 0) atomicMax(norms + b, largest);
    });
}

// A warp a bucket. Element j of it in lane j % 8, in order, then lanes 0+4, 1+5, 2+6, 3+7, then 0+2, 1+3, then 0+1, as
// in qsgd.cpp; all of the warp loads, and its eights of lanes repeat each other's sums.
KERNEL l2_norms(const float* values, u64 count, u64 bucket, float* norms) {
    const u64 buckets = (count + bucket - 1) / bucket;
    for (u64 b = grid_thread() / 32; b < buckets; b += grid_threads() / 32) {
        const u64 begin = b * bucket, end = begin + bucket < count ? begin + bucket : count;
        double sum = 0.0;
        for (u64 base = begin; base < end; base += 32) {
            const double x = base + lane_number() < end ? (double)values[base + lane_number()] : 0.0;
            const double square = x * x;
            for (u32 part = 0; part < 32; part += 8) sum += __shfl_sync(WHOLE_WARP, square, (lane_number() & 7) + part);
        }
        for (u32 half = 4; half; half /= 2) sum += __shfl_down_sync(WHOLE_WARP, sum, half);
        const double norm = sqrt(sum), most = 3.4028234663852886e38;
        if (lane_number() == 0) norms[b] = norm > most ? 3.402823466e+38f : (float)norm;
    }
}

KERNEL qsgd_codes(const float* values, u64 count, u64 bucket, u32 s, u32 seed, u32 parameter, u32 step, u32 rank,
                  const float* norms, u8* codes) {
    const u32 of = (u32)bucket;
    each_rounded(count, {seed, parameter, step, rank}, [=](u64 i, u32 word) {
        codes[i] = (u8)qsgd_level(values[i], norms[(u32)i / of], s, uniform24(word));
    });
}

// The largest magnitude of a bucket, found by a warp.
__device__ __forceinline__ float largest_of(const float* values, u64 begin, u64 end) {
    u32 largest = 0;
    for (u64 i = begin + lane_number(); i < end; i += 32) {
        const u32 bits = magnitude_bits(values[i]);
        largest = bits > largest ? bits : largest;
    }
    return __uint_as_float(warp_max(largest));
}

// Largest magnitudes and codes in one launch, for buckets of a multiple of four: a warp a bucket, four elements a lane.
KERNEL qsgd_encode(const float* values, u64 count, u64 bucket, u32 s, u32 seed, u32 parameter, u32 step, u32 rank,
                   float* norms, u8* codes) {
    const RoundingKey key = {seed, parameter, step, rank};
    const u64 buckets = (count + bucket - 1) / bucket;
    for (u64 b = grid_thread() / 32; b < buckets; b += grid_threads() / 32) {
        const u64 begin = b * bucket, end = begin + bucket < count ? begin + bucket : count;
        const float norm = largest_of(values, begin, end);
        if (lane_number() == 0) norms[b] = norm;
        for (u64 i = begin + 4 * lane_number(); i < end; i += 128) {
            u32 words[4];
            rounding_words(key, i / 4, words);
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (i + j < end) codes[i + j] = (u8)qsgd_level(values[i + j], norm, s, uniform24(words[j]));
        }
    }
}

// The whole section of value/qsgd.py in one launch, for such buckets whose codes fill whole words:
//     section:  | header u64 | norms [buckets] | codes, `bits` each |
// A lane packs its four codes, and the words of a step of 128 are put together out of the lanes that hold their bits.
KERNEL qsgd_section(const float* values, u64 count, u64 bucket, u32 bits, u32 seed, u32 parameter, u32 step, u32 rank,
                    u64 header, u32* section) {
    const RoundingKey key = {seed, parameter, step, rank};
    const u32 s = (1u << (bits - 1)) - 1, own_bits = 4 * bits;
    const u64 buckets = (count + bucket - 1) / bucket, words = (count * bits + 31) / 32;
    u32* codes = section + 2 + buckets;
    if (grid_thread() == 0) section[0] = (u32)header, section[1] = (u32)(header >> 32);
    for (u64 b = grid_thread() / 32; b < buckets; b += grid_threads() / 32) {
        const u64 begin = b * bucket, end = begin + bucket < count ? begin + bucket : count;
        const float norm = largest_of(values, begin, end);
        if (lane_number() == 0) section[2 + b] = __float_as_uint(norm);
        for (u64 base = begin; base < end; base += 128) {
            const u64 i = base + 4 * lane_number();
            u32 own = 0;
            if (i < end) {
                u32 random[4];
                rounding_words(key, i / 4, random);
#pragma unroll
                for (u32 j = 0; j < 4; ++j)
                    if (i + j < end) own |= qsgd_level(values[i + j], norm, s, uniform24(random[j])) << (j * bits);
            }
            // Bit p of the step's codes is bit p % own_bits of lane p / own_bits.
            const u32 first = 32 * lane_number() / own_bits, shift = 32 * lane_number() % own_bits;
            u64 word = 0;
            for (u32 l = 0; l * own_bits < 32 + own_bits; ++l) {
                const u32 other = __shfl_sync(WHOLE_WARP, own, (first + l) & 31);
                if (first + l < 32 && l * own_bits < 32 + shift)
                    word |= l ? (u64)other << (l * own_bits - shift) : (u64)(other >> shift);
            }
            const u64 to = base * bits / 32 + lane_number();
            if (lane_number() < own_bits && to < words && 32 * to < end * bits) codes[to] = (u32)word;
        }
    }
}

// The values of packed codes.
KERNEL qsgd_open(const u8* packed, u64 bytes, const float* norms, u64 count, u64 bucket, u32 bits, float* values,
                 i32* error) {
    const u32 of = (u32)bucket, s = (1u << (bits - 1)) - 1;
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 code = load_field(packed, bytes, i * bits, bits);
        const float norm = norms[(u32)i / of];
        bad |= code > 2 * s || !(norm >= 0.0f && finite_bits(norm));
        values[i] = qsgd_value(code, 1.0f, s) * norm;
    }
    if (bad) atomicMin(error, ERR_VALUE);
}

KERNEL qsgd_decode(const u8* codes, const float* norms, u64 count, u64 bucket, u32 s, float* values, i32* error) {
    const u32 of = (u32)bucket;
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const float norm = norms[(u32)i / of];
        bad |= codes[i] > 2 * s || !(norm >= 0.0f && finite_bits(norm));
        values[i] = qsgd_value(codes[i], 1.0f, s) * norm;
    }
    if (bad) atomicMin(error, ERR_VALUE);
}

// One level of the sum that kernels/quantize/quantize.cpp describes: 1024 terms become one, by a warp. A bucket has `each`
// terms, the last one what is left of `count`; its sums stand behind those of the bucket before.
template <class F>
__device__ void fold(u64 count, u64 each, double* sums, F term) {
    const u64 out_each = (each + 1023) / 1024, whole = (count - 1) / each, rest = count - whole * each;
    const u64 total = whole * out_each + (rest + 1023) / 1024;
    for (u64 o = grid_thread() / 32; o < total; o += grid_threads() / 32) {
        const u64 b = o / out_each, begin = b * each + o % out_each * 1024;
        u64 end = (b + 1) * each < count ? (b + 1) * each : count;
        end = begin + 1024 < end ? begin + 1024 : end;
        double sum = 0.0;
        for (u64 i = begin + lane_number(); i < end; i += 32) sum += term(i);
        for (u32 half = 16; half; half /= 2) sum += __shfl_down_sync(WHOLE_WARP, sum, half);
        if (lane_number() == 0) sums[o] = sum;
    }
}
KERNEL fold_magnitudes(const float* values, u64 count, u64 each, double* sums) {
    fold(count, each, sums, [=](u64 i) { return (double)__uint_as_float(magnitude_bits(values[i])); });
}
KERNEL fold_squares(const float* values, u64 count, u64 each, double* sums) {
    fold(count, each, sums, [=](u64 i) { return (double)values[i] * (double)values[i]; });
}
KERNEL fold_sums(const double* terms, u64 count, u64 each, double* sums) {
    fold(count, each, sums, [=](u64 i) { return terms[i]; });
}

// Unsigned words in the floats' order, and back.
__device__ __forceinline__ u32 ordered_bits(float x) {
    const u32 bits = bits_of(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(u32 word) {
    return __uint_as_float(word >> 31 ? word & 0x7FFFFFFFu : ~word);
}

// extremes: zeros; becomes each bucket's (complement of the least, largest) ordered bits.
KERNEL uniform_extremes(const float* values, u64 count, u64 bucket, u32* extremes) {
    each_chunk(count, bucket, [=](u64 b, u64 begin, u64 end) {
        u32 low = 0, high = 0;
        for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
            const u32 bits = ordered_bits(values[i]);
            low = ~bits > low ? ~bits : low;
            high = bits > high ? bits : high;
        }
        low = block_max(low);
        high = block_max(high);
        if (threadIdx.x == 0) {
            atomicMax(extremes + 2 * b, low);
            atomicMax(extremes + 2 * b + 1, high);
        }
    });
}

// ranges: (least, largest) a bucket; -0 becomes 0.
template <class Code>
__device__ void uniform_codes(const float* values, u64 count, u64 bucket, u32 s, const RoundingKey& key,
                              const u32* extremes, float* ranges, Code* codes) {
    const u64 buckets = (count + bucket - 1) / bucket;
    const u32 of = (u32)bucket;
    for (u64 b = grid_thread(); b < buckets; b += grid_threads()) {
        ranges[2 * b] = from_ordered(~extremes[2 * b]) + 0.0f;
        ranges[2 * b + 1] = from_ordered(extremes[2 * b + 1]) + 0.0f;
    }
    each_rounded(count, key, [=](u64 i, u32 word) {
        const u32 b = (u32)i / of;
        const float low = from_ordered(~extremes[2 * b]) + 0.0f, high = from_ordered(extremes[2 * b + 1]) + 0.0f;
        const double width = (double)high - (double)low;
        const double scale = width > 0.0 ? (double)s / width : 0.0;
        codes[i] = (Code)uniform_level(values[i], low, scale, s, uniform24(word));
    });
}
KERNEL uniform_encode8(const float* values, u64 count, u64 bucket, u32 seed, u32 parameter, u32 step, u32 rank,
                       const u32* extremes, float* ranges, u8* codes) {
    uniform_codes(values, count, bucket, 255, {seed, parameter, step, rank}, extremes, ranges, codes);
}
KERNEL uniform_encode16(const float* values, u64 count, u64 bucket, u32 seed, u32 parameter, u32 step, u32 rank,
                        const u32* extremes, float* ranges, u16* codes) {
    uniform_codes(values, count, bucket, 65535, {seed, parameter, step, rank}, extremes, ranges, codes);
}

template <class Code>
__device__ void uniform_values(const Code* codes, const float* ranges, u64 count, u64 bucket, u32 s, float* values,
                               i32* error) {
    const u32 of = (u32)bucket;
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const float low = ranges[2 * ((u32)i / of)], high = ranges[2 * ((u32)i / of) + 1];
        bad |= !(low <= high && finite_bits(low) && finite_bits(high));
        const double step = ((double)high - (double)low) / (double)s;
        values[i] = uniform_value(codes[i], low, step);
    }
    if (bad) atomicMin(error, ERR_VALUE);
}
KERNEL uniform_decode8(const u8* codes, const float* ranges, u64 count, u64 bucket, float* values, i32* error) {
    uniform_values(codes, ranges, count, bucket, 255, values, error);
}
KERNEL uniform_decode16(const u16* codes, const float* ranges, u64 count, u64 bucket, float* values, i32* error) {
    uniform_values(codes, ranges, count, bucket, 65535, values, error);
}

// Whole warps come here, so that the last word's lanes all vote.
KERNEL signs(const float* values, u64 count, u32* words) {
    const u64 total = (count + 31) / 32;
    for (u64 w = grid_thread() / 32; w < total; w += grid_threads() / 32) {
        const u64 i = 32 * w + lane_number();
        const u32 word = __ballot_sync(WHOLE_WARP, i < count && values[i] < 0.0f);
        if (lane_number() == 0) words[w] = word;
    }
}

__device__ __forceinline__ u32 sign_bit(const u8* signs, u64 i) { return (u32)(signs[i >> 3] >> (i & 7) & 1) << 31; }

KERNEL sign_decode(const u8* signs, const float* scales, u64 count, u64 bucket, float* values, i32* error) {
    const u32 of = (u32)bucket;
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const float scale = scales[(u32)i / of];
        bad |= !(scale >= 0.0f && finite_bits(scale));
        values[i] = __uint_as_float(bits_of(scale + 0.0f) | sign_bit(signs, i));
    }
    if (bad) atomicMin(error, ERR_VALUE);
}

KERNEL natural_exponents(const float* values, u64 count, u32 seed, u32 parameter, u32 step, u32 rank, u8* exponents) {
    each_rounded(count, {seed, parameter, step, rank}, [=](u64 i, u32 word) {
        exponents[i] = (u8)natural_exponent(bits_of(values[i]), word);
    });
}

KERNEL natural_decode(const u8* signs, const u8* exponents, u64 count, float* values, i32* error) {
    bool bad = false;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        bad |= exponents[i] > 254;
        values[i] = __uint_as_float((u32)exponents[i] << 23 | sign_bit(signs, i));
    }
    if (bad) atomicMin(error, ERR_VALUE);
}

// ---- Ternary digits, five to a byte: byte j holds digits j, m + j, ..., 4 m + j.

template <class F>
__device__ __forceinline__ void pack_trits(u64 count, u8* out, F digit) {
    const u64 m = (count + 4) / 5;
    for (u64 j = grid_thread(); j < m; j += grid_threads()) {
        u32 byte = 0;
        for (u64 i = j; i < 5 * m; i += m) byte = 3 * byte + (i < count ? digit(i) : 1u);
        out[j] = (u8)byte;
    }
}
KERNEL trits_pack(const u8* digits, u64 count, u8* out) {
    pack_trits(count, out, [=](u64 i) { return (u32)digits[i]; });
}
KERNEL three_lc_pack(const float* values, u64 count, float m, u8* out) {
    pack_trits(count, out, [=](u64 i) { return three_lc_digit(values[i], m); });
}

template <class F>
__device__ __forceinline__ void unpack_trits(const u8* in, u64 count, i32* error, F store) {
    const u64 m = (count + 4) / 5;
    bool bad = false;
    for (u64 j = grid_thread(); j < m; j += grid_threads()) {
        u32 byte = in[j], power = 81;
        bad |= byte > 242;
        for (u64 i = j; i < 5 * m; i += m, power /= 3) {
            const u32 digit = byte / power % 3;
            if (i < count) store(i, digit);
            else bad |= digit != 1;
        }
    }
    if (bad) atomicMin(error, ERR_VALUE);
}
KERNEL trits_unpack(const u8* in, u64 count, u8* digits, i32* error) {
    unpack_trits(in, count, error, [=](u64 i, u32 digit) { digits[i] = (u8)digit; });
}
KERNEL three_lc_unpack(const u8* in, u64 count, float m, float* values, i32* error) {
    unpack_trits(in, count, error, [=](u64 i, u32 digit) { values[i] = m * (float)((i32)digit - 1); });
}

// Runs of zero bytes. others: the places of the bytes that are not ALL_ZERO; rank[i]: how many stand before byte i.
const u32 ALL_ZERO = 121, LONGEST_RUN = 14;

KERNEL zero_runs_find(const u8* in, u64 count, u64* status, u64* found, u32* others, u32* rank) {
    each_place(
        count, 0, status, found, [=](u64 i) { return (u64)(in[i] != ALL_ZERO); },
        [=](u64 i, u64 place) {
            rank[i] = (u32)place;
            if (in[i] != ALL_ZERO) others[place] = (u32)i;
        });
}

// *size: the bytes written. A run of zeros is cut into fourteens from its first byte on.
KERNEL zero_runs_write(const u8* in, u64 count, const u64* found, const u32* others, const u32* rank, u64* status,
                       u64* size, u8* out) {
    const auto begins = [=](u64 i) {
        if (in[i] != ALL_ZERO) return 1ull;
        const u64 first = rank[i] ? (u64)others[rank[i] - 1] + 1 : 0;
        return (u64)((i - first) % LONGEST_RUN == 0);
    };
    each_place(count, 0, status, size, begins, [=](u64 i, u64 place) {
        if (!begins(i)) return;
        const u64 next = rank[i] < *found ? others[rank[i]] : count;  // for a zero: where its run ends
        const u64 run = next - i < LONGEST_RUN ? next - i : LONGEST_RUN;
        out[place] = in[i] != ALL_ZERO || run < 2 ? in[i] : (u8)(241 + run);
    });
}

KERNEL zero_runs_decode(const u8* in, u64 bytes, u64 count, u64* status, u64* size, u8* out) {
    const auto length = [=](u64 i) { return in[i] > 242 ? in[i] - 241ull : 1ull; };
    each_place(bytes, 0, status, size, length, [=](u64 i, u64 place) {
        for (u64 j = 0; j < length(i); ++j)
            if (place + j < count) out[place + j] = in[i] > 242 ? (u8)ALL_ZERO : in[i];
    });
}

// ---- Sixteen-bit values, of value/half.py: to nearest, ties to even, never up to infinity.

__device__ __forceinline__ u16 to_bfloat16(float x) {
    const u32 bits = bits_of(x), rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    return (u16)((rounded & 0x7FFF) == 0x7F80 ? rounded - 1 : rounded);
}
__device__ __forceinline__ u16 to_float16(float x) {
    const u32 sign = bits_of(x) >> 16 & 0x8000u, magnitude = magnitude_bits(x);
    if (magnitude >= 0x477FE000u) return (u16)(sign | 0x7BFFu);  // 65504 and more
    if (magnitude < 0x33000001u) return (u16)sign;               // up to half of the least denormal
    const u32 exponent = magnitude >> 23;
    // Normal: 13 bits are rounded off and the exponent goes from 127 to 15. Below 2^-14 more bits are.
    const u32 shift = exponent > 112 ? 13 : 126 - exponent;
    const u32 fraction = exponent > 112 ? magnitude - (112u << 23) : (magnitude & 0x7FFFFFu) | 0x800000u;
    const u32 half = 1u << (shift - 1), kept = fraction >> shift, rest = fraction & (2 * half - 1);
    return (u16)(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
}
KERNEL half_encode(const float* values, u64 count, u32 bfloat16, u16* section) {
    for (u64 i = grid_thread(); i <= count; i += grid_threads())
        section[i] = i == 0 ? (u16)bfloat16 : bfloat16 ? to_bfloat16(values[i - 1]) : to_float16(values[i - 1]);
}

KERNEL half_decode(const u16* section, u64 count, float* values, i32* error) {
    const u32 bfloat16 = section[0];
    bool bad = bfloat16 > 1;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 word = section[i + 1];
        u32 bits = word << 16;
        if (!bfloat16) {
            const u32 exponent = word >> 10 & 31, fraction = word & 1023;
            // A denormal is fraction * 2^-24, which float32 holds exactly.
            bits = exponent == 31  ? 0x7F800000u
                   : exponent == 0 ? bits_of((float)fraction * 5.9604644775390625e-08f)
                                   : (exponent + 112) << 23 | fraction << 13;
            bits |= (word & 0x8000u) << 16;
        }
        bad |= (bits & 0x7FFFFFFFu) >= 0x7F800000u;
        values[i] = __uint_as_float(bits);
    }
    if (bad) atomicMin(error, ERR_VALUE);
}

// float64 in float32, those beyond its range at its ends.
KERNEL narrow(const double* values, u64 count, float* out) {
    const double most = 3.4028234663852886e38;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const double x = values[i];
        out[i] = (float)(x > most ? most : x < -most ? -most : x);
    }
}

// ---- The scale of a bucket, out of the sum over its values.

__device__ __forceinline__ double bucket_size(u64 b, u64 count, u64 bucket) {
    return (double)((b + 1) * bucket <= count ? bucket : count - b * bucket);
}
KERNEL bucket_means(const double* sums, u64 buckets, u64 count, u64 bucket, float* means) {
    for (u64 b = grid_thread(); b < buckets; b += grid_threads()) means[b] = (float)(sums[b] / bucket_size(b, count, bucket));
}
KERNEL clip_scales(const float* scales, const double* squares, u64 buckets, u64 count, u64 bucket, double clip,
                   float* clipped) {
    for (u64 b = grid_thread(); b < buckets; b += grid_threads()) {
        const double limit = clip * sqrt(squares[b] / bucket_size(b, count, bucket)), most = 3.4028234663852886e38;
        const float least = (float)(limit < most ? limit : most);
        clipped[b] = least < scales[b] ? least : scales[b];
    }
}
