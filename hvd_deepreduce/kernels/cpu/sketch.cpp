// MinMaxSketch: bucket numbers in fewer bins than numbers (SketchML; SKCompress, section 4.2).
//
//     rows of `columns` bins:   row 0 | . . 3 . . |      insert: in each row, the bin of the key's hash becomes the
//                               row 1 | . 2 . . . |      smaller of what it is and the number; query: the largest of
//                               ...                      the key's bins. A bin begins with the largest number.
//
// A query gives the inserted number or a smaller one. A row's hash hangs on the container's seed, parameter and step,
// so that a key that loses in one step may win in the next.
#include <memory>
#include <new>

#include "radix.h"

static const u32 MAX_ROWS = 8;
static const u32 MAX_GROUPS = 257;

struct RowSeeds {
    u32 of[MAX_ROWS];
    RowSeeds(u32 rows, u32 seed, u32 parameter, u32 step) {
        for (u32 row = 0; row < rows; ++row) of[row] = philox4x32(seed, parameter, row, step, STREAM_SKETCH, 0).x;
    }
};

// bins[rows * columns]; numbers: 0 .. width-1.
DR_API void dr_sketch_insert(const u32* keys, const u8* numbers, u64 count, u32 rows, u32 columns, u32 width, u32 seed,
                             u32 parameter, u32 step, u8* bins) {
    const RowSeeds seeds(rows, seed, parameter, step);
    std::memset(bins, (int)(width - 1), (size_t)rows * columns);
    for (u32 row = 0; row < rows; ++row) {
        u8* const of_row = bins + (u64)row * columns;
        for (u64 i = 0; i < count; ++i) {
            u8& bin = of_row[sketch_column(keys[i], seeds.of[row], columns)];
            bin = numbers[i] < bin ? numbers[i] : bin;
        }
    }
}

// values[i] = means[what the sketch holds for keys[i]]; ERR_VALUE where a bin is not below `width`.
DR_API i64 dr_sketch_query(const u32* keys, u64 count, u32 rows, u32 columns, u32 width, u32 seed, u32 parameter,
                           u32 step, const u8* bins, const float* means, float* values) {
    if (rows == 0 || rows > MAX_ROWS || columns == 0) return ERR_VALUE;
    u32 largest = 0;
    for (u64 i = 0; i < (u64)rows * columns; ++i) largest = bins[i] > largest ? bins[i] : largest;
    if (largest >= width) return ERR_VALUE;
    const RowSeeds seeds(rows, seed, parameter, step);
    for (u64 i = 0; i < count; ++i) {
        u32 number = 0;
        for (u32 row = 0; row < rows; ++row) {
            const u32 bin = bins[(u64)row * columns + sketch_column(keys[i], seeds.of[row], columns)];
            number = bin > number ? bin : number;
        }
        values[i] = means[number];
    }
    return 0;
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

// Sorts pairs of a key below numel and a value by their keys. ERR_INDEX where two keys are equal or one is not below
// numel; 1 where there is no memory.
DR_API i64 dr_sketch_merge(const u32* keys, const float* values, u64 count, u64 numel, u32* sorted_keys,
                           float* sorted_values) {
    const std::unique_ptr<u64[]> memory(new (std::nothrow) u64[2 * count]);
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
