// Rice and QSGD of many containers at once: the CUDA side of the decoder in fused.cpp. The containers of all ranks take
// one set of launches. Each container has `each` blocks of every grid.
#include "buckets/buckets.h"
#include "qsgd/qsgd.cuh"
#include "rice/blocks.cuh"
#include "rice/rice.cuh"
#include "sections/checksum.cuh"

// One container, as the host has read its header. Places are bytes of `data`, words of `scratch`, and elements of
// `highs`, `indices` and `values`. The same in ops/fused.py.
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

// This block's job, its number among the blocks of the job, and its first thread there.
__device__ __forceinline__ const Job& job_of(const u64* jobs, u64 each) {
    return ((const Job*)jobs)[blockIdx.x / each];
}
__device__ __forceinline__ u64 job_thread(u64 each) { return blockIdx.x % each * THREADS + threadIdx.x; }

KERNEL fused_highs(const u8* data, const u64* jobs, u64 each, u64* scratch, u32* highs) {
    const Job& job = job_of(jobs, each);
    find_rice_highs(data + job.rice, job.rice_bytes, job.count, scratch + job.of_highs, highs + job.first,
                    scratch + job.found);
}

// Sets *error if a section is broken, as rice_join.
KERNEL fused_join(const u8* data, const u64* jobs, u64 each, u64* scratch, const u32* highs, u32* indices, i32* error) {
    const Job& job = job_of(jobs, each);
    if (data[job.rice] > 31 || scratch[job.found] < job.count) {
        if (job_thread(each) == 0) atomicMin(error, ERR_TRUNCATED);
        return;
    }
    join_rice(data + job.rice, job.rice_bytes, job.count, job.numel, highs + job.first, scratch + job.of_join,
              scratch + job.found + 1, indices + job.first, error);
}

// As the three kernels of rice/blocks.cu, in place of the two above.
KERNEL fused_places(const u8* data, const u64* jobs, u64 each, u64* scratch, u64* places, i32* error) {
    const Job& job = job_of(jobs, each);
    read_rice_places(data + job.rice, job.rice_bytes, job.count, scratch + job.of_places, places + job.first_block,
                     scratch + job.found + 3, error);
}

KERNEL fused_blocks_highs(const u8* data, const u64* jobs, u64 each, u64* scratch, u32* highs) {
    const Job& job = job_of(jobs, each);
    find_rice_blocks_highs(data + job.rice, job.rice_bytes, job.count, scratch[job.found + 3], scratch + job.of_highs,
                           highs + job.first, scratch + job.found);
}

KERNEL fused_blocks_join(const u8* data, const u64* jobs, u64 each, u64* scratch, const u64* places, const u32* highs,
                         u32* indices, i32* error) {
    const Job& job = job_of(jobs, each);
    if (scratch[job.found] < job.count) {
        if (job_thread(each) == 0) atomicMin(error, ERR_TRUNCATED);
        return;
    }
    join_rice_blocks(data + job.rice, job.rice_bytes, job.count, job.numel, places + job.first_block,
                     scratch[job.found + 3], highs + job.first, scratch + job.of_join, scratch + job.found + 1,
                     indices + job.first, error);
}

// The values, and the checksum of the whole container. Sections begin at any byte, and so do the norms.
KERNEL fused_values(const u8* data, const u64* jobs, u64 each, u32 bits, u64 bucket_size, u64* scratch, float* values,
                    i32* error) {
    const Job& job = job_of(jobs, each);
    const u8 *norms = data + job.norms, *codes = data + job.codes;
    const u64 norm_bytes = job.codes - job.norms, code_bytes = job.code_bytes;
    bool bad = qsgd_open(
        job.count, (u32)bucket_size, qsgd_levels(bits), job_thread(each), each * THREADS, values + job.first,
        [=](u64 i) { return load_fields<u8>(codes, code_bytes, i, bits); },
        [=](u32 b) { return __uint_as_float(load_field(norms, norm_bytes, 32ull * b, 32)); });
    if (job_thread(each) == 0) bad |= !zeros_follow(codes, job.count * bits);
    if (bad) atomicMin(error, ERR_VALUE);

    check_one_of_many(data + job.at, job.bytes, (u32)job.salt, blockIdx.x % each, each,
                      (u32*)(scratch + job.found + 2), error);
}
