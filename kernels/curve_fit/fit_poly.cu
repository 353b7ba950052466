// Piecewise polynomials: the CUDA side of kernels/curve_fit/fit_poly.cpp. fit_poly.h draws the section.
#include "curve_fit/fit_poly.h"

#include "curve_fit/curves.cuh"

struct Segments {
    u32 begin[MAX_SEGMENTS], end[MAX_SEGMENTS], split[MAX_SEGMENTS];
    double distance[MAX_SEGMENTS];
};

// The place of the largest of the threads' distances (the smallest place of equals), NOWHERE if all are 0. *largest:
// that distance.
__device__ u64 block_argmax(double distance, u64 place, double* largest) {
    const u64 bits = bits_of(distance), most = block_max(bits);  // not negative, so ordered as their bits
    *largest = __longlong_as_double((i64)most);
    return most ? ~block_max(bits == most ? ~place : 0ull) : NOWHERE;
}

// Finds the point of segment s that is farthest from its chord. Both parts keep at least `points` points.
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

// The segments, in no order; a tie of distances goes to the one that begins first.
__device__ u32 find_segments(const float* sorted, u64 m, u32 wanted, u32 points, Segments& segments) {
    if (threadIdx.x == 0) segments.begin[0] = 0, segments.end[0] = (u32)m;
    __syncthreads();
    if (wanted > 1) find_split(sorted, segments, 0, points);
    u32 count = 1;
    for (; count < wanted; ++count) {
        double distance = 0.0, largest;
        u64 place = NOWHERE;  // | begin | segment |
        for (u32 s = threadIdx.x; s < count; s += THREADS) {
            const u64 here = (u64)segments.begin[s] << 32 | s;
            if (segments.distance[s] > distance ||
                (segments.distance[s] == distance && distance > 0.0 && here < place))
                distance = segments.distance[s], place = here;
        }
        const u64 widest = block_argmax(distance, place, &largest);
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

// Writes a side from `word` on, and returns the word after it.
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
    block_sums<MAX_TERMS>(before[count], partial, size, [&](u64 block, u64 i, double* sums) {
        const u32 s = segment_of(block), begin = segments.begin[order[s]];
        const u64 points = segments.end[order[s]] - begin, at = (block - before[s]) * FIT_BLOCK + i;
        const u32 terms = fit_terms(degree, points);
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
    // Only a segment that is a whole side can have fewer terms than degree + 1.
    const u32 terms = fit_terms(degree, m);
    const u64 first = word + 3 + count - 1;
    for (u32 c = threadIdx.x; c < count * terms; c += THREADS) {
        const u32 s = c / terms, k = c % terms;
        const u64 points = segments.end[order[s]] - segments.begin[order[s]];
        double sum = 0.0, norm = (double)(i64)points;
        for (u32 block = before[s]; block < before[s + 1]; ++block) sum += partial[(u64)block * MAX_TERMS + k];
        for (u32 j = 1; j <= k; ++j) norm *= gram_ratio(j, points);
        section[first + c] = bits_of((float)(sum / (norm * largest)));
    }
    __syncthreads();
    return first + (u64)count * terms;
}

// One block. partial: fit_poly_scratch(count) numbers. *words: the section's size.
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

// A side, as fit_poly_read finds it; `first` and `knots` are places of words in the section.
struct Side {
    u32 values, segments, first, knots;
};

// One block. Checks the section's sizes and numbers, and finds each segment's coefficients. sides: the positives and
// the negatives; coefficients[side * MAX_SEGMENTS + s]: the word of the first coefficient of segment s.
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
                terms = end <= begin ? degree + 1 : fit_terms(degree, end - begin);
            }
            const u32 terms_before = block_scan(terms, &total);
            if (s < segments) {
                coefficients[side * MAX_SEGMENTS + s] = (u32)(first + before + terms_before);
                for (u32 k = 0; k < terms && first + before + terms_before + k < words; ++k)
                    bad |= !finite_bits(float_at(section, bytes, first + before + terms_before + k));
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

// values[count]. Writes nothing if fit_poly_read has found an error.
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
        const u32 terms = fit_terms(degree, m);
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
