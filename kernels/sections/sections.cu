// Sections and containers: joined, peeked at and checked. docs/container.md draws the bytes.
#include "common/device.cuh"

// An array, and the bytes of the result where it goes.
struct Piece {
    const u8* bytes;
    u64 at, size;
};

// out: the header's 64 bytes and up to four pieces, each at its place, zeros between them; `words` words of 8 bytes. A
// thread makes a word. checked: the checksum goes to the 32-bit word 3 of `out`, which is 0 before the launch.
KERNEL join(u64 h0, u64 h1, u64 h2, u64 h3, u64 h4, u64 h5, u64 h6, u64 h7, const u8* p0, u64 at0, u64 n0, const u8* p1,
            u64 at1, u64 n1, const u8* p2, u64 at2, u64 n2, const u8* p3, u64 at3, u64 n3, u64 words, u32 checked,
            u64* out) {
    const u64 header[8] = {h0, h1, h2, h3, h4, h5, h6, h7};
    const Piece piece[4] = {{p0, at0, n0}, {p1, at1, n1}, {p2, at2, n2}, {p3, at3, n3}};
    u32 sum = 0;
    for (u64 w = grid_thread(); w < words; w += grid_threads()) {
        const u64 at = 8 * w;
        u64 word = w < 8 ? header[w] : 0;
#pragma unroll
        for (u32 p = 0; p < 4; ++p) {
            if (at + 8 <= piece[p].at || at >= piece[p].at + piece[p].size) continue;
            if (at >= piece[p].at) word |= load64(piece[p].bytes, piece[p].size, at - piece[p].at);
            else word |= load64(piece[p].bytes, piece[p].size, 0) << 8 * (piece[p].at - at);
        }
        if (checked) {
            sum += checksum_word((u32)word, (u32)(2 * w));
            if (w != 1) sum += checksum_word((u32)(word >> 32), (u32)(2 * w + 1));
        }
        if (checked && w == 1) *(u32*)(out + 1) = (u32)word;
        else out[w] = word;
    }
    if (!checked) return;
    sum = block_sum(sum);
    if (threadIdx.x == 0) atomicAdd((u32*)out + 3, sum);
}

// Sets *error to ERR_CHECKSUM if the container's checksum is not that of its words. scratch[2]: zeros before the
// launch.
KERNEL check_container(const u32* words, u64 count, u32* scratch, i32* error) {
    u32 sum = 0;
    for (u64 i = grid_thread(); i < count; i += grid_threads())
        if (i != 3) sum += checksum_word(words[i], (u32)i);
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        atomicAdd(scratch, sum);
        __threadfence();
        // The last block to arrive sees the sum of all blocks.
        if (atomicAdd(scratch + 1, 1u) + 1 == gridDim.x && atomicAdd(scratch, 0u) != words[3])
            atomicMin(error, ERR_CHECKSUM);
    }
}

// Sets *error to ERR_PADDING if the bytes that fill one of four pieces to a multiple of 8 are not zeros. A piece ends
// at the byte end_i. A thread takes a piece.
KERNEL check_padding(const u8* data, u64 end_0, u64 end_1, u64 end_2, u64 end_3, i32* error) {
    const u64 ends[4] = {end_0, end_1, end_2, end_3};
    if (threadIdx.x >= 4) return;
    bool bad = false;
    for (u64 at = ends[threadIdx.x]; at % 8; ++at) bad |= data[at] != 0;
    if (bad) atomicMin(error, ERR_PADDING);
}

// What the host reads of each of `ranks` containers in a row in `data`:
//
//     heads:  | header, 64 bytes | first 64 bytes of the index, the value and the order section, filled with zeros |
//
// Zeros for the containers after one that does not end within `data`. One block; a thread writes a byte of each head.
KERNEL container_heads(const u8* data, u64 size, u32 ranks, u8* heads) {
    const u32 part = threadIdx.x / 64, byte = threadIdx.x % 64;
    u64 at = 0;
    for (u32 rank = 0; rank < ranks; ++rank) {
        u8 seen = 0;
        u64 end = at + 64;
        const bool there = end <= size;
        if (there && part == 0) seen = data[at + byte];
        bool whole = there;
        for (u32 section = 1; whole && section <= 3; ++section) {
            const u64 bytes = load64(data, size, at + 32 + 8 * section);
            if (bytes > size - end) {
                whole = false;
            } else {
                if (part == section && byte < bytes) seen = data[end + byte];
                end += (bytes + 7) / 8 * 8;
                whole = end <= size;
            }
        }
        heads[rank * 256u + threadIdx.x] = seen;
        at = whole ? end : size;
    }
}
