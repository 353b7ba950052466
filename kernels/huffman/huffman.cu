// Canonical Huffman codes: the CUDA side of huffman.cpp, which draws the sections.
#include "entropy/chunks.cuh"
#include "huffman/huffman.cuh"

// ---- The coder of symbols.

// One block. Writes words[256], and the code lengths into the section `out`, which are *bits bits, whole bytes. If only
// one symbol occurs, the section ends there and *single is 1.
KERNEL huffman_plan(const u64* counts, u64 count, u32* words, u32* out, u64* bits, u32* single) {
    __shared__ PackageMerge room;
    __shared__ u8 length[256];
    __shared__ i32 only;
    if (threadIdx.x == 0) only = -1;
    __syncthreads();
    if (counts[threadIdx.x] == count) only = (i32)threadIdx.x;
    huffman_lengths(counts, length, room);
    huffman_words(length, words);
    if (threadIdx.x == 0) {
        BitWriter writer = {out, 0};
        write_lengths(length, only, writer);
        *bits = (writer.position + 7) / 8 * 8;
        *single = only >= 0;
    }
}

// sums[k]: the number of bits of stream k; zeros before the launch.
KERNEL huffman_sizes(const u8* symbols, u64 count, const u32* words, u64* sums) {
    const u64 part = part_of(count);
    for (u32 k = 0; k < 4; ++k) {
        const u64 begin = k * part, end = begin + part < count ? begin + part : count;
        u64 sum = 0;
        for (u64 i = begin + grid_thread(); i < end; i += grid_threads()) sum += words[symbols[i]] >> 16;
        sum = block_sum(sum);
        if (threadIdx.x == 0 && sum) atomicAdd(sums + k, sum);
    }
}

// out: the section with its code lengths, zeros after them. *end: its number of bits.
KERNEL huffman_write(const u8* symbols, u64 count, const u32* words, const u64* sums, const u64* bits,
                     const u32* single, u64* status, u64* places_end, u32* out, u64* end) {
    if (*single) {
        if (grid_thread() == 0) *end = *bits;
        return;
    }
    const u64 part = part_of(count), first = *bits + (part < count ? 96 : 0);
    u64 at[4], before[4];  // of each stream: its first bit, and the number of bits of all streams before it
    u64 sum = 0, next = first;
    for (u32 k = 0; k < 4; ++k) {
        at[k] = next, before[k] = sum;
        sum += sums[k];
        next += (sums[k] + 7) / 8 * 8;
    }
    if (grid_thread() == 0) {
        *end = next;
        if (part < count)
            for (u32 k = 0; k < 3; ++k) put_bits(out, *bits + 32 * k, (sums[k] + 7) / 8);
    }
    each_place(
        count, 0, status, places_end, [=](u64 i) { return (u64)(words[symbols[i]] >> 16); },
        [=](u64 i, u64 place) {
            const u64 k = i / part;
            put_bits(out, at[k] + (place - before[k]), words[symbols[i]] & 0xFFFF);
        });
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
    huffman_lengths(counts, length, room);
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
