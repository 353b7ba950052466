// Quantile buckets, MinMaxSketch and flagged keys: the CUDA side of kernels/sketch/quantile.cpp and sketch.cpp.
#include "common/device.cuh"

const u32 SIGN = 0x80000000u;

// ---- Quantile buckets.

// To be sorted: zeros first, positive values, then negative ones by their magnitudes.
KERNEL quantile_words(const float* values, u64 count, u64* words) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 bits = bits_of(values[i]);
        words[i] = bits == SIGN ? 0 : bits;
    }
}

// The magnitudes of the sorted words; bounds: | the first that is not zero | the first negative one |, both `count` at
// first.
KERNEL quantile_bounds(const u64* words, u64 count, u32* magnitudes, u64* bounds) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 word = (u32)words[i];
        magnitudes[i] = word & ~SIGN;
        if (word != 0 && (i == 0 || (u32)words[i - 1] == 0)) bounds[0] = i;
        if (word > SIGN && (i == 0 || (u32)words[i - 1] <= SIGN)) bounds[1] = i;
    }
}

// The splits of n sorted magnitudes, at most `buckets`: each new value among those of rank floor(j n / buckets), and
// behind one that stands there twice the next float, unless that comes by itself. *end: how many.
KERNEL find_splits(const u32* sorted, u64 n, u32 buckets, u64* status, u64* end, u32* splits) {
    const u32 largest = sorted[n - 1];
    const auto at = [=](u64 j) { return sorted[j * n / buckets]; };
    const auto first = [=](u64 j) { return j == 0 || at(j - 1) != at(j); };
    const auto twice = [=](u64 j) { return j + 1 < buckets && at(j + 1) == at(j) && at(j) < largest; };
    const auto alone = [=](u64 j) {  // not written already, as the next float of the value before
        return j < 2 || at(j - 1) + 1 != at(j) || at(j - 2) != at(j - 1);
    };
    each_place(
        buckets, 0, status, end,
        [=](u64 j) { return first(j) ? (u64)alone(j) + (u64)twice(j) : 0ull; },
        [=](u64 j, u64 place) {
            if (!first(j)) return;
            if (alone(j)) splits[place++] = at(j);
            if (twice(j)) splits[place] = at(j) + 1;
        });
}

// below, above: the splits of each sign, their numbers in counts[0] and counts[1]; with `zero`, above[0] is 0 and
// counts[1] does not count it.
KERNEL quantile_codes(const float* values, u64 count, const u32* below, const u32* above, const u64* counts, u32 zero,
                      u32* codes) {
    const u32 n_below = (u32)counts[0], n_above = (u32)counts[1] + zero;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 bits = bits_of(values[i]), magnitude = bits & ~SIGN;
        codes[i] = bits > SIGN ? (u32)last_at_most(below, n_below, magnitude)
                               : (u32)last_at_most(above, n_above, magnitude) + n_below;
    }
}

__device__ u64 first_at_least(const u32* a, u64 count, u32 value) {
    return first_not(count, [=](u64 i) { return a[i] < value; });
}

// The means of one sign's buckets, from `offset[0]` on where `behind` says so; a warp a bucket. The sums are of
// integers, as in quantile.cpp, so their order does not matter.
KERNEL quantile_means(const u32* sorted, u64 n, const u32* splits, const u64* found, u32 middle, u32 negative,
                      const u64* offset, u32 behind, float* means) {
    const u64 buckets = *found;
    for (u64 j = grid_thread() / 32; j < buckets; j += grid_threads() / 32) {
        const bool last = j + 1 == buckets;
        const u32 low = splits[j], high = last ? sorted[n - 1] : splits[j + 1];
        const u64 begin = j ? first_at_least(sorted, n, low) : 0, end = last ? n : first_at_least(sorted, n, high);
        float mean = __uint_as_float(low);
        if (begin < end && high - low > 1) {
            if (middle) {
                mean = (float)(((double)__uint_as_float(low) + (double)__uint_as_float(high)) / 2);
            } else {
                const u32 largest = sorted[end - 1], exponent = largest >> 23 ? largest >> 23 : 1;
                // 2^(exponent - 127 - 30)
                const double unit = __longlong_as_double((i64)(exponent + 866) << 52), scale = 1.0 / unit;
                u64 sum = 0;
                for (u64 i = begin + lane_number(); i < end; i += 32)
                    sum += (u64)((double)__uint_as_float(sorted[i]) * scale);
                sum = warp_sum(sum);
                mean = (float)((double)sum / (double)(end - begin) * unit);
                const float least = __uint_as_float(sorted[begin]), most = __uint_as_float(largest);
                mean = mean < least ? least : mean;
                mean = mean > most ? most : mean;
            }
        }
        if (lane_number() == 0) means[(behind ? *offset + behind - 1 : 0) + j] = negative ? -mean : mean;
    }
}

KERNEL quantile_decode(const u32* codes, u64 count, const float* means, u32 buckets, float* values, i32* error) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        if (codes[i] >= buckets) atomicMin(error, ERR_VALUE);
        values[i] = codes[i] < buckets ? means[codes[i]] : 0.0f;
    }
}

// ---- MinMaxSketch. A minimum does not depend on the order of the insertions.

__device__ __forceinline__ u32 row_seed(u32 row, u32 seed, u32 parameter, u32 step) {
    return philox4x32(seed, parameter, row, step, STREAM_SKETCH, 0).x;
}

// depths: zeros; a bin's depth is width - 1 less what it holds.
KERNEL sketch_insert(const u32* keys, const u8* numbers, u64 count, u32 rows, u32 columns, u32 width, u32 seed,
                     u32 parameter, u32 step, u32* depths) {
    // The grid is a multiple of `rows` blocks: one for each row of each part of the keys.
    const u32 row = blockIdx.x % rows, own_seed = row_seed(row, seed, parameter, step);
    const u64 part = blockIdx.x / rows, parts = gridDim.x / rows;
    for (u64 i = part * THREADS + threadIdx.x; i < count; i += parts * THREADS)
        atomicMax(depths + (u64)row * columns + sketch_column(keys[i], own_seed, columns), width - 1 - numbers[i]);
}
KERNEL sketch_bins(const u32* depths, u64 count, u32 width, u8* bins) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) bins[i] = (u8)(width - 1 - depths[i]);
}

KERNEL sketch_query(const u32* keys, u64 count, u32 rows, u32 columns, u32 width, u32 seed, u32 parameter, u32 step,
                    const u8* bins, const float* means, float* values, i32* error) {
    __shared__ u32 seeds[8];
    if (threadIdx.x < rows) seeds[threadIdx.x] = row_seed(threadIdx.x, seed, parameter, step);
    __syncthreads();
    for (u64 i = grid_thread(); i < (u64)rows * columns; i += grid_threads())
        if (bins[i] >= width) atomicMin(error, ERR_VALUE);
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        u32 number = 0;
        for (u32 row = 0; row < rows; ++row) {
            const u32 bin = bins[(u64)row * columns + sketch_column(keys[i], seeds[row], columns)];
            number = bin > number ? bin : number;
        }
        values[i] = number < width ? means[number] : 0.0f;
    }
}

// To be sorted by group: | group | element |.  counts: zeros.
KERNEL group_words(const u32* codes, u64 count, const u32* group_of, u64* words, u32* counts) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 group = group_of[codes[i]];
        words[i] = (u64)group << 32 | i;
        atomicAdd(counts + group, 1u);
    }
}
KERNEL group_take(const u64* words, u64 count, const u32* indices, const u32* codes, const u32* first, u32* keys,
                  u8* numbers) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 from = (u32)words[i];
        keys[i] = indices[from];
        numbers[i] = (u8)(codes[from] - first[words[i] >> 32]);
    }
}

// ---- Flagged keys: lengths of 2 bits, then gaps of as many bytes.

__device__ __forceinline__ u32 gap_of(const u32* keys, u64 i) { return i ? keys[i] - keys[i - 1] - 1 : keys[0]; }
__device__ __forceinline__ u32 gap_bytes(u32 gap) { return (31 - (u32)__clz((i32)(gap | 1))) / 8 + 1; }

KERNEL flagged_encode(const u32* keys, u64 count, u64* status, u64* end, u8* out) {
    each_place(
        count, (count + 3) / 4, status, end, [=](u64 i) { return (u64)gap_bytes(gap_of(keys, i)); },
        [=](u64 i, u64 place) {
            const u32 gap = gap_of(keys, i);
            for (u32 j = 0; j < gap_bytes(gap); ++j) out[place + j] = (u8)(gap >> (8 * j));
            if (i % 4) return;
            u32 lengths = 0;
            for (u32 j = 0; j < 4 && i + j < count; ++j) lengths |= (gap_bytes(gap_of(keys, i + j)) - 1) << (2 * j);
            out[i / 4] = (u8)lengths;
        });
}

// The gaps, then the keys.
KERNEL flagged_gaps(const u8* in, u64 bytes, u64 count, u64* status, u64* end, u32* gaps, i32* error) {
    const auto length = [=](u64 i) { return (u64)(in[i / 4] >> (2 * (i & 3)) & 3) + 1; };
    each_place(count, (count + 3) / 4, status, end, length, [=](u64 i, u64 place) {
        u32 gap = 0;
        for (u32 j = 0; j < length(i); ++j)
            if (place + j < bytes) gap |= (u32)in[place + j] << (8 * j);
        gaps[i] = gap;
        if (gap_bytes(gap) != length(i)) atomicMin(error, ERR_INDEX);
        if (i + 1 == count && place + length(i) != bytes) atomicMin(error, ERR_TRUNCATED);
    });
}
KERNEL keys_of_gaps(const u32* gaps, u64 count, u64 numel, u64* status, u64* end, u32* keys, i32* error) {
    each_place(
        count, 0, status, end, [=](u64 i) { return (u64)gaps[i] + 1; },
        [=](u64 i, u64 place) {
            const u64 key = place + gaps[i];
            keys[i] = (u32)key;
            if (key >= numel) atomicMin(error, ERR_INDEX);
        });
}
