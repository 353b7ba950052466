// What the entropy coders share on the device: see chunks.cuh for join_chunks.
#include "entropy/chunks.cuh"

const u32 OF_THREAD = 16, MAPS = OF_THREAD * THREADS, OF_GROUP = 16;  // maps of a thread, of all; runs of a group
const u64 ENTRY = (1u << ENTRY_BITS) - 1;

// Where `now`, | words << ENTRY_BITS | entry |, comes to by way of a map of its entry.
__device__ __forceinline__ u64 passed(u64 now, u64 map) {
    return ((now >> ENTRY_BITS) + (map >> ENTRY_BITS)) << ENTRY_BITS | (map & ENTRY);
}
__device__ __forceinline__ u64 map_of(u64 exit) { return exit >> 32 << ENTRY_BITS | (exit & ENTRY); }

// starts[chunk]: | number of the chunk's first word << ENTRY_BITS | entry |. *words: of the whole string.
//
// One block. The chunks are divided into runs, and these into groups. A thread follows OF_THREAD entries of runs to the
// runs' ends, so that as many loads are under way; then a thread for each entry of each group follows it over the runs.
// One thread follows the true entry from group to group, one for each group from run to run, and at last one for each
// run finds its chunks' true entries.
KERNEL join_chunks(const u64* exits, u32 entries, u64 chunks, u64* starts, u64* words) {
    __shared__ u64 maps[MAPS], of_groups[MAPS / OF_GROUP + (1u << ENTRY_BITS)];  // the last group may be short
    __shared__ u64 begins[THREADS], group_begins[THREADS / OF_GROUP];
    const u32 runs = MAPS / entries < THREADS ? MAPS / entries : THREADS, groups = (runs + OF_GROUP - 1) / OF_GROUP;
    const u64 size = (chunks + runs - 1) / runs;
    u64 now[OF_THREAD];
#pragma unroll
    for (u32 j = 0; j < OF_THREAD; ++j) now[j] = (threadIdx.x + j * THREADS) % entries;
    for (u64 step = 0; step < size; ++step)
#pragma unroll
        for (u32 j = 0; j < OF_THREAD; ++j) {
            const u32 run = (threadIdx.x + j * THREADS) / entries;
            const u64 chunk = run * size + step;
            if (run < runs && chunk < chunks)
                now[j] = passed(now[j], map_of(exits[chunk * entries + (now[j] & ENTRY)]));
        }
#pragma unroll
    for (u32 j = 0; j < OF_THREAD; ++j) maps[threadIdx.x + j * THREADS] = now[j];
    __syncthreads();
    const auto follow = [&](u32 group, u64 at, bool keep) {
        for (u32 run = group * OF_GROUP; run < (group + 1) * OF_GROUP && run < runs; ++run) {
            if (keep) begins[run] = at;
            at = passed(at, maps[run * entries + (at & ENTRY)]);
        }
        return at;
    };
    for (u32 i = threadIdx.x; i < groups * entries; i += THREADS)
        of_groups[i] = follow(i / entries, i % entries, false);
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 at = 0;
        for (u32 group = 0; group < groups; ++group) {
            group_begins[group] = at;
            at = passed(at, of_groups[group * entries + (at & ENTRY)]);
        }
        *words = at >> ENTRY_BITS;
    }
    __syncthreads();
    if (threadIdx.x < groups) follow(threadIdx.x, group_begins[threadIdx.x], true);
    __syncthreads();
    if (threadIdx.x >= runs) return;
    u64 at = begins[threadIdx.x];
    for (u64 chunk = threadIdx.x * size; chunk < (threadIdx.x + 1) * size && chunk < chunks; ++chunk) {
        starts[chunk] = at;
        at = passed(at, map_of(exits[chunk * entries + (at & ENTRY)]));
    }
}

// counts[256]: how often each symbol occurs; zeros before the launch.
KERNEL histogram(const u8* symbols, u64 count, u64* counts) {
    __shared__ u32 local[256];
    local[threadIdx.x] = 0;
    __syncthreads();
    for (u64 i = grid_thread(); i < count; i += grid_threads()) atomicAdd(local + symbols[i], 1u);
    __syncthreads();
    if (local[threadIdx.x]) atomicAdd(counts + threadIdx.x, (u64)local[threadIdx.x]);
}
