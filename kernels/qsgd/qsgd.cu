// QSGD: the CUDA side of kernels/qsgd/qsgd.cpp. An element's index is below 2^32, so 32-bit divisions find its bucket.
#include "bits/bits.h"
#include "buckets/buckets.cuh"
#include "qsgd/qsgd.cuh"
#include "rounding/rounding.cuh"

KERNEL qsgd_quantize(const float* values, u64 count, u64 bucket_size, u32 s, u32 seed, u32 parameter, u32 step,
                     u32 rank, const float* norms, u8* codes) {
    const u32 size = (u32)bucket_size;
    each_rounded(count, {seed, parameter, step, rank}, [=](u64 i, u32 word) {
        codes[i] = (u8)qsgd_level(values[i], norms[(u32)i / size], s, uniform24(word));
    });
}

// Largest magnitudes and codes in one launch. A warp takes a bucket, and each lane four elements at a time, so the
// bucket size must be a multiple of four.
KERNEL qsgd_norms_and_codes(const float* values, u64 count, u64 bucket_size, u32 s, u32 seed, u32 parameter, u32 step,
                            u32 rank, float* norms, u8* codes) {
    const RoundingKey key = {seed, parameter, step, rank};
    const u64 buckets = bucket_count(count, bucket_size);
    for (u64 b = grid_thread() / 32; b < buckets; b += grid_threads() / 32) {
        const u64 begin = b * bucket_size, end = run_end(begin, bucket_size, count);
        const float norm = largest_magnitude(values, begin, end);
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

// The whole section in one launch, as 32-bit words. The codes of a bucket must fill whole words.
//
//     words:    | header 2 | norms [buckets] | codes, `bits` bits each |
//     a turn:   | lane 0: 4 codes | lane 1: 4 codes | ... | lane 31: 4 codes |      128 codes = 4 * bits words
//
// Lane w then assembles word w of the turn from the lanes that hold its bits.
KERNEL qsgd_encode_section(const float* values, u64 count, u64 bucket_size, u32 bits, u32 seed, u32 parameter, u32 step,
                           u32 rank, u64 header, u32* section) {
    const RoundingKey key = {seed, parameter, step, rank};
    const u32 s = qsgd_levels(bits), lane_bits = 4 * bits;
    const u64 buckets = bucket_count(count, bucket_size), words = (count * bits + 31) / 32;
    u32* codes = section + 2 + buckets;
    if (grid_thread() == 0) section[0] = (u32)header, section[1] = (u32)(header >> 32);
    for (u64 b = grid_thread() / 32; b < buckets; b += grid_threads() / 32) {
        const u64 begin = b * bucket_size, end = run_end(begin, bucket_size, count);
        const float norm = largest_magnitude(values, begin, end);
        if (lane_number() == 0) section[2 + b] = __float_as_uint(norm);
        for (u64 base = begin; base < end; base += 128) {
            const u64 i = base + 4 * lane_number();
            u32 packed = 0;
            if (i < end) {
                u32 random[4];
                rounding_words(key, i / 4, random);
#pragma unroll
                for (u32 j = 0; j < 4; ++j)
                    if (i + j < end) packed |= qsgd_level(values[i + j], norm, s, uniform24(random[j])) << (j * bits);
            }
            // Bit p of the turn's codes is bit p % lane_bits of lane p / lane_bits.
            const u32 first = 32 * lane_number() / lane_bits, shift = 32 * lane_number() % lane_bits;
            u64 word = 0;
            for (u32 l = 0; l * lane_bits < 32 + lane_bits; ++l) {
                const u32 other = __shfl_sync(WHOLE_WARP, packed, (first + l) & 31);
                if (first + l < 32 && l * lane_bits < 32 + shift)
                    word |= l ? (u64)other << (l * lane_bits - shift) : (u64)(other >> shift);
            }
            const u64 to = base * bits / 32 + lane_number();
            if (lane_number() < lane_bits && to < words && 32 * to < end * bits) codes[to] = (u32)word;
        }
    }
}

// The values of the codes of a section, `bits` bits each.
KERNEL qsgd_decode_section(const u8* packed, u64 bytes, const float* norms, u64 count, u64 bucket_size, u32 bits,
                           float* values, i32* error) {
    bool bad = qsgd_open(
        count, (u32)bucket_size, qsgd_levels(bits), grid_thread(), grid_threads(), values,
        [=](u64 i) { return load_fields<u8>(packed, bytes, i, bits); }, [=](u32 b) { return norms[b]; });
    if (grid_thread() == 0) bad |= !zeros_follow(packed, count * bits);
    if (bad) atomicMin(error, ERR_VALUE);
}

KERNEL qsgd_dequantize(const u8* codes, const float* norms, u64 count, u64 bucket_size, u32 s, float* values,
                       i32* error) {
    const bool bad = qsgd_open(
        count, (u32)bucket_size, s, grid_thread(), grid_threads(), values,
        [=](u64 i) { return load_fields<u8>(codes, count, i, 8); }, [=](u32 b) { return norms[b]; });
    if (bad) atomicMin(error, ERR_VALUE);
}

// A warp computes a bucket.
KERNEL qsgd_fit_norms(const float* values, const u8* codes, u64 count, u64 bucket_size, u32 s, const float* norms,
                      float* fitted) {
    const u64 buckets = bucket_count(count, bucket_size);
    for (u64 b = grid_thread() / 32; b < buckets; b += grid_threads() / 32) {
        const u64 begin = b * bucket_size, end = run_end(begin, bucket_size, count);
        double squares = 0.0;  // of integers: exact in any order
        const double products = sum_in_lanes(begin, end, [&](u64 i) {
            const i32 c = (i32)codes[i] - (i32)s;
            squares += (double)(c * c);
            return (double)values[i] * (double)c;
        });
        for (u32 half = 16; half; half /= 2) squares += __shfl_down_sync(WHOLE_WARP, squares, half);
        if (lane_number() == 0) fitted[b] = fitted_norm(norms[b], products, squares, s);
    }
}
