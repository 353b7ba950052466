// Curves through sorted values: the CUDA side of kernels/curve_fit/fit_poly.cpp and fit_dexp.cpp, which draw the sections.
//
// An encoder is one block. Sums over a side are taken as curves.h says: in blocks of FIT_BLOCK elements, each by eight
// lanes (element j in lane j % 8), four blocks a warp; then the blocks in order, by one thread.
#include "curve_fit/curves.h"
#include "common/device.cuh"

const u32 TERMS = MAX_DEGREE + 1;

// How many of `count` sorted values are above zero, or, `zero`, not below.
__device__ u64 values_above(const float* sorted, u64 count, bool zero) {
    return first_not(count, [=](u64 i) { return sorted[i] > 0.0f || (zero && sorted[i] == 0.0f); });
}

// The sums of N products over eights of lanes: f(block, i, sums) adds element i of FIT block `block` to sums[N].
// partial[block * N + n] of all blocks; size(block): its elements.
template <u32 N, class S, class F>
__device__ void block_sums(u64 blocks, double* partial, S size, F f) {
    const u64 group = threadIdx.x / 8, groups = THREADS / 8;
    for (u64 base = 0; base < blocks; base += groups) {
        const u64 block = base + group;
        double sums[N];
        for (u32 n = 0; n < N; ++n) sums[n] = 0.0;
        if (block < blocks)
            for (u64 i = threadIdx.x % 8; i < size(block); i += 8) f(block, i, sums);
        for (u32 n = 0; n < N; ++n) {
            for (u32 half = 4; half; half /= 2) sums[n] += __shfl_down_sync(WHOLE_WARP, sums[n], half);
            if (block < blocks && threadIdx.x % 8 == 0) partial[block * N + n] = sums[n];
        }
    }
    __syncthreads();
}

// ---- Piecewise polynomials.

struct Segments {
    u32 begin[MAX_SEGMENTS], end[MAX_SEGMENTS], split[MAX_SEGMENTS];
    double distance[MAX_SEGMENTS];
};

// The place of the largest of the threads' distances (the least of equals), ~0 where all are 0. *largest: it.
__device__ u64 block_argmax(double distance, u64 place, double* largest) {
    const u64 bits = bits_of(distance), most = block_max(bits);  // not negative: ordered as their bits
    *largest = __longlong_as_double((i64)most);
    return most ? ~block_max(bits == most ? ~place : 0ull) : NOWHERE;
}

// The point of segment s that is farthest from its chord. Both parts keep `points` points.
__device__ void find_split(const float* sorted, Segments& segments, u32 s, u32 points) {
    const u64 begin = segments.begin[s], end = segments.end[s];
    double farthest = 0.0;
    u64 at = 0;
    if (end - begin >= 2 * points) {
        const double first = sorted[begin];
        const double slope = ((double)sorted[end - 1] - first) / (double)(end - 1 - begin);
        for (u64 i = begin + points + threadIdx.x; i < end - points + 1; i += THREADS) {
            const double d = fabs((first + slope * (double)(i64)(i - begin)) - (double)sorted[i]);
            if (d > farthest) farthest = d, at = i;
        }
    }
    double distance;
    const u64 split = block_argmax(farthest, at, &distance);
    if (threadIdx.x == 0) {
        segments.distance[s] = distance;
        segments.split[s] = (u32)split;
    }
    __syncthreads();
}

// Segments in no order; a tie of distances goes to the one that begins first.
__device__ u32 find_segments(const float* sorted, u64 m, u32 wanted, u32 points, Segments& segments) {
    if (threadIdx.x == 0) segments.begin[0] = 0, segments.end[0] = (u32)m;
    __syncthreads();
    if (wanted > 1) find_split(sorted, segments, 0, points);
    u32 count = 1;
    for (; count < wanted; ++count) {
        double own = 0.0, largest;
        u64 place = NOWHERE;  // | begin | segment |
        for (u32 s = threadIdx.x; s < count; s += THREADS) {
            const u64 here = (u64)segments.begin[s] << 32 | s;
            if (segments.distance[s] > own || (segments.distance[s] == own && own > 0.0 && here < place))
                own = segments.distance[s], place = here;
        }
        const u64 widest = block_argmax(own, place, &largest);
        if (widest == NOWHERE) break;
        const u32 s = (u32)widest;
        if (threadIdx.x == 0) {
            segments.begin[count] = segments.split[s];
            segments.end[count] = segments.end[s];
            segments.end[s] = segments.split[s];
        }
        __syncthreads();
        find_split(sorted, segments, s, points);
        find_split(sorted, segments, count, points);
    }
    return count;
}

// One side's section from `word` on; the word behind it.
__device__ u64 encode_side(const float* sorted, u64 m, bool negative, u32 degree, u32 wanted, double* partial,
                           u32* section, u64 word) {
    __shared__ Segments segments;
    __shared__ u32 order[MAX_SEGMENTS], before[MAX_SEGMENTS + 1];  // FIT blocks before the s-th segment
    if (m == 0) return word;
    if (wanted == 0) wanted = heuristic_segments(sorted, m, degree);
    const u32 count = find_segments(sorted, m, wanted, degree + 1, segments);
    const double sign = negative ? -1.0 : 1.0;
    const double ends[2] = {sign * (double)sorted[0], sign * (double)sorted[m - 1]};
    const double largest = ends[negative ? 1 : 0];
    for (u32 s = threadIdx.x; s < count; s += THREADS) {
        u32 rank = 0;
        for (u32 other = 0; other < count; ++other) rank += segments.begin[other] < segments.begin[s];
        order[rank] = s;
        if (rank) section[word + 3 + rank - 1] = segments.begin[s];
    }
    if (threadIdx.x == 0) {
        section[word] = count;
        section[word + 1] = bits_of((float)ends[negative ? 0 : 1]);
        section[word + 2] = bits_of((float)largest);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        before[0] = 0;
        for (u32 s = 0; s < count; ++s) {
            const u32 points = segments.end[order[s]] - segments.begin[order[s]];
            before[s + 1] = before[s] + (u32)((points + FIT_BLOCK - 1) / FIT_BLOCK);
        }
    }
    __syncthreads();
    const auto segment_of = [&](u64 block) { return (u32)last_at_most(before, count, block); };
    const auto size = [&](u64 block) {
        const u32 s = segment_of(block);
        const u64 left = segments.end[order[s]] - segments.begin[order[s]] - (block - before[s]) * FIT_BLOCK;
        return left < FIT_BLOCK ? left : FIT_BLOCK;
    };
    block_sums<TERMS>(before[count], partial, size, [&](u64 block, u64 i, double* sums) {
        const u32 s = segment_of(block), begin = segments.begin[order[s]];
        const u64 points = segments.end[order[s]] - begin, at = (block - before[s]) * FIT_BLOCK + i;
        const u32 terms = degree + 1 < points ? degree + 1 : (u32)points;
        const double last = (double)(i64)(points - 1), scale = points > 1 ? 1.0 / last : 0.0;
        const double t = (2.0 * (double)(i64)at - last) * scale, y = sign * (double)sorted[begin + at];
        double lower = 0.0, upper = 1.0;
        for (u32 k = 0; k < terms; ++k) {
            sums[k] += y * upper;
            const double next = t * upper - (k ? gram_ratio(k, points) : 0.0) * lower;
            lower = upper;
            upper = next;
        }
    });
    // Only a side of one segment can have fewer terms than the degree asks for.
    const u32 terms = degree + 1 < m ? degree + 1 : (u32)m;
    const u64 first = word + 3 + count - 1;
    for (u32 c = threadIdx.x; c < count * terms; c += THREADS) {
        const u32 s = c / terms, k = c % terms;
        const u64 points = segments.end[order[s]] - segments.begin[order[s]];
        double sum = 0.0, norm = (double)(i64)points;
        for (u32 block = before[s]; block < before[s + 1]; ++block) sum += partial[(u64)block * TERMS + k];
        for (u32 j = 1; j <= k; ++j) norm *= gram_ratio(j, points);
        section[first + c] = bits_of((float)(sum / (norm * largest)));
    }
    __syncthreads();
    return first + (u64)count * terms;
}

// One block. partial: TERMS * (count / FIT_BLOCK + MAX_SEGMENTS + 1) doubles. *words: of the section.
KERNEL fit_poly_encode(const float* sorted, u64 count, u32 degree, u32 wanted, double* partial, u32* section,
                       u64* words) {
    const u64 positives = values_above(sorted, count, false), others = values_above(sorted, count, true);
    if (threadIdx.x == 0) {
        section[0] = degree;
        section[1] = (u32)positives;
        section[2] = (u32)(count - others);
    }
    u64 word = encode_side(sorted, positives, false, degree, wanted, partial, section, 3);
    word = encode_side(sorted + others, count - others, true, degree, wanted, partial, section, word);
    if (threadIdx.x == 0) *words = word;
}

__device__ __forceinline__ u32 word_at(const u8* section, u64 bytes, u64 word) {
    return load_field(section, bytes, 32 * word, 32);
}
__device__ __forceinline__ float float_at(const u8* section, u64 bytes, u64 word) {
    return __uint_as_float(word_at(section, bytes, word));
}

// What a side is made of, as fit_poly_read finds it. terms of segment s: from first + terms_before[s] on.
struct Side {
    u32 values, segments, first, knots;  // `first`, `knots`: words of the section
};

// One block: looks at the sections' sizes and numbers, and says where each segment's coefficients are. sides: of the
// positives and of the negatives; coefficients[side * MAX_SEGMENTS + s]: the word of segment s's first one.
KERNEL fit_poly_read(const u8* section, u64 bytes, u64 count, Side* sides, u32* coefficients, i32* error) {
    const u64 words = bytes / 4;
    const u32 degree = word_at(section, bytes, 0);
    u64 word = 3;
    i32 wrong = degree > MAX_DEGREE ||
                        (u64)word_at(section, bytes, 1) + word_at(section, bytes, 2) > count
                    ? ERR_VALUE
                    : 0;
    for (u32 side = 0; side < 2 && !wrong; ++side) {
        const u32 m = word_at(section, bytes, 1 + side);
        if (threadIdx.x == 0) sides[side] = {m, 0, 0, 0};
        if (m == 0) continue;
        if (words - word < 3) {
            wrong = ERR_TRUNCATED;
            break;
        }
        const u32 segments = word_at(section, bytes, word);
        if (segments == 0 || segments > MAX_SEGMENTS || segments > m ||
            !valid_range(float_at(section, bytes, word + 1), float_at(section, bytes, word + 2))) {
            wrong = ERR_VALUE;
            break;
        }
        const u64 knots = word + 3, first = knots + segments - 1;
        if (words < first) {
            wrong = ERR_TRUNCATED;
            break;
        }
        u64 before = 0;
        bool bad = false;
        for (u32 base = 0; base < segments; base += THREADS) {
            const u32 s = base + threadIdx.x;
            u32 terms = 0, total;
            if (s < segments) {
                const u32 begin = s ? word_at(section, bytes, knots + s - 1) : 0;
                const u32 end = s + 1 < segments ? word_at(section, bytes, knots + s) : m;
                bad |= end <= begin || end > m;
                terms = end <= begin || end - begin > degree ? degree + 1 : end - begin;
            }
            const u32 own = block_scan(terms, &total);
            if (s < segments) {
                coefficients[side * MAX_SEGMENTS + s] = (u32)(first + before + own);
                for (u32 k = 0; k < terms && first + before + own + k < words; ++k)
                    bad |= !finite_bits(float_at(section, bytes, first + before + own + k));
            }
            before += total;
        }
        if (threadIdx.x == 0) sides[side] = {m, segments, (u32)word, (u32)knots};
        word = first + before;
        wrong = __syncthreads_or(bad) ? ERR_VALUE : words < word ? ERR_TRUNCATED : 0;
    }
    if (!wrong && word != words) wrong = ERR_VALUE;
    if (threadIdx.x == 0) *error = wrong;
}

KERNEL fit_poly_decode(const u8* section, u64 bytes, u64 count, const Side* sides, const u32* coefficients,
                       const i32* error, float* values) {
    if (*error) return;
    const u32 degree = word_at(section, bytes, 0);
    const Side positive = sides[0], negative = sides[1];
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const bool below = i >= count - negative.values;
        if (!below && i >= positive.values) {
            values[i] = 0.0f;
            continue;
        }
        const Side side = below ? negative : positive;
        const u64 at = below ? i - (count - negative.values) : i;
        const auto knot = [=](u64 s) { return word_at(section, bytes, side.knots + s); };
        const u64 s = first_not(side.segments - 1, [=](u64 k) { return knot(k) <= at; });
        const u64 begin = s ? knot(s - 1) : 0, end = s + 1 < side.segments ? knot(s) : side.values;
        const u64 m = end - begin;
        const u32 terms = degree + 1 < m ? degree + 1 : (u32)m;
        const u32 first = coefficients[(below ? MAX_SEGMENTS : 0) + s];
        const double last = (double)(i64)(m - 1), scale = m > 1 ? 1.0 / last : 0.0;
        const double t = (2.0 * (double)(i64)(at - begin) - last) * scale;
        double b0 = float_at(section, bytes, first + terms - 1), b1 = 0.0;
        for (u32 k = terms - 1; k-- > 0;) {
            const double next = gram_step(float_at(section, bytes, first + k), t, b0, gram_ratio(k + 1, m), b1);
            b1 = b0;
            b0 = next;
        }
        values[i] = fitted_value(b0, float_at(section, bytes, side.first + 1), float_at(section, bytes, side.first + 2),
                                 below ? -1.0 : 1.0);
    }
}

// ---- Two exponentials. See fit_dexp.cpp for the mathematics.

// One side: its magnitudes as shares of the largest, falling.
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

// Room for the sums of the blocks: | partial [12 a block] | w | u [m each] | base [a block] | own [a block] |
struct Room {
    double *partial, *w, *u, *base, *own;
};

// Adds the N partial sums of all blocks up, in order; totals[N] for every thread.
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

// base[b] = own[0] + ... + own[b - 1], one after the other.
__device__ void add_bases(const Room& room, u64 blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0.0;
        for (u64 b = 0; b < blocks; ++b) room.base[b] = sum, sum += room.own[b];
    }
    __syncthreads();
}

__device__ Moments integrate(const Shares& y, const Room& room) {
    const u64 m = y.m, blocks = y.blocks();
    const double h = 1.0 / (double)(i64)(m - 1);
    const auto size = [&](u64 block) { return y.size(block); };
    double total;
    block_sums<1>(blocks, room.partial, size,
                  [&](u64 block, u64 i, double* sums) { sums[0] += y(block * FIT_BLOCK + i); });
    add_blocks<1>(room.partial, blocks, &total);
    const double mean = (total - 0.5 * (y(0) + y(m - 1))) * h;
    // Running sums within each block, by one thread; then what the blocks before have reached.
    for (u64 b = threadIdx.x; b < blocks; b += THREADS) {
        double sum = 0.0, before = b ? y(b * FIT_BLOCK - 1) - mean : 0.0;
        for (u64 i = b * FIT_BLOCK; i < b * FIT_BLOCK + y.size(b); ++i) {
            const double now = y(i) - mean;
            if (i) sum += 0.5 * h * (before + now);
            before = now;
            room.w[i] = sum;
        }
        room.own[b] = sum;
    }
    add_bases(room, blocks);
    for (u64 b = threadIdx.x; b < blocks; b += THREADS) {
        double sum = 0.0, before = room.base[b];  // what w had reached at the end of the block before
        for (u64 i = b * FIT_BLOCK; i < b * FIT_BLOCK + y.size(b); ++i) {
            const double now = room.base[b] + room.w[i];
            if (i) sum += 0.5 * h * (before + now);
            before = now;
            room.w[i] = now;
            room.u[i] = sum;
        }
        room.own[b] = sum;
    }
    add_bases(room, blocks);
    double s[12];
    block_sums<12>(blocks, room.partial, size, [&](u64 block, u64 j, double* sums) {
        const u64 i = block * FIT_BLOCK + j;
        const double x = (double)(i64)i * h, q = 2.0 * x - 1.0, w = room.w[i], v = y(i) - mean;
        const double u = (room.base[block] + room.u[i]) + mean * (0.5 * x * (x - 1.0));
        sums[0] += u, sums[1] += u * q, sums[2] += u * u, sums[3] += u * w, sums[4] += u * v;
        sums[5] += w, sums[6] += w * q, sums[7] += w * w, sums[8] += w * v;
        sums[9] += v, sums[10] += v * q, sums[11] += v * v;
    });
    add_blocks<12>(room.partial, blocks, s);
    return moments_of({s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11]}, m);
}

__device__ Curve solve(const Shares& y, Rates rates, const Room& room) {
    const double h = y.m > 1 ? 1.0 / (double)(i64)(y.m - 1) : 0.0, b = rates.b, d = rates.d;
    double s[6];
    block_sums<6>(
        y.blocks(), room.partial, [&](u64 block) { return y.size(block); },
        [&](u64 block, u64 j, double* sums) {
            const u64 i = block * FIT_BLOCK + j;
            const double x = (double)(i64)i * h, e = dexp_term(b, x), f = dexp_term(d, x), v = y(i);
            sums[0] += e * e, sums[1] += e * f, sums[2] += f * f;
            sums[3] += e * v, sums[4] += f * v, sums[5] += v * v;
        });
    add_blocks<6>(room.partial, y.blocks(), s);
    return curve_of(rates, s[0], s[1], s[2], s[3], s[4], s[5]);
}

// One block. room: 2 * count + 14 * (count / FIT_BLOCK + 1) doubles. *words: of the section, at most 14.
KERNEL fit_dexp_encode(const float* sorted, u64 count, double* room, u32* section, u64* words) {
    const u64 positives = values_above(sorted, count, false), others = values_above(sorted, count, true);
    const u64 blocks = count / FIT_BLOCK + 1, sizes[2] = {positives, count - others};
    const Room rooms = {room + 2 * count, room, room + count, room + 2 * count + 12 * blocks,
                        room + 2 * count + 13 * blocks};
    if (threadIdx.x == 0) section[0] = (u32)positives, section[1] = (u32)(count - others);
    u64 word = 2;
    for (u32 side = 0; side < 2; ++side) {
        const u64 m = sizes[side];
        if (m == 0) continue;
        const float* of_side = side ? sorted + others : sorted;
        const float largest = side ? -of_side[m - 1] : of_side[0], least = side ? -of_side[0] : of_side[m - 1];
        const Shares y = {of_side, m, side == 1, (side ? -1.0 : 1.0) / (double)largest};
        const Curve curve = best_curve(
            m, [&] { return integrate(y, rooms); }, [&](Rates rates) { return solve(y, rates, rooms); });
        if (threadIdx.x == 0) {
            const float numbers[6] = {least, largest, curve.a, curve.rates.b, curve.c, curve.rates.d};
            for (u32 k = 0; k < 6; ++k) section[word + k] = bits_of(numbers[k]);
        }
        word += 6;
    }
    if (threadIdx.x == 0) *words = word;
}

// The section has 8 bytes or more.
KERNEL fit_dexp_decode(const u8* section, u64 bytes, u64 count, float* values, i32* error) {
    const u64 positives = word_at(section, bytes, 0), negatives = word_at(section, bytes, 1);
    i32 wrong = positives + negatives > count ? ERR_VALUE : 0;
    if (!wrong && bytes != 8 + 24 * ((u64)(positives > 0) + (u64)(negatives > 0))) wrong = ERR_TRUNCATED;
    for (u32 side = 0; side < 2 && !wrong; ++side) {
        if (!(side ? negatives : positives)) continue;
        const u64 word = side && positives ? 8 : 2;
        if (!valid_range(float_at(section, bytes, word), float_at(section, bytes, word + 1))) wrong = ERR_VALUE;
        for (u32 k = 2; k < 6; ++k)
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
        const u64 word = negative && positives ? 8 : 2, m = negative ? negatives : positives;
        const u64 at = negative ? i - (count - negatives) : i;
        const double h = m > 1 ? 1.0 / (double)(i64)(m - 1) : 0.0, sign = negative ? -1.0 : 1.0;
        const double first = negative ? (double)(i64)(m - 1) : 0.0, x = (first + sign * (double)(i64)at) * h;
        const double a = float_at(section, bytes, word + 2), b = float_at(section, bytes, word + 3);
        const double c = float_at(section, bytes, word + 4), d = float_at(section, bytes, word + 5);
        values[i] = fitted_value(a * dexp_term(b, x) + c * dexp_term(d, x), float_at(section, bytes, word),
                                 float_at(section, bytes, word + 1), sign);
    }
}
