// What the entropy coders share on the device: see chunks.cuh for join_chunks.
#include "entropy/chunks.cuh"

// starts[chunk]: | number of the chunk's first word << ENTRY_BITS | entry |. *words: of the whole string.
KERNEL join_chunks(const u64* exits, u32 entries, u64 chunks, u64* starts, u64* words) {
    if (grid_thread()) return;
    u64 entry = 0, number = 0;
    for (u64 chunk = 0; chunk < chunks; ++chunk) {
        starts[chunk] = number << ENTRY_BITS | entry;
        const u64 exit = exits[chunk * entries + entry];
        number += exit >> 32;
        entry = exit & 0xFFFFFFFF;
    }
    *words = number;
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
