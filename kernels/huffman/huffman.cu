// Canonical Huffman codes: the CUDA side of huffman.cpp, which draws the sections.
#include "entropy/chunks.cuh"
#include "huffman/huffman.cuh"

// ---- The coder of symbols.

static_assert(sizeof(HuffmanPlan) == 167 * sizeof(u64), "the size that ops/huffman.py allocates");

// counts[4 * THREADS]: zeros before the launch.
KERNEL huffman_count(const u8* symbols, u64 count, u64* counts) {
    count_symbols(count, blockIdx.x, gridDim.x, counts, [=](u64 i) { return symbols[i]; });
}

// One block. *bytes: of the section.
KERNEL huffman_plan(const u64* counts, u64 count, HuffmanPlan* plan, u64* bytes) {
    plan_symbols(counts, count, plan);
    if (threadIdx.x == 0) *bytes = plan->bytes;
}

// out: the section, zeros before the launch.
KERNEL huffman_write(const u8* symbols, u64 count, const HuffmanPlan* plan, u64* status, u64* places_end, u32* out) {
    write_symbols(symbols, count, plan, blockIdx.x == 0, status, places_end, out, 0);
}

// What a section's head says. ops/huffman.py allocates it.
struct HuffmanStreams {
    u64 begin[4], bytes[4];  // of each stream
    i64 only, error;         // the only symbol, or -1; the error, or 0
};
static_assert(sizeof(HuffmanStreams) == 10 * sizeof(u64), "the size that ops/huffman.py allocates");

// One block. Reads the head of a section: *streams, and the decoder's table unless there is only one symbol.
KERNEL huffman_read(const u8* in, u64 size, u64 count, u16* table, HuffmanStreams* streams, i32* error) {
    __shared__ u8 length[256];
    __shared__ u32 words[256];
    __shared__ i32 only;
    __shared__ i64 taken;
    if (threadIdx.x == 0) taken = read_lengths(BitReader{in, size, 0}, length, &only);
    __syncthreads();
    huffman_words(length, words);
    if (taken >= 0 && only < 0) huffman_table(words, table);
    if (threadIdx.x) return;
    i32 wrong = taken < 0 ? (i32)taken : 0;
    u64 at = taken < 0 ? 0 : (u64)taken;
    const u64 left = size - at;
    streams->only = only;
    for (u32 k = 0; k < 4; ++k) streams->begin[k] = streams->bytes[k] = 0;
    if (!wrong && only >= 0) {
        if (left) wrong = ERR_VALUE;
    } else if (!wrong && 8 * left < count) {
        wrong = ERR_TRUNCATED;
    } else if (!wrong && count < FOUR_STREAMS) {
        streams->begin[0] = at, streams->bytes[0] = left;
    } else if (!wrong && left < 12) {
        wrong = ERR_TRUNCATED;
    } else if (!wrong) {
        u64 sum = 12;
        for (u32 k = 0; k < 4; ++k) {
            const u64 bytes = k < 3 ? load_field(in, size, 8 * at + 32 * k, 32) : sum <= left ? left - sum : 0;
            streams->begin[k] = at + sum, streams->bytes[k] = bytes;
            sum += bytes;
        }
        if (sum > left) wrong = ERR_TRUNCATED;
    }
    streams->error = wrong;
    if (wrong) *error = wrong;
}

KERNEL huffman_walk(const u8* in, const HuffmanStreams* streams, u32 k, const u16* table, u64 chunks, u64* exits) {
    if (streams->error || streams->only >= 0) return;
    const u8* stream = in + streams->begin[k];
    const u64 bytes = streams->bytes[k];
    walk_all(8 * bytes, LONGEST, 1, chunks, exits, [=](u64& position, u32&) {
        position += table[load_field(stream, bytes, position, LONGEST)] >> 8;
    });
}

// Decodes stream k, whose symbols begin at k * part_of(count). Sets *error to ERR_VALUE if the stream does not end with
// its last symbol.
KERNEL huffman_take(const u8* in, const HuffmanStreams* streams, u32 k, const u16* table, u64 chunks, const u64* starts,
                    const u64* words, u64 count, u8* symbols, i32* error) {
    if (streams->error) return;
    const u64 part = part_of(count), first = k * part, left = count - first, most = part < left ? part : left;
    if (streams->only >= 0) {
        for (u64 i = grid_thread(); i < most; i += grid_threads()) symbols[first + i] = (u8)streams->only;
        return;
    }
    const u8* stream = in + streams->begin[k];
    const u64 bytes = streams->bytes[k];
    if (grid_thread() == 0 && *words < most) atomicMin(error, ERR_VALUE);
    walk_again(
        8 * bytes, 1, chunks, starts,
        [=](u64& position, u32&) { position += table[load_field(stream, bytes, position, LONGEST)] >> 8; },
        [=](u64 number, u64 at, u64 after, u32) {
            if (number >= most) return;
            symbols[first + number] = (u8)table[load_field(stream, bytes, at, LONGEST)];
            if (number + 1 == most && !ends_at(stream, bytes, after)) atomicMin(error, ERR_VALUE);
        });
}

// ---- The index codec: the four bytes of each index.

// One block. The code of the bytes of 0 .. numel - 1.
KERNEL byte_code(u64 numel, u32* words, u16* table) {
    __shared__ PackageMerge room;
    __shared__ u64 counts[256];
    __shared__ u8 length[256];
    counts[threadIdx.x] = count_byte(threadIdx.x, numel);
    __syncthreads();
    huffman_lengths(counts, THREADS, length, room);
    huffman_words(length, words);
    huffman_table(words, table);
}

// out: the section, zeros before the launch. *end: its number of bits.
KERNEL huffman_indices_write(const u32* indices, u64 count, const u32* words, u64* status, u64* end, u32* out) {
    const auto of = [=](u64 i) { return four_words(words, (const u8*)(indices + i)); };
    each_place(
        count, 0, status, end, [=](u64 i) { return (u64)of(i).bits; },
        [=](u64 i, u64 at) { put_bits(out, at, of(i).field); });
}

KERNEL huffman_indices_walk(const u8* in, u64 bytes, const u16* table, u64 chunks, u64* exits) {
    walk_all(8 * bytes, LONGEST, 4, chunks, exits, [=](u64& position, u32& phase) {
        position += table[load_field(in, bytes, position, LONGEST)] >> 8;
        phase = (phase + 1) & 3;
    });
}

// octets: the four bytes of each index. Sets *error to ERR_TRUNCATED if the section is too short, ERR_VALUE if it
// continues after the last index.
KERNEL huffman_indices_take(const u8* in, u64 bytes, const u16* table, u64 chunks, const u64* starts, const u64* words,
                            u64 count, u8* octets, i32* error) {
    if (grid_thread() == 0 && *words < 4 * count) atomicMin(error, ERR_TRUNCATED);
    walk_again(
        8 * bytes, 4, chunks, starts,
        [=](u64& position, u32& phase) {
            position += table[load_field(in, bytes, position, LONGEST)] >> 8;
            phase = (phase + 1) & 3;
        },
        [=](u64 number, u64 at, u64 after, u32) {
            if (number >= 4 * count) return;
            octets[number] = (u8)table[load_field(in, bytes, at, LONGEST)];
            if (number + 1 == 4 * count && !ends_at(in, bytes, after)) atomicMin(error, ERR_VALUE);
        });
}
