// Two exponentials through sorted values (DeepReduce, section 5 and appendix E), without iteration: the curve solves an
// integral equation that is linear in known functions of b and d. fit_dexp.h draws the section.
#include "curve_fit/fit_dexp.h"

#include "curve_fit/curves_cpu.h"

// y[full]: the magnitudes begin .. begin + size - 1 as shares of the largest, filled up with zeros.
DR_INLINE void load_shares(const float* sorted, u64 m, bool negative, double scale, u64 begin, u64 size, u64 full,
                           double* y) {
    if (negative)
        for (u64 i = 0; i < size; ++i) y[i] = (double)sorted[m - 1 - begin - i] * scale;
    else
        for (u64 i = 0; i < size; ++i) y[i] = (double)sorted[begin + i] * scale;
    for (u64 i = size; i < full; ++i) y[i] = 0.0;
}

// The first linear system. With S the integral of y from 0 and SS that of S, every such y has
//     y = A SS + B S + C x + D,   A = -b d,   B = b + d,
// so A, B, C, D come from linear least squares, and b, d are the roots of z^2 - B z - A.
//
// The integrals are computed by the trapezoidal rule. To keep the sums small, S and SS are replaced by functions that
// differ from them only by a combination of x and 1: w = the integral of y - mean, and u = the integral of w, plus mean
// x (x - 1) / 2. Then 1 and q = 2x - 1, which are orthogonal to each other, are projected out of u, w and y, and a 2 x
// 2 system is left.
//
// Running sums start from 0 in each block of FIT_BLOCK points; the integrals' values at the end of the block before are
// added to them.
DR_CLONES static Moments integrate(const float* sorted, u64 m, bool negative, double scale) {
    double y[FIT_BLOCK], w[FIT_BLOCK], u[FIT_BLOCK], q[FIT_BLOCK], ones[FIT_BLOCK];
    const double h = 1.0 / (double)(i64)(m - 1);
    std::fill(ones, ones + FIT_BLOCK, 1.0);
    double total = 0.0, first = 0.0, last = 0.0;
    for (u64 begin = 0; begin < m; begin += FIT_BLOCK) {
        const u64 size = m - begin < FIT_BLOCK ? m - begin : FIT_BLOCK, full = round_up8(size);
        load_shares(sorted, m, negative, scale, begin, size, full, y);
        if (begin == 0) first = y[0];
        last = y[size - 1];
        total += block_dot(y, ones, full);
    }
    const double mean = (total - 0.5 * (first + last)) * h;
    double u1 = 0, uq = 0, uu = 0, uw = 0, uy = 0, w1 = 0, wq = 0, ww = 0, wy = 0, y1 = 0, yq = 0, yy = 0;
    double base_w = 0.0, base_u = 0.0, before_y = 0.0, before_w = 0.0;
    for (u64 begin = 0; begin < m; begin += FIT_BLOCK) {
        const u64 size = m - begin < FIT_BLOCK ? m - begin : FIT_BLOCK, full = round_up8(size);
        load_shares(sorted, m, negative, scale, begin, size, full, y);
        for (u64 i = 0; i < size; ++i) y[i] -= mean;
        double sum_w = 0.0, sum_u = 0.0;
        for (u64 i = 0; i < size; ++i) {
            if (begin + i) sum_w += 0.5 * h * (before_y + y[i]);
            before_y = y[i];
            w[i] = base_w + sum_w;
        }
        for (u64 i = 0; i < size; ++i) {
            if (begin + i) sum_u += 0.5 * h * (before_w + w[i]);
            before_w = w[i];
            u[i] = base_u + sum_u;
        }
        base_w += sum_w;
        base_u += sum_u;
        for (u64 i = 0; i < size; ++i) {
            const double x = (double)(i64)(begin + i) * h;
            q[i] = 2.0 * x - 1.0;
            u[i] += mean * (0.5 * x * (x - 1.0));
        }
        for (u64 i = size; i < full; ++i) u[i] = w[i] = q[i] = 0.0;
        u1 += block_dot(u, ones, full);
        uq += block_dot(u, q, full);
        uu += block_dot(u, u, full);
        uw += block_dot(u, w, full);
        uy += block_dot(u, y, full);
        w1 += block_dot(w, ones, full);
        wq += block_dot(w, q, full);
        ww += block_dot(w, w, full);
        wy += block_dot(w, y, full);
        y1 += block_dot(y, ones, full);
        yq += block_dot(y, q, full);
        yy += block_dot(y, y, full);
    }
    return moments_of({u1, uq, uu, uw, uy, w1, wq, ww, wy, y1, yq, yy}, m);
}

DR_CLONES static Curve solve(const float* sorted, u64 m, bool negative, double scale, Rates rates) {
    double y[FIT_BLOCK], e[FIT_BLOCK], f[FIT_BLOCK];
    const double h = m > 1 ? 1.0 / (double)(i64)(m - 1) : 0.0, b = rates.b, d = rates.d;
    double ee = 0, ef = 0, ff = 0, ey = 0, fy = 0, yy = 0;
    for (u64 begin = 0; begin < m; begin += FIT_BLOCK) {
        const u64 size = m - begin < FIT_BLOCK ? m - begin : FIT_BLOCK, full = round_up8(size);
        load_shares(sorted, m, negative, scale, begin, size, full, y);
        for (u64 i = 0; i < size; ++i) {
            const double x = (double)(i64)(begin + i) * h;
            e[i] = dexp_term(b, x);
            f[i] = dexp_term(d, x);
        }
        for (u64 i = size; i < full; ++i) e[i] = f[i] = 0.0;
        ee += block_dot(e, e, full);
        ef += block_dot(e, f, full);
        ff += block_dot(f, f, full);
        ey += block_dot(e, y, full);
        fy += block_dot(f, y, full);
        yy += block_dot(y, y, full);
    }
    return curve_of(rates, ee, ef, ff, ey, fy, yy);
}

// Writes a side from `word` on, and returns the word after it.
static u64 encode_side(const float* sorted, u64 m, bool negative, u8* section, u64 word) {
    if (m == 0) return word;
    const float largest = negative ? -sorted[m - 1] : sorted[0], least = negative ? -sorted[0] : sorted[m - 1];
    const double scale = (negative ? -1.0 : 1.0) / (double)largest;
    const Ways ways = m < 3 ? ways_of_few(m) : ways_of(integrate(sorted, m, negative, scale), m);
    const Curve curve =
        best_curve(ways, [&](u32 way) { return solve(sorted, m, negative, scale, ways.rates[way]); });
    for (const float x : {least, largest, curve.a, curve.rates.b, curve.c, curve.rates.d}) put_word(section, word++, x);
    return word;
}

// Returns the section's words, at most FIT_DEXP_BOUND.
DR_API u64 dr_fit_dexp_encode(const float* sorted, u64 count, u8* section) {
    const Signs signs = signs_of(sorted, count);
    put_word(section, 0, (u32)signs.positives);
    put_word(section, 1, (u32)signs.negatives);
    const u64 word = encode_side(sorted, signs.positives, false, section, DEXP_HEADER_WORDS);
    return encode_side(sorted + (count - signs.negatives), signs.negatives, true, section, word);
}

DR_CLONES static void evaluate(double a, double b, double c, double d, u64 m, double least, double largest,
                               bool negative, float* values) {
    const double h = m > 1 ? 1.0 / (double)(i64)(m - 1) : 0.0;
    const double first = negative ? (double)(i64)(m - 1) : 0.0, sign = negative ? -1.0 : 1.0;
    for (u64 i = 0; i < m; ++i) {
        const double x = (first + sign * (double)(i64)i) * h;
        values[i] = fitted_value(a * dexp_term(b, x) + c * dexp_term(d, x), least, largest, sign);
    }
}

static i64 decode_side(const u8* section, u64 word, u64 m, bool negative, float* values) {
    float side[DEXP_SIDE_WORDS];
    for (u32 k = 0; k < DEXP_SIDE_WORDS; ++k) side[k] = word_at<float>(section, word + k);
    if (!valid_range(side[0], side[1])) return ERR_VALUE;
    for (u32 k = 2; k < DEXP_SIDE_WORDS; ++k)
        if (!std::isfinite(side[k])) return ERR_VALUE;
    evaluate(side[2], side[3], side[4], side[5], m, side[0], side[1], negative, values);
    return 0;
}

// values[count].
DR_API i64 dr_fit_dexp_decode(const u8* section, u64 bytes, u64 count, float* values) {
    if (bytes < 8) return ERR_TRUNCATED;
    const u64 positives = word_at<u32>(section, 0), negatives = word_at<u32>(section, 1);
    if (positives + negatives > count) return ERR_VALUE;
    if (bytes != dexp_bytes(positives, negatives)) return ERR_TRUNCATED;
    i64 error = positives ? decode_side(section, dexp_side(false, positives), positives, false, values) : 0;
    if (error) return error;
    std::fill(values + positives, values + (count - negatives), 0.0f);
    if (negatives)
        error = decode_side(section, dexp_side(true, positives), negatives, true, values + (count - negatives));
    return error;
}

// For the memory of an encoder.
DR_API u64 dr_fit_dexp_bound() { return FIT_DEXP_BOUND; }
DR_API u64 dr_fit_dexp_scratch(u64 count) { return fit_dexp_scratch(count); }
