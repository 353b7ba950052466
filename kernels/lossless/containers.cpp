// Containers of version 2 (wire/frame.py) whose value section is one of form 1 (lossless.cpp), of all elements of a
// vector or a slice, in one pass over memory each: to encode and to sum. The checksum is computed chunk by chunk, and a
// sum is encoded while it is in the cache.
//
//     | checksum u32 | 0 u8 | bytes of the section, a varint | section |
//
// Whatever is not as it should be makes these functions return 0 or an error: the codecs then look at it one by one.
#include <algorithm>

#include "common/stream_copy.h"
#include "half/half.h"
#include "lossless/lossless_cpu.h"
#include "sections/checksum.h"
#include "sections/varint.h"

namespace {

const u64 FIXED_HEADER = 5, MOST_HEADER = FIXED_HEADER + 9;

// Writes a container chunk by chunk.
class Writer {
  public:
    Writer(u8* out, u64 count) : container(out), count(count), running(out, out) { place(MOST_HEADER - FIXED_HEADER); }

    // The next `values` of the `count` patterns. Returns whether they are finite, and the section takes no more bytes
    // than the values do.
    bool add(const u32* patterns, u32 values) {
        bool finite;
        const u32 bytes = lossless_encode_chunk(patterns, values, at, &finite);
        if (!finite) return false;
        if (!chunk) {  // how long the header is follows from the section's size, which is much like the first chunk's
            const u8* const written = at;
            place(varint_bytes((u64)(at - section) + bytes * count / values));
            std::memmove(at, written, bytes);
        }
        const u16 size = (u16)bytes;
        std::memcpy(section + 1 + 2 * chunk++, &size, 2);
        at += bytes;
        running.advance(at);
        return (u64)(at - section) <= 1 + 4 * count;
    }
    // Of a section of all values; returns the container's bytes.
    u64 end(u32 salt) {
        const u64 bytes = (u64)(at - section);
        const u32 numbers = varint_bytes(bytes);
        u8* const where = container + FIXED_HEADER + numbers;
        if (where != section) {  // the first chunk is unlike the others
            std::memmove(where, section, bytes);
            running = RunningChecksum(container, where);
        }
        container[4] = 0;
        put_varint(container + FIXED_HEADER, bytes);
        where[0] = 1;
        const u64 size = (u64)(where - container) + bytes;
        const u32 checksum = running.whole(size) + salt;
        std::memcpy(container, &checksum, 4);
        return size;
    }

  private:
    void place(u32 number_bytes) {
        section = container + FIXED_HEADER + number_bytes;
        at = section + 1 + 2 * chunks_of(count);
        running = RunningChecksum(container, at);
    }
    u8* const container;
    const u64 count;
    RunningChecksum running;
    u8 *section, *at;
    u64 chunk = 0;
};

// One of these containers, of another rank.
class Reader {
  public:
    // Whether there is one of `count` values at the begin of these bytes, as far as its header says.
    bool open(const u8* in, u64 bytes, u64 count) {
        u64 section;
        const u8 *at = in + FIXED_HEADER, *const end = in + bytes;
        if (bytes < FIXED_HEADER || in[4] || !take_varint(at, end, section) || section > (u64)(end - at)) return false;
        if (!section || *at != 1 || values.open(at, section, count)) return false;
        container = in;
        size = (u64)(values.end - in);
        return true;
    }
    // A chunk of as many values; whether there is one.
    bool next(u32 count, Use use, bool streams, float scale, float* out) {
        return !values.next(count, use, streams, scale, out);
    }
    bool ended() const { return values.at == values.end; }
    bool holds(u32 sum, u32 salt) const {
        u32 checksum;
        std::memcpy(&checksum, container, 4);
        return sum + salt == checksum;
    }

    const u8* container;
    u64 size;
    LosslessReader values;
};

// Rounds values to float16 (1) or bfloat16 (2). Returns the largest magnitude's bits, before.
template <class F>
__attribute__((always_inline)) inline u32 round_each(u32* patterns, u32 count, F rounded) {
    u32 largest = 0;
    for (u32 i = 0; i < count; ++i) {
        largest = std::max(largest, patterns[i] & 0x7FFFFFFFu);
        patterns[i] = rounded(patterns[i]);
    }
    return largest;
}
DR_CLONES static u32 round_float16(u32* patterns, u32 count) {
    return round_each(patterns, count, [](u32 bits) { return bits_of_float16(float16_of(bits)); });
}
DR_CLONES static u32 round_bfloat16(u32* patterns, u32 count) {
    return round_each(patterns, count, [](u32 bits) { return bits_of_bfloat16(bfloat16_of(bits)); });
}
const u32 LARGEST[] = {0x7F7FFFFF, 0x477FE000, 0x7F7F0000};  // magnitudes that are rounded: all, 65504, 0x1.fep127

u32 values_of(u64 count, u64 begin) { return (u32)std::min<u64>(CHUNK, count - begin); }

}  // namespace

// Room for a container: one that would be longer is given up.
DR_API u64 dr_lossless_container_bound(u64 count) {
    return MOST_HEADER + 1 + 4 * count + 2 * chunks_of(count) + MOST_BYTES + ROOM;
}

// values[count], count > 0. Returns the bytes of their container, or 0: they are not finite, or take more bytes so than
// as they are.
DR_API u64 dr_lossless_container(const u32* values, u64 count, u32 salt, u8* out) {
    Writer writer(out, count);
    for (u64 begin = 0; begin < count; begin += CHUNK)
        if (!writer.add(values + begin, values_of(count, begin))) return 0;
    return writer.end(salt);
}

// The container of the sum of `ranks` containers of `count` values each, in this order; data has sizes[rank] bytes of
// each. half: the sum is rounded to float16 (1) or bfloat16 (2); 0: it is not. Returns its bytes, or 0: a container is
// not one of these, or the sum has none, or is beyond the range of the dtype that it is rounded to.
DR_API u64 dr_lossless_sum(const u8* data, const u64* sizes, u64 ranks, u64 count, u32 half, u32 salt, u8* out) {
    std::vector<Reader> readers(ranks);
    std::vector<RunningChecksum> sums;
    for (u64 rank = 0; rank < ranks; data += sizes[rank++]) {
        if (!readers[rank].open(data, sizes[rank], count) || readers[rank].size != sizes[rank]) return 0;
        sums.emplace_back(data, readers[rank].values.at);
    }
    alignas(64) float sum[CHUNK];
    u32* const patterns = (u32*)sum;
    Writer writer(out, count);
    for (u64 begin = 0; begin < count; begin += CHUNK) {
        const u32 values = values_of(count, begin);
        for (u64 rank = 0; rank < ranks; ++rank) {
            if (!readers[rank].next(values, rank ? ADDED : FIRST, false, 1, sum)) return 0;
            sums[rank].advance(readers[rank].values.at);
        }
        if (half && (half == 1 ? round_float16 : round_bfloat16)(patterns, values) > LARGEST[half]) return 0;
        if (!writer.add(patterns, values)) return 0;
    }
    for (u64 rank = 0; rank < ranks; ++rank) {
        const Reader& reader = readers[rank];
        if (!reader.ended() || !reader.holds(sums[rank].whole(reader.size), salt)) return 0;
    }
    return writer.end(salt);
}

// The bytes of the container at the begin of data; 0: it is not one of `count` values with this checksum.
DR_API u64 dr_lossless_container_bytes(const u8* data, u64 bytes, u64 count, u32 salt) {
    Reader reader;
    if (!reader.open(data, bytes, count)) return 0;
    RunningChecksum running(data, data + 4);
    return reader.holds(running.whole(reader.size), salt) ? reader.size : 0;
}

// out = scale * (0 + the values of a container that dr_lossless_container_bytes has found). Returns 0 or an error.
DR_API i64 dr_lossless_scaled(const u8* container, u64 bytes, u64 count, float scale, float* out) {
    Reader reader;
    if (!reader.open(container, bytes, count)) return ERR_SIZES;
    // Not multiplied by 1: the caller's thread may flush denormals.
    const Use use = scale == 1 ? FIRST : SCALED;
    bool found = true;
    for (u64 begin = 0; found && begin < count; begin += CHUNK)
        found = reader.next(values_of(count, begin), use, 4 * count >= STREAMED, scale, out + begin);
    stream_fence();
    return found && reader.ended() ? 0 : (i64)ERR_SIZES;
}
