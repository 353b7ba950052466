// What the entropy coders share on the device: see chunks.cuh for join_chunks.
#include "entropy/chunks.cuh"

const u32 MAPS = 4096;  // of all runs

// starts[chunk]: | number of the chunk's first word << ENTRY_BITS | entry |. *words: of the whole string.
//
// One block. The chunks are divided into runs. A thread for each entry of each run follows it to the run's end; then
// one thread follows the true entry from run to run, and at last a thread for each run finds its chunks' true entries.
KERNEL join_chunks(const u64* exits, u32 entries, u64 chunks, u64* starts, u64* words) {
    __shared__ u64 maps[MAPS], begins[THREADS];  // | words << ENTRY_BITS | entry |: of a run, and before a run
    const u32 runs = MAPS / entries < THREADS ? MAPS / entries : THREADS;
    const u64 size = (chunks + runs - 1) / runs;
    const u32 mask = (1u << ENTRY_BITS) - 1;
    // Follows an entry through a run. passed[chunk]: | words << ENTRY_BITS | entry | before the chunk; null: not wanted.
    // No generic lambda: the NVRTC of CUDA 13.0 takes it for a host function.
    const auto follow = [=](u32 run, u64 now, u64* passed) {
        const u64 end = (run + 1) * size < chunks ? (run + 1) * size : chunks;
        for (u64 chunk = run * size; chunk < end; ++chunk) {
            if (passed) passed[chunk] = now;
            const u64 exit = exits[chunk * entries + (now & mask)];
            now = ((now >> ENTRY_BITS) + (exit >> 32)) << ENTRY_BITS | (exit & mask);
        }
        return now;
    };
    for (u32 i = threadIdx.x; i < runs * entries; i += THREADS)
        maps[i] = follow(i / entries, i % entries, nullptr);
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 now = 0;
        for (u32 run = 0; run < runs; ++run) {
            begins[run] = now;
            const u64 map = maps[run * entries + (now & mask)];
            now = ((now >> ENTRY_BITS) + (map >> ENTRY_BITS)) << ENTRY_BITS | (map & mask);
        }
        *words = now >> ENTRY_BITS;
    }
    __syncthreads();
    if (threadIdx.x < runs) follow(threadIdx.x, begins[threadIdx.x], starts);
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
