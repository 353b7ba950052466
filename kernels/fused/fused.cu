// Rice, and QSGD or signs, of many containers at once: the CUDA side of the decoder in fused.cpp. The containers of all
// ranks take one set of launches, and the host reads none of their headers. Each container has `each` blocks of every
// grid but the first and the sums'.
#include "arrays/sum.cuh"
#include "buckets/buckets.h"
#include "qsgd/qsgd.cuh"
#include "rice/blocks.cuh"
#include "rice/rice.cuh"
#include "sections/checksum.cuh"
#include "sign/sign.h"

// What the containers have in common. bits: of QSGD, or 1 for signs. bucket_size: 0 for all values.
struct Form {
    u32 form, bits;
    u64 bucket_size;

    __device__ u64 bucket(u64 count) const { return bucket_size ? bucket_size : count; }
};

// One container. Places are bytes of `data`, words of `scratch`, and elements of `highs`, `indices` and `values`.
struct Job {
    u64 at, bytes, salt;           // the container
    u64 numel, count;              // of its tensor, and of its support
    u64 rice, rice_bytes;          // the index section
    u64 norms, codes, code_bytes;  // in the value section
    u64 first;                     // of its elements
    u64 found;                     // | ones | end | checksum u32, blocks u32 | place of the highs, with rice_blocks |
    u64 of_highs, of_join;         // status words
    u64 first_block, of_places;    // with rice_blocks: of the elements of `places`, and status words
};

// What the host reads. bad: a header is not as an encoder writes it, which fused_jobs finds, so that no other kernel
// runs. error: a section or a checksum is not; the sums do not run then.
struct State {
    u64 bad, own;  // own: bytes of this rank's containers
    i32 error;
};

// A varint, as frame.py writes them, in data[*at .. size), at most 9 bytes. *at moves past it. Returns whether it is one.
__device__ inline bool read_varint(const u8* data, u64 size, u64* at, u64* number) {
    *number = 0;
    for (u32 place = 0; place < 9 && *at < size; ++place) {
        const u8 byte = data[(*at)++];
        *number |= (u64)(byte & 127) << 7 * place;
        if (byte < 128) return byte || !place;
    }
    return false;
}

// The jobs of `ranks * tensors` containers in a row. table: | elements | salt | of each tensor. One thread, since a
// container begins where the one before it ends. The arrays have room for all elements, words and blocks that `size`
// bytes can be of: see ops/fused.py.
KERNEL fused_jobs(const u8* data, u64 size, u32 ranks, u32 tensors, const u64* table, u32 form, u32 bits,
                  u64 bucket_size, u32 rank, u64* jobs, State* state) {
    if (threadIdx.x) return;
    const Form of = {form, bits, bucket_size};
    u64 at = 0, elements = 0, words = 0, blocks = 0, own = 0;
    for (u32 number = 0; number < ranks * tensors; ++number) {
        const u64* tensor = table + 2 * (number % tensors);
        u64 next = at + 5, count, rice_bytes, value_bytes;
        const bool read = next <= size && data[at + 4] == of.form && read_varint(data, size, &next, &count) &&
                          read_varint(data, size, &next, &rice_bytes) && read_varint(data, size, &next, &value_bytes);
        const u64 left = size - next;
        // An empty support, too, is left to the host: it is rare. An index takes a bit at least.
        if (!read || next > size || count == 0 || count > tensor[0] || rice_bytes > left ||
            8 * rice_bytes < count || value_bytes > left - rice_bytes) {
            state->bad = 1;
            return;
        }
        const u64 norms = next + rice_bytes + 8, code_bytes = (count * bits + 7) / 8;
        const u64 codes = norms + 4 * bucket_count(count, of.bucket(count));
        const u64 end = next + rice_bytes + value_bytes;
        if (end != codes + code_bytes) {
            state->bad = 1;
            return;
        }
        const u64 of_highs = words + 4, of_join = of_highs + (rice_bytes + 8 * THREADS - 1) / (8 * THREADS) + 1;
        const u64 of_places = of_join + (count + THREADS - 1) / THREADS + 1;
        ((Job*)jobs)[number] = Job{at,    end - at,   tensor[1], tensor[0], count,    next,    rice_bytes, norms,
                                   codes, code_bytes, elements,  words,     of_highs, of_join, blocks,     of_places};
        words = of_places + (rice_block_count(count) + THREADS - 1) / THREADS + 1;
        elements += (count + 3) / 4 * 4;  // so that four values are stored at once
        blocks += rice_block_count(count);
        if (number / tensors == rank) own += end - at;
        at = end;
    }
    if (at != size) state->bad = 1;
    state->own = own;
}

// This block's job, its number among the blocks of the job, and its first thread there.
__device__ __forceinline__ const Job& job_of(const u64* jobs, u64 each) {
    return ((const Job*)jobs)[blockIdx.x / each];
}
__device__ __forceinline__ u64 job_thread(u64 each) { return blockIdx.x % each * THREADS + threadIdx.x; }

KERNEL fused_highs(const u8* data, const u64* jobs, u64 each, u64* scratch, u32* highs, const State* state) {
    if (state->bad) return;
    const Job& job = job_of(jobs, each);
    find_rice_highs(data + job.rice, job.rice_bytes, job.count, scratch + job.of_highs, highs + job.first,
                    scratch + job.found);
}

// Sets the error if a section is broken, as rice_join.
KERNEL fused_join(const u8* data, const u64* jobs, u64 each, u64* scratch, const u32* highs, u32* indices,
                  State* state) {
    if (state->bad) return;
    const Job& job = job_of(jobs, each);
    if (data[job.rice] > 31 || scratch[job.found] < job.count) {
        if (job_thread(each) == 0) atomicMin(&state->error, ERR_TRUNCATED);
        return;
    }
    join_rice(data + job.rice, job.rice_bytes, job.count, job.numel, highs + job.first, scratch + job.of_join,
              scratch + job.found + 1, indices + job.first, &state->error);
}

// As the three kernels of rice/blocks.cu, in place of the two above.
KERNEL fused_places(const u8* data, const u64* jobs, u64 each, u64* scratch, u64* places, State* state) {
    if (state->bad) return;
    const Job& job = job_of(jobs, each);
    read_rice_places(data + job.rice, job.rice_bytes, job.count, scratch + job.of_places, places + job.first_block,
                     scratch + job.found + 3, &state->error);
}

KERNEL fused_blocks_highs(const u8* data, const u64* jobs, u64 each, u64* scratch, u32* highs, const State* state) {
    if (state->bad) return;
    const Job& job = job_of(jobs, each);
    find_rice_blocks_highs(data + job.rice, job.rice_bytes, job.count, scratch[job.found + 3], scratch + job.of_highs,
                           highs + job.first, scratch + job.found);
}

KERNEL fused_blocks_join(const u8* data, const u64* jobs, u64 each, u64* scratch, const u64* places, const u32* highs,
                         u32* indices, State* state) {
    if (state->bad) return;
    const Job& job = job_of(jobs, each);
    if (scratch[job.found] < job.count) {
        if (job_thread(each) == 0) atomicMin(&state->error, ERR_TRUNCATED);
        return;
    }
    join_rice_blocks(data + job.rice, job.rice_bytes, job.count, job.numel, places + job.first_block,
                     scratch[job.found + 3], highs + job.first, scratch + job.of_join, scratch + job.found + 1,
                     indices + job.first, &state->error);
}

// The signs of a job: four values at a time. Returns whether a scale is negative or not finite.
template <class N>
__device__ bool open_signs(const u8* signs, u64 count, u32 bucket_size, u64 thread, u64 threads, float* values,
                           N scale) {
    bool bad = false;
    for (u64 i = 4 * thread; i < count; i += 4 * threads) {
        Four<float> four;
        for (u32 j = 0; j < 4 && i + j < count; ++j) {
            const float of = scale((u32)(i + j) / bucket_size);
            bad |= !valid_scale(of);
            four.x[j] = __uint_as_float(bits_of(of + 0.0f) | sign_bit(signs, i + j));  // -0.0 becomes 0.0
        }
        store_four(values, i, count, four);
    }
    return bad;
}

// The values, the settings before them, and the checksum of the whole container. Sections begin at any byte, and so do
// the norms.
KERNEL fused_values(const u8* data, const u64* jobs, u64 each, u32 bits, u64 bucket_size, u64* scratch, float* values,
                    State* state) {
    if (state->bad) return;
    const Form of = {0, bits, bucket_size};
    const Job& job = job_of(jobs, each);
    const u8 *norms = data + job.norms, *codes = data + job.codes;
    const u64 norm_bytes = job.codes - job.norms, code_bytes = job.code_bytes, of_bucket = of.bucket(job.count);
    const auto norm = [=](u32 b) { return __uint_as_float(load_field(norms, norm_bytes, 32ull * b, 32)); };
    bool bad;
    if (bits == 1) {
        bad = open_signs(codes, job.count, (u32)of_bucket, job_thread(each), each * THREADS, values + job.first, norm);
    } else {
        const auto four_codes = [=](u64 i) { return load_fields<u8>(codes, code_bytes, i, bits); };
        bad = qsgd_open(job.count, (u32)of_bucket, qsgd_levels(bits), job_thread(each), each * THREADS,
                        values + job.first, four_codes, norm);
    }
    if (job_thread(each) == 0) {
        bad |= !zeros_follow(codes, job.count * bits);
        bad |= load64(norms - 8, norm_bytes + 8, 0) != ((bits == 1 ? 0 : bits) | of_bucket << 32);
    }
    if (bad) atomicMin(&state->error, ERR_VALUE);

    check_one_of_many(data + job.at, job.bytes, (u32)job.salt, blockIdx.x % each, each,
                      (u32*)(scratch + job.found + 2), &state->error);
}

// Of up to eight ranks, the containers of one tensor: those from number `first` on, each `stride` behind the other.
// starts: places of `indices` and `values`, so that fused_sum need not look at the jobs. They are zeros after an error:
// fused_sum loads them before it knows of one.
KERNEL fused_sum_starts(u32 parts, const u64* jobs, u32 first, u32 stride, const u32* indices, u64 tiles, u32* starts,
                        const State* state) {
    const u32 p = blockIdx.x % parts;
    if (state->bad || state->error) {
        for (u64 t = (u64)(blockIdx.x / parts) * THREADS + threadIdx.x; t <= tiles; t += gridDim.x / parts * THREADS)
            starts[p * (tiles + 1) + t] = 0;
        return;
    }
    const Job& job = ((const Job*)jobs)[first + p * stride];
    sum_starts(parts, p, indices + job.first, job.count, job.first, tiles, starts);
}

KERNEL fused_sum(float* out, u64 n, float scale, u32 more, u32 parts, const u32* indices, const float* values,
                 const u32* starts, const State* state) {
    Part<float> part[8];
#pragma unroll
    for (u32 q = 0; q < 8; ++q) part[q] = Part<float>{indices, values, 0};
    sum<false>(out, n, scale, more, parts, part, starts, [=] { return (state->bad | (u32)state->error) != 0; });
}
