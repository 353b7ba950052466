// Reading a string of code words in parallel.
//
// Where a word begins depends on all words before it. So the string is cut into chunks, and each chunk is read from
// every place where its first word may begin: at one of its first `longest` bits, and, if several codes take turns, in
// one of their `phases`. These are the chunk's entries: | bit * phases + phase |.
//
//     walk_all      a thread for each entry of each chunk walks to the chunk's end, counts the words and finds the
//                   entry of the next chunk
//     join_chunks   (entropy.cu) one block follows the true entries from chunk to chunk
//     walk_again    a thread for each chunk walks from its true entry and writes what it reads
#pragma once

#include "common/device.cuh"

const u64 CHUNK_BITS = 2048;  // as in ops/entropy.py
const u32 ENTRY_BITS = 8;     // starts[chunk] is | number of the chunk's first word << ENTRY_BITS | entry |

// step(position, phase) moves both past the next word, which has at most `longest` bits.
//
//     exits[chunk * longest * phases + bit * phases + phase]:   | words in the chunk << 32 | entry of the next chunk |
template <class F>
__device__ void walk_all(u64 bits, u32 longest, u32 phases, u64 chunks, u64* exits, F step) {
    const u32 entries = longest * phases;
    for (u64 t = grid_thread(); t < chunks * entries; t += grid_threads()) {
        const u64 end = (t / entries + 1) * CHUNK_BITS;
        u64 position = t / entries * CHUNK_BITS + t % entries / phases, words = 0;
        u32 phase = (u32)(t % phases);
        while (position < end && position < bits) step(position, phase), ++words;
        exits[t] = words << 32 | (position < end ? 0 : (position - end) * phases + phase);
    }
}

// Calls f(number, position, next position, phase) for each word of the string: its number and position, the position
// after it, and its phase.
template <class F, class G>
__device__ void walk_again(u64 bits, u32 phases, u64 chunks, const u64* starts, F step, G f) {
    for (u64 chunk = grid_thread(); chunk < chunks; chunk += grid_threads()) {
        const u64 end = (chunk + 1) * CHUNK_BITS;
        const u32 entry = (u32)starts[chunk] & ((1u << ENTRY_BITS) - 1);
        u64 position = chunk * CHUNK_BITS + entry / phases, number = starts[chunk] >> ENTRY_BITS;
        u32 phase = entry % phases;
        for (; position < end && position < bits; ++number) {
            const u64 at = position;
            const u32 phase_at = phase;
            step(position, phase);
            f(number, at, position, phase_at);
        }
    }
}
