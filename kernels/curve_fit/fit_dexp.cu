// Two exponentials: the CUDA side of kernels/curve_fit/fit_dexp.cpp, which says how the curve is found. fit_dexp.h
// draws the section.
#include "curve_fit/fit_dexp.h"

#include "curve_fit/curves.cuh"

// A side: its magnitudes as shares of the largest, falling.
struct Shares {
    const float* sorted;
    u64 m;
    bool negative;
    double scale;
    __device__ double operator()(u64 i) const { return (double)sorted[negative ? m - 1 - i : i] * scale; }
    __device__ u64 blocks() const { return (m + FIT_BLOCK - 1) / FIT_BLOCK; }
    __device__ u64 size(u64 block) const {
        return m - block * FIT_BLOCK < FIT_BLOCK ? m - block * FIT_BLOCK : FIT_BLOCK;
    }
};

// Scratch memory: w and u of each point; for each FIT block, 12 sums, its own sum, and the sum of the blocks before it.
//
//     | w [count] | u [count] | partial [12 * blocks] | before [blocks] | sum [blocks] |
struct Scratch {
    double *w, *u, *partial, *before, *sum;
};

// Adds the N partial sums of all blocks, in order; totals[N] for every thread.
template <u32 N>
__device__ void add_blocks(const double* partial, u64 blocks, double* totals) {
    __shared__ double all[N];
    if (threadIdx.x < N) {
        double sum = 0.0;
        for (u64 block = 0; block < blocks; ++block) sum += partial[block * N + threadIdx.x];
        all[threadIdx.x] = sum;
    }
    __syncthreads();
    for (u32 n = 0; n < N; ++n) totals[n] = all[n];
    __syncthreads();
}

// before[b] = sum[0] + ... + sum[b - 1], added in order.
__device__ void add_before(const Scratch& scratch, u64 blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (u64 b = 0; b < blocks; ++b) scratch.before[b] = total, total += scratch.sum[b];
    }
    __syncthreads();
}

__device__ Moments integrate(const Shares& y, const Scratch& scratch) {
    const u64 m = y.m, blocks = y.blocks();
    const double h = 1.0 / (double)(i64)(m - 1);
    const auto size = [&](u64 block) { return y.size(block); };
    double total;
    block_sums<1>(blocks, scratch.partial, size,
                  [&](u64 block, u64 i, double* sums) { sums[0] += y(block * FIT_BLOCK + i); });
    add_blocks<1>(scratch.partial, blocks, &total);
    const double mean = (total - 0.5 * (y(0) + y(m - 1))) * h;
    // One thread computes the running sums within a block, from 0; the sum of the blocks before is added afterwards.
    for (u64 b = threadIdx.x; b < blocks; b += THREADS) {
        double sum = 0.0, before = b ? y(b * FIT_BLOCK - 1) - mean : 0.0;
        for (u64 i = b * FIT_BLOCK; i < b * FIT_BLOCK + y.size(b); ++i) {
            const double now = y(i) - mean;
            if (i) sum += 0.5 * h * (before + now);
            before = now;
            scratch.w[i] = sum;
        }
        scratch.sum[b] = sum;
    }
    add_before(scratch, blocks);
    for (u64 b = threadIdx.x; b < blocks; b += THREADS) {
        double sum = 0.0, before = scratch.before[b];  // w at the end of the block before
        for (u64 i = b * FIT_BLOCK; i < b * FIT_BLOCK + y.size(b); ++i) {
            const double now = scratch.before[b] + scratch.w[i];
            if (i) sum += 0.5 * h * (before + now);
            before = now;
            scratch.w[i] = now;
            scratch.u[i] = sum;
        }
        scratch.sum[b] = sum;
    }
    add_before(scratch, blocks);
    double s[12];
    block_sums<12>(blocks, scratch.partial, size, [&](u64 block, u64 j, double* sums) {
        const u64 i = block * FIT_BLOCK + j;
        const double x = (double)(i64)i * h, q = 2.0 * x - 1.0, w = scratch.w[i], v = y(i) - mean;
        const double u = (scratch.before[block] + scratch.u[i]) + mean * (0.5 * x * (x - 1.0));
        sums[0] += u, sums[1] += u * q, sums[2] += u * u, sums[3] += u * w, sums[4] += u * v;
        sums[5] += w, sums[6] += w * q, sums[7] += w * w, sums[8] += w * v;
        sums[9] += v, sums[10] += v * q, sums[11] += v * v;
    });
    add_blocks<12>(scratch.partial, blocks, s);
    return moments_of({s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11]}, m);
}

__device__ Curve solve(const Shares& y, Rates rates, const Scratch& scratch) {
    const double h = y.m > 1 ? 1.0 / (double)(i64)(y.m - 1) : 0.0, b = rates.b, d = rates.d;
    double s[6];
    block_sums<6>(
        y.blocks(), scratch.partial, [&](u64 block) { return y.size(block); },
        [&](u64 block, u64 j, double* sums) {
            const u64 i = block * FIT_BLOCK + j;
            const double x = (double)(i64)i * h, e = dexp_term(b, x), f = dexp_term(d, x), v = y(i);
            sums[0] += e * e, sums[1] += e * f, sums[2] += f * f;
            sums[3] += e * v, sums[4] += f * v, sums[5] += v * v;
        });
    add_blocks<6>(scratch.partial, y.blocks(), s);
    return curve_of(rates, s[0], s[1], s[2], s[3], s[4], s[5]);
}

// One block. memory: fit_dexp_scratch(count) numbers. *words: the section's size, at most FIT_DEXP_BOUND.
KERNEL fit_dexp_encode(const float* sorted, u64 count, double* memory, u32* section, u64* words) {
    const u64 positives = values_above(sorted, count, false), others = values_above(sorted, count, true);
    const u64 blocks = count / FIT_BLOCK + 1, sizes[2] = {positives, count - others};
    double* const partial = memory + 2 * count;
    const Scratch scratch = {memory, memory + count, partial, partial + 12 * blocks, partial + 13 * blocks};
    if (threadIdx.x == 0) section[0] = (u32)positives, section[1] = (u32)(count - others);
    u64 word = DEXP_HEADER_WORDS;
    for (u32 side = 0; side < 2; ++side) {
        const u64 m = sizes[side];
        if (m == 0) continue;
        const float* of_side = side ? sorted + others : sorted;
        const float largest = side ? -of_side[m - 1] : of_side[0], least = side ? -of_side[0] : of_side[m - 1];
        const Shares y = {of_side, m, side == 1, (side ? -1.0 : 1.0) / (double)largest};
        const Curve curve = best_curve(
            m, [&] { return integrate(y, scratch); }, [&](Rates rates) { return solve(y, rates, scratch); });
        if (threadIdx.x == 0) {
            const float numbers[DEXP_SIDE_WORDS] = {least, largest, curve.a, curve.rates.b, curve.c, curve.rates.d};
            for (u32 k = 0; k < DEXP_SIDE_WORDS; ++k) section[word + k] = bits_of(numbers[k]);
        }
        word += DEXP_SIDE_WORDS;
    }
    if (threadIdx.x == 0) *words = word;
}

// values[count]. The section has 8 bytes or more.
KERNEL fit_dexp_decode(const u8* section, u64 bytes, u64 count, float* values, i32* error) {
    const u64 positives = word_at(section, bytes, 0), negatives = word_at(section, bytes, 1);
    i32 wrong = positives + negatives > count ? ERR_VALUE : 0;
    if (!wrong && bytes != dexp_bytes(positives, negatives)) wrong = ERR_TRUNCATED;
    for (u32 side = 0; side < 2 && !wrong; ++side) {
        if (!(side ? negatives : positives)) continue;
        const u64 word = dexp_side(side, positives);
        if (!valid_range(float_at(section, bytes, word), float_at(section, bytes, word + 1))) wrong = ERR_VALUE;
        for (u32 k = 2; k < DEXP_SIDE_WORDS; ++k)
            if (!finite_bits(float_at(section, bytes, word + k))) wrong = ERR_VALUE;
    }
    if (wrong) {
        if (grid_thread() == 0) *error = wrong;
        return;
    }
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const bool negative = i >= count - negatives;
        if (!negative && i >= positives) {
            values[i] = 0.0f;
            continue;
        }
        const u64 word = dexp_side(negative, positives), m = negative ? negatives : positives;
        const u64 at = negative ? i - (count - negatives) : i;
        const double h = m > 1 ? 1.0 / (double)(i64)(m - 1) : 0.0, sign = negative ? -1.0 : 1.0;
        const double first = negative ? (double)(i64)(m - 1) : 0.0, x = (first + sign * (double)(i64)at) * h;
        const double a = float_at(section, bytes, word + 2), b = float_at(section, bytes, word + 3);
        const double c = float_at(section, bytes, word + 4), d = float_at(section, bytes, word + 5);
        values[i] = fitted_value(a * dexp_term(b, x) + c * dexp_term(d, x), float_at(section, bytes, word),
                                 float_at(section, bytes, word + 1), sign);
    }
}
