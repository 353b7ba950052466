// Sections and containers: joined, peeked at and checked. docs/container.md draws the bytes.
#include "common/device.cuh"
#include "sections/checksum.cuh"

// An array, and the bytes of the result where it goes.
struct Piece {
    const u8* bytes;
    u64 at, size;
};

// The terms of a checksum of both 32-bit words of the 64-bit word number w, without that of the word `kept`.
__device__ __forceinline__ u32 word_pair(u64 word, u64 w, u32 kept) {
    u32 sum = 0;
    if (2 * w != kept) sum += checksum_word((u32)word, (u32)(2 * w));
    if (2 * w + 1 != kept) sum += checksum_word((u32)(word >> 32), (u32)(2 * w + 1));
    return sum;
}

// The number of the 32-bit word where no checksum is kept.
#define NO_CHECKSUM 0xFFFFFFFFu

// The word number w of a header, which is given, and of pieces, each at its place, zeros between them.
template <u32 PIECES>
__device__ __forceinline__ u64 joined_word(u64 word, const Piece* piece, u64 w) {
    const u64 at = 8 * w;
#pragma unroll
    for (u32 p = 0; p < PIECES; ++p) {
        if (at + 8 <= piece[p].at || at >= piece[p].at + piece[p].size) continue;
        if (at >= piece[p].at) word |= load64(piece[p].bytes, piece[p].size, at - piece[p].at);
        else word |= load64(piece[p].bytes, piece[p].size, 0) << 8 * (piece[p].at - at);
    }
    return word;
}

// out: the header's 64 bytes and up to four pieces, as joined_word; `words` words of 8 bytes. A thread makes a word. The checksum
// plus `salt` goes to the 32-bit word `kept` of `out`, which is 0 before the launch.
KERNEL join(u64 h0, u64 h1, u64 h2, u64 h3, u64 h4, u64 h5, u64 h6, u64 h7, const u8* p0, u64 at0, u64 n0, const u8* p1,
            u64 at1, u64 n1, const u8* p2, u64 at2, u64 n2, const u8* p3, u64 at3, u64 n3, u64 words, u32 kept,
            u32 salt, u64* out) {
    const u64 header[8] = {h0, h1, h2, h3, h4, h5, h6, h7};
    const Piece piece[4] = {{p0, at0, n0}, {p1, at1, n1}, {p2, at2, n2}, {p3, at3, n3}};
    u32 sum = 0;
    for (u64 w = grid_thread(); w < words; w += grid_threads()) {
        const u64 word = joined_word<4>(w < 8 ? header[w] : 0, piece, w);
        if (kept != NO_CHECKSUM) sum += word_pair(word, w, kept);
        if (kept / 2 == w && kept != NO_CHECKSUM) ((u32*)(out + w))[1 - kept % 2] = (u32)(kept % 2 ? word : word >> 32);
        else out[w] = word;
    }
    if (kept == NO_CHECKSUM) return;
    sum = block_sum(sum);
    if (threadIdx.x == 0) atomicAdd((u32*)out + kept, sum + (blockIdx.x == 0 ? salt : 0));
}

// A header of up to 32 bytes, which is written from its begin on. All places are known when this is compiled, so that it
// stays in registers.
struct ShortHeader {
    u64 words[4];
    u32 bytes;

    // The lowest `count` bytes of a number, whose others are 0.
    __device__ __forceinline__ void put(u64 number, u32 count) {
#pragma unroll
        for (u32 w = 0; w < 4; ++w) {
            const i32 shift = 8 * (i32)bytes - 64 * (i32)w;
            if (shift >= 0 && shift < 64) words[w] |= number << shift;
            else if (shift < 0 && shift > -64) words[w] |= number >> -shift;
        }
        bytes += count;
    }
    __device__ __forceinline__ u64 word(u64 number) const {
        u64 found = 0;
#pragma unroll
        for (u32 w = 0; w < 4; ++w)
            if (w == number) found = words[w];
        return found;
    }
};

// A container of version 2 whose index section has as many bits as *bits says:
//
//     out:  | checksum u32 | start | varint of the index section's bytes | varint | index section | value section |
//
// start: the form and the varint of the count, of `start_bytes` bytes. varint: that of the value section's bytes, of
// `varint_bytes`. scratch[2]: zeros before the launch.
KERNEL measured_container(u64 start, u32 start_bytes, u64 varint, u32 varint_bytes, const u8* indices, const u64* bits,
                          const u8* values, u64 value_bytes, u32 salt, u32* scratch, u64* out) {
    const u64 index_bytes = (*bits + 7) / 8;
    ShortHeader header = {{0, 0, 0, 0}, 4};
    header.put(start, start_bytes);
    u64 left = index_bytes;
    for (; left > 127; left >>= 7) header.put(left & 127 | 128, 1);
    header.put(left, 1);
    header.put(varint, varint_bytes);
    const u64 begin = header.bytes;
    const Piece piece[2] = {{indices, begin, index_bytes}, {values, begin + index_bytes, value_bytes}};
    u32 sum = 0;
    for (u64 w = grid_thread(); 8 * w < begin + index_bytes + value_bytes; w += grid_threads()) {
        const u64 word = joined_word<2>(header.word(w), piece, w);
        sum += word_pair(word, w, 0);
        if (w) out[w] = word;
        else ((u32*)out)[1] = (u32)(word >> 32);
    }
    sum = block_sum(sum);
    if (threadIdx.x) return;
    atomicAdd(scratch, sum);
    __threadfence();
    // The last block to arrive sees the sum of all blocks.
    if (atomicAdd(scratch + 1, 1u) + 1 == gridDim.x) *(u32*)out = atomicAdd(scratch, 0u) + salt;
}

// Sets *error to ERR_CHECKSUM if the 32-bit word `kept` of the container is not the checksum of its other words plus
// `salt`. Zeros fill the container to a multiple of 8 bytes. scratch[2]: zeros before the launch.
KERNEL check_container(const u8* data, u64 size, u32 kept, u32 salt, u32* scratch, i32* error) {
    u32 sum = 0;
    for (u64 w = grid_thread(); 8 * w < size; w += grid_threads()) sum += word_pair(load64(data, size, 8 * w), w, kept);
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        atomicAdd(scratch, sum);
        __threadfence();
        // The last block to arrive sees the sum of all blocks.
        if (atomicAdd(scratch + 1, 1u) + 1 == gridDim.x &&
            atomicAdd(scratch, 0u) + salt != (u32)load64(data, size, 4 * (u64)kept))
            atomicMin(error, ERR_CHECKSUM);
    }
}

// rows: | first byte | bytes | salt | of each container of version 2. scratch: a word for each, zeros before the launch.
// Each container has `each` blocks.
KERNEL check_containers(const u8* data, const u64* rows, u64 each, u64* scratch, i32* error) {
    const u64 number = blockIdx.x / each, *row = rows + 3 * number;
    check_one_of_many(data + row[0], row[1], (u32)row[2], blockIdx.x % each, each, (u32*)(scratch + number), error);
}

// rows: | first byte | bytes | where it goes, in words of 8 bytes | of each section. Zeros fill it to whole words. Each
// section has `each` blocks.
KERNEL align_sections(const u8* data, const u64* rows, u64 each, u64* out) {
    const u64* row = rows + blockIdx.x / each * 3;
    for (u64 w = blockIdx.x % each * THREADS + threadIdx.x; 8 * w < row[1]; w += each * THREADS)
        out[row[2] + w] = load64(data + row[0], row[1], 8 * w);
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

// The number in the bytes from *at on, 7 bits in each, the lowest first; a byte below 128 ends it, or the ninth one. *at
// moves past it. There are zeros after the data.
__device__ __forceinline__ u64 varint(const u8* data, u64 size, u64* at) {
    const u64 word = load64(data, size, *at), last = ~word & 0x8080808080808080ull;
    u64 x = word & (last & (0 - last)) - 1 & 0x7F7F7F7F7F7F7F7Full;
    x = (x & 0x007F007F007F007Full) | (x & 0x7F007F007F007F00ull) >> 1;
    x = (x & 0x00003FFF00003FFFull) | (x & 0x3FFF00003FFF0000ull) >> 2;
    x = (x & 0x000000000FFFFFFFull) | (x & 0x0FFFFFFF00000000ull) >> 4;
    if (!last) x |= (load64(data, size, *at + 8) & 127) << 56;
    *at += last ? (u64)__ffsll((i64)last) / 8 : 9;
    return x;
}

const u32 FOUND = 32;  // containers that short_heads finds before it copies them

// What the host reads of each of `containers` containers of version 2 in a row in `data`. The tensor of number i has
// numels[i % tensors] elements of `itemsize` bytes:
//
//     heads:  | 64 bytes from the container's start on | first 64 bytes of the index, the value and the order section |
//             | begin and end in `data` of header, index, value and order section: eight u64 |
//
// Zeros fill what is not there, and stand for containers after one that does not end within `data`. One block: where a
// container begins, only the one before it tells. So the first thread finds FOUND places after FOUND places, with no
// other loads in between, and the other warps copy those that it found before.
KERNEL short_heads(const u8* data, u64 size, u32 containers, const u64* numels, u32 tensors, u64 itemsize, u8* heads) {
    __shared__ u64 found[2][FOUND][8];  // the eight numbers
    u64 at = 0;
    u32 tensor = 0;
    for (u32 base = 0; base < containers + FOUND; base += FOUND) {
        for (u32 number = base; threadIdx.x == 0 && number < base + FOUND && number < containers; ++number) {
            u64* of_this = found[base / FOUND % 2][number - base];
            const u64 numel = numels[tensor];
            tensor = tensor + 1 < tensors ? tensor + 1 : 0;
            u64 next = at + 5, bytes[3];
            const u8 form = next <= size ? data[at + 4] : 0;
            const u64 count = form & 32 ? varint(data, size, &next) : numel;
            bytes[0] = form & 15 ? varint(data, size, &next) : 0;
            bytes[1] = form & 64 ? numel * itemsize : varint(data, size, &next);
            bytes[2] = form & 16 ? (count * bits_for(count) + 7) / 8 : 0;
            bool whole = next <= size;
            of_this[0] = at;
            of_this[1] = at + 64 < size ? at + 64 : size;
#pragma unroll
            for (u32 section = 0; section < 3; ++section) {
                whole = whole && bytes[section] <= size - next;
                of_this[2 + 2 * section] = whole ? next : size;
                next = whole ? next + bytes[section] : size;
                of_this[3 + 2 * section] = next;
            }
            at = next;
        }
        // A warp copies a head, a lane 8 bytes of it.
        for (u32 i = warp_number() - 1; base && i < FOUND && base - FOUND + i < containers; i += WARPS - 1) {
            const u64* of_this = found[(base / FOUND + 1) % 2][i];
            u64* head = (u64*)(heads + (base - FOUND + i) * 320ull);
            const u32 part = lane_number() / 8;
            const u64 from = of_this[2 * part] + lane_number() % 8 * 8, end = of_this[2 * part + 1];
            const u64 word = from < end ? load64(data, size, from) : 0;
            head[lane_number()] = from + 8 > end && from < end ? word & (1ull << 8 * (end - from)) - 1 : word;
            if (lane_number() < 8) head[32 + lane_number()] = of_this[lane_number()];
        }
        __syncthreads();
    }
}
