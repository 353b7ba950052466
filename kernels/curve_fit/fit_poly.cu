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
    __shared__ u64 of_warp[WARPS][2];
    u64 most = bits_of(distance);  // not negative, so ordered as their bits
    const auto take = [&](u32 lanes) {
        const u64 other = __shfl_xor_sync(WHOLE_WARP, most, lanes);
        const u64 other_place = __shfl_xor_sync(WHOLE_WARP, place, lanes);
        if (other > most || (other == most && other_place < place)) most = other, place = other_place;
    };
    for (u32 lanes = 16; lanes; lanes /= 2) take(lanes);
    if (lane_number() == 0) of_warp[warp_number()][0] = most, of_warp[warp_number()][1] = place;
    __syncthreads();
    most = of_warp[lane_number() % WARPS][0], place = of_warp[lane_number() % WARPS][1];
    for (u32 lanes = WARPS / 2; lanes; lanes /= 2) take(lanes);
    __syncthreads();
    *largest = __longlong_as_double((i64)most);
    return most ? place : NOWHERE;
}

// The largest distance from the chord of segment s among the points of this thread, number `thread` of `threads`; *at:
// the first point that has it. Both parts of a split segment keep at least `points` points.
__device__ double farthest_point(const float* sorted, const Segments& segments, u32 s, u32 points, u64 thread,
                                 u64 threads, u64* at) {
    const u64 begin = segments.begin[s], end = segments.end[s];
    double farthest = 0.0;
    *at = 0;
    if (end - begin < 2 * points) return farthest;
    const double first = sorted[begin];
    const double slope = ((double)sorted[end - 1] - first) / (double)(end - 1 - begin);
#pragma unroll 8
    for (u64 i = begin + points + thread; i < end - points + 1; i += threads) {
        const double d = fabs((first + slope * (double)(i64)(i - begin)) - (double)sorted[i]);
        if (d > farthest) farthest = d, *at = i;
    }
    return farthest;
}

// Where segment s would be split: from the threads' farthest points.
__device__ void set_split(Segments& segments, u32 s, double farthest, u64 at) {
    double distance;
    const u64 split = block_argmax(farthest, at, &distance);
    if (threadIdx.x == 0) {
        segments.distance[s] = distance;
        segments.split[s] = (u32)split;
    }
    __syncthreads();
}
__device__ void find_split(const float* sorted, Segments& segments, u32 s, u32 points) {
    u64 at;
    const double farthest = farthest_point(sorted, segments, s, points, threadIdx.x, THREADS, &at);
    set_split(segments, s, farthest, at);
}

// Splits the segment that has the farthest point, a tie going to the one that begins first; its second part becomes
// segment `count`. Returns the segment, or NOWHERE if none can be split.
__device__ u64 split_widest(Segments& segments, u32 count) {
    double distance = 0.0, largest;
    u64 place = NOWHERE;  // | begin | segment |
    for (u32 s = threadIdx.x; s < count; s += THREADS) {
        const u64 here = (u64)segments.begin[s] << 32 | s;
        if (segments.distance[s] > distance || (segments.distance[s] == distance && distance > 0.0 && here < place))
            distance = segments.distance[s], place = here;
    }
    const u64 widest = block_argmax(distance, place, &largest);
    if (widest == NOWHERE) return NOWHERE;
    const u32 s = (u32)widest;
    if (threadIdx.x == 0) {
        segments.begin[count] = segments.split[s];
        segments.end[count] = segments.end[s];
        segments.end[s] = segments.split[s];
    }
    __syncthreads();
    return s;
}

// What a sign's values need.
struct Values {
    const float* sorted;
    u64 m;
    u32 wanted;  // segments
};
__device__ Values values_of(const float* sorted, u64 count, u32 side, u32 degree, u32 wanted) {
    const u64 from = side ? values_above(sorted, count, true) : 0;
    const u64 m = side ? count - from : values_above(sorted, count, false);
    return {sorted + from, m, wanted || m == 0 ? wanted : heuristic_segments(sorted + from, m, degree)};
}

// The first splits are looked for by the whole grid, one launch after the other. Each looks at the segments that the
// split before it made (at first at the whole side), and leaves the farthest point of each block:
//
//     farthest:  [round][side][part][block][2]     distance, and the point's place; part 1 is the split-off one
//
// The segments after the splits of `rounds` such launches, which a block of any later launch computes for itself. They
// are in no order. *first, *second: the segments that the last split made, whose splits are not known yet; second is
// NOWHERE if there is one segment, and both are if no segment can be split. Returns the number of segments.
__device__ u32 replay(const u64* farthest, u32 blocks, u32 rounds, u32 side, const Values& values, Segments& segments,
                      u64* first, u64* second) {
    if (threadIdx.x == 0) segments.begin[0] = 0, segments.end[0] = (u32)values.m;
    __syncthreads();
    *first = 0, *second = NOWHERE;
    u32 count = 1;
    for (u32 round = 0; round < rounds && count < values.wanted; ++round) {
        for (u32 part = 0; part < 2; ++part) {
            const u64 s = part ? *second : *first;
            if (s == NOWHERE) continue;
            const u64* own = farthest + (((round * 2 + side) * 2 + part) * blocks + threadIdx.x) * 2;
            const bool there = threadIdx.x < blocks;
            set_split(segments, (u32)s, there ? __longlong_as_double((i64)own[0]) : 0.0, there ? own[1] : 0);
        }
        *second = NOWHERE;
        *first = split_widest(segments, count);
        if (*first == NOWHERE) break;
        *second = count++;
    }
    return count;
}

// A launch of the splits above: up to THREADS blocks for each side, which they take in turn.
KERNEL fit_poly_split(const float* sorted, u64 count, u32 degree, u32 wanted, u32 round, u64* farthest) {
    __shared__ Segments segments;
    const u32 side = blockIdx.x % 2, block = blockIdx.x / 2, blocks = gridDim.x / 2;
    const Values values = values_of(sorted, count, side, degree, wanted);
    u64 open[2];
    const u32 segments_now = replay(farthest, blocks, round, side, values, segments, open, open + 1);
#pragma unroll
    for (u32 part = 0; part < 2; ++part) {
        u64 at = 0;
        double own = 0.0, distance;
        if (open[part] != NOWHERE && segments_now < values.wanted)
            own = farthest_point(values.sorted, segments, (u32)open[part], degree + 1, block * THREADS + threadIdx.x,
                                 blocks * THREADS, &at);
        const u64 place = block_argmax(own, at, &distance);
        if (threadIdx.x == 0) {
            u64* out = farthest + (((round * 2 + side) * 2 + part) * blocks + block) * 2;
            out[0] = bits_of(distance), out[1] = place;
        }
    }
}

// The segments of a side, in their order.
struct SidePlan {
    u32 values, segments;
    u32 begin[MAX_SEGMENTS + 1];     // the last: the number of values
    u32 before[MAX_SEGMENTS + 1];    // FIT blocks before the segment
    // Words of the section. Only a segment that is a whole side can have fewer terms than degree + 1.
    __device__ u64 knots() const { return segments - 1; }
    __device__ u64 words(u32 degree) const { return values ? 3 + knots() + segments * fit_terms(degree, values) : 0; }
};
static_assert(sizeof(SidePlan) == (2 + 2 * (MAX_SEGMENTS + 1)) * sizeof(u32), "the size in ops/curve_fit.py");

// A block for each side. The rest of the splits, after `rounds` launches of `blocks` blocks; plans[2].
KERNEL fit_poly_plan(const float* sorted, u64 count, u32 degree, u32 wanted, const u64* farthest, u32 blocks,
                     u32 rounds, SidePlan* plans) {
    __shared__ Segments segments;
    const u32 side = blockIdx.x;
    const Values values = values_of(sorted, count, side, degree, wanted);
    SidePlan& plan = plans[side];
    u32 now = 0;
    if (values.m) {
        u64 first, second;
        now = replay(farthest, blocks, rounds, side, values, segments, &first, &second);
        while (first != NOWHERE && now < values.wanted) {
            find_split(values.sorted, segments, (u32)first, degree + 1);
            if (second != NOWHERE) find_split(values.sorted, segments, (u32)second, degree + 1);
            first = split_widest(segments, now);
            if (first != NOWHERE) second = now++;
        }
    }
    for (u32 s = threadIdx.x; s < now; s += THREADS) {
        u32 rank = 0;
        for (u32 other = 0; other < now; ++other) rank += segments.begin[other] < segments.begin[s];
        plan.begin[rank] = segments.begin[s];
    }
    if (threadIdx.x == 0) {
        plan.values = plan.begin[now] = (u32)values.m;
        plan.segments = now;
        plan.before[0] = 0;
    }
    __syncthreads();
    u32 sum = 0, total;
    for (u32 base = 0; base < now; base += THREADS) {
        const u32 s = base + threadIdx.x, points = s < now ? plan.begin[s + 1] - plan.begin[s] : 0;
        const u32 of_segment = (u32)((points + FIT_BLOCK - 1) / FIT_BLOCK), before = block_scan(of_segment, &total);
        if (s < now) plan.before[s + 1] = sum + before + of_segment;
        sum += total;
    }
}

// partial[MAX_TERMS * (FIT block)], of the positives' FIT blocks and then the negatives': the sums of a block's
// magnitudes with each polynomial.
KERNEL fit_poly_project(const float* sorted, u64 count, u32 degree, const SidePlan* plans, double* partial) {
    __shared__ double ratios[THREADS / 8][MAX_TERMS];
    const u32 of_positives = plans[0].before[plans[0].segments], blocks = of_positives + plans[1].before[plans[1].segments];
    const u32 group = threadIdx.x / 8, lane = threadIdx.x % 8, groups = THREADS / 8;
    for (u32 base = blockIdx.x * groups; base < blocks; base += gridDim.x * groups) {
        const bool there = base + group < blocks, below = base + group >= of_positives;
        const SidePlan& plan = plans[below && there];
        const u32 block = there ? base + group - (below ? of_positives : 0) : 0;
        const u32 s = there ? (u32)last_at_most(plan.before, plan.segments, block) : 0;
        const u64 begin = plan.begin[s], points = there ? plan.begin[s + 1] - begin : 0;
        const u32 terms = there ? fit_terms(degree, points) : 0;
        for (u32 k = lane; k < terms; k += 8) ratios[group][k] = k ? gram_ratio(k, points) : 0.0;
        __syncwarp();
        const float* values = sorted + (below ? count - plan.values : 0) + begin;
        const double last = (double)(i64)(points - 1), scale = points > 1 ? 1.0 / last : 0.0, sign = below ? -1.0 : 1.0;
        const u64 from = there ? (block - plan.before[s]) * FIT_BLOCK : 0;
        const u64 end = points < from + FIT_BLOCK ? points : from + FIT_BLOCK;
        // With the loops unrolled, the sums are in registers.
        double sums[MAX_TERMS];
#pragma unroll
        for (u32 k = 0; k < MAX_TERMS; ++k) sums[k] = 0.0;
        for (u64 at = from + lane; at < end; at += 8) {
            const double t = (2.0 * (double)(i64)at - last) * scale, y = sign * (double)values[at];
            double lower = 0.0, upper = 1.0;
#pragma unroll
            for (u32 k = 0; k < MAX_TERMS; ++k) {
                if (k >= terms) break;
                sums[k] += y * upper;
                const double next = t * upper - ratios[group][k] * lower;
                lower = upper;
                upper = next;
            }
        }
#pragma unroll
        for (u32 k = 0; k < MAX_TERMS; ++k) {
            if (k > degree) break;
            for (u32 half = 4; half; half /= 2) sums[k] += __shfl_down_sync(WHOLE_WARP, sums[k], half);
            if (there && lane == 0) partial[(u64)(base + group) * MAX_TERMS + k] = sums[k];
        }
        __syncwarp();
    }
}

// The section: a coefficient a thread, and a knot. *words: its size.
KERNEL fit_poly_coefficients(const float* sorted, u64 count, u32 degree, const SidePlan* plans, const double* partial,
                             u32* section, u64* words) {
    u64 word = 3;
    for (u32 side = 0; side < 2; ++side) {
        const SidePlan& plan = plans[side];
        if (grid_thread() == 0) section[1 + side] = plan.values;
        if (plan.values == 0) continue;
        const u32 terms = fit_terms(degree, plan.values);
        const u64 blocks_before = side ? plans[0].before[plans[0].segments] : 0;
        const float* const values = side ? sorted + (count - plan.values) : sorted;
        const float ends[2] = {values[0], values[plan.values - 1]};
        const float least = side ? -ends[0] : ends[1], largest = side ? -ends[1] : ends[0];
        for (u64 c = grid_thread(); c < (u64)plan.segments * terms; c += grid_threads()) {
            const u32 s = (u32)c / terms, k = (u32)c % terms;
            const u64 points = plan.begin[s + 1] - plan.begin[s];
            double sum = 0.0, norm = (double)(i64)points;
            for (u32 block = plan.before[s]; block < plan.before[s + 1]; ++block)
                sum += partial[(blocks_before + block) * MAX_TERMS + k];
            for (u32 j = 1; j <= k; ++j) norm *= gram_ratio(j, points);
            section[word + 3 + plan.knots() + c] = bits_of((float)(sum / (norm * (double)largest)));
            if (k == 0 && s) section[word + 3 + s - 1] = plan.begin[s];
        }
        if (grid_thread() == 0) {
            section[word] = plan.segments;
            section[word + 1] = bits_of(least);
            section[word + 2] = bits_of(largest);
        }
        word += plan.words(degree);
    }
    if (grid_thread() == 0) section[0] = degree, *words = word;
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
