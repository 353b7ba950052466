// y = a e^(b x) + c e^(d x) through sorted values (DeepReduce, section 5 and appendix E), without iteration: the curve
// solves an integral equation that is linear in known functions of b and d.
//
//     section:  | positives u32 | negatives u32 | side of the positives | side of the negatives |
//     side:     | least float32 | largest float32 | a | b | c | d |  (float32)
//
// A side without values is left out. y is the magnitude as a share of `largest`, falling on both sides: point i of a
// side of m, counted from its largest magnitude, lies at x = i * (1 / (m - 1)), or 0 for m = 1. An exponential with a
// positive rate is e^(b (x - 1)), so that no term exceeds 1 and a and c are of the size of y.
#include "curve_fit/fit.h"

// Magnitudes begin .. begin + size as shares, filled up with zeros to `full`.
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
// The integrals are taken by trapezoids. For the sums' sake S and SS are replaced by what differs from them by a
// combination of x and 1 only: w = the integral of y - mean, and u = the integral of w, plus mean x (x - 1) / 2. Then 1
// and q = 2x - 1, which are orthogonal to each other, are projected out of u, w and y; a 2 x 2 system is left.
//
// Running sums are taken from 0 within each block of FIT_BLOCK points, and added to what w and u's integral had reached
// at the end of the block before.
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

static u64 encode_side(const float* sorted, u64 m, bool negative, u8* section, u64 word) {
    if (m == 0) return word;
    const float largest = negative ? -sorted[m - 1] : sorted[0], least = negative ? -sorted[0] : sorted[m - 1];
    const double scale = (negative ? -1.0 : 1.0) / (double)largest;
    const Curve curve = best_curve(
        m, [&] { return integrate(sorted, m, negative, scale); },
        [&](Rates rates) { return solve(sorted, m, negative, scale, rates); });
    for (const float x : {least, largest, curve.a, curve.rates.b, curve.c, curve.rates.d}) put_word(section, word++, x);
    return word;
}

// Gives the section's words, at most 14.
DR_API u64 dr_fit_dexp_encode(const float* sorted, u64 count, u8* section) {
    const Signs signs = signs_of(sorted, count);
    put_word(section, 0, (u32)signs.positives);
    put_word(section, 1, (u32)signs.negatives);
    const u64 word = encode_side(sorted, signs.positives, false, section, 2);
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
    float side[6];
    for (int k = 0; k < 6; ++k) side[k] = word_at<float>(section, word + k);
    if (!valid_range(side[0], side[1])) return ERR_VALUE;
    for (int k = 2; k < 6; ++k)
        if (!std::isfinite(side[k])) return ERR_VALUE;
    evaluate(side[2], side[3], side[4], side[5], m, side[0], side[1], negative, values);
    return 0;
}

DR_API i64 dr_fit_dexp_decode(const u8* section, u64 bytes, u64 count, float* values) {
    if (bytes < 8) return ERR_TRUNCATED;
    const u64 positives = word_at<u32>(section, 0), negatives = word_at<u32>(section, 1);
    if (positives + negatives > count) return ERR_VALUE;
    if (bytes != 8 + 24 * ((u64)(positives > 0) + (u64)(negatives > 0))) return ERR_TRUNCATED;
    i64 error = positives ? decode_side(section, 2, positives, false, values) : 0;
    if (error) return error;
    std::fill(values + positives, values + (count - negatives), 0.0f);
    if (negatives) error = decode_side(section, positives ? 8 : 2, negatives, true, values + (count - negatives));
    return error;
}
