// Codes of varying length: the CUDA side of kernels/rle/rle.cpp and huffman.cpp, which draw the sections.
#include "entropy/entropy.cuh"

// Where each chunk starts; *words: of the string. One thread follows the entries from chunk to chunk.
KERNEL walk_join(const u64* exits, u32 entries, u64 chunks, u64* starts, u64* words) {
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

// ---- RLE. Run r begins with the element begins[r] of the indices.

__device__ __forceinline__ bool begins_run(const u32* indices, u64 i) {
    return i == 0 || indices[i] - indices[i - 1] > 1;
}

KERNEL rle_runs(const u32* indices, u64 count, u64* status, u64* runs, u32* begins) {
    each_place(
        count, 0, status, runs, [=](u64 i) { return (u64)begins_run(indices, i); },
        [=](u64 i, u64 place) {
            if (begins_run(indices, i)) begins[place] = (u32)i;
        });
}

struct Run {
    u64 zeros, ones;  // what is written
};
__device__ __forceinline__ Run run_of(const u32* indices, u64 count, const u32* begins, u64 runs, u64 r) {
    const u64 begin = begins[r], end = r + 1 < runs ? begins[r + 1] : count;
    return {r ? (u64)(indices[begin] - indices[begin - 1]) - 2 : (u64)indices[0], end - begin - 1};
}

// lengths: of zeros [34], then of ones [34]; zeros at first.
KERNEL rle_count(const u32* indices, u64 count, const u32* begins, const u64* runs, u64* lengths) {
    __shared__ u32 own[68];
    if (threadIdx.x < 68) own[threadIdx.x] = 0;
    __syncthreads();
    for (u64 r = grid_thread(); r < *runs; r += grid_threads()) {
        const Run run = run_of(indices, count, begins, *runs, r);
        atomicAdd(own + bit_length(run.zeros + 1), 1u);
        atomicAdd(own + 34 + bit_length(run.ones + 1), 1u);
    }
    __syncthreads();
    if (threadIdx.x < 68 && own[threadIdx.x]) atomicAdd(lengths + threadIdx.x, (u64)own[threadIdx.x]);
}

__device__ __forceinline__ u32 run_bits(u64 v, u32 width, u32 escape) {
    return v < (1ull << width) - 1 ? width : width + escape;
}
__device__ __forceinline__ void put_run(u32* words, u64 at, u64 v, u32 width, u32 escape) {
    const u64 all = (1ull << width) - 1;
    put_bits(words, at, v < all ? v : all);
    if (v >= all) put_bits(words, at + width, v);
}

// words: zeros; *end: the section's bits.
KERNEL rle_write(const u32* indices, u64 count, u32 escape, const u32* begins, const u64* runs, const u64* lengths,
                 u64* status, u32* words, u64* end) {
    __shared__ u32 widths[2];
    if (threadIdx.x < 2) widths[threadIdx.x] = best_fields(lengths + 34 * threadIdx.x, escape).width;
    __syncthreads();
    const u32 z = widths[0], o = widths[1];
    if (grid_thread() == 0) put_bits(words, 0, z | o << 8);
    const u64 total = *runs;
    each_place(
        total, 16, status, end,
        [=](u64 r) {
            const Run run = run_of(indices, count, begins, total, r);
            return (u64)run_bits(run.zeros, z, escape) + run_bits(run.ones, o, escape);
        },
        [=](u64 r, u64 place) {
            const Run run = run_of(indices, count, begins, total, r);
            put_run(words, place, run.zeros, z, escape);
            put_run(words, place + run_bits(run.zeros, z, escape), run.ones, o, escape);
        });
}

struct RunReader {
    const u8* in;
    u64 bytes;
    u32 width[2], escape;
    __device__ RunReader(const u8* section, u64 size, u32 escape)
        : in(section + 2), bytes(size - 2), width{section[0], section[1]}, escape(escape) {}
    __device__ bool valid() const { return width[0] - 1 < 32 && width[1] - 1 < 32; }
    __device__ u64 read(u64& position, u32& phase) const {
        const u32 w = width[phase];
        u64 v = load_field(in, bytes, position, w);
        position += w;
        if (v == (1ull << w) - 1) {
            v = load_field(in, bytes, position, escape);
            position += escape;
        }
        phase ^= 1;
        return v;
    }
};

// 64 offsets and two phases, zeros and ones.
KERNEL rle_walk(const u8* section, u64 size, u32 escape, u64 chunks, u64* exits) {
    const RunReader reader(section, size, escape);
    if (!reader.valid()) return;
    walk_all(8 * reader.bytes, 64, 2, chunks, exits, [&](u64& position, u32& phase) { reader.read(position, phase); });
}

// zeros[r], ones[r]: lengths of the r-th pair of runs, up to `room` pairs, 0 where there are none; ends[r]: the bit
// behind it.
KERNEL rle_read(const u8* section, u64 size, u32 escape, u64 chunks, const u64* starts, u64 room, u64* zeros, u64* ones,
                u64* ends) {
    const RunReader reader(section, size, escape);
    if (!reader.valid()) return;
    walk_again(
        8 * reader.bytes, 2, chunks, starts, [&](u64& position, u32& phase) { reader.read(position, phase); },
        [&](u64 number, u64 at, u64 behind, u32 phase) {
            const u64 r = number / 2;
            if (r >= room) return;
            const u32 was = phase;
            const u64 v = reader.read(at, phase);
            if (was) ones[r] = v + 1, ends[r] = behind;
            else zeros[r] = v + (r ? 1 : 0);
        });
}

// places[r]: the elements before pair r.
KERNEL rle_places(const u64* ones, u64 room, u64* status, u64* end, u64* places) {
    each_place(
        room, 0, status, end, [=](u64 r) { return ones[r]; }, [=](u64 r, u64 place) { places[r] = place; });
}

// firsts[r]: the first index of pair r's ones. *pairs: how many give `count` elements; stays 0 where none do.
KERNEL rle_firsts(const u8* section, u64 size, const u64* zeros, const u64* ones, const u64* ends, const u64* places,
                  u64 room, u64 count, u64 numel, u64* status, u64* end, u32* firsts, u64* pairs, i32* error) {
    each_place(
        room, 0, status, end, [=](u64 r) { return zeros[r] + ones[r]; },
        [=](u64 r, u64 place) {
            const u64 first = place + zeros[r], done = places[r] + ones[r];
            firsts[r] = (u32)first;
            if (places[r] >= count || ones[r] == 0) return;
            if (done > count || first + ones[r] > numel) atomicMin(error, ERR_INDEX);
            if (done == count) {
                *pairs = r + 1;
                if ((ends[r] + 7) / 8 != size - 2) atomicMin(error, ERR_VALUE);
            }
        });
}

KERNEL rle_fill(const u64* places, const u32* firsts, const u64* pairs, u64 count, u32* indices, i32* error) {
    if (*pairs == 0) {
        if (grid_thread() == 0) atomicMin(error, ERR_TRUNCATED);
        return;
    }
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u64 r = last_at_most(places, *pairs, i);
        indices[i] = firsts[r] + (u32)(i - places[r]);
    }
}

// ---- Huffman's coder of symbols.

KERNEL histogram(const u8* symbols, u64 count, u64* counts) {
    __shared__ u32 own[256];
    own[threadIdx.x] = 0;
    __syncthreads();
    for (u64 i = grid_thread(); i < count; i += grid_threads()) atomicAdd(own + symbols[i], 1u);
    __syncthreads();
    if (own[threadIdx.x]) atomicAdd(counts + threadIdx.x, (u64)own[threadIdx.x]);
}

// One block: words[256], and the lengths into the section `out`. *bits: of these; where a single symbol occurs the
// section ends there and *single is 1.
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

// sums[k]: bits of stream k; zeros at first.
KERNEL huffman_sizes(const u8* symbols, u64 count, const u32* words, u64* sums) {
    __shared__ u64 own[4];
    const u64 part = part_of(count);
    if (threadIdx.x < 4) own[threadIdx.x] = 0;
    __syncthreads();
    for (u64 i = grid_thread(); i < count; i += grid_threads())
        atomicAdd(own + i / part, (u64)(words[symbols[i]] >> 16));
    __syncthreads();
    if (threadIdx.x < 4 && own[threadIdx.x]) atomicAdd(sums + threadIdx.x, own[threadIdx.x]);
}

// *end: bits of the section.
KERNEL huffman_write(const u8* symbols, u64 count, const u32* words, const u64* sums, const u64* bits,
                     const u32* single, u64* status, u64* places_end, u32* out, u64* end) {
    if (*single) {
        if (grid_thread() == 0) *end = *bits;
        return;
    }
    const u64 part = part_of(count), first = *bits + (part < count ? 96 : 0);
    u64 at[4], before[4];  // of each stream: its first bit, and the bits of the symbols of those before it
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

struct HuffmanStreams {
    u64 begin[4], bytes[4];
    i64 only, wrong;
};

// One block: the table, and where the streams are.
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
    streams->wrong = wrong;
    if (wrong) *error = wrong;
}

// Stream k's symbols begin at k * part_of(count).
KERNEL huffman_walk(const u8* in, const HuffmanStreams* streams, u32 k, const u16* table, u64 chunks, u64* exits) {
    if (streams->wrong || streams->only >= 0) return;
    const u8* own = in + streams->begin[k];
    const u64 bytes = streams->bytes[k];
    walk_all(8 * bytes, LONGEST, 1, chunks, exits, [=](u64& position, u32&) {
        position += table[load_field(own, bytes, position, LONGEST)] >> 8;
    });
}

KERNEL huffman_take(const u8* in, const HuffmanStreams* streams, u32 k, const u16* table, u64 chunks, const u64* starts,
                    const u64* words, u64 count, u8* symbols, i32* error) {
    if (streams->wrong) return;
    const u64 part = part_of(count), first = k * part, left = count - first, most = part < left ? part : left;
    if (streams->only >= 0) {
        for (u64 i = grid_thread(); i < most; i += grid_threads()) symbols[first + i] = (u8)streams->only;
        return;
    }
    const u8* own = in + streams->begin[k];
    const u64 bytes = streams->bytes[k];
    if (grid_thread() == 0 && *words < most) atomicMin(error, ERR_VALUE);
    walk_again(
        8 * bytes, 1, chunks, starts,
        [=](u64& position, u32&) { position += table[load_field(own, bytes, position, LONGEST)] >> 8; },
        [=](u64 number, u64 at, u64 behind, u32) {
            if (number >= most) return;
            symbols[first + number] = (u8)table[load_field(own, bytes, at, LONGEST)];
            if (number + 1 == most && (behind + 7) / 8 != bytes) atomicMin(error, ERR_VALUE);
        });
}

// ---- Huffman's code of the bytes of indices.

// One block: the code that numel alone fixes.
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

// octets: the four bytes of each index. Of one element, whose index is 0 and takes no bits, none is read.
KERNEL huffman_indices_take(const u8* in, u64 bytes, const u16* table, u64 chunks, const u64* starts, const u64* words,
                            u64 count, u8* octets, i32* error) {
    if (grid_thread() == 0 && *words < 4 * count) atomicMin(error, ERR_TRUNCATED);
    walk_again(
        8 * bytes, 4, chunks, starts,
        [=](u64& position, u32& phase) {
            position += table[load_field(in, bytes, position, LONGEST)] >> 8;
            phase = (phase + 1) & 3;
        },
        [=](u64 number, u64 at, u64 behind, u32) {
            if (number >= 4 * count) return;
            octets[number] = (u8)table[load_field(in, bytes, at, LONGEST)];
            if (number + 1 == 4 * count && (behind + 7) / 8 != bytes) atomicMin(error, ERR_VALUE);
        });
}

// ---- SKCompress's deltas, of kernels/delta/delta.cpp.

__device__ __forceinline__ u32 delta_of(const u32* keys, u64 i) { return i ? keys[i] - keys[i - 1] : keys[0]; }

// lengths[33]: how many deltas have so many bits; zeros at first.
KERNEL delta_count(const u32* keys, u64 count, u64* lengths) {
    __shared__ u32 own[33];
    if (threadIdx.x < 33) own[threadIdx.x] = 0;
    __syncthreads();
    for (u64 i = grid_thread(); i < count; i += grid_threads()) atomicAdd(own + delta_length(delta_of(keys, i)), 1u);
    __syncthreads();
    if (threadIdx.x < 33 && own[threadIdx.x]) atomicAdd(lengths + threadIdx.x, (u64)own[threadIdx.x]);
}

// Where the parts of a section are.
struct DeltaPlan {
    u64 prefixes, deltas, bits;  // where they begin, and where the section ends
    u32 word[33];                // of a delta of so many bits
};

// One block: of the eight ways the smallest; of equals the fixed prefix, then the least m. Writes the section's head
// into words of zeros.
KERNEL delta_plan(const u64* lengths, u64 count, DeltaPlan* plan, u32* out) {
    __shared__ PackageMerge room;
    __shared__ u64 counts[256];
    __shared__ u32 words[256];
    __shared__ u8 length[256];
    __shared__ DeltaPlan best;
    if (threadIdx.x == 0) best.bits = NOWHERE;
    u32 best_way = 0;
    // The ninth time the best one is made again, and written.
    for (u32 way = 0; way < 9; ++way) {
        const bool writes = way == 8;
        const u32 now = writes ? best_way : way, log2_m = now % 4 + 1;
        const bool coded = now >= 4;
        __syncthreads();
        counts[threadIdx.x] = 0;
        __syncthreads();
        const u64 delta_bits = threadIdx.x ? 0 : count_prefixes(lengths, log2_m, counts);
        __syncthreads();
        huffman_lengths(counts, length, room);
        huffman_words(length, words);
        if (threadIdx.x == 0) {
            i32 only = -1;
            u64 prefix_bits = 0;
            for (u32 s = 0; s < 16; ++s) {
                prefix_bits += counts[s] * (coded ? length[s] : log2_m);
                if (counts[s] == count) only = (i32)s;
            }
            BitCount table = {0};
            if (coded) write_lengths(length, only, table);
            const u64 head = 8 + 8 * table.bytes();
            const u64 deltas = head + (prefix_bits + 7) / 8 * 8, bits = deltas + (delta_bits + 7) / 8 * 8;
            if (bits < best.bits) best.bits = bits, best.word[0] = way;
            if (writes) {
                BitWriter writer = {out, 0};
                writer.put(log2_m | (coded ? 16 : 0), 8);
                if (coded) write_lengths(length, only, writer);
                plan->prefixes = head, plan->deltas = deltas, plan->bits = bits;
                for (u32 l = 1; l <= 32; ++l) plan->word[l] = delta_word(l, log2_m, coded ? words : nullptr);
            }
        }
        __syncthreads();
        best_way = best.word[0];
    }
}

KERNEL delta_prefixes(const u32* keys, u64 count, const DeltaPlan* plan, u64* status, u64* end, u32* out) {
    const auto word = [=](u64 i) { return plan->word[delta_length(delta_of(keys, i))]; };
    each_place(
        count, plan->prefixes, status, end, [=](u64 i) { return (u64)(word(i) >> 16 & 255); },
        [=](u64 i, u64 place) { put_bits(out, place, word(i) & 0xFFFF); });
}
KERNEL delta_deltas(const u32* keys, u64 count, const DeltaPlan* plan, u64* status, u64* end, u32* out) {
    each_place(
        count, plan->deltas, status, end,
        [=](u64 i) { return (u64)(plan->word[delta_length(delta_of(keys, i))] >> 24); },
        [=](u64 i, u64 place) { put_bits(out, place, delta_of(keys, i)); });
}

struct DeltaRead {
    u64 prefixes;  // the byte where they begin
    i32 only, wrong;
    u32 window, step;
};

// One block: the head of a section of one byte or more, and the table of its prefixes.
KERNEL delta_read(const u8* in, u64 bytes, u16* table, DeltaRead* read, i32* error) {
    __shared__ u8 length[256];
    __shared__ u32 words[256];
    __shared__ i32 only;
    __shared__ i64 taken;
    const u32 log2_m = in[0] & 15, s = threadIdx.x;
    const bool coded = in[0] & 16;
    if (s == 0) {
        only = -1;
        taken = 0;
        if (log2_m < 1 || log2_m > 4 || in[0] > 31) taken = ERR_VALUE;
        else if (coded) taken = read_lengths(BitReader{in + 1, bytes - 1, 0}, length, &only);
    }
    __syncthreads();
    const bool foreign = taken >= 0 && coded && s >= 1u << log2_m && (length[s] || only == (i32)s);
    const i32 wrong = __syncthreads_or(foreign) ? ERR_VALUE : taken < 0 ? (i32)taken : 0;
    if (!wrong && coded) {
        huffman_words(length, words);
        if (only < 0) huffman_table(words, table);
    } else if (!wrong && s < 1u << log2_m) {
        table[s] = (u16)(s | log2_m << 8);
    }
    if (s) return;
    read->prefixes = wrong ? 0 : 1 + (u64)taken;
    read->only = only;
    read->wrong = wrong;
    read->window = coded ? LONGEST : log2_m;
    read->step = 32u >> (log2_m & 7);
    if (wrong) *error = wrong;
}

KERNEL delta_walk(const u8* in, u64 bytes, const DeltaRead* read, const u16* table, u64 chunks, u64* exits) {
    if (read->wrong || read->only >= 0) return;
    const u8* own = in + read->prefixes;
    const u64 size = bytes - read->prefixes;
    const u32 window = read->window;
    walk_all(8 * size, LONGEST, 1, chunks, exits, [=](u64& position, u32&) {
        position += table[load_field(own, size, position, window)] >> 8;
    });
}

// bits[i]: of delta i. *at: the byte where the deltas begin; stays 0 where the prefixes are cut.
KERNEL delta_lengths(const u8* in, u64 bytes, const DeltaRead* read, const u16* table, u64 chunks, const u64* starts,
                     u64 count, u8* bits, u64* at) {
    if (read->wrong) return;
    const u32 window = read->window, step = read->step;
    if (read->only >= 0) {
        for (u64 i = grid_thread(); i < count; i += grid_threads()) bits[i] = (u8)(step * (u32)(read->only + 1));
        if (grid_thread() == 0) *at = read->prefixes;
        return;
    }
    const u64 first = read->prefixes, size = bytes - first;
    const u8* own = in + first;
    walk_again(
        8 * size, 1, chunks, starts,
        [=](u64& position, u32&) { position += table[load_field(own, size, position, window)] >> 8; },
        [=](u64 number, u64 place, u64 behind, u32) {
            if (number >= count) return;
            bits[number] = (u8)(step * ((table[load_field(own, size, place, window)] & 255u) + 1));
            if (number + 1 == count && behind <= 8 * size) *at = first + (behind + 7) / 8;
        });
}

KERNEL delta_values(const u8* in, u64 bytes, const u8* bits, const u64* at, u64 count, u64* status, u64* end,
                    u32* deltas, i32* error) {
    if (*at == 0) {
        if (grid_thread() == 0) atomicMin(error, ERR_TRUNCATED);
        return;
    }
    const u8* own = in + *at;
    const u64 size = bytes - *at;
    each_place(
        count, 0, status, end, [=](u64 i) { return (u64)bits[i]; },
        [=](u64 i, u64 place) {
            deltas[i] = load_field(own, size, place, bits[i]);
            if (i && deltas[i] == 0) atomicMin(error, ERR_INDEX);
            if (i + 1 == count && (place + bits[i] + 7) / 8 != size) atomicMin(error, ERR_VALUE);
        });
}

KERNEL delta_keys(const u32* deltas, u64 count, u64 numel, u64* status, u64* end, u32* keys, i32* error) {
    each_place(
        count, 0, status, end, [=](u64 i) { return (u64)deltas[i]; },
        [=](u64 i, u64 place) {
            keys[i] = (u32)(place + deltas[i]);
            if (place + deltas[i] >= numel) atomicMin(error, ERR_INDEX);
        });
}
