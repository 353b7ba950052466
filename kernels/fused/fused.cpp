// Top-k, Rice and QSGD in one call: from a gradient to its container, and from the messages of all ranks to sums. A
// message has the containers of several tensors. It calls the kernels of the three codecs, so the bytes and the sums
// are those of the composed way; what it saves is two dozen calls from Python for each container.
//
// docs/container.md draws the container, of version 2; rice.cpp and qsgd.h draw the sections:
//
//     | checksum u32 | form u8 | count | index bytes | value bytes | Rice section | QSGD section |
//
// The Rice section is one of `rice` or, if Settings::blocks is 1, one of `rice_blocks`.
#include <algorithm>
#include <memory>
#include <new>

#include "bits/bits.h"
#include "buckets/buckets.h"
#include "common/cpu.h"
#include "qsgd/qsgd.h"
#include "rice/rice.h"
#include "sections/varint.h"
#include "select/select.h"

// The kernels of the composed way.
DR_API u32 dr_rice_parameter(const u32* indices, u64 count, u64 numel, u64* bytes);
DR_API void dr_rice_encode(const u32* indices, u64 count, u32 b, u8* out);
DR_API i64 dr_rice_decode(const u8* in, u64 bytes, u64 count, u32 b, u64 numel, u32* indices);
DR_API u64 dr_rice_blocks_plan(const u32* indices, u64 count, u8* parameters);
DR_API void dr_rice_blocks_encode(const u32* indices, u64 count, const u8* parameters, u8* out);
DR_API i64 dr_rice_blocks_decode(const u8* in, u64 bytes, u64 count, u64 numel, u8* parameters, u32* indices);
DR_API void dr_bucket_norms(const float* values, u64 count, u64 bucket_size, int l2, float* norms);
DR_API void dr_qsgd_quantize(const float* values, u64 count, u64 bucket_size, u32 s, u32 seed, u32 parameter, u32 step,
                             u32 rank, const float* norms, u8* codes);
DR_API i64 dr_qsgd_dequantize(const u8* codes, const float* norms, u64 count, u64 bucket_size, u32 s, float* values);
DR_API void dr_pack8(const u8* values, u64 count, u32 width, u8* out);
DR_API i64 dr_unpack8(const u8* in, u64 bytes, u64 count, u32 width, u8* values);
DR_API void dr_sum_f32(float* out, u64 n, const u64* indices, const u64* values, const u64* counts, int count,
                       double scale, int threads);
DR_API u32 dr_checksum(const u8* bytes, u64 size, u64 kept);

namespace {

// What all containers of a message have in common.
struct Settings {
    u32 form;         // of the header
    u32 bits;         // of a QSGD code
    u64 bucket_size;  // values that share a norm
    u32 l2;           // the norm: 0 the largest magnitude, 1 l2
    u32 blocks;       // a Rice parameter for: 0 the whole section, 1 each block of gaps
};

// One tensor of a message. The same in ops/fused.py.
struct Tensor {
    u64 begin, end;  // its elements of the vector
    u64 salt;        // of the checksum, below 2^32
};

const u64 QSGD_HEADER = 8, FIXED_HEADER = 5, MOST_HEADER = FIXED_HEADER + 3 * 9;

// Memory for one container's elements, not filled with zeros.
struct Elements {
    std::unique_ptr<u32[]> indices;
    std::unique_ptr<float[]> values, norms;
    std::unique_ptr<u8[]> codes;

    Elements(u64 count, u64 bucket_size)
        : indices(new u32[count]),
          values(new float[count]),
          norms(new float[bucket_count(count, bucket_size)]),
          codes(new u8[count]) {}
};

// One container of other ranks, decoded.
struct Part {
    std::unique_ptr<u32[]> indices;
    std::unique_ptr<float[]> values;
    u64 count = 0;
};

// Decodes the container at `in`; nullptr if it is not one of these settings, else its end.
const u8* decode(const u8* in, const u8* end, const Tensor& tensor, const Settings& settings, Part& part) {
    const u64 n = tensor.end - tensor.begin, size = settings.bucket_size;
    if (end - in < (i64)FIXED_HEADER || in[4] != settings.form) return nullptr;
    const u8* at = in + FIXED_HEADER;
    u64 count, index_bytes, value_bytes;
    if (!take_varint(at, end, count) || !take_varint(at, end, index_bytes) || !take_varint(at, end, value_bytes))
        return nullptr;
    const u64 left = (u64)(end - at);
    if (count > n || index_bytes > left || value_bytes > left - index_bytes) return nullptr;
    // Before memory is allocated: the sizes of the sections bound the count.
    const u64 buckets = bucket_count(count, size);
    if (value_bytes != QSGD_HEADER + 4 * buckets + field_bytes(count, settings.bits)) return nullptr;
    if (count ? index_bytes == 0 || index_bytes * 8 < count : index_bytes != 0) return nullptr;
    const u8 *values_at = at + index_bytes, *next = values_at + value_bytes;
    u32 checksum;
    std::memcpy(&checksum, in, 4);
    if (dr_checksum(in, (u64)(next - in), 0) + (u32)tensor.salt != checksum) return nullptr;
    const u32 head[2] = {settings.bits, (u32)size};
    if (std::memcmp(values_at, head, QSGD_HEADER)) return nullptr;

    Elements elements(count, size);
    // The codes come later, so their memory serves for the parameters.
    if (count && (settings.blocks ? dr_rice_blocks_decode(at, index_bytes, count, n, elements.codes.get(),
                                                          elements.indices.get())
                                  : dr_rice_decode(at + 1, index_bytes - 1, count, at[0], n, elements.indices.get())))
        return nullptr;
    const u8* codes_at = values_at + QSGD_HEADER + 4 * buckets;
    std::memcpy(elements.norms.get(), values_at + QSGD_HEADER, 4 * buckets);
    if (dr_unpack8(codes_at, (u64)(next - codes_at), count, settings.bits, elements.codes.get())) return nullptr;
    if (dr_qsgd_dequantize(elements.codes.get(), elements.norms.get(), count, size, qsgd_levels(settings.bits),
                           elements.values.get()))
        return nullptr;
    part = {std::move(elements.indices), std::move(elements.values), count};
    return next;
}

}  // namespace

// The most bytes that dr_fused_encode writes for `kept` of n elements.
DR_API u64 dr_fused_bound(u64 n, u64 kept, const Settings* settings) {
    const u64 of_indices = !kept ? 0 : settings->blocks ? rice_blocks_bound(kept, n) : rice_bound(kept, n);
    return MOST_HEADER + of_indices + QSGD_HEADER +
           4 * bucket_count(kept, settings->bucket_size) + field_bytes(kept, settings->bits);
}

// out[n] = residual + the gradient in `pieces` pieces of memory; then the container of the `kept` elements of largest
// magnitude is written to `packed`, and what the receivers will decode is subtracted from `out`, which is the residual, or
// memory apart from it. With a null residual, the gradient is one piece, and nothing but the container is written. Without
// `finite`, NaN and infinity in the gradient are searched for.
//
// Returns the bytes written; ERR_NOT_FINITE: the residual has not changed; -1: memory is short, and a part of `out` may
// have changed.
DR_API i64 dr_fused_encode(const float* residual, float* out, const u64* addresses, const u64* ends, u64 pieces, u64 n,
                           u64 kept, const Settings* settings, u32 salt, u32 seed, u32 parameter, u32 step, u32 rank,
                           int finite, int threads, u8* packed) {
    const u64 size = settings->bucket_size;
    const u32 bits = settings->bits, levels = qsgd_levels(bits);
    Pieces<float> grads{addresses, ends, pieces};
    const float* dense = residual;
    if (!residual) {
        dense = grads.at(0), grads.count = 0;
    } else if (out == residual && !finite) {  // before it changes
        if (!grads.finite(threads)) return ERR_NOT_FINITE;
        finite = 1;
    }
    try {
        Elements elements(kept, size);
        u32* indices = elements.indices.get();
        float *values = elements.values.get(), *norms = elements.norms.get();
        u8* codes = elements.codes.get();
        const i64 selected = topk_into(dense, grads, out, n, kept, finite != 0, indices, values, threads);
        if (selected < 0) return selected;
        const u64 count = (u64)selected, buckets = bucket_count(count, size);
        u64 index_bytes = 0;
        u32 b = 0;
        if (count && settings->blocks)
            index_bytes = dr_rice_blocks_plan(indices, count, codes);
        else if (count)
            b = dr_rice_parameter(indices, count, n, &index_bytes);

        u8* at = packed + 4;
        *at++ = (u8)settings->form;
        at = put_varint(put_varint(at, count), index_bytes);
        at = put_varint(at, QSGD_HEADER + 4 * buckets + field_bytes(count, bits));
        if (count && settings->blocks) {
            dr_rice_blocks_encode(indices, count, codes, at);
        } else if (count) {
            *at = (u8)b;
            dr_rice_encode(indices, count, b, at + 1);
        }
        at += index_bytes;
        const u32 head[2] = {bits, (u32)size};
        std::memcpy(at, head, QSGD_HEADER);
        at += QSGD_HEADER;
        dr_bucket_norms(values, count, size, (int)settings->l2, norms);
        dr_qsgd_quantize(values, count, size, levels, seed, parameter, step, rank, norms, codes);
        std::memcpy(at, norms, 4 * buckets);
        at += 4 * buckets;
        dr_pack8(codes, count, bits, at);
        at += field_bytes(count, bits);
        if (residual) {  // `out` has the values, and is not read again for them
            std::vector<float> sent(std::min(size, count));
            for (u64 begin = 0, b = 0; begin < count; begin += size, ++b) {
                const u64 end = run_end(begin, size, count);
                dr_qsgd_dequantize(codes + begin, norms + b, end - begin, size, levels, sent.data());
                for (u64 i = begin; i < end; ++i) out[indices[i]] = values[i] - sent[i - begin];
            }
        }
        std::memset(packed, 0, 4);
        const u32 checksum = dr_checksum(packed, (u64)(at - packed), 0) + salt;
        std::memcpy(packed, &checksum, 4);
        return at - packed;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

// out[tensor] = scale * (the sum of all ranks' containers of the tensor, in rank order), for each tensor.
// data: the first rank's containers, in the order of the tensors, then the next rank's. *own: the bytes of rank `rank`.
//
// Returns 0; -1 if any byte is not as dr_fused_encode writes it, or if memory is short. `out` is unchanged then, and the
// composed way finds out what is wrong, or decodes what only it can decode.
DR_API i64 dr_fused_decode(const u8* data, u64 size, u64 ranks, const Tensor* tensors, u64 count,
                           const Settings* settings, float* out, double scale, u64 rank, u64* own, int threads) {
    try {
        std::vector<Part> parts(ranks * count);
        const u8 *at = data, *end = data + size;
        for (u64 r = 0; r < ranks; ++r) {
            const u8* begin = at;
            for (u64 t = 0; t < count; ++t) {
                at = decode(at, end, tensors[t], *settings, parts[t * ranks + r]);
                if (!at) return -1;
            }
            if (r == rank) *own = (u64)(at - begin);
        }
        if (at != end) return -1;
        std::vector<u64> indices(ranks), values(ranks), counts(ranks);
        for (u64 t = 0; t < count; ++t) {
            for (u64 r = 0; r < ranks; ++r) {
                const Part& part = parts[t * ranks + r];
                indices[r] = (u64)part.indices.get(), values[r] = (u64)part.values.get(), counts[r] = part.count;
            }
            const u64 n = tensors[t].end - tensors[t].begin;
            dr_sum_f32(out + tensors[t].begin, n, indices.data(), values.data(), counts.data(), (int)ranks, scale,
                       threads);
        }
    } catch (const std::bad_alloc&) {
        return -1;
    }
    return 0;
}
