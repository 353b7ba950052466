// MinMaxSketch: bucket numbers in fewer bins than numbers (SketchML; SKCompress, section 4.2).
//
//     rows of `columns` bins:   row 0 | . . 3 . . |      insert: in each row, the bin of the key's hash becomes the
//                               row 1 | . 2 . . . |      smaller of what it is and the number; query: the largest of
//                               ...                      the key's bins. A bin begins with the largest number.
//
// A query gives the inserted number or a smaller one. A row's hash hangs on the container's seed, parameter and step,
// so that a key that loses in one step may win in the next.
#include <algorithm>
#include <cfloat>
#include <memory>
#include <new>

#include "bits/bits_cpu.h"
#include "delta/delta_cpu.h"
#include "huffman/huffman_cpu.h"
#include "sort/radix.h"

static const u32 MAX_ROWS = 8;
static const u32 MAX_GROUPS = 257;
static const u64 CHUNK = 256;  // keys hashed at once

template <class T>
using Array = std::unique_ptr<T[]>;

template <class T>
static Array<T> array(u64 size) {
    return Array<T>(new (std::nothrow) T[size]);
}

struct RowSeeds {
    u32 of[MAX_ROWS];
    RowSeeds(u32 rows, u32 seed, u32 parameter, u32 step) {
        for (u32 row = 0; row < rows; ++row) of[row] = philox4x32(seed, parameter, row, step, STREAM_SKETCH, 0).x;
    }
};

DR_CLONES static void find_columns(const u32* keys, u64 count, u32 row_seed, u32 columns, u32* at) {
    for (u64 i = 0; i < count; ++i) at[i] = sketch_column(keys[i], row_seed, columns);
}

static void insert(const u32* keys, const u8* numbers, u64 count, u32 rows, u32 columns, u32 width,
                   const RowSeeds& seeds, u8* bins) {
    std::memset(bins, (int)(width - 1), (size_t)rows * columns);
    u32 at[CHUNK];
    for (u32 row = 0; row < rows; ++row, bins += columns)
        for (u64 begin = 0; begin < count; begin += CHUNK) {
            const u64 size = std::min(CHUNK, count - begin);
            find_columns(keys + begin, size, seeds.of[row], columns, at);
            for (u64 i = 0; i < size; ++i) {
                const u32 bin = bins[at[i]], number = numbers[begin + i];  // words: the least of two bytes is a branch
                bins[at[i]] = (u8)(number < bin ? number : bin);
            }
        }
}

// values[i] = means[what the sketch holds for keys[i]]; ERR_VALUE where a bin is not below `width`.
static i64 query(const u32* keys, u64 count, u32 rows, u32 columns, u32 width, const RowSeeds& seeds, const u8* bins,
                 const float* means, float* values) {
    u32 largest = 0;
    for (u64 i = 0; i < (u64)rows * columns; ++i) largest = bins[i] > largest ? bins[i] : largest;
    if (largest >= width) return ERR_VALUE;
    u32 at[CHUNK];
    u32 numbers[CHUNK];
    for (u64 begin = 0; begin < count; begin += CHUNK) {
        const u64 size = std::min(CHUNK, count - begin);
        std::memset(numbers, 0, sizeof(numbers));
        for (u32 row = 0; row < rows; ++row) {
            const u8* const of_row = bins + (u64)row * columns;
            find_columns(keys + begin, size, seeds.of[row], columns, at);
            for (u64 i = 0; i < size; ++i) {
                const u32 bin = of_row[at[i]];
                numbers[i] = bin > numbers[i] ? bin : numbers[i];
            }
        }
        for (u64 i = 0; i < size; ++i) values[begin + i] = means[numbers[i]];
    }
    return 0;
}

// bins[rows * columns]; numbers: 0 .. width-1.
DR_API void dr_sketch_insert(const u32* keys, const u8* numbers, u64 count, u32 rows, u32 columns, u32 width, u32 seed,
                             u32 parameter, u32 step, u8* bins) {
    insert(keys, numbers, count, rows, columns, width, RowSeeds(rows, seed, parameter, step), bins);
}

DR_API i64 dr_sketch_query(const u32* keys, u64 count, u32 rows, u32 columns, u32 width, u32 seed, u32 parameter,
                           u32 step, const u8* bins, const float* means, float* values) {
    if (rows == 0 || rows > MAX_ROWS || columns == 0) return ERR_VALUE;
    return query(keys, count, rows, columns, width, RowSeeds(rows, seed, parameter, step), bins, means, values);
}

// Puts element i, of bucket codes[i], into its group: group_of[code] says which, first[group] is its first bucket.
// counts[group]: how many elements it has; its keys and its numbers (its first bucket's is 0) stand behind those of the
// groups before it, in their old order. Up to MAX_GROUPS groups.
DR_API void dr_sketch_group(const u32* indices, const u32* codes, u64 count, const u32* group_of, const u32* first,
                            u32 groups, u32* counts, u32* keys, u8* numbers) {
    u64 starts[MAX_GROUPS] = {};
    for (u64 i = 0; i < count; ++i) ++starts[group_of[codes[i]]];
    u64 sum = 0;
    for (u32 group = 0; group < groups; ++group) {
        counts[group] = (u32)starts[group];
        starts[group] = sum;
        sum += counts[group];
    }
    for (u64 i = 0; i < count; ++i) {
        const u32 group = group_of[codes[i]];
        const u64 at = starts[group]++;
        keys[at] = indices[i];
        numbers[at] = (u8)(codes[i] - first[group]);
    }
}

// Sorts pairs of a key below numel and a value by their keys; in place too. ERR_INDEX where two keys are equal or one
// is not below numel; 1 where there is no memory.
DR_API i64 dr_sketch_merge(const u32* keys, const float* values, u64 count, u64 numel, u32* sorted_keys,
                           float* sorted_values) {
    const Array<u64> memory = array<u64>(2 * count);
    if (!memory) return 1;
    u64* const pairs = memory.get();
    for (u64 i = 0; i < count; ++i) {
        u32 bits;
        std::memcpy(&bits, values + i, 4);
        pairs[i] = (u64)keys[i] << 32 | bits;
    }
    const u64* const sorted = radix_sort(pairs, pairs + count, count, 32, 32 + bits_for(numel));
    u64 bad = 0;
    for (u64 i = 0; i < count; ++i) {
        const u32 bits = (u32)sorted[i];
        sorted_keys[i] = (u32)(sorted[i] >> 32);
        std::memcpy(sorted_values + i, &bits, 4);
        bad |= sorted_keys[i] >= numel || (i && sorted_keys[i] <= sorted_keys[i - 1]);
    }
    return bad ? (i64)ERR_INDEX : 0;
}

// Keys as their gaps, in one to four bytes each (SKCompress, section 5.1):
//
//     | lengths: 2 bits each, to a whole byte; the number of bytes less one | gaps: that many bytes each |
//
// gap_i = key_i - key_{i-1} - 1, key_{-1} = -1. Result: the bytes written, at most `flagged_bound`.
static u64 length_bytes(u64 count) { return (count + 3) / 4; }

DR_API u64 dr_flagged_bound(u64 count) { return length_bytes(count) + 4 * count; }

DR_API u64 dr_flagged_encode(const u32* keys, u64 count, u8* out) {
    u8* at = out + length_bytes(count);
    u32 next = 0, lengths = 0;
    for (u64 i = 0; i < count; ++i) {
        const u32 gap = keys[i] - next;
        next = keys[i] + 1;
        const u32 length = (31 - (u32)__builtin_clz(gap | 1)) / 8;
        lengths |= length << 2 * (i & 3);
        if ((i & 3) == 3 || i + 1 == count) {
            out[i / 4] = (u8)lengths;
            lengths = 0;
        }
        std::memcpy(at, &gap, 4);  // the next gap, or nobody, reads the bytes too many; the bound has room for them
        at += length + 1;
    }
    return (u64)(at - out);
}

// ERR_TRUNCATED where `bytes` is not what `count` keys take, ERR_INDEX where a key is not below numel or takes more
// bytes than it needs.
DR_API i64 dr_flagged_decode(const u8* in, u64 bytes, u64 count, u64 numel, u32* keys) {
    static const u64 masks[4] = {0xFF, 0xFFFF, 0xFFFFFF, 0xFFFFFFFF}, least[4] = {0, 1 << 8, 1 << 16, 1 << 24};
    const u8* const end = in + bytes;
    const u8* at = in + length_bytes(count);
    if (bytes < length_bytes(count) + count) return ERR_TRUNCATED;
    u64 next = 0;
    bool bad = false;
    for (u64 i = 0; i < count; ++i) {
        const u32 length = in[i / 4] >> 2 * (i & 3) & 3;
        const u64 left = (u64)(end - at);
        if (left < 8 && left <= length) return ERR_TRUNCATED;
        const u64 gap = (left < 8 ? load64_tail(at, end) : load64(at)) & masks[length];
        next += gap;
        bad |= next >= numel || gap < least[length];
        keys[i] = (u32)next++;
        at += length + 1;
    }
    if (bad) return ERR_INDEX;
    return at == end ? 0 : (i64)ERR_TRUNCATED;
}

// ---- A section of grouped sketches, as drawn in joint/minmax_sketch.py, where its header is written and checked.
struct Header {
    u8 rows, zeros[3];
    u32 columns;  // for each 65536 elements of a group
    u32 buckets, negative;
    u16 below, above;

    explicit Header(const u8* section) { std::memcpy(this, section, sizeof(*this)); }

    u32 groups() const { return (u32)below + above; }
    u64 tables() const { return sizeof(*this) + 4 * (u64)buckets; }
    u64 parts() const { return tables() + 12 * (u64)groups(); }

    // A group's first bucket; groups() gives the number of buckets.
    u32 first(u32 group) const {
        if (group < below) return (u32)((u64)group * negative / below);
        if (group == groups()) return buckets;
        return negative + (u32)((u64)(group - below) * (buckets - negative) / above);
    }

    u32 columns_of(u64 count) const {
        const u64 wide = count * columns / 65536;
        return (u32)std::min<u64>(wide ? wide : 1, 0xFFFFFFFFu);
    }
};
static_assert(sizeof(Header) == 20, "the header has no gaps");

// How keys and bins become bytes: as SKCompress has it, or else plain.
static u64 encode_keys(const u32* keys, u64 count, bool coded, u8* out) {
    return coded ? dr_delta_encode(keys, count, out) : dr_flagged_encode(keys, count, out);
}

static u64 encode_bins(const u8* bins, u64 count, u32 width, bool coded, u8* out) {
    if (coded) return dr_huffman_encode(bins, count, out);
    const u32 bits = bits_for(width);
    dr_pack8(bins, count, bits, out);
    return (count * bits + 7) / 8;
}

static i64 decode_keys(const u8* in, u64 bytes, u64 count, u64 numel, bool coded, u8* scratch, u32* keys) {
    return coded ? dr_delta_decode(in, bytes, count, numel, scratch, keys)
                 : dr_flagged_decode(in, bytes, count, numel, keys);
}

static i64 decode_bins(const u8* in, u64 bytes, u64 count, u32 width, bool coded, u8* bins) {
    if (coded) return dr_huffman_decode(in, bytes, count, bins);
    const u32 bits = bits_for(width);
    return bytes == (count * bits + 7) / 8 ? dr_unpack8(in, bytes, count, bits, bins) : (i64)ERR_TRUNCATED;
}

// Room for the section with this header of `count` elements, and for what the coders store behind their bytes.
DR_API u64 dr_sketch_bound(const u8* header, u64 count) {
    const Header head(header);
    const u64 bins = head.rows * (count * head.columns / 65536 + head.groups());
    return head.parts() + DELTA_ROOM * head.groups() + 5 * count + dr_huffman_bound(0) * head.groups() + 2 * bins;
}

// Writes the groups' sizes, keys and bins into a section that has its header and means. codes[i]: the bucket of element
// i; count >= 1. Result: the section's bytes; 0 where there is no memory, 1 where a size does not fit into 32 bits.
DR_API u64 dr_sketch_encode(const u32* indices, const u32* codes, u64 count, u32 seed, u32 parameter, u32 step,
                            int coded, u8* section) {
    const Header head(section);
    const u32 groups = head.groups();
    const Array<u32> keys = array<u32>(count), group_of = array<u32>(head.buckets);
    const Array<u8> numbers = array<u8>(count);
    u32 first[MAX_GROUPS + 1], counts[MAX_GROUPS];
    if (!keys || !group_of || !numbers) return 0;
    for (u32 group = 0; group <= groups; ++group) first[group] = head.first(group);
    for (u32 group = 0; group < groups; ++group)
        for (u32 bucket = first[group]; bucket < first[group + 1]; ++bucket) group_of[bucket] = group;
    dr_sketch_group(indices, codes, count, group_of.get(), first, groups, counts, keys.get(), numbers.get());
    const u32 most = *std::max_element(counts, counts + groups);
    const Array<u8> bins = array<u8>((u64)head.rows * head.columns_of(most));
    if (!bins) return 0;
    const RowSeeds seeds(head.rows, seed, parameter, step);
    u8* table = section + head.tables();
    u8* at = section + head.parts();
    u64 begin = 0;
    for (u32 group = 0; group < groups; ++group, table += 12) {
        const u32 of_group = counts[group];
        u64 key_bytes = 0, bin_bytes = 0;
        if (of_group) {
            const u32 width = first[group + 1] - first[group], columns = head.columns_of(of_group);
            insert(&keys[begin], &numbers[begin], of_group, head.rows, columns, width, seeds, bins.get());
            key_bytes = encode_keys(&keys[begin], of_group, coded, at);
            at += key_bytes;
            bin_bytes = encode_bins(bins.get(), (u64)head.rows * columns, width, coded, at);
            at += bin_bytes;
        }
        if ((key_bytes | bin_bytes) >> 32) return 1;
        const u32 sizes[3] = {of_group, (u32)key_bytes, (u32)bin_bytes};
        std::memcpy(table, sizes, 12);
        begin += of_group;
    }
    return (u64)(at - section);
}

// Whether the means are finite, of their signs and in the order of their magnitudes.
static bool means_are_ordered(const Header& head, const float* means) {
    bool good = true;
    for (u32 j = 0; j < head.buckets; ++j) {
        const bool below = j < head.negative, first = j == 0 || j == head.negative;
        const float magnitude = below ? -means[j] : means[j];
        const float least = first ? 0.0f : below ? -means[j - 1] : means[j - 1];
        good &= magnitude >= least && magnitude <= FLT_MAX && !(below && magnitude == 0.0f);
    }
    return good;
}

// The sorted keys, all different and below numel, and the values of a section whose header is in order and whose tables
// lie within `bytes`; count >= 1. An error, or 1 where there is no memory.
DR_API i64 dr_sketch_decode(const u8* section, u64 bytes, u64 count, u64 numel, u32 seed, u32 parameter, u32 step,
                            int coded, u32* keys, float* values) {
    const Header head(section);
    const u32 groups = head.groups();
    const Array<float> means = array<float>(head.buckets);
    const Array<u32> sizes = array<u32>(3 * (u64)groups);
    if (!means || !sizes) return 1;
    std::memcpy(means.get(), section + sizeof(Header), 4 * (u64)head.buckets);
    std::memcpy(sizes.get(), section + head.tables(), 12 * (u64)groups);
    if (!means_are_ordered(head, means.get())) return ERR_MEANS;
    u64 elements = 0, most = 0, size = head.parts();
    for (u32 group = 0; group < groups; ++group) {
        const u64 of_group = sizes[3 * group];
        elements += of_group;
        most = std::max(most, of_group);
        size += (u64)sizes[3 * group + 1] + sizes[3 * group + 2];
    }
    if (elements != count || size != bytes) return ERR_SIZES;

    const Array<u8> scratch = array<u8>(most), bins = array<u8>((u64)head.rows * head.columns_of(most));
    if (!scratch || !bins) return 1;
    const RowSeeds seeds(head.rows, seed, parameter, step);
    const u8* at = section + head.parts();
    u64 begin = 0;
    for (u32 group = 0; group < groups; ++group) {
        const u32* const of = &sizes[3 * group];
        if (of[0] == 0) {
            if (of[1] || of[2]) return ERR_SIZES;
            continue;
        }
        const u32 first = head.first(group), width = head.first(group + 1) - first, columns = head.columns_of(of[0]);
        i64 error = decode_keys(at, of[1], of[0], numel, coded, scratch.get(), keys + begin);
        if (error) return error;
        error = decode_bins(at + of[1], of[2], (u64)head.rows * columns, width, coded, bins.get());
        if (error) return error;
        error = query(keys + begin, of[0], head.rows, columns, width, seeds, bins.get(), &means[first], values + begin);
        if (error) return error;
        at += (u64)of[1] + of[2];
        begin += of[0];
    }
    return dr_sketch_merge(keys, values, count, numel, keys, values);
}
