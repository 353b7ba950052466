// MinMaxSketch on the host, and the sections of SketchML and SKCompress: see sketch.h.
#include "sketch/sketch.h"

#include <algorithm>
#include <cfloat>
#include <memory>
#include <new>

#include "bits/bits_cpu.h"
#include "delta/delta_cpu.h"
#include "huffman/huffman_cpu.h"
#include "sort/radix.h"

static const u32 MAX_GROUPS = 258;  // 256 shared by two signs, each rounded up, and one for numbers of no group
static const u64 CHUNK = 256;  // keys hashed at once

// In flagged_keys.cpp.
DR_API u64 dr_flagged_encode(const u32* keys, u64 count, u8* out);
DR_API i64 dr_flagged_decode(const u8* in, u64 bytes, u64 count, u64 numel, u32* keys);

template <class T>
using Array = std::unique_ptr<T[]>;

template <class T>
static Array<T> array(u64 size) {
    return Array<T>(new (std::nothrow) T[size]);
}

struct RowSeeds {
    u32 of[MAX_ROWS];
    RowSeeds(u32 rows, u32 seed, u32 parameter, u32 step) {
        for (u32 row = 0; row < rows; ++row) of[row] = sketch_row_seed(row, seed, parameter, step);
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
                // Words, since the minimum of two bytes compiles to a branch.
                const u32 bin = bins[at[i]], number = numbers[begin + i];
                bins[at[i]] = (u8)(number < bin ? number : bin);
            }
        }
}

// values[i] = means[the number of keys[i]]. ERR_VALUE if a bin is not below `width`, the number of means.
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

// bins[rows * columns]; numbers[count]: 0 .. width - 1.
DR_API void dr_sketch_insert(const u32* keys, const u8* numbers, u64 count, u32 rows, u32 columns, u32 width, u32 seed,
                             u32 parameter, u32 step, u8* bins) {
    insert(keys, numbers, count, rows, columns, width, RowSeeds(rows, seed, parameter, step), bins);
}

// values[count]; means[width].
DR_API i64 dr_sketch_query(const u32* keys, u64 count, u32 rows, u32 columns, u32 width, u32 seed, u32 parameter,
                           u32 step, const u8* bins, const float* means, float* values) {
    if (rows == 0 || rows > MAX_ROWS || columns == 0) return ERR_VALUE;
    return query(keys, count, rows, columns, width, RowSeeds(rows, seed, parameter, step), bins, means, values);
}

// Orders the elements by group, and keeps their order within a group. Element i has the bucket codes[i], which belongs
// to the group group_of[codes[i]]; first[group] is the group's first bucket, whose number is 0. counts[group]: its
// number of elements; keys[count], numbers[count]: ordered by group. Up to MAX_GROUPS groups.
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

// Sorts pairs of a key and a value by key; the result may overwrite the input. ERR_INDEX if two keys are equal or a key
// is not below numel, 1 if there is no memory.
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

// ---- A section of grouped sketches. ops/sketch.py draws it and writes the header; codecs/joint/minmax_sketch.py checks it.
struct Header {
    u8 rows, form, zeros[2];
    u32 columns;            // for each 65536 elements of a group
    u32 buckets, negative;  // `negative`: buckets of negative values
    u16 below, above;       // groups of negative, and of other buckets

    explicit Header(const u8* section) { std::memcpy(this, section, sizeof(*this)); }

    u32 groups() const { return (u32)below + above; }
    // The place of the groups' sizes, after the means; and the place of the first group's keys.
    u64 tables() const { return sizeof(*this) + 4 * (u64)buckets; }
    u64 parts() const { return tables() + 12 * (u64)groups(); }

    // A group's first bucket; for `group` = groups(), the number of buckets.
    u32 first(u32 group) const {
        if (group < below) return (u32)((u64)group * negative / below);
        if (group == groups()) return buckets;
        return negative + (u32)((u64)(group - below) * (buckets - negative) / above);
    }

    // The bins in a row of the sketch of a group of `count` keys.
    u32 columns_of(u64 count) const {
        const u64 wide = count * columns / 65536;
        return (u32)std::min<u64>(wide ? wide : 1, 0xFFFFFFFFu);
    }
};
static_assert(sizeof(Header) == 20, "the header has no gaps");

// How keys and bins become bytes; coded: by SKCompress's entropy codes, else plain.
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

// The number that all bins have, if their section is one of equal bins, which takes a few bytes for any number of them;
// else -1.
static i64 only_bin(const u8* in, u64 bytes, u32 width, bool coded) {
    if (!coded) return width == 1 && bytes == 0 ? 0 : -1;
    u8 length[256];
    i32 only;
    return read_lengths(BitReader{in, bytes}, length, &only) == (i64)bytes && only >= 0 ? only : -1;
}

// The most bytes of a section with this header and `count` elements, and of what the coders store past their last byte.
DR_API u64 dr_sketch_bound(const u8* header, u64 count) {
    const Header head(header);
    const u64 bins = head.rows * (count * head.columns / 65536 + head.groups());
    return head.parts() + DELTA_ROOM * head.groups() + 5 * count + dr_huffman_bound(0) * head.groups() + 2 * bins;
}

// Writes the groups' sizes, keys and bins into a section that has its header and means. codes[i]: the bucket of element
// i; count >= 1. Returns the section's bytes; 0 if there is no memory, 1 if a size does not fit into 32 bits.
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

// Whether the means are finite, have the signs of their buckets, and are in the order of their magnitudes.
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

// The means and the groups' sizes of a section with a checked header, which need not be aligned. sizes: 3 for each
// group, its elements, bytes of keys and bytes of bins.
struct Tables {
    Array<float> means;
    Array<u32> sizes;

    // `start` has the section's first Header::parts() bytes, the section has `bytes`. ERR_MEANS, ERR_SIZES, or 1 if
    // there is no memory.
    i64 read(const Header& head, const u8* start, u64 bytes, u64 count) {
        means = array<float>(head.buckets);
        sizes = array<u32>(3 * (u64)head.groups());
        if (!means || !sizes) return 1;
        std::memcpy(means.get(), start + sizeof(Header), 4 * (u64)head.buckets);
        std::memcpy(sizes.get(), start + head.tables(), 12 * (u64)head.groups());
        if (!means_are_ordered(head, means.get())) return ERR_MEANS;
        u64 elements = 0, size = head.parts();
        for (u32 group = 0; group < head.groups(); ++group) {
            const u32* const of = &sizes[3 * group];
            if (of[0] == 0 && (of[1] || of[2])) return ERR_SIZES;
            elements += of[0];
            size += (u64)of[1] + of[2];
        }
        return elements == count && size == bytes ? 0 : (i64)ERR_SIZES;
    }
};

// For an encode and decode on a GPU: first[groups + 1]; only_bin; the bins in a row for `count` keys; and the check of
// the tables of a section of `bytes` bytes, of which `start` has the first Header::parts().
DR_API void dr_sketch_first_buckets(const u8* header, u32* first) {
    const Header head(header);
    for (u32 group = 0; group <= head.groups(); ++group) first[group] = head.first(group);
}
DR_API i64 dr_sketch_only_bin(const u8* in, u64 bytes, u32 width, int coded) {
    return only_bin(in, bytes, width, coded);
}
DR_API u32 dr_sketch_columns(const u8* header, u64 count) { return Header(header).columns_of(count); }
DR_API i64 dr_sketch_check_tables(const u8* start, u64 bytes, u64 count) {
    return Tables().read(Header(start), start, bytes, count);
}

// The sorted keys, all different and below numel, and their values, from a section whose header is checked and whose
// tables are within `bytes`; count >= 1. An error, or 1 if there is no memory.
DR_API i64 dr_sketch_decode(const u8* section, u64 bytes, u64 count, u64 numel, u32 seed, u32 parameter, u32 step,
                            int coded, u32* keys, float* values) {
    const Header head(section);
    Tables tables;
    const i64 wrong = tables.read(head, section, bytes, count);
    if (wrong) return wrong;
    const u32 groups = head.groups();
    // Of keys and bins, only as many as their bytes can hold.
    u64 most = 0, most_bins = 0;
    for (u32 group = 0; group < groups; ++group) {
        const u32* const of = &tables.sizes[3 * group];
        if (of[0] > 4 * (u64)of[1]) return ERR_TRUNCATED;
        most = std::max<u64>(most, of[0]);
        most_bins = std::max(most_bins, std::min((u64)head.rows * head.columns_of(of[0]), 8 * (u64)of[2]));
    }
    const Array<u8> scratch = array<u8>(most), bins = array<u8>(most_bins);
    if (!scratch || !bins) return 1;
    const RowSeeds seeds(head.rows, seed, parameter, step);
    const u8* at = section + head.parts();
    u64 begin = 0;
    for (u32 group = 0; group < groups; ++group) {
        const u32* const of = &tables.sizes[3 * group];
        if (of[0] == 0) continue;
        const u32 first = head.first(group), width = head.first(group + 1) - first, columns = head.columns_of(of[0]);
        i64 error = decode_keys(at, of[1], of[0], numel, coded, scratch.get(), keys + begin);
        if (error) return error;
        const i64 only = only_bin(at + of[1], of[2], width, coded);
        const u8 bin = (u8)only;
        if (only < 0) {
            if ((u64)head.rows * columns > 8 * (u64)of[2]) return ERR_TRUNCATED;
            error = decode_bins(at + of[1], of[2], (u64)head.rows * columns, width, coded, bins.get());
            if (error) return error;
        }
        // Bins that are all equal are one bin.
        error = query(keys + begin, of[0], only < 0 ? head.rows : 1, only < 0 ? columns : 1, width, seeds,
                      only < 0 ? bins.get() : &bin, &tables.means[first], values + begin);
        if (error) return error;
        at += (u64)of[1] + of[2];
        begin += of[0];
    }
    return dr_sketch_merge(keys, values, count, numel, keys, values);
}
