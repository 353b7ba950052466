// Piecewise polynomials through sorted values (DeepReduce, section 5). fit_poly.h draws the section.
#include "curve_fit/fit_poly.h"

#include "curve_fit/curves_cpu.h"

struct Segment {
    u64 begin, end;
    u64 split;        // the point farthest from the chord, where the segment would be split
    double distance;  // of that point; 0: no split is possible
};

// Finds the point with the largest vertical distance to the chord from the first point to the last: by lemma 10 of the
// appendix, the best knot of a convex curve. Both parts keep at least `points` points. A tie goes to the first point.
DR_CLONES static void find_split(const float* sorted, Segment& s, u64 points) {
    s.distance = 0.0;
    if (s.end - s.begin < 2 * points) return;
    const double first = sorted[s.begin];
    const double slope = ((double)sorted[s.end - 1] - first) / (double)(s.end - 1 - s.begin);
    const u64 from = s.begin + points, to = s.end - points + 1;
    const auto distance_at = [&](u64 i) __attribute__((always_inline)) {
        return std::fabs((first + slope * (double)(i64)(i - s.begin)) - (double)sorted[i]);
    };
    u64 block = from;
    for (u64 b = from; b < to; b += FIT_BLOCK) {
        double farthest[8] = {};
        const u64 stop = b + FIT_BLOCK < to ? b + FIT_BLOCK : to;
        u64 i = b;
        for (; i + 8 <= stop; i += 8)
            for (int j = 0; j < 8; ++j) {
                const double d = distance_at(i + j);
                farthest[j] = d > farthest[j] ? d : farthest[j];
            }
        for (; i < stop; ++i) farthest[0] = std::max(farthest[0], distance_at(i));
        const double d = *std::max_element(farthest, farthest + 8);
        if (d > s.distance) s.distance = d, block = b;
    }
    if (s.distance > 0.0)
        for (s.split = block; distance_at(s.split) != s.distance;) ++s.split;
}

// Splits the segment that has the farthest point (the first of equals), until there are `wanted` segments or no segment
// can be split. Returns their number.
static u32 find_segments(const float* sorted, u64 m, u32 wanted, u64 points, Segment* segments) {
    segments[0] = {0, m, 0, 0.0};
    if (wanted > 1) find_split(sorted, segments[0], points);
    u32 count = 1;
    while (count < wanted) {
        u32 widest = 0;
        for (u32 s = 1; s < count; ++s)
            if (segments[s].distance > segments[widest].distance) widest = s;
        if (segments[widest].distance == 0.0) break;
        Segment left = segments[widest], right = left;
        left.end = right.begin = left.split;
        find_split(sorted, left, points);
        find_split(sorted, right, points);
        std::copy_backward(segments + widest + 1, segments + count, segments + count + 1);
        segments[widest] = left;
        segments[widest + 1] = right;
        ++count;
    }
    return count;
}

// sums[k] = sum of |value i| P_k(t_i); sign: -1 for negative values.
DR_CLONES static void project(const float* values, u64 m, u32 terms, double sign, const double* ratios, double* sums) {
    double t[FIT_BLOCK], y[FIT_BLOCK], lower[FIT_BLOCK], upper[FIT_BLOCK];
    const double last = (double)(i64)(m - 1), scale = m > 1 ? 1.0 / last : 0.0;
    for (u32 k = 0; k < terms; ++k) sums[k] = 0.0;
    for (u64 begin = 0; begin < m; begin += FIT_BLOCK) {
        const u64 size = m - begin < FIT_BLOCK ? m - begin : FIT_BLOCK, full = round_up8(size);
        for (u64 i = 0; i < size; ++i) y[i] = sign * (double)values[begin + i];
        for (u64 i = size; i < full; ++i) y[i] = 0.0;
        for (u64 i = 0; i < full; ++i) {
            t[i] = (2.0 * (double)(i64)(begin + i) - last) * scale;
            lower[i] = 0.0;
            upper[i] = 1.0;
        }
        for (u32 k = 0; k < terms; ++k) {
            sums[k] += block_dot(y, upper, full);
            for (u64 i = 0; i < full; ++i) {
                const double next = t[i] * upper[i] - ratios[k] * lower[i];
                lower[i] = upper[i];
                upper[i] = next;
            }
        }
    }
}

// ratios[k] = gram_ratio(k) for 0 < k < terms; ratios[0] = 0, since P_-1 = 0.
static void find_ratios(u64 m, u32 terms, double* ratios) {
    ratios[0] = 0.0;
    for (u32 k = 1; k < terms; ++k) ratios[k] = gram_ratio(k, m);
}

// Writes a side from `word` on, and returns the word after it.
static u64 encode_side(const float* sorted, u64 m, bool negative, u32 degree, u32 wanted, u8* section, u64 word) {
    if (m == 0) return word;
    Segment segments[MAX_SEGMENTS];
    if (wanted == 0) wanted = heuristic_segments(sorted, m, degree);
    const u32 count = find_segments(sorted, m, wanted, degree + 1, segments);
    const double sign = negative ? -1.0 : 1.0;
    const double ends[2] = {sign * (double)sorted[0], sign * (double)sorted[m - 1]};
    const double largest = ends[negative ? 1 : 0];
    put_word(section, word++, count);
    put_word(section, word++, (float)ends[negative ? 0 : 1]);
    put_word(section, word++, (float)largest);
    for (u32 s = 1; s < count; ++s) put_word(section, word++, (u32)segments[s].begin);
    for (u32 s = 0; s < count; ++s) {
        double ratios[MAX_TERMS], sums[MAX_TERMS];
        const u64 points = segments[s].end - segments[s].begin;
        const u32 terms = fit_terms(degree, points);
        find_ratios(points, terms, ratios);
        project(sorted + segments[s].begin, points, terms, sign, ratios, sums);
        double norm = (double)(i64)points;
        for (u32 k = 0; k < terms; ++k) {
            if (k) norm *= ratios[k];
            put_word(section, word++, (float)(sums[k] / (norm * largest)));
        }
    }
    return word;
}

// segments: the most that a side may have, 0 for the heuristic. Returns the section's words, at most fit_poly_bound.
DR_API u64 dr_fit_poly_encode(const float* sorted, u64 count, u32 degree, u32 segments, u8* section) {
    const Signs signs = signs_of(sorted, count);
    put_word(section, 0, degree);
    put_word(section, 1, (u32)signs.positives);
    put_word(section, 2, (u32)signs.negatives);
    const u64 word = encode_side(sorted, signs.positives, false, degree, segments, section, 3);
    return encode_side(sorted + (count - signs.negatives), signs.negatives, true, degree, segments, section, word);
}

DR_CLONES static void evaluate(const double* coefficients, const double* ratios, u32 terms, u64 m, double least,
                               double largest, double sign, float* values) {
    double t[FIT_BLOCK], b0[FIT_BLOCK], b1[FIT_BLOCK];
    const double last = (double)(i64)(m - 1), scale = m > 1 ? 1.0 / last : 0.0;
    for (u64 begin = 0; begin < m; begin += FIT_BLOCK) {
        const u64 size = m - begin < FIT_BLOCK ? m - begin : FIT_BLOCK;
        for (u64 i = 0; i < size; ++i) {
            t[i] = (2.0 * (double)(i64)(begin + i) - last) * scale;
            b0[i] = coefficients[terms - 1];
            b1[i] = 0.0;
        }
        for (u32 k = terms - 1; k-- > 0;)
            for (u64 i = 0; i < size; ++i) {
                const double next = gram_step(coefficients[k], t[i], b0[i], ratios[k + 1], b1[i]);
                b1[i] = b0[i];
                b0[i] = next;
            }
        for (u64 i = 0; i < size; ++i) values[begin + i] = fitted_value(b0[i], least, largest, sign);
    }
}

// Reads a side from `word` on, and sets `word` to the word after it. Sizes are checked before what they size is read.
static i64 decode_side(const u8* section, u64 words, u64& word, u64 m, bool negative, u32 degree, float* values) {
    if (m == 0) return 0;
    if (words - word < 3) return ERR_TRUNCATED;
    const u32 count = word_at<u32>(section, word);
    const float least = word_at<float>(section, word + 1), largest = word_at<float>(section, word + 2);
    word += 3;
    if (count == 0 || count > MAX_SEGMENTS || count > m || !valid_range(least, largest)) return ERR_VALUE;
    if (words - word < count - 1) return ERR_TRUNCATED;
    const u64 knots = word;
    word += count - 1;
    u64 begin = 0;
    for (u32 s = 0; s < count; ++s) {
        const u64 end = s + 1 < count ? word_at<u32>(section, knots + s) : m;
        if (end <= begin || end > m) return ERR_VALUE;
        double ratios[MAX_TERMS], coefficients[MAX_TERMS];
        const u32 terms = fit_terms(degree, end - begin);
        if (words - word < terms) return ERR_TRUNCATED;
        for (u32 k = 0; k < terms; ++k) {
            coefficients[k] = word_at<float>(section, word++);
            if (!std::isfinite(coefficients[k])) return ERR_VALUE;
        }
        find_ratios(end - begin, terms, ratios);
        evaluate(coefficients, ratios, terms, end - begin, least, largest, negative ? -1.0 : 1.0, values + begin);
        begin = end;
    }
    return 0;
}

// values[count].
DR_API i64 dr_fit_poly_decode(const u8* section, u64 bytes, u64 count, float* values) {
    if (bytes % 4 || bytes < 12) return ERR_TRUNCATED;
    const u64 words = bytes / 4, positives = word_at<u32>(section, 1), negatives = word_at<u32>(section, 2);
    const u32 degree = word_at<u32>(section, 0);
    if (degree > MAX_DEGREE || positives + negatives > count) return ERR_VALUE;
    u64 word = 3;
    i64 error = decode_side(section, words, word, positives, false, degree, values);
    if (error) return error;
    std::fill(values + positives, values + (count - negatives), 0.0f);
    error = decode_side(section, words, word, negatives, true, degree, values + (count - negatives));
    if (error) return error;
    return word == words ? 0 : (i64)ERR_VALUE;
}

// For the memory of an encoder.
DR_API u64 dr_fit_poly_bound(u64 count, u32 degree, u32 segments) { return fit_poly_bound(count, degree, segments); }
DR_API u64 dr_fit_poly_scratch(u64 count) { return fit_poly_scratch(count); }
