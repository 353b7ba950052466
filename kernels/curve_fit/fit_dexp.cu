// Two exponentials: the CUDA side of kernels/curve_fit/fit_dexp.cpp, which says how the curve is found. fit_dexp.h
// draws the section.
//
// An encoder has six launches, and each adds what the one before it has found for each FIT block, in their order, once
// for each of its own blocks: the order is the host's, and the sums of all blocks are few.
//
//     fit_dexp_sums       y                     sums of y
//     fit_dexp_first      the mean of y         the integral of y - mean over each FIT block
//     fit_dexp_second     w at its beginning    the integral of w
//     fit_dexp_products   u at its beginning    the twelve products of Sums
//     fit_dexp_solve      the rates             the products of the exponentials, for each of the WAYS
//     fit_dexp_write      the curves            the section
#include "curve_fit/fit_dexp.h"

#include "curve_fit/curves.cuh"

const u32 OF_WAY = 6, OF_WAYS = WAYS * OF_WAY;  // products

// A side: its magnitudes as shares of the largest, falling. What is found of FIT block b is at numbers[b] ..
struct Side {
    const float* sorted;
    u64 m, blocks;
    bool negative;
    double scale, h;
    double *y, *w, *u, *products, *solved;  // products[blocks][12], solved[blocks][OF_WAYS]
    u64 first, last;                        // FIT blocks of this block of the grid
    __device__ double operator()(u64 i) const { return (double)sorted[negative ? m - 1 - i : i] * scale; }
    __device__ u64 size(u64 block) const {
        return m - block * FIT_BLOCK < FIT_BLOCK ? m - block * FIT_BLOCK : FIT_BLOCK;
    }
};

// signs: the number of positive values, and of those that are not negative. The blocks of a grid take the sides in
// turn, and of a side FIT blocks in a row, a multiple of WARPS. memory: fit_dexp_scratch(count) numbers.
__device__ Side side_of(const float* sorted, u64 count, const u64* signs, u32 side, double* memory) {
    const u64 positives = signs[0], m = side ? count - signs[1] : positives, blocks = (m + FIT_BLOCK - 1) / FIT_BLOCK;
    const u64 all = fit_dexp_blocks(count), before = side ? (positives + FIT_BLOCK - 1) / FIT_BLOCK : 0;
    const u64 parts = gridDim.x / 2 ? gridDim.x / 2 : 1, part = blockIdx.x / 2;
    const u64 each = ((blocks + parts - 1) / parts + WARPS - 1) / WARPS * WARPS;
    const u64 first = part * each < blocks ? part * each : blocks;
    const float* of_side = side ? sorted + signs[1] : sorted;
    double scale = 0.0;
    if (m) scale = side ? -1.0 / -(double)of_side[m - 1] : 1.0 / (double)of_side[0];
    return {of_side, m, blocks, side == 1, scale, m > 1 ? 1.0 / (double)(i64)(m - 1) : 0.0,
            memory + before, memory + all + before, memory + 2 * all + before, memory + 3 * all + 12 * before,
            memory + 15 * all + OF_WAYS * before, first, first + each < blocks ? first + each : blocks};
}

// totals[n] = begin + partial[first][n] + ... + partial[last - 1][n], in this order. All threads of the block call it.
template <u32 N>
__device__ void add_in_order(const double* partial, u64 first, u64 last, double begin, double* totals) {
    __shared__ double staged[THREADS], all[N];
    const u32 rows = THREADS / N;
    const auto load = [=](u64 block) {
        const u64 row = block + threadIdx.x / N;
        return threadIdx.x < rows * N && row < last ? partial[row * N + threadIdx.x % N] : 0.0;
    };
    double next = load(first), sum = begin;
    for (u64 block = first; block < last; block += rows) {
        const u32 there = (u32)(last - block < rows ? last - block : rows);
        staged[threadIdx.x] = next;
        __syncthreads();
        next = load(block + rows);
        if (threadIdx.x < N)
#pragma unroll 8
            for (u32 row = 0; row < there; ++row) sum += staged[row * N + threadIdx.x];
        __syncthreads();
    }
    if (threadIdx.x < N) all[threadIdx.x] = sum;
    __syncthreads();
    for (u32 n = 0; n < N; ++n) totals[n] = all[n];
    __syncthreads();
}

// Sums before each of WARPS FIT blocks in a row, to which blocks of the grid come in order.
struct Before {
    const double* sums;
    u64 upto;
    double total;
    // The sum of the blocks before `block`, of this warp: `first` for the first warp. All threads of the block call it.
    __device__ double at(u64 first, u64 block) {
        add_in_order<1>(sums, upto, first, total, &total);
        upto = first;
        double own = total;
        for (u64 b = first; b < block; ++b) own += sums[b];
        return own;
    }
};

__device__ double mean_of(const Side& y) {
    double total;
    add_in_order<1>(y.y, 0, y.blocks, 0.0, &total);
    return (total - 0.5 * (y(0) + y(y.m - 1))) * y.h;
}

// sums[i] = term(0) + ... + term(i), added in order, by a warp. Returns the last one.
template <class F>
__device__ double run(double* sums, u64 size, F term) {
    for (u64 i = lane_number(); i < size; i += 32) sums[i] = term(i);
    __syncwarp();
    if (lane_number() == 0) {
        double sum = 0.0;
#pragma unroll 8
        for (u32 i = 0; i < (u32)size; ++i) sums[i] = sum += sums[i];
    }
    __syncwarp();
    return sums[size - 1];
}
// The integral of y - mean from the beginning of a FIT block on, by the trapezoidal rule; and that of w, which is
// `before` there: `sums` has w less `before`.
__device__ double run_w(const Side& y, double mean, u64 block, double* sums) {
    return run(sums, y.size(block), [=](u64 j) {
        const u64 i = block * FIT_BLOCK + j;
        return i ? 0.5 * y.h * ((y(i - 1) - mean) + (y(i) - mean)) : 0.0;
    });
}
__device__ double run_u(const Side& y, double before, u64 block, const double* w, double* sums) {
    return run(sums, y.size(block), [=](u64 j) {
        const double last = j ? before + w[j - 1] : before;
        return block + j ? 0.5 * y.h * (last + (before + w[j])) : 0.0;
    });
}

// signs[2]: see side_of. The section's numbers of values, too.
KERNEL fit_dexp_sums(const float* sorted, u64 count, u64* signs, double* memory, u32* section) {
    const u64 own[2] = {values_above(sorted, count, false), values_above(sorted, count, true)};
    if (grid_thread() == 0) {
        signs[0] = own[0], signs[1] = own[1];
        section[0] = (u32)own[0], section[1] = (u32)(count - own[1]);
    }
    const Side y = side_of(sorted, count, own, blockIdx.x % 2, memory);
    block_sums<1>(
        y.first, y.last, y.y, [&](u64 block) { return y.size(block); },
        [&](u64 block, u64 i, double* sums) { sums[0] += y(block * FIT_BLOCK + i); });
}

KERNEL fit_dexp_first(const float* sorted, u64 count, const u64* signs, double* memory) {
    __shared__ double w[WARPS][FIT_BLOCK];
    const Side y = side_of(sorted, count, signs, blockIdx.x % 2, memory);
    if (y.m < 3 || y.first == y.last) return;
    const double mean = mean_of(y);
    for (u64 block = y.first + warp_number(); block < y.last; block += WARPS) {
        const double sum = run_w(y, mean, block, w[warp_number()]);
        if (lane_number() == 0) y.w[block] = sum;
        __syncwarp();
    }
}

KERNEL fit_dexp_second(const float* sorted, u64 count, const u64* signs, double* memory) {
    __shared__ double w[WARPS][FIT_BLOCK], u[WARPS][FIT_BLOCK];
    const Side y = side_of(sorted, count, signs, blockIdx.x % 2, memory);
    if (y.m < 3 || y.first == y.last) return;
    const double mean = mean_of(y);
    Before before = {y.w, 0, 0.0};
    for (u64 first = y.first; first < y.last; first += WARPS) {
        const u64 block = first + warp_number();
        const double of_w = before.at(first, block < y.last ? block : first);
        if (block >= y.last) continue;
        run_w(y, mean, block, w[warp_number()]);
        const double sum = run_u(y, of_w, block, w[warp_number()], u[warp_number()]);
        if (lane_number() == 0) y.u[block] = sum;
        __syncwarp();
    }
}

KERNEL fit_dexp_products(const float* sorted, u64 count, const u64* signs, double* memory) {
    __shared__ double ws[WARPS][FIT_BLOCK], us[WARPS][FIT_BLOCK];
    const Side y = side_of(sorted, count, signs, blockIdx.x % 2, memory);
    if (y.m < 3 || y.first == y.last) return;
    const double mean = mean_of(y);
    Before before_w = {y.w, 0, 0.0}, before_u = {y.u, 0, 0.0};
    for (u64 first = y.first; first < y.last; first += WARPS) {
        const u64 block = first + warp_number();
        const double of_w = before_w.at(first, block < y.last ? block : first);
        const double of_u = before_u.at(first, block < y.last ? block : first);
        if (block < y.last) {
            run_w(y, mean, block, ws[warp_number()]);
            run_u(y, of_w, block, ws[warp_number()], us[warp_number()]);
        }
        double sums[12] = {};
        for (u64 j = lane_number(); block < y.last && lane_number() < 8 && j < y.size(block); j += 8) {
            const u64 i = block * FIT_BLOCK + j;
            const double x = (double)(i64)i * y.h, q = 2.0 * x - 1.0, w = of_w + ws[warp_number()][j], v = y(i) - mean;
            const double u = (of_u + us[warp_number()][j]) + mean * (0.5 * x * (x - 1.0));
            sums[0] += u, sums[1] += u * q, sums[2] += u * u, sums[3] += u * w, sums[4] += u * v;
            sums[5] += w, sums[6] += w * q, sums[7] += w * w, sums[8] += w * v;
            sums[9] += v, sums[10] += v * q, sums[11] += v * v;
        }
        for (u32 n = 0; n < 12; ++n) {
            for (u32 half = 4; half; half /= 2) sums[n] += __shfl_down_sync(WHOLE_WARP, sums[n], half);
            if (block < y.last && lane_number() == 0) y.products[block * 12 + n] = sums[n];
        }
    }
}

// The rates of all ways.
__device__ Ways ways_of_side(const Side& y) {
    if (y.m < 3) return ways_of_few(y.m);
    double s[12];
    add_in_order<12>(y.products, 0, y.blocks, 0.0, s);
    return ways_of(
        moments_of({s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11]}, y.m), y.m);
}

KERNEL fit_dexp_solve(const float* sorted, u64 count, const u64* signs, double* memory) {
    const Side y = side_of(sorted, count, signs, blockIdx.x % 2, memory);
    if (y.first == y.last) return;
    const Ways ways = ways_of_side(y);
    block_sums<OF_WAYS>(
        y.first, y.last, y.solved, [&](u64 block) { return y.size(block); },
        [&](u64 block, u64 j, double* sums) {
            const u64 i = block * FIT_BLOCK + j;
            const double x = (double)(i64)i * y.h, v = y(i);
#pragma unroll
            for (u32 way = 0; way < WAYS; ++way) {
                const double e = dexp_term(ways.rates[way].b, x), f = dexp_term(ways.rates[way].d, x);
                double* const own = sums + way * OF_WAY;
                own[0] += e * e, own[1] += e * f, own[2] += f * f, own[3] += e * v, own[4] += f * v, own[5] += v * v;
            }
        });
}

// One block. *words: the section's size, at most FIT_DEXP_BOUND.
KERNEL fit_dexp_write(const float* sorted, u64 count, const u64* signs, double* memory, u32* section, u64* words) {
    u64 word = DEXP_HEADER_WORDS;
    for (u32 side = 0; side < 2; ++side) {
        const Side y = side_of(sorted, count, signs, side, memory);
        if (y.m == 0) continue;
        const Ways ways = ways_of_side(y);
        double all[OF_WAYS];
        add_in_order<OF_WAYS>(y.solved, 0, y.blocks, 0.0, all);
        const Curve curve = best_curve(ways, [&](u32 way) {
            const double* s = all + way * OF_WAY;
            return curve_of(ways.rates[way], s[0], s[1], s[2], s[3], s[4], s[5]);
        });
        const float ends[2] = {y.sorted[0], y.sorted[y.m - 1]};
        if (threadIdx.x == 0) {
            const float least = side ? -ends[0] : ends[1], largest = side ? -ends[1] : ends[0];
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
